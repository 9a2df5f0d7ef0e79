"""Preemption: a run that is told to go saves first.

Owns what SIGTERM and SIGUSR2 do while training is under way: the step is finished, a checkpoint is written, and the
process ends with a code of its own. Leaves the signals themselves to ``lifeline``. All ranks stop at the same step
although the signal may reach them at different ones, or only one: the wish travels with the exchange that ends each
backward.
"""

import signal
from typing import Any

from transformers import TrainerCallback


class Preemption(TrainerCallback):
    """Saves and stops after the step in which any rank was told to go.

    Attributes:
        step: The step after which the run stopped; None if it was not told to.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._asked = False
        self.step: int | None = None

    def ask(self, number: signal.Signals) -> None:
        """Note the wish; called on the thread that waits for signals."""
        self._asked = True
        if self._trainer.handle is not None:
            self._trainer.handle.raise_flag()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A wish from before the model was sharded."""
        if self._asked:
            self._trainer.handle.raise_flag()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Runs at the same step on all ranks."""
        if self._trainer.handle.flagged and self.step is None:
            self.step = state.global_step
            control.should_save = control.should_training_stop = True
            args.load_best_model_at_end = False  # the run is not at its end

"""Snapshots of a run while it trains: at given steps, and when SIGUSR1 asks for them.

Owns when a rank looks, and how the ranks agree on the step. Leaves the look to ``lens``, the files to ``lens.store``,
the plan's side to ``planning`` and ``plan.expected``, the signal to ``look_signal``.

[Note: the same step on all ranks] A look needs no other rank, so nothing here is a collective: a rank that is asked
alone hangs nobody. The ranks agree through the launcher's store. A rank that was asked puts the step's number there
before that step begins on it, and every rank looks it up when the step ends. No rank ends a step before all have begun
it, since gradients are exchanged in it: so all of them find the number, or none.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from shardglass.engine.registry import live_handle
from shardglass.errors import ShardglassError
from shardglass.hf.look_signal import LookSignal
from shardglass.hf.run_planning import PlannedEngine
from shardglass.lens.look import look
from shardglass.lens.snapshot import Snapshot
from shardglass.lens.store import FOLDER, Moment, clear, write_moment
from shardglass.plan.expected import planned_snapshot
from shardglass.plan.kinds import StepShape

log = logging.getLogger(__name__)

_RUNS = itertools.count()
"""A process's, not a run's: the keys in the launcher's store must be new each time."""


class LookCallback(TrainerCallback):
    """Writes this rank's snapshots into the run's folder; for a Trainer of any engine that ``look`` reads.

    Attributes:
        last: The last snapshot that was written; None before the first.
    """

    last: Snapshot | None

    def __init__(
        self,
        trainer: Any,
        *,
        steps: Sequence[int] = (),
        signal: LookSignal | None = None,
        engine: Callable[[], PlannedEngine] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Prepare.

        Args:
            trainer: Whose model, optimizer and scheduler are looked at.
            steps: Steps after which every rank looks; 0 is before the first.
            signal: Asks for more.
            engine: Makes the plan that snapshots are held against; called once, when the first is written. None plans
                nothing.
            say: Writes a line on what was written; None says nothing.
        """
        self.last = None
        self._trainer, self._steps, self._signal, self._say = trainer, frozenset(steps), signal, say
        self._make_engine = engine
        self._engine: PlannedEngine | None = None
        self._run = next(_RUNS)
        self._micro_batches = 1
        self._shapes: set[int] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look if this is one of the steps."""
        self._micro_batches, self._shapes = 1, set()
        if state.global_step in self._steps:
            self._look(args, state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask all ranks to look when this step ends, if this one was asked to."""
        if self._signal is not None and self._signal.take():
            self._ask_for(state.global_step + 1)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count micro-batches: what a step allocates depends on their number."""
        self._micro_batches += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look if this is one of the steps, or somebody asked."""
        self._shapes.add(self._micro_batches)
        self._micro_batches = 1
        step = int(state.global_step)
        wanted = step in self._steps
        if self._signal is not None:
            asked, here = self._is_asked_for(step), self._signal.take()
            is_last = control.should_training_stop or step >= state.max_steps
            wanted = wanted or asked or (here and is_last)
            if here and not wanted:
                self._ask_for(step + 1)
        if wanted:
            self._look(args, step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say which steps never came."""
        late = sorted(step for step in self._steps if step > state.global_step)
        if late and state.is_world_process_zero:
            log.warning("--look %s: the run ended at step %d", ",".join(str(step) for step in late), state.global_step)

    # ---- see [Note: the same step on all ranks] ----

    def _key(self, step: int) -> str:
        return f"shardglass/look/{self._run}/{step}"

    def _ask_for(self, step: int) -> None:
        dist.distributed_c10d._get_default_store().set(self._key(step), "asked")

    def _is_asked_for(self, step: int) -> bool:
        return bool(dist.distributed_c10d._get_default_store().check([self._key(step)]))

    # ---- a look ----

    def _look(self, args: Any, step: int) -> None:
        """Write this rank's snapshot; a failure is said, and ends no run."""
        try:
            live = look(self._trainer)
            folder = write_moment(Path(str(args.output_dir)), step, Moment(live=live, plan=self._plan(live)))
        except (ShardglassError, OSError) as error:
            log.error("rank %d: no snapshot of step %d: %s", args.process_index, step, error)
            return
        self.last = live
        if self._say is not None:
            self._say(f"look: snapshots of step {step} are in {folder}")

    def _plan(self, live: Snapshot) -> Snapshot | None:
        """What the plan says of this rank now; None if there is none."""
        handle = live_handle(self._trainer.model)
        if self._make_engine is None or handle is None:
            return None
        if self._engine is None:
            try:
                self._engine = self._make_engine()
            except ShardglassError as error:
                log.warning("snapshots of this run have no plan to be held against: %s", error)
                self._make_engine = None
                return None
        engine = self._engine
        taken = handle.counters["step"] - handle.steps_skipped
        shape = StepShape(
            micro_batches=tuple(sorted(self._shapes)) or (1,),
            accumulates_locally=not engine.options.rules.shards_grads,
            backend=handle.backend,
        )
        return planned_snapshot(
            engine.layout,
            engine.options,
            live.rank,
            optimizer=engine.optimizer,
            step=taken,
            shape=shape if self._shapes else None,
        )


def clear_snapshots(output_dir: Path) -> list[str]:
    """Remove the snapshots that an earlier run left, before a run that begins anew; returns what was done.

    One process of a machine calls it, before the ranks meet in ``train()``.
    """
    removed = clear(output_dir)
    if not removed:
        return []
    of = "1 step" if removed == 1 else f"{removed} steps"
    return [f"{output_dir / FOLDER}: snapshots of an earlier run, of {of}, are removed"]

"""Losses that are nan or inf, in the Trainer's log.

Owns one callback over any ``transformers.Trainer``.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback


class NonFiniteLossCallback(TrainerCallback):
    """Shows a loss that is nan or inf in the steps it belongs to, and in no later ones.

    The Trainer empties its sum of losses by taking it from itself, and nan - nan is nan: without
    ``logging_nan_inf_filter`` one bad step would make the logged loss of every later step nan.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Runs behind the Trainer's own emptying; a log without a training loss emptied nothing."""
        total = getattr(self._trainer, "_tr_loss", None)
        if "loss" in (kwargs.get("logs") or {}) and isinstance(total, Tensor) and not bool(torch.isfinite(total)):
            total.zero_()

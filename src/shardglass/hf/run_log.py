"""What a run leaves beside its summary: the resolved config in a file, and losses that are nan in the log.

Owns two callbacks. Leaves the table to ``report.config_table``, the summary to ``summary``.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from shardglass.errors import ConfigError
from shardglass.hf.trainer import ZeroMixin
from shardglass.report.config_table import config_json

CONFIG_FILE = "shardglass_config.json"
"""The resolved config as JSON, in the output folder."""


class ResolvedConfigCallback(TrainerCallback):
    """Writes the resolved config when training begins: only then are the number of steps and the width known."""

    def __init__(self, trainer: ZeroMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the file on rank 0, beside its place and then moved.

        Raises:
            ConfigError: The output folder cannot be written to.
        """
        if not state.is_world_process_zero:
            return
        folder = Path(str(args.output_dir))
        beside = folder / f".{CONFIG_FILE}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            beside.write_text(config_json(self._trainer.resolved) + "\n", encoding="utf-8")
            os.replace(beside, folder / CONFIG_FILE)
        except OSError as error:
            raise ConfigError(f"--output_dir: {folder} cannot be written to: {error}") from None


class NonFiniteLossCallback(TrainerCallback):
    """Shows a loss that is nan or inf in the steps it belongs to, and in no later ones.

    The Trainer empties its sum of losses by taking it from itself, and nan - nan is nan: without
    ``logging_nan_inf_filter`` one bad step would make the logged loss of every later step nan.
    """

    def __init__(self, trainer: ZeroMixin) -> None:
        self._trainer: Any = trainer

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Runs behind the Trainer's own emptying; a log without a training loss emptied nothing."""
        total = getattr(self._trainer, "_tr_loss", None)
        if "loss" in (kwargs.get("logs") or {}) and isinstance(total, Tensor) and not bool(torch.isfinite(total)):
            total.zero_()

"""The resolved config as a file beside the run.

Owns when and where it is written. Leaves the table to ``report.config_table``.
"""

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from shardglass.errors import ConfigError
from shardglass.hf.output_folder import CONFIG_FILE
from shardglass.hf.trainer import ZeroMixin
from shardglass.report.config_table import config_json


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

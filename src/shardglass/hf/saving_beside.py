"""Checkpoints of the Trainer that are written while it trains.

Owns what is put aside during the pause (small files, and a list of the weights), and when the thread is waited for.
Leaves the thread to ``checkpoint.background``, and the contents of the files to ``checkpoints``.

[Note: weights from the state] The whole weights are not gathered: when every rank's masters are on the disk, rank 0
casts them to the model's dtype, a little at a time, and writes the files that ``from_pretrained`` reads. Models other
than transformers' own, or of which it renames tensors when it saves, are gathered whole during the pause instead.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from shardglass.checkpoint.background import BackgroundSaver
from shardglass.checkpoint.manifest import STATE
from shardglass.checkpoint.own import StateFiles
from shardglass.checkpoint.plain import Weight, weights_of, write_plain
from shardglass.checkpoint.snapshot import persistent_buffers
from shardglass.engine.buffers import torch_dtype
from shardglass.engine.handle import Handle
from shardglass.errors import CheckpointError


class Beside:
    """One Trainer's saves beside training."""

    def __init__(self, trainer: Any) -> None:
        """Prepare nothing yet: the group is made with the first save."""
        self._trainer = trainer
        self._saver: BackgroundSaver | None = None

    def save(self, handle: Handle, target: Path, extra: Mapping[str, Any]) -> None:
        """Put aside what training changes, and begin to write; collective.

        Raises:
            CheckpointError: The save before failed.
        """
        if self._saver is None:
            self._saver = BackgroundSaver(handle)
        self.wait()
        aside = Path(tempfile.mkdtemp(prefix="shardglass-"))
        whole = self._put_aside(handle, aside)
        weights = [] if whole is not None or not self._trainer.args.should_save else plain_weights(handle)

        def write(folder: Path) -> None:
            shutil.copytree(aside, folder, dirs_exist_ok=True)
            if whole:
                self._trainer._save_whole(folder, whole)
            elif weights:
                write_plain(StateFiles(folder / STATE), weights, folder)

        def done(*, complete: bool) -> None:
            shutil.rmtree(aside, ignore_errors=True)
            if complete:
                self._trainer._count_checkpoint(target)

        self._saver.save(target, extra=extra, write=write, done=done)

    def _put_aside(self, handle: Handle, aside: Path) -> dict[str, Tensor] | None:
        """Write the small files; the whole weights if they cannot come from the state, see the note above."""
        trainer = self._trainer
        trainer._write_small_files(aside)
        if is_plain(trainer.model):
            if trainer.args.should_save:
                trainer._save_whole(aside, {})
                for file in aside.glob("model*.safetensors*"):  # the one without weights
                    file.unlink()
            return None
        return handle.full_state_dict(rank0_only=not trainer.args.save_on_each_node)

    def check(self) -> None:
        """Raise what a save failed with, at the same step on all ranks."""
        if self._saver is not None:
            self._settle(self._saver.check)

    def wait(self) -> None:
        """Wait for the save that is under way."""
        if self._saver is not None:
            self._settle(self._saver.wait)

    def close(self) -> None:
        """Wait, and give the group back."""
        if self._saver is not None:
            saver, self._saver = self._saver, None
            self._settle(saver.close)

    def _settle(self, what: Callable[[], None]) -> None:
        try:
            what()
        except CheckpointError as error:
            self._trainer._bear(error)


def is_plain(model: nn.Module) -> bool:
    """Whether the files of a model have its parameters under their own names."""
    return isinstance(model, PreTrainedModel) and not get_checkpoint_conversion_mapping(model.config.model_type)


def plain_weights(handle: Handle) -> list[Weight]:
    """What the files of a model hold, in the model's dtypes."""
    params = [p for buffer in handle.layout.buffers for p in buffer.params]
    buffers = {name: (tuple(b.shape), b.dtype) for name, b in persistent_buffers(handle).items()}
    return weights_of(
        {p.name: p.shape for p in params},
        frozenset(p.name for p in params if p.trainable),
        {p.name: torch_dtype(p.dtype) for p in params},
        buffers,
    )


class TellSaved(TrainerCallback):
    """Has a save that failed end the run after the next step."""

    def __init__(self, beside: Beside) -> None:
        self._beside = beside

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Runs on every rank."""
        self._beside.check()

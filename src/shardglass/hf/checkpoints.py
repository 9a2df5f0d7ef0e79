"""The Trainer's checkpoints: ``checkpoint-N`` folders, their rotation, resuming, and the best model.

Owns what the Trainer adds to a training state (weights as safetensors with config and tokenizer,
``trainer_state.json``, scheduler, one RNG state a rank) and the data position. Leaves folders and tensors to
``shardglass.checkpoint``.

[Note: whole override] The Trainer's own ``_save_checkpoint`` writes in place, deletes in place and saves the optimizer
of rank 0 alone, so it is replaced as a whole; names and contents of the files stay.
"""

import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_callback import ExportableState

from shardglass.checkpoint.folder import PREFIX, delete, numbered, tidy, to_delete
from shardglass.checkpoint.load import load_checkpoint
from shardglass.checkpoint.manifest import MANIFEST
from shardglass.checkpoint.save import save_checkpoint, save_files
from shardglass.engine.handle import Handle
from shardglass.errors import CheckpointError, UsageError
from shardglass.hf.arguments import words_of
from shardglass.hf.resuming import ResumeMixin, check_position, find_checkpoint, resume_of
from shardglass.hf.saving_beside import Beside

log = logging.getLogger(__name__)

SCHEDULER, STATE = "scheduler.pt", "trainer_state.json"
"""Names transformers gives these files."""

_SAVING = ".saving-"
"""Begins the name of the folder that final files are written to before they are moved to their place."""


def _base_rate(group: Mapping[str, Any]) -> float:
    """The learning rate of a param_group that its scheduler starts from."""
    return float(group.get("initial_lr", group["lr"]))


class CheckpointMixin(ResumeMixin):
    """The part of ``ZeroMixin`` that writes and reads files; see [Note: whole override]."""

    handle: Handle | None
    model: Any
    _sharded_model: nn.Module | None
    _whole: dict[str, Tensor] | None = None  # while it is being saved
    _beside: Beside | None = None
    _mine: list[Path]  # this run's checkpoints and those it goes on from, oldest first

    # ---- resuming ----

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:  # noqa: FBT001
        """Train; see ``transformers.Trainer.train``.

        Args:
            resume_from_checkpoint: A checkpoint's folder, or True for the last complete one of ``output_dir``; the
                argument of the same name counts when this one is None.
            args: The Trainer's.
            kwargs: The Trainer's.

        Raises:
            CheckpointError: The checkpoint is incomplete or does not fit; nothing was trained.
        """
        wanted = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        output_dir = Path(self.args.output_dir)
        if self.args.should_save:
            for line in tidy(output_dir):
                log.warning("%s: %s", output_dir, line)
            for left in output_dir.glob(f"{_SAVING}*"):  # of a run that was killed while it saved its model
                shutil.rmtree(left, ignore_errors=True)
        self.accelerator.wait_for_everyone()  # type: ignore[attr-defined]
        words = words_of(self.args)
        folder = find_checkpoint(wanted, output_dir, words)
        self._mine, self._resume, self.resume_note = [], None, None
        if folder is not None:
            position = self._position()
            skips = bool(self.args.ignore_data_skip)
            check_position(folder, position, ignore_data_skip=skips, words=words)
            self._resume = resume_of(folder, position.get("samples"))
            self._mine = [path for number, path in numbered(output_dir) if number <= self._resume.step]
        has_state = self._resume is not None and self._resume.has_state
        # Without a Trainer's state in the folder the Trainer itself begins anew, and we put it where the state is.
        return super().train(str(folder) if has_state else None, *args, **kwargs)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing yet: the master weights come with the optimizer's state, once the model is sharded."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Bring weights, optimizer and scheduler to where the checkpoint left them."""
        if self._resume is None:
            return
        folder = self._resume.folder
        asked = [_base_rate(group) for group in self._engine().optimizer.param_groups]
        source = load_checkpoint(self._engine(), folder)
        done, last = self.state.global_step, self.state.max_steps
        if done >= last > 0:  # the Trainer would take one step more
            words = words_of(self.args)
            raise CheckpointError(
                f"{folder} is at step {done} and this run ends at step {last}: nothing is left to train; raise "
                f"{words.named('max_steps')} or {words.named('num_train_epochs')} to go on",
                is_shared=True,
            )
        rate_then = float(source.groups[0]["lr"]) if source.groups else None
        self._load_schedule(folder, done)
        self._tell_course(rate_then)
        then = [_base_rate(group) for group in source.groups or ()]
        if source.groups is not None and then != asked and self.args.should_save:
            log.warning("resuming with the checkpoint's learning rates %s, not with %s of this run", then, asked)

    def _load_schedule(self, folder: Path, done: int) -> None:
        """Bring the scheduler to where it was; one without a file of its own goes through its steps."""
        path = folder / SCHEDULER
        if path.is_file():
            self.lr_scheduler.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
            self._rate_by_present_schedule()
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
            for _ in range(done):
                self.lr_scheduler.step()

    def _load_best_model(self) -> None:
        """Load the best checkpoint's weights into the live engine."""
        best = Path(self.state.best_model_checkpoint)
        if (best / MANIFEST).is_file():
            load_checkpoint(self._engine(), best, weights_only=True)
            return
        with self._engine().gathered(modifier_rank=0):  # from save_only_model: the Trainer fills a whole model
            super()._load_best_model()  # type: ignore[misc]

    def _engine(self) -> Handle:
        if self.handle is None:
            raise UsageError("the model is not sharded yet: call train()")
        return self.handle

    # ---- saving ----

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write ``checkpoint-N``, then delete what is too many; collective."""
        if trial is None:
            self.store_flos()  # type: ignore[attr-defined]
        run = Path(self._get_output_dir(trial=trial))  # type: ignore[attr-defined]
        target = run / f"{PREFIX}-{self.state.global_step}"
        best = self.state.best_global_step
        if best:
            folder = run / f"{PREFIX}-{best}"
            if folder == target or folder.exists():
                self.state.best_model_checkpoint = str(folder)
        extra = {"position": {**self._position(), **self._place_now()}}
        try:
            if self.args.save_only_model:
                save_files(self._engine(), target, self._write_model)
            elif getattr(self.args, "async_save", False):
                self._saves().save(self._engine(), target, extra)
                return  # it counts when it is complete
            else:
                save_checkpoint(self._engine(), target, extra=extra, write=self._write_trainer_files)
        except CheckpointError as error:
            self._bear(error)
            return
        self._count_checkpoint(target)

    def _bear(self, error: CheckpointError) -> None:
        """Go on after a checkpoint that could not be written, if the user says so.

        Raises:
            CheckpointError: The user does not.
        """
        if getattr(self.args, "on_save_failure", "stop") != "continue":
            raise error
        if self.args.should_save:
            asked = words_of(self.args).given("on_save_failure", value="continue")
            log.error("%s; training goes on, as %s asks for", error, asked)

    def _count_checkpoint(self, target: Path) -> None:
        """A checkpoint is complete: push it where that is asked for, and delete what is too many."""
        self._mine = [path for path in self._mine if path != target] + [target]
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(target))  # type: ignore[attr-defined]
        self._rotate(self.args.save_total_limit)

    def _saves(self) -> Beside:
        """The saves beside training, of this trainer."""
        if self._beside is None:
            self._beside = Beside(self)
        return self._beside

    def _end_saves(self) -> None:
        """Wait for a save under way, and give its group back; raises what it failed with."""
        if self._beside is not None:
            self._beside.close()

    def _rotate(self, limit: int | None) -> None:
        """Delete this run's oldest checkpoints beyond ``limit``; those of other runs stay."""
        best = self.state.best_model_checkpoint
        for folder in to_delete(self._mine, limit=limit, best=None if best is None else Path(best)):
            self._mine.remove(folder)
            if self.args.should_save and folder.exists():
                delete(folder)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """End the training; the Trainer would delete the last checkpoint in place if another one is the best."""
        self._end_saves()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.args.save_total_limit = limit

    def _write_model(self, folder: Path) -> None:
        """Weights, config, tokenizer and the Trainer's state, by the rank that saves; collective."""
        self._save(str(folder))
        self._write_state(folder)

    def _write_state(self, folder: Path) -> None:
        """The Trainer's state, by the rank that saves."""
        if self.args.should_save:
            self._export_callbacks()
            self.state.save_to_json(str(folder / STATE))

    def _write_small_files(self, folder: Path) -> None:
        """What the Trainer needs beside weights and the engine's state; called on every rank."""
        self._write_state(folder)
        self._save_rng_state(str(folder))  # type: ignore[attr-defined]
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)

    def _write_trainer_files(self, folder: Path) -> None:
        """What the Trainer needs beside the engine's state; called on every rank."""
        self._save(str(folder))
        self._write_small_files(folder)

    def _save_whole(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """The Trainer's own way to save a model and what belongs to it."""
        super()._save(str(folder), state_dict=weights)  # type: ignore[misc]

    def _export_callbacks(self) -> None:
        """Put the present state of callbacks that have one in the Trainer's state."""
        exported: dict[str, Any] = {}
        for callback in [*self.callback_handler.callbacks, self.control]:  # type: ignore[attr-defined]
            if isinstance(callback, ExportableState):
                exported.setdefault(type(callback).__name__, []).append(callback.state())
        one = {name: states[0] if len(states) == 1 else states for name, states in exported.items()}
        self.state.stateful_callbacks = one

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Save the whole model for ``from_pretrained()``; call it on every rank.

        Args:
            output_dir: Where; None is the run's folder.
            args: The Trainer's.
            kwargs: The Trainer's.
        """
        self._whole = self._whole_model()  # before some release of the Trainer leaves all ranks but one out
        try:
            super().save_model(output_dir, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._whole = None

    def _whole_model(self) -> dict[str, Tensor] | None:
        """The whole weights on the rank that saves; None for a model that is not sharded here. Collective."""
        if self.handle is None or self.handle.closed or self._sharded_model is not self.model:
            return None
        return self.handle.full_state_dict(rank0_only=not self.args.save_on_each_node)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save model and tokenizer; a failure leaves what the folder held: write beside, then move file by file."""
        if state_dict is None:
            state_dict = self._whole_model() if self._whole is None else self._whole
        if not self.args.should_save:
            return
        target = Path(output_dir if output_dir is not None else self.args.output_dir)
        target.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=_SAVING, dir=target))
        try:
            super()._save(str(beside), state_dict=state_dict)  # type: ignore[misc]
            for written in sorted(beside.iterdir()):
                if written.is_dir():  # templates of a tokenizer; a folder is not replaced by one that holds files
                    shutil.rmtree(target / written.name, ignore_errors=True)
                os.replace(written, target / written.name)
        finally:
            shutil.rmtree(beside, ignore_errors=True)

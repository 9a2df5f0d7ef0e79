"""Resuming a Trainer from a checkpoint, whatever world size, stage, batch or writer it is of.

Owns which checkpoint is meant, the checks before anything is loaded, and where the data goes on. Leaves the training
state to ``checkpoint`` and the arithmetic of steps and samples to ``course``.

[Note: two ways on] Where the present batches would have come to the same place, the Trainer's own way is taken: it
skips batches, and the numbers are bit for bit those of a run that was not interrupted. Otherwise the first epoch is
run as one that has only the samples that are left, see ``_run_epoch``.
"""

import logging
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerState
from transformers.trainer_pt_utils import safe_globals

from shardglass.checkpoint.deepspeed import open_deepspeed
from shardglass.checkpoint.folder import PREFIX, REPLACED, numbered
from shardglass.checkpoint.kinds import kind_of
from shardglass.checkpoint.manifest import read_manifest
from shardglass.errors import CheckpointError
from shardglass.hf.arguments import words_of
from shardglass.hf.course import Batching, Course, Place, place_of
from shardglass.hf.sample_order import from_sample
from shardglass.words import IN_PYTHON, ON_A_COMMAND_LINE, Words

log = logging.getLogger(__name__)

STATE = "trainer_state.json"
AUTO = "auto"
"""Value of ``resume_from_checkpoint`` for a command that is started again and again, the first time too."""
BATCH = ("world_size", "per_device_train_batch_size", "gradient_accumulation_steps")
"""What decides how samples become steps."""


def is_asked_for(wanted: str | bool | None) -> bool:  # noqa: FBT001
    """Whether a value of ``resume_from_checkpoint`` asks for a checkpoint."""
    return not (wanted is None or wanted is False or str(wanted).lower() in ("false", ""))


def check_whole(folder: Path) -> None:
    """See that a folder is a checkpoint to resume from, as far as can be told without the model.

    Raises:
        CheckpointError: It is none, or incomplete.
    """
    if kind_of(folder) == "own":
        read_manifest(folder)


def find_checkpoint(
    wanted: str | bool | None,  # noqa: FBT001
    output_dir: Path,
    words: Words = IN_PYTHON,
) -> Path | None:
    """Which checkpoint to resume from; None if none is asked for.

    Args:
        wanted: A folder; True (also as text) for the last complete one in ``output_dir``; "auto" for that, if there is
            one.
        output_dir: The run's folder.
        words: How the message names arguments.

    Raises:
        CheckpointError: The folder is no complete checkpoint, or there is none; says why for each.
    """
    if not is_asked_for(wanted):
        return None
    is_auto = str(wanted).lower() == AUTO
    if not is_auto and str(wanted).lower() != "true":
        folder = Path(str(wanted)).expanduser()
        check_whole(folder)
        return folder
    reasons = []
    for _, folder in reversed(numbered(output_dir)):
        try:
            check_whole(folder)
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            for reason in reasons:
                log.warning("%s; resuming from %s", reason, folder)
            return folder
    if is_auto and not reasons:
        return None
    listed = "".join(f"\n  {reason}" for reason in reasons)
    raise CheckpointError(
        f"{words.given('resume_from_checkpoint', value=True)}: {output_dir} has no complete {PREFIX}-N folder; leave "
        f"the {words.one} out to start anew{listed}"
    )


def written_position(folder: Path) -> Mapping[str, Any]:
    """What a checkpoint of ours says of its batches and its place in the data; nothing of another writer's."""
    if kind_of(folder) != "own":
        return {}
    position: Mapping[str, Any] = read_manifest(folder).extra.get("position", {})
    return position


def check_position(folder: Path, now: Mapping[str, Any], *, ignore_data_skip: bool, words: Words = IN_PYTHON) -> None:
    """See that a checkpoint's place in the data means the same in this run.

    Args:
        folder: The checkpoint.
        now: World size, batch sizes, seed and, where the data has a length, samples of this run.
        ignore_data_skip: The user wants the epoch from its beginning.
        words: How the message names arguments.

    Raises:
        CheckpointError: It does not; names every number that differs.
    """
    then = written_position(folder)
    free = BATCH if "samples" in now else ()
    differing = [key for key in now if key in then and then[key] != now[key] and key not in free]
    if not differing or ignore_data_skip:
        return
    rows = "".join(f"\n  {key}: {then[key]} there, {now[key]} here" for key in differing)
    text = (
        f"{folder} was written by a run that drew its data otherwise; keep them, or give "
        f"{words.given('ignore_data_skip', value=True)} to begin the epoch anew:{rows}"
    )
    raise CheckpointError(text, is_shared=True)


def check_resume(wanted: str | bool | None, output_dir: Path) -> None:  # noqa: FBT001
    """Find out before any weight is loaded that a checkpoint cannot be resumed from; ``train`` checks the rest.

    Raises:
        CheckpointError: It is no complete checkpoint.
    """
    if not any(output_dir.glob(f".*.{REPLACED}")):  # a kill left work that ``train`` puts in order first
        find_checkpoint(wanted, output_dir, ON_A_COMMAND_LINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """What is resumed from.

    Attributes:
        folder: The checkpoint.
        step: Steps taken.
        place: Its place in the data; None if that is not known.
        written: What it says of its batches.
        has_state: Whether the Trainer's state lies in it.
    """

    folder: Path
    step: int
    place: Place | None
    written: Mapping[str, Any]
    has_state: bool


def resume_of(folder: Path, samples: int | None) -> Resume:
    """Read where a checkpoint left off.

    Args:
        folder: A whole checkpoint.
        samples: Samples of an epoch now, which stand for those of a writer that does not tell.

    Raises:
        CheckpointError: The Trainer's state in it is damaged.
    """
    written = written_position(folder)
    path = folder / STATE
    if not path.is_file():
        step, place = _without_state(folder, samples)
        return Resume(folder=folder, step=step, place=place, written=written, has_state=False)
    try:
        state = TrainerState.load_from_json(str(path))
        step = int(state.global_step)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: not a Trainer's state: {error!r}") from error
    known = written if written or samples is None else {"samples": samples}
    place = place_of(known, state.epoch)
    return Resume(folder=folder, step=step, place=place, written=written, has_state=True)


def _without_state(folder: Path, samples: int | None) -> tuple[int, Place | None]:
    """Step and place of a checkpoint without a Trainer's state, as far as its writer tells."""
    kind = kind_of(folder)
    if kind == "deepspeed":
        read = open_deepspeed(folder)
        epoch, used = divmod(read.global_samples, samples) if samples else (0, 0)
        return read.global_steps, Place(epoch=epoch, used=used)
    return (int(read_manifest(folder).counters["step"]) if kind == "own" else 0), None


class ResumeMixin:
    """The part of ``ZeroMixin`` that finds the way on from a checkpoint; see [Note: two ways on]."""

    args: Any
    state: Any
    lr_scheduler: Any
    train_dataset: Any
    _train_batch_size: int
    _resume: Resume | None = None
    _course: Course | None = None  # of the present call of train(); None where the data has no length
    resume_note: str | None = None  # what a changed batch means, for the summary

    def _batching(self) -> Batching | None:
        """How samples become steps; None for data without a length."""
        if not hasattr(self.train_dataset, "__len__"):
            return None
        return Batching(
            world_size=self.args.world_size,
            per_device=self._train_batch_size,
            accumulation=self.args.gradient_accumulation_steps,
            samples=len(self.train_dataset),
            drop_last=bool(self.args.dataloader_drop_last),
        )

    def _position(self) -> dict[str, Any]:
        """What the order of the data and the place in it depend on."""
        args = self.args
        found = {
            "world_size": args.world_size,
            "per_device_train_batch_size": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "seed": args.seed if args.data_seed is None else args.data_seed,
        }
        batching = self._batching()
        return found if batching is None else {**found, "samples": batching.samples}

    def _place_now(self) -> dict[str, int]:
        """The place in the data after the present step, for a checkpoint."""
        if self._course is None:
            return {}
        place = self._course.at(self.state.global_step)
        return {"epoch": place.epoch, "used": place.used}

    @property
    def _goes_own_way(self) -> bool:
        """Whether the first epoch is run by us, see [Note: two ways on]."""
        course, resume = self._course, self._resume
        return course is not None and resume is not None and not (course.is_regular and resume.has_state)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Count steps and epochs from where the checkpoint is, if its batches were others."""
        values = super().set_initial_training_values(args, dataloader)  # type: ignore[misc]
        batching, resume = self._batching(), self._resume
        self._course = None
        if batching is None or (resume is not None and resume.place is None and resume.has_state):
            return values
        start, step = Place(epoch=0, used=0), 0
        if resume is not None:
            step = resume.step
            start = resume.place or Course(batching=batching, start=start, step=0).at(step)
            if args.ignore_data_skip:
                start = Place(epoch=start.epoch, used=0)
        if start.used and not batching.steps(batching.samples - start.used):
            start = Place(epoch=start.epoch + 1, used=0)
        self._course = course = Course(batching=batching, start=start, step=step)
        if not self._goes_own_way or args.ignore_data_skip:
            return values
        total = args.max_steps if args.max_steps > 0 else course.total_steps(args.num_train_epochs)
        last = course.at(total)
        epochs = last.epoch + (1 if last.used else 0)
        return (max(epochs, start.epoch + 1), *values[1:6], total)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Epochs behind, and micro-steps to skip in the next: none where the samples are skipped by ``_run_epoch``."""
        found: tuple[int, int] = super()._init_training_state(*args, **kwargs)  # type: ignore[misc]
        if self._resume is not None and not self._resume.has_state:
            self.state.global_step = self._resume.step
        if self._course is None or not self._goes_own_way:
            return found
        return self._course.start.epoch, 0

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Shard, then load; the Trainer loads nothing from a folder without its own state."""
        prepared = super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]
        if self._resume is not None and not self._resume.has_state:
            self._load_optimizer_and_scheduler(str(self._resume.folder))  # type: ignore[attr-defined]
        return prepared

    def _run_epoch(self, *args: Any, **given: Any) -> None:
        """Run an epoch, of which the Trainer names every argument; after a change of batches, what is left of it."""
        course = self._course
        if (
            course is None
            or not self._goes_own_way
            or self.args.ignore_data_skip
            or given["epoch"] != course.start.epoch
        ):
            super()._run_epoch(*args, **given)  # type: ignore[misc]
            return
        given["steps_in_epoch"] = course.batching.micro_steps(course.left)
        given["num_update_steps_per_epoch"] = course.first_steps
        with from_sample(given["train_dataloader"], course.start.used, words_of(self.args)):
            super()._run_epoch(*args, **given)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Give this rank the generators' states of its number; ranks that are new take those of the first ones again.

        At another world size no order of random numbers is the one of the uninterrupted run.
        """
        if checkpoint is None:
            return
        files = [path for path in _rng_files(Path(checkpoint)) if path.is_file()]
        if not files:
            return
        with safe_globals():
            saved = torch.load(files[self.args.process_index % len(files)], weights_only=True)
        random.setstate(saved["python"])
        np.random.set_state(saved["numpy"])
        torch.random.set_rng_state(saved["cpu"])
        if torch.cuda.is_available() and "cuda" in saved:
            states = saved["cuda"]
            torch.cuda.random.set_rng_state(states[0] if isinstance(states, list) else states)

    def _tell_course(self, rate_then: float | None) -> None:
        """Say what steps, schedule and place mean now, if they mean something else than when they were written."""
        course, resume = self._course, self._resume
        if course is None or resume is None or not self._goes_own_way:
            return
        now, total = course.batching, self.state.max_steps
        then = math.prod(int(resume.written.get(key, 0)) for key in BATCH)
        was = f"{then} samples a step" if then else "steps of a size that it does not tell"
        if then == now.whole:
            return
        rate = self.lr_scheduler.get_last_lr()[0]
        rates = f"learning rate {rate:.3g}" + (f", was {rate_then:.3g}" if rate_then is not None else "")
        self.resume_note = (
            f"resumed from {resume.folder.name} with {now.whole} samples a step, where it had {was}: the data goes on "
            f"at sample {course.start.used} of {now.samples} of epoch {course.start.epoch + 1}, steps are counted on "
            f"from {course.step}, and the run ends at step {total}; the schedule is over these steps ({rates})"
        )
        if self.args.should_save:
            log.warning("%s", self.resume_note)

    def _rate_by_present_schedule(self) -> None:
        """Give the next step the learning rate that the schedule over the present number of steps has there."""
        scheduler = self.lr_scheduler
        if self._goes_own_way and isinstance(scheduler, LambdaLR):
            rates = [
                base * rule(scheduler.last_epoch)
                for base, rule in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            ]
            for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            scheduler._last_lr = rates


class TellEpoch(TrainerCallback):
    """Keeps the Trainer's number of epochs right in an epoch that was not begun at its beginning."""

    def __init__(self, trainer: ResumeMixin) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Runs before anything is logged or saved of the step."""
        course = self._trainer._course
        if course is not None and self._trainer._goes_own_way:
            place = course.at(state.global_step)
            state.epoch = place.epoch + place.used / course.batching.samples


def _rng_files(folder: Path) -> list[Path]:
    """Where the Trainer keeps the generators' states, by rank; one rank alone has a file of another name."""
    numbered_files = sorted(folder.glob("rng_state_*.pth"), key=lambda path: int(path.stem.rpartition("_")[2]))
    return numbered_files or [folder / "rng_state.pth"]

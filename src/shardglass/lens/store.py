"""The snapshots of a run as files: ``<output_dir>/snapshots/step-000003/rank-1.json``.

Owns names, writing in one piece, and finding them again. Beside a snapshot lies what the plan says of the same rank at
the same step, ``rank-1.plan.json``. Leaves what is in a file to ``snapshot``.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shardglass.errors import UsageError, suggestion
from shardglass.lens.snapshot import Snapshot

FOLDER = "snapshots"
HOW = "train with --look STEP, or send SIGUSR1 to the run"

_STEP = re.compile(r"^step-(\d+)$")
_RANK = re.compile(r"^rank-(\d+)\.json$")
_OURS = re.compile(r"^\.?rank-\d+(\.plan)?\.json(\.writing)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What one rank held at one step.

    Attributes:
        live: What was there.
        plan: What the plan said; None if the run has no plan.
    """

    live: Snapshot
    plan: Snapshot | None


def write_moment(output_dir: Path, step: int, moment: Moment) -> Path:
    """Write the files of one rank, each in one piece: a file of its name is whole, whenever the process ends.

    Returns:
        The step's folder.
    """
    folder = _step_folder(output_dir, step)
    folder.mkdir(parents=True, exist_ok=True)
    rank = moment.live.rank
    if moment.plan is not None:  # first, so that no snapshot is without the plan that it is held against
        _replace(folder / f"rank-{rank}.plan.json", moment.plan.to_json())
    _replace(folder / f"rank-{rank}.json", moment.live.to_json())
    return folder


def clear(output_dir: Path) -> int:
    """Remove the snapshots of an earlier run, and nothing else; returns how many steps they were of."""
    steps = steps_of(output_dir)
    for step in steps:
        folder = _step_folder(output_dir, step)
        for path in list(folder.iterdir()):
            if _OURS.match(path.name):
                path.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
    return len(steps)


def steps_of(output_dir: Path) -> list[int]:
    """Steps of which there are snapshots, in order."""
    folder = output_dir / FOLDER
    if not folder.is_dir():
        return []
    found = (_STEP.match(path.name) for path in folder.iterdir())
    return sorted(int(m[1]) for m in found if m is not None and ranks_of(output_dir, int(m[1])))


def ranks_of(output_dir: Path, step: int) -> list[int]:
    """Ranks that wrote a snapshot of a step."""
    folder = _step_folder(output_dir, step)
    found = (_RANK.match(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(m[1]) for m in found if m is not None)


def step_to_show(output_dir: Path, wanted: int | None, *, flag: str = "--step") -> int:
    """The step that is asked for, or the last one.

    Args:
        output_dir: The run's output folder.
        wanted: A step; None takes the last.
        flag: How it was asked for, for the message.

    Raises:
        UsageError: There is no such folder, it has no snapshots, or none of this step; says which there are.
    """
    if output_dir.is_file():
        raise UsageError(f"{output_dir}: this is a file; give the run's output_dir")
    if not output_dir.is_dir():
        beside = [path.name for path in output_dir.parent.iterdir()] if output_dir.parent.is_dir() else []
        raise UsageError(f"{output_dir}: there is no such folder{suggestion(output_dir.name, beside)}")
    steps = steps_of(output_dir)
    if not steps:
        raise UsageError(f"{output_dir} has no snapshots: {HOW}, then give the run's output_dir")
    if wanted is not None and wanted not in steps:
        raise UsageError(f"{flag} {wanted}: no snapshot is of this step; there are those of {_listed(steps)}")
    return steps[-1] if wanted is None else wanted


def read_moments(output_dir: Path, step: int, rank: int | None = None) -> list[Moment]:
    """What was written of a step, by rank.

    Args:
        output_dir: The run's output folder.
        step: A step that has snapshots.
        rank: Of one rank alone; None takes all.

    Raises:
        UsageError: This rank wrote none, or a file is damaged or of another version.
    """
    ranks = ranks_of(output_dir, step)
    if rank is not None and rank not in ranks:
        raise UsageError(
            f"--rank {rank}: it wrote no snapshot of step {step}; there are those of ranks {_listed(ranks)}"
        )
    folder = _step_folder(output_dir, step)
    moments = []
    for r in ranks if rank is None else [rank]:
        planned = folder / f"rank-{r}.plan.json"
        moments.append(
            Moment(live=_read(folder / f"rank-{r}.json"), plan=_read(planned) if planned.is_file() else None)
        )
    return moments


def _step_folder(output_dir: Path, step: int) -> Path:
    return output_dir / FOLDER / f"step-{step:06d}"


def _read(path: Path) -> Snapshot:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    return Snapshot.from_json(text, where=str(path))


def _replace(path: Path, text: str) -> None:
    """Write beside, bring it to the disk, then move."""
    beside = path.with_name(f".{path.name}.writing")
    with beside.open("w", encoding="utf-8") as file:
        file.write(f"{text}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _listed(numbers: Iterable[int], most: int = 12) -> str:
    words = [str(number) for number in numbers]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")

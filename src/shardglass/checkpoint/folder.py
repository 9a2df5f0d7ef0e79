"""The folder protocol: a checkpoint is complete, or does not exist under its name.

Owns names, renames and fsyncs. Leaves what is in the folder to ``manifest`` and ``store``.

[Note: complete or absent] A checkpoint ``checkpoint-30`` is written as ``.checkpoint-30.saving``, brought to the disk
(fsync of every file and folder), then renamed; renaming is the one step after which it exists. One that it replaces
is first renamed to ``.checkpoint-30.replaced`` and deleted last, and one that is deleted is first renamed to
``.checkpoint-30.deleting``. So whatever a kill leaves behind either has the name and is complete, or has a name with a
dot in front, which nothing reads; ``tidy`` brings a replaced one back if its successor never came, and removes the
rest.
"""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from shardglass.checkpoint.digest import sync

SAVING, REPLACED, DELETING = "saving", "replaced", "deleting"
PREFIX = "checkpoint"
"""What transformers' Trainer calls its checkpoints; ``get_last_checkpoint`` finds them by it."""

_HIDDEN = re.compile(rf"^\.(?P<name>.+)\.(?P<state>{SAVING}|{REPLACED}|{DELETING})$")
_NUMBERED = re.compile(rf"^{PREFIX}-(\d+)$")


def hidden(target: Path, state: str) -> Path:
    """The name of a checkpoint while it is being written, replaced or deleted."""
    return target.parent / f".{target.name}.{state}"


def begin(target: Path) -> Path:
    """Make the empty folder a checkpoint is written in, and return it; leavings of an earlier attempt are removed."""
    folder = hidden(target, SAVING)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def publish(target: Path) -> None:
    """Give a written checkpoint its name, see [Note: complete or absent]."""
    written, replaced = hidden(target, SAVING), hidden(target, REPLACED)
    _sync_tree(written)
    if target.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        target.rename(replaced)
    written.rename(target)
    sync(target.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def abandon(target: Path) -> None:
    """Remove what was written of a checkpoint that will not be finished."""
    shutil.rmtree(hidden(target, SAVING), ignore_errors=True)


def delete(target: Path) -> None:
    """Delete a checkpoint; it loses its name first."""
    gone = hidden(target, DELETING)
    if gone.exists():
        shutil.rmtree(gone)
    target.rename(gone)
    shutil.rmtree(gone)


def tidy(output_dir: Path) -> list[str]:
    """Bring order into what a kill left behind; returns a line for each thing done."""
    if not output_dir.is_dir():
        return []
    done = []
    for found in sorted(output_dir.iterdir()):
        match = _HIDDEN.match(found.name)
        if match is None or not found.is_dir():
            continue
        target = output_dir / match["name"]
        if match["state"] == REPLACED and not target.exists():
            found.rename(target)
            done.append(f"{target.name} is back: a run was killed while it replaced it")
        else:
            shutil.rmtree(found)
            if match["state"] == SAVING:
                done.append(f"removed the unfinished {target.name}: a run was killed while it wrote it")
    return done


def numbered(output_dir: Path) -> list[tuple[int, Path]]:
    """The ``checkpoint-N`` folders, by ascending N."""
    if not output_dir.is_dir():
        return []
    found = ((_NUMBERED.match(path.name), path) for path in output_dir.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in found if match)


def to_delete(mine: Sequence[Path], *, limit: int | None, best: Path | None) -> list[Path]:
    """Which checkpoints are too many, oldest first; never the newest nor the best.

    Args:
        mine: Those of this run, oldest first.
        limit: How many to keep; None or below 1 keeps all. The best one beside the newest is kept even at 1.
        best: The best one, if there is one.
    """
    if limit is None or limit < 1 or not mine:
        return []
    kept = {mine[-1], *([best] if best is not None else [])}
    spare = [path for path in mine if path not in kept]
    count = max(0, limit - len(kept & set(mine)))
    return spare[: len(spare) - count] if count else spare


def _sync_tree(folder: Path) -> None:
    """Bring every file and folder below to the disk."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(root, name))
        sync(Path(root))

"""Saving the training state of a sharded model.

Owns what all ranks write and in which order. Leaves folders to ``folder``, the list of contents to ``manifest``, what
is written to ``snapshot``, and planning and storage of tensors to torch.distributed.checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

from shardglass.checkpoint.digest import digest_of, sync
from shardglass.checkpoint.folder import SAVING, abandon, begin, hidden, publish
from shardglass.checkpoint.manifest import LAYOUT, MANIFEST, STATE, Manifest, files_in, stored_name
from shardglass.checkpoint.ranks import Ranks
from shardglass.checkpoint.snapshot import Snapshot, take_snapshot
from shardglass.checkpoint.together import together
from shardglass.engine.handle import Handle
from shardglass.errors import CheckpointError
from shardglass.layout import Layout

FILE_BYTES = 1 << 30
"""Bytes of a rank's tensors in one file, about: a file is put together in memory."""


def save_checkpoint(
    handle: Handle,
    folder: str | Path,
    *,
    extra: Mapping[str, Any] | None = None,
    write: Callable[[Path], None] | None = None,
) -> None:
    """Save the training state of all ranks; collective. The folder is complete afterwards, or as it was before.

    Args:
        handle: The sharded model, between two steps.
        folder: Where; one that is there already is replaced as a whole.
        extra: JSON values to keep in the manifest.
        write: Called on every rank with the folder under its temporary name, to add files of the caller.

    Raises:
        UsageError: Gradients are accumulated.
        CheckpointError: Any rank could not write; says which and why. What was at ``folder`` is still there.
    """
    write_snapshot(handle, Path(folder), take_snapshot(handle), extra=extra or {}, write=write)


def write_snapshot(
    ranks: Ranks,
    target: Path,
    snapshot: Snapshot,
    *,
    extra: Mapping[str, Any],
    write: Callable[[Path], None] | None = None,
) -> None:
    """Write a snapshot that each of the ranks took; collective. The arguments and errors of ``save_checkpoint``."""
    temporary = hidden(target, SAVING)
    parts: list[Callable[[], object]] = [
        lambda: _write_tensors(ranks, temporary / STATE, snapshot),
        lambda: write(temporary) if write is not None else None,
        lambda: _finish(ranks, temporary, snapshot, extra),
    ]
    _in_folder(ranks, target, parts)


def save_files(ranks: Ranks, folder: str | Path, write: Callable[[Path], None]) -> None:
    """Write a folder without the training state, complete or not at all; collective.

    Args:
        ranks: Who takes part.
        folder: Where; one that is there already is replaced as a whole.
        write: Called on every rank with the folder under its temporary name.

    Raises:
        CheckpointError: Any rank could not write; says which and why. What was at ``folder`` is still there.
    """
    target = Path(folder)
    _in_folder(ranks, target, [lambda: write(hidden(target, SAVING))])


def _in_folder(ranks: Ranks, target: Path, parts: Sequence[Callable[[], object]]) -> None:
    """Do the parts one after the other on all ranks, in a folder that gets its name when all are done; collective.

    Raises:
        CheckpointError: A part failed on some rank; what was at ``target`` is still there.
    """
    on_main = ranks.rank == 0
    try:
        together(ranks, target, "made", lambda: begin(target) if on_main else None)
        together(ranks, target, "made", lambda: _check_seen(hidden(target, SAVING)))
        for part in parts:
            together(ranks, target, "written", part, _ROOM)
        together(ranks, target, "finished", lambda: publish(target) if on_main else None)
    except CheckpointError:
        if on_main:
            abandon(target)
        raise


_ROOM = "; checkpoints written before it are whole: make room there, and go on from the last"
"""What a user can do if a file could not be written."""


def _check_seen(temporary: Path) -> None:
    """See that the ranks share a file system.

    Raises:
        CheckpointError: They do not.
    """
    if not temporary.is_dir():
        raise CheckpointError(
            f"{temporary}, which rank 0 made, is not seen here: the folder must be on a file system that all machines "
            "share"
        )


def _write_tensors(ranks: Ranks, folder: Path, snapshot: Snapshot) -> None:
    """Write every rank's tensors; collective."""
    files = _file_of_names(snapshot.layout, ["master", "param", *snapshot.kinds])
    files |= {f"buffer/{name}": 1 for name in snapshot.buffers}
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)
    save(dict(snapshot.tensors), storage_writer=writer, process_group=ranks.host_group)


def _file_of_names(layout: Layout, kinds: list[str]) -> dict[str, int]:
    """Which of a rank's files a tensor goes to, counted from 1; the same on every rank."""
    files: dict[str, int] = {}
    index, filled = 1, 0
    for buffer in layout.buffers:
        size = buffer.shard_numel * 4 * len(kinds)
        if filled and filled + size > FILE_BYTES:
            index, filled = index + 1, 0
        filled += size
        files |= {stored_name(kind, p.name): index for p in buffer.params for kind in kinds}
    return files


def _finish(ranks: Ranks, temporary: Path, snapshot: Snapshot, extra: Mapping[str, Any]) -> None:
    """Bring what was written to the disk, each rank its own files, and list it all; collective."""
    on_main = ranks.rank == 0
    mine: dict[str, str] = {}
    fault: str | None = None
    try:
        if on_main:
            (temporary / LAYOUT).write_text(snapshot.layout.to_json(), encoding="utf-8")
        for name in files_in(temporary):
            if _owner(name, ranks.world_size) == ranks.rank:
                mine[name] = digest_of(temporary / name)
                sync(temporary / name)
    except OSError as error:
        fault = f"{type(error).__name__}: {error}"
    told = ranks.agree("checksums of a checkpoint", (mine, fault))
    if fault is not None:
        raise CheckpointError(fault)
    if on_main and all(theirs is None for _, theirs in told):
        digests = {name: value for found, _ in told for name, value in found.items()}
        manifest = _manifest_of(snapshot, extra, files_in(temporary), dict(sorted(digests.items())))
        (temporary / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def _owner(name: str, world_size: int) -> int:
    """The rank that wrote a file, which has it in its cache: DCP numbers a rank's files; the rest is rank 0's."""
    first = Path(name).name.split("-")
    if name.startswith(f"{STATE}/") and first[0] == "shard" and len(first) > 1 and first[1].isdigit():
        return (int(first[1]) - 1) % world_size
    return 0


def _manifest_of(
    snapshot: Snapshot, extra: Mapping[str, Any], files: Mapping[str, int], digests: Mapping[str, str]
) -> Manifest:
    return Manifest(
        shardglass=version("shardglass"),
        torch=str(torch.__version__),
        world_size=snapshot.world_size,
        stage=snapshot.stage,
        optimizer=snapshot.optimizer,
        groups=tuple(snapshot.groups),
        states=snapshot.kinds,
        counters=snapshot.counters,
        extra=extra,
        files=files,
        digests=digests,
    )

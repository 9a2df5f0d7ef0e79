"""Saving the training state of a sharded model.

Owns what all ranks write and in which order. Leaves folders to ``folder``, the list of contents to ``manifest``, and
planning and storage of tensors to torch.distributed.checkpoint.

[Note: names] Every tensor is stored flat, as ``kind/name``: ``master/`` fp32 weights of a trainable parameter,
``param/`` a frozen parameter, ``optimizer.<key>/`` a state of the optimizer (a scalar has one element), ``buffer/`` a
persistent buffer of a module. Weights in the model's dtype are not stored: they are the master weights, cast.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

from shardglass.checkpoint.chunk import FlatChunk
from shardglass.checkpoint.folder import SAVING, abandon, begin, hidden, publish
from shardglass.checkpoint.manifest import (
    IMPLEMENTATION,
    LAYOUT,
    MANIFEST,
    STATE,
    Manifest,
    files_in,
    stored_name,
)
from shardglass.checkpoint.together import together
from shardglass.engine.handle import Handle
from shardglass.engine.state import Piece
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
    target = Path(folder)
    temporary = hidden(target, SAVING)
    pieces = handle.pieces_to_save()
    kinds = _kinds(handle, pieces)

    def finish() -> None:
        (temporary / LAYOUT).write_text(handle.layout.to_json(), encoding="utf-8")
        manifest = _manifest_of(handle, kinds, extra or {}, temporary)
        (temporary / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")

    parts: list[Callable[[], object]] = [
        lambda: _write_tensors(handle, temporary / STATE, pieces, kinds),
        lambda: write(temporary) if write is not None else None,
        lambda: finish() if handle.rank == 0 else None,
    ]
    _in_folder(handle, target, parts)


def save_files(handle: Handle, folder: str | Path, write: Callable[[Path], None]) -> None:
    """Write a folder without the training state, complete or not at all; collective.

    Args:
        handle: Whose ranks take part.
        folder: Where; one that is there already is replaced as a whole.
        write: Called on every rank with the folder under its temporary name.

    Raises:
        CheckpointError: Any rank could not write; says which and why. What was at ``folder`` is still there.
    """
    target = Path(folder)
    _in_folder(handle, target, [lambda: write(hidden(target, SAVING))])


def _in_folder(handle: Handle, target: Path, parts: Sequence[Callable[[], object]]) -> None:
    """Do the parts one after the other on all ranks, in a folder that gets its name when all are done; collective.

    Raises:
        CheckpointError: A part failed on some rank; what was at ``target`` is still there.
    """
    on_main = handle.rank == 0
    try:
        together(handle, target, "made", lambda: begin(target) if on_main else None)
        together(handle, target, "made", lambda: _check_seen(hidden(target, SAVING)))
        for part in parts:
            together(handle, target, "written", part, _ROOM)
        together(handle, target, "finished", lambda: publish(target) if on_main else None)
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


def _kinds(handle: Handle, pieces: list[Piece]) -> dict[str, bool]:
    """Keys of the optimizer's state on any rank, and whether each is a scalar; collective."""
    mine = {p.kind: p.is_scalar for p in pieces if p.kind not in ("master", "param")}
    found: dict[str, bool] = {}
    for theirs in handle.agree("keys of the optimizer's state", mine):
        found |= theirs
    return found


def _write_tensors(handle: Handle, folder: Path, pieces: list[Piece], kinds: Mapping[str, bool]) -> None:
    """Write every rank's pieces; collective."""
    tensors: dict[str, Tensor] = {}
    for piece in pieces:
        value = piece.value.detach().reshape(-1)
        if piece.is_scalar:
            value = value.clone()  # one number for all parameters of a run; safetensors refuses shared memory
        tensors[stored_name(piece.kind, piece.name)] = FlatChunk(value, piece.start, piece.numel)
    files = _file_of_names(handle.layout, ["master", "param", *kinds])
    for name, buffer in persistent_buffers(handle).items():
        files[f"buffer/{name}"] = 1
        if handle.rank == 0:
            value = buffer.detach().reshape(-1)
            tensors[f"buffer/{name}"] = FlatChunk(value, 0, value.numel())
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)
    save(tensors, storage_writer=writer, process_group=handle.host_group)


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


def persistent_buffers(handle: Handle) -> dict[str, Tensor]:
    """Buffers that are part of the model's state dict and have elements."""
    kept = handle.model.state_dict(keep_vars=True)
    return {name: b for name, b in handle.model.named_buffers() if name in kept and b.numel()}


def _manifest_of(handle: Handle, kinds: Mapping[str, bool], extra: Mapping[str, Any], folder: Path) -> Manifest:
    groups = [
        {key: _plain(value) for key, value in group.items() if key not in IMPLEMENTATION}
        for group in handle.optimizer.param_groups
    ]
    return Manifest(
        shardglass=version("shardglass"),
        torch=str(torch.__version__),
        world_size=handle.world_size,
        stage=handle.options.stage,
        optimizer=type(handle.optimizer).__name__,
        groups=tuple(groups),
        states=kinds,
        counters=handle.counters,
        extra=extra,
        files=files_in(folder),
    )


def _plain(value: object) -> object:
    """An option of a param_group as JSON has it."""
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value

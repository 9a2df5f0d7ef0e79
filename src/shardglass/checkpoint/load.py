"""Loading the training state of a sharded model.

Owns the checks that a checkpoint fits, and what all ranks read. Where its tensors lie is told in ``save``.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from shardglass.checkpoint.chunk import FlatChunk
from shardglass.checkpoint.manifest import STATE, Manifest, read_layout, read_manifest, stored_name
from shardglass.checkpoint.save import persistent_buffers
from shardglass.checkpoint.together import together
from shardglass.engine.handle import Handle
from shardglass.engine.state import StateKind
from shardglass.errors import CheckpointError
from shardglass.layout import Layout

Stored = Mapping[str, TensorStorageMetadata]
"""The tensors of a checkpoint: size, dtype and chunks by name."""


def load_checkpoint(handle: Handle, folder: str | Path, *, weights_only: bool = False) -> Manifest:
    """Bring a sharded model to the state that was saved; collective.

    Args:
        handle: The model, sharded; its present weights and optimizer state are dropped.
        folder: A checkpoint that ``save_checkpoint`` wrote, at the same world size; the stage may be another.
        weights_only: Leave the optimizer and the counters as they are.

    Returns:
        What the checkpoint says of itself.

    Raises:
        CheckpointError: It is incomplete, or does not fit the model, the optimizer or the world size; says in what.
    """
    source = Path(folder)
    read: list[tuple[Manifest, HuggingFaceStorageReader, Stored]] = []
    together(handle, source, "read", lambda: read.append(_checked(handle, source, weights_only=weights_only)))
    manifest, reader, stored = read[0]
    states = None if weights_only else _stored_states(manifest, stored)
    wanted: dict[str, Tensor] = {
        stored_name(piece.kind, piece.name): FlatChunk(piece.value.detach(), piece.start, piece.numel)
        for piece in handle.pieces_to_load(states)
    }
    buffers = persistent_buffers(handle)
    flat = {name: buffer.detach().reshape(-1).clone() for name, buffer in buffers.items()}
    wanted |= {f"buffer/{name}": FlatChunk(value, 0, value.numel()) for name, value in flat.items()}
    together(handle, source, "read", lambda: _check_whole(wanted, stored))
    together(handle, source, "read", lambda: load(wanted, storage_reader=reader, process_group=handle.host_group))
    for name, buffer in buffers.items():
        buffer.copy_(flat[name].view(buffer.shape))
    handle.adopt_pieces()
    if not weights_only:
        _restore_groups(handle.optimizer, manifest)
        handle.counters = manifest.counters
    return manifest


def _checked(handle: Handle, folder: Path, *, weights_only: bool) -> tuple[Manifest, HuggingFaceStorageReader, Stored]:
    """Manifest, reader and stored tensors of a checkpoint that fits.

    Raises:
        CheckpointError: It does not fit; all reasons at once.
    """
    manifest = read_manifest(folder)
    faults = _misfits(read_layout(folder), handle.layout)
    if manifest.world_size != handle.world_size:
        faults.append(
            f"written by {manifest.world_size} ranks, this run has {handle.world_size}; resuming at another world size "
            "is not supported yet"
        )
    if not weights_only:
        now = handle.optimizer
        if manifest.optimizer != type(now).__name__:
            faults.append(f"written with {manifest.optimizer}, this run has {type(now).__name__}")
        elif len(manifest.groups) != len(now.param_groups):
            faults.append(f"written with {len(manifest.groups)} param_groups, this run has {len(now.param_groups)}")
    if faults:
        raise CheckpointError(f"{folder} does not fit this run:\n" + "\n".join(f"  {fault}" for fault in faults))
    reader = HuggingFaceStorageReader(str(folder / STATE))
    stored: Any = reader.read_metadata().state_dict_metadata
    return manifest, reader, stored


def _misfits(theirs: Layout, ours: Layout) -> list[str]:
    """In what the parameters of a checkpoint differ from the model's, at most five lines of each kind."""
    then = {p.name: p for b in theirs.buffers for p in b.params}
    now = {p.name: p for b in ours.buffers for p in b.params}
    missing = [f"{name} is not in the checkpoint" for name in now if name not in then]
    foreign = [f"{name} is in the checkpoint only" for name in then if name not in now]
    other = []
    for name in now.keys() & then.keys():
        if now[name].shape != then[name].shape:
            other.append(f"{name} has shape {list(now[name].shape)} here and {list(then[name].shape)} there")
        elif now[name].trainable is not then[name].trainable:
            words = ("trained", "frozen") if now[name].trainable else ("frozen", "trained")
            other.append(f"{name} is {words[0]} here and was {words[1]} there")
    faults = []
    for lines in (missing, foreign, sorted(other)):
        faults += lines[:5] + ([f"and {len(lines) - 5} more"] if len(lines) > 5 else [])
    return faults


def _stored_states(manifest: Manifest, stored: Stored) -> dict[str, dict[str, StateKind]]:
    """By parameter, the optimizer states that are stored of it."""
    found: dict[str, dict[str, StateKind]] = {}
    for fqn, tensor in stored.items():
        prefix, _, name = fqn.partition("/")
        key = prefix.removeprefix("optimizer.")
        if key != prefix:
            kind = StateKind(dtype=tensor.properties.dtype, is_scalar=manifest.states[key])
            found.setdefault(name, {})[key] = kind
    return found


def _check_whole(wanted: Mapping[str, Tensor], stored: Stored) -> None:
    """See that every element that is wanted is stored: DCP leaves what no file covers as it was.

    Raises:
        CheckpointError: Names the first tensors that are not whole.
    """
    faults = []
    for fqn, chunk in wanted.items():
        have = sum(math.prod(c.sizes) for c in stored[fqn].chunks) if fqn in stored else 0
        if have != chunk.numel():
            faults.append(f"{fqn} has {have} of {chunk.numel()} elements")
    if faults:
        shown = "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")
        raise CheckpointError(f"the checkpoint is not whole: {shown}; use another checkpoint")


def _restore_groups(optimizer: torch.optim.Optimizer, manifest: Manifest) -> None:
    """Give each param_group the options it had, as ``Optimizer.load_state_dict`` does."""
    for group, then in zip(optimizer.param_groups, manifest.groups, strict=True):
        for key, value in then.items():
            now = group.get(key)
            if isinstance(now, Tensor):
                now.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(now, tuple) else value

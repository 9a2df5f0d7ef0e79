"""The training state of this rank at one moment, apart from the model that trains on.

Owns what a checkpoint holds, and the host buffers that keep it while a thread writes. Leaves files to ``save``.

[Note: names] Every tensor is stored flat, as ``kind/name``: ``master/`` fp32 weights of a trainable parameter,
``param/`` a frozen parameter, ``optimizer.<key>/`` a state of the optimizer (a scalar has one element), ``buffer/`` a
persistent buffer of a module. Weights in the model's dtype are not stored: they are the master weights, cast.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardglass.checkpoint.chunk import FlatChunk
from shardglass.checkpoint.manifest import IMPLEMENTATION, stored_name
from shardglass.engine.handle import Handle
from shardglass.engine.state import Piece
from shardglass.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A training state, as far as this rank has it.

    Attributes:
        tensors: By stored name, see [Note: names], this rank's chunk.
        kinds: Keys of the optimizer's state on any rank; True for one number a parameter.
        buffers: Names of the model's persistent buffers.
        layout: Which rank has what.
        world_size: Number of ranks.
        stage: ZeRO stage.
        optimizer: Class of the optimizer.
        groups: Options of each param_group but for its parameters.
        counters: Steps, skipped steps.
    """

    tensors: Mapping[str, Tensor]
    kinds: Mapping[str, bool]
    buffers: Sequence[str]
    layout: Layout
    world_size: int
    stage: int
    optimizer: str
    groups: Sequence[Mapping[str, Any]]
    counters: Mapping[str, int]


class HostBuffers:
    """Memory on the host for a rank's state, used again for each snapshot; pinned where a GPU copies into it."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def keep(self, name: str, value: Tensor) -> Tensor:
        """Copy a tensor into the buffer of that name; ``finish`` waits for the copies."""
        held = self._kept.get(name)
        if held is None or held.shape != value.shape or held.dtype != value.dtype:
            held = self._kept[name] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        return held.copy_(value, non_blocking=value.is_cuda)

    def finish(self) -> None:
        """Wait until the copies are done."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return sum(t.numel() * t.element_size() for t in self._kept.values())


def take_snapshot(handle: Handle, buffers: HostBuffers | None = None) -> Snapshot:
    """Take the training state as it is between two steps; collective.

    Args:
        handle: The sharded model.
        buffers: Where to copy it to; None: the tensors are views, and training must wait until they are written.

    Raises:
        UsageError: Gradients are accumulated.
    """
    pieces = handle.pieces_to_save()
    kinds = _kinds(handle, pieces)
    tensors: dict[str, Tensor] = {}

    def put(name: str, value: Tensor, start: int, numel: int) -> None:
        flat = value.detach().reshape(-1)
        tensors[name] = FlatChunk(flat if buffers is None else buffers.keep(name, flat), start, numel)

    for piece in pieces:
        # One number for all parameters of a run; safetensors refuses shared memory.
        value = piece.value.detach().clone() if piece.is_scalar else piece.value
        put(stored_name(piece.kind, piece.name), value, piece.start, piece.numel)
    kept = persistent_buffers(handle)
    for name, buffer in kept.items():
        if handle.rank == 0:
            put(f"buffer/{name}", buffer, 0, buffer.numel())
    if buffers is not None:
        buffers.finish()
    groups = [
        {key: _plain(value) for key, value in group.items() if key not in IMPLEMENTATION}
        for group in handle.optimizer.param_groups
    ]
    return Snapshot(
        tensors=tensors,
        kinds=kinds,
        buffers=list(kept),
        layout=handle.layout,
        world_size=handle.world_size,
        stage=handle.options.stage,
        optimizer=type(handle.optimizer).__name__,
        groups=groups,
        counters=handle.counters,
    )


def _kinds(handle: Handle, pieces: list[Piece]) -> dict[str, bool]:
    """Keys of the optimizer's state on any rank, and whether each is a scalar; collective."""
    mine = {p.kind: p.is_scalar for p in pieces if p.kind not in ("master", "param")}
    found: dict[str, bool] = {}
    for theirs in handle.agree("keys of the optimizer's state", mine):
        found |= theirs
    return found


def persistent_buffers(handle: Handle) -> dict[str, Tensor]:
    """Buffers that are part of the model's state dict and have elements."""
    kept = handle.model.state_dict(keep_vars=True)
    return {name: b for name, b in handle.model.named_buffers() if name in kept and b.numel()}


def _plain(value: object) -> object:
    """An option of a param_group as JSON has it."""
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value

"""Whole values of one parameter, from what each rank of a foreign engine holds of it.

Owns the way from shards to whole tensors. The native engine has ``handle.state_of``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shardglass.engine.comm import Comm
from shardglass.layout import slices_of
from shardglass.lens.reading import Reading, as_plain


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    """A run of one kind of the parameter on this rank; ``start`` is None for a number beside it."""

    kind: str
    start: int | None
    value: Tensor


def whole_values(reading: Reading, name: str, comm: Comm | None) -> dict[str, Tensor]:
    """Every kind of one parameter in its shape; collective if there is a ``comm``.

    Args:
        reading: What this rank holds.
        name: The parameter.
        comm: Ways to the other ranks; None if this rank has all.
    """
    b, k = reading.layout.find(name)
    buffer = reading.layout.buffers[b]
    shape, numel = buffer.params[k].shape, buffer.params[k].numel
    found: dict[str, Tensor] = {}
    for held in reading.held:
        if held.buffer == b and not held.cut and held.tensor.numel():
            offset = buffer.offsets[k] - held.first
            found[held.kind] = as_plain(held.tensor).reshape(-1)[offset : offset + numel].clone().view(shape)
    flats: dict[str, Tensor] = {}
    for piece in _exchanged(_pieces(reading, name, b), name, comm, reading.device):
        if piece.start is None:
            found[piece.kind] = piece.value.reshape(()).cpu()
        else:
            flat = flats.setdefault(piece.kind, torch.zeros(numel, dtype=piece.value.dtype, device=piece.value.device))
            flat[piece.start : piece.start + piece.value.numel()] = piece.value
    return found | {kind: flat.view(shape) for kind, flat in flats.items()}


def _pieces(reading: Reading, name: str, b: int) -> list[_Piece]:
    """What this rank has of the parameter in its shards."""
    found = []
    for held in reading.held:
        if held.buffer != b or not held.cut:
            continue
        flat = as_plain(held.tensor).reshape(-1)
        for s in slices_of(reading.layout, name, reading.rank):
            low, high = max(s.offset, held.first), min(s.offset + s.length, held.first + flat.numel())
            if low < high:
                value = flat[low - held.first : high - held.first]
                found.append(_Piece(kind=held.kind, start=s.start + low - s.offset, value=value))
    scalars = [s for s in reading.scalars if s.buffer == b]
    return found + [_Piece(kind=s.kind, start=None, value=as_plain(s.tensor)) for s in scalars]


def _exchanged(mine: list[_Piece], name: str, comm: Comm | None, device: torch.device) -> list[_Piece]:
    """Every rank's pieces, from the first rank that has each."""
    if comm is None:
        return mine
    offered = comm.exchange(f"state of {name}", [(p.kind, p.start, p.value.numel(), p.value.dtype) for p in mine])
    values = {(p.kind, p.start): p.value for p in mine}
    found: dict[tuple[str, int | None], _Piece] = {}
    for owner, rows in enumerate(offered):
        for kind, start, length, dtype in rows:
            if (kind, start) in found:
                continue
            own = values.get((kind, start)) if owner == comm.rank else None
            part = torch.empty(length, dtype=dtype) if own is None else own.reshape(-1)
            part = part.to(device).contiguous().clone()
            comm.broadcast(f"{kind} of {name}", part, source=owner)
            found[kind, start] = _Piece(kind=kind, start=start, value=part)
    return list(found.values())

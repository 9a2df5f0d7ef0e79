"""Sums of gradients in pieces that stay in the cache.

Owns the arithmetic of adding parts of different dtypes. A mixed-dtype add (bfloat16 into float32) is five times
slower on CPU than a cast into the cache followed by an add, and a whole-size temporary costs page faults; so both
happen piece by piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shardglass.options import SUM_CHUNK

NORM_ROW = 1 << 14
"""Elements whose squares are added in fp32 before the sums go on in fp64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSum:
    """Where a sum goes: ``out`` is overwritten with, or gains, ``scale`` times the sum."""

    out: Tensor
    scale: float
    add: bool


class Scratch:
    """Two pieces per dtype, allocated once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: dict[torch.dtype, Tensor] = {}

    def pieces(self, dtype: torch.dtype, count: int) -> tuple[Tensor, Tensor]:
        """Two [count] tensors of ``dtype``; what they hold is undefined."""
        if dtype not in self._pieces or self._pieces[dtype].shape[1] < count:
            self._pieces[dtype] = torch.empty(2, count, dtype=dtype, device=self._device)
        both = self._pieces[dtype]
        return both[0, :count], both[1, :count]

    def tensors(self) -> list[Tensor]:
        """For the memory account."""
        return list(self._pieces.values())


def add_into(target: Tensor, source: Tensor, scratch: Scratch) -> None:
    """``target += source`` for two contiguous tensors of one size, whatever their dtypes."""
    target, source = target.view(-1), source.reshape(-1)
    if target.dtype == source.dtype or target.is_cuda:
        target.add_(source)
        return
    for low in _pieces_of(target):
        piece = source[low : low + SUM_CHUNK]
        cast, _ = scratch.pieces(target.dtype, SUM_CHUNK)
        target[low : low + SUM_CHUNK].add_(cast[: piece.numel()].copy_(piece))


def sum_parts(parts: Sequence[Tensor], into: ShardSum, scratch: Scratch) -> None:
    """Add the parts in their order, in the dtype of ``into.out``; ``into`` says what becomes of the sum.

    Args:
        parts: [n] tensors of one dtype, at least one.
        into: ``into.out`` is [n]; its dtype is at least as wide as the parts'.
        scratch: Pieces to work in.
    """
    out = into.out
    if len(parts) == 1 and not into.add and into.scale == 1.0:
        out.copy_(parts[0])
        return
    if out.is_cuda:  # a GPU's collectives give one part, and its kernels cast on the way
        for k, part in enumerate(parts):
            if into.add or k:
                out.add_(part, alpha=into.scale)
            else:
                out.copy_(part).mul_(into.scale)
        return
    for low in _pieces_of(out):
        target = out[low : low + SUM_CHUNK]
        first, second = (piece[: target.numel()] for piece in scratch.pieces(out.dtype, SUM_CHUNK))
        total = first if into.add else target
        total.copy_(parts[0][low : low + SUM_CHUNK])
        for part in parts[1:]:
            piece = part[low : low + SUM_CHUNK]
            total.add_(piece if piece.dtype == total.dtype else second.copy_(piece))
        if into.scale != 1.0:
            total.mul_(into.scale)
        if into.add:
            target.add_(total)


def _pieces_of(x: Tensor) -> range:
    """Where pieces begin; of a tensor without memory only the first, as the others would take the same memory."""
    return range(0, SUM_CHUNK if isinstance(x, FakeTensor) else x.numel(), SUM_CHUNK)


def sum_of_squares(x: Tensor) -> Tensor:
    """The sum of squares of a flat tensor as a 0-d fp64 tensor, to a relative 1e-7.

    fp32 norms of torch on CPU add everything in one chain and are off by 1e-3 on 2.8e7 elements; rows of ``NORM_ROW``
    elements keep fp32 exact enough and are twenty times faster than fp64 throughout.
    """
    full = x.numel() // NORM_ROW * NORM_ROW
    total: Tensor = torch.linalg.vector_norm(x[full:], dtype=torch.float64).square()
    if full:
        rows = torch.linalg.vector_norm(x[:full].view(-1, NORM_ROW), dim=1, dtype=torch.float32)
        total = total + rows.double().square().sum()
    return total

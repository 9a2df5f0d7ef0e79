"""Two sets of named tensors held against each other, tensor by tensor.

Owns the measure and its wording. Leaves to callers where the tensors come from (a live run, a checkpoint, an oracle)
and which tolerance is right. Differences are taken in float64, a block of elements at a time, so a large tensor costs
no second copy of itself.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

BLOCK_NUMEL = 1 << 20
"""Elements that are converted to float64 at once: 8 MiB a side."""

TINY = 1e-30
"""What the largest reference value is taken as at least, so that a tensor of zeros has a relative difference too."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""An integer dtype for each item size: equal bits, also for nan and for the sign of zero."""


class Match(Enum):
    """How one name was found on the two sides."""

    COMPARED = "compared"  # both sides have it, shapes agree
    MISSING = "missing"  # only the right side has it
    EXTRA = "extra"  # only the left side has it
    SHAPE = "shape mismatch"  # both have it, shapes differ: no values were compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was found for one tensor.

    Attributes:
        name: Its name.
        match: Whether values could be compared.
        left_shape: Its shape on the left, or None if it is missing there.
        right_shape: Its shape on the right, or None if it is missing there.
        max_abs: The largest |left - right|; infinite where one side alone is nan, or where values were not compared.
        max_rel: ``max_abs`` over the largest finite |right|, so the scale is the tensor's and not one small element's.
        bitwise: Same dtype and the same bits.
    """

    name: str
    match: Match
    left_shape: tuple[int, ...] | None
    right_shape: tuple[int, ...] | None
    max_abs: float
    max_rel: float
    bitwise: bool

    def __str__(self) -> str:
        """One line that names the tensor and what differs."""
        if self.match is Match.SHAPE:
            return f"{self.name}: {self.match.value}, {self.left_shape} against {self.right_shape}"
        shape = self.left_shape if self.right_shape is None else self.right_shape
        if self.match is not Match.COMPARED:
            return f"{self.name} {shape}: {self.match.value}"
        if self.bitwise:
            return f"{self.name} {shape}: the same bits"
        return f"{self.name} {shape}: max abs {self.max_abs:.3e}, relative {self.max_rel:.3e}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The rows of two sets of tensors, in the right side's order, then what only the left side has."""

    rows: tuple[Row, ...]

    @property
    def worst(self) -> Row | None:
        """The row that differs most (names that do not match first), or None if nothing was compared."""
        return max(self.rows, key=_badness, default=None)

    @property
    def bitwise(self) -> bool:
        """Whether both sides have the same names, shapes, dtypes and bits."""
        return all(row.bitwise for row in self.rows)

    def within(self, tolerance: float) -> bool:
        """Whether both sides have the same names and shapes, and no tensor's ``max_rel`` is above ``tolerance``."""
        return all(row.match is Match.COMPARED and row.max_rel <= tolerance for row in self.rows)

    def describe(self, limit: int = 5) -> str:
        """Return a headline and the ``limit`` worst tensors, one a line."""
        if not self.rows:
            return "no tensors on either side"
        differing = [row for row in self.rows if not row.bitwise]
        if not differing:
            return f"{len(self.rows)} tensors, all the same bits"
        shown = sorted(differing, key=_badness, reverse=True)[: max(0, limit)]
        lines = [f"{len(differing)} of {len(self.rows)} tensors differ; the worst:", *(f"  {row}" for row in shown)]
        if len(differing) > len(shown):
            lines.append(f"  and {len(differing) - len(shown)} more")
        return "\n".join(lines)


def _badness(row: Row) -> tuple[bool, float, float, bool]:
    """Sort key: what could not be compared, then the relative difference, then the absolute, then other bits."""
    return (row.match is not Match.COMPARED, row.max_rel, row.max_abs, not row.bitwise)


def compare_tensors(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Comparison:
    """Compare two sets of tensors by name; ``right`` is the reference.

    Dtypes may differ: values are compared then, and the row is not bitwise. Equal infinities, and nan on both sides,
    count as no difference. Neither side is changed.

    Args:
        left: Name to tensor of any shape and real dtype, on any device.
        right: The same for the reference; shapes are expected to agree name by name.

    Returns:
        One row for every name on either side.
    """
    rows = [_row(name, left.get(name), right[name]) for name in right]
    rows += [_row(name, left[name], None) for name in left if name not in right]
    return Comparison(rows=tuple(rows))


def _row(name: str, left: Tensor | None, right: Tensor | None) -> Row:
    """One name, which at least one side has."""
    left_shape = None if left is None else tuple(left.shape)
    right_shape = None if right is None else tuple(right.shape)
    if left is None or right is None or left_shape != right_shape:
        absent = Match.MISSING if left is None else Match.EXTRA if right is None else Match.SHAPE
        max_abs, max_rel, bitwise, match = math.inf, math.inf, False, absent
    else:
        bitwise, match = _same_bits(left, right), Match.COMPARED
        max_abs, scale = (0.0, 0.0) if bitwise else _difference(left, right)
        max_rel = max_abs / max(scale, TINY)
    return Row(
        name=name,
        match=match,
        left_shape=left_shape,
        right_shape=right_shape,
        max_abs=max_abs,
        max_rel=max_rel,
        bitwise=bitwise,
    )


def _same_bits(left: Tensor, right: Tensor) -> bool:
    """Same dtype and the same bits in every element; shapes are known to agree."""
    if left.dtype != right.dtype:
        return False
    bits = _BITS[left.dtype.itemsize]
    a, b = (t.detach().contiguous().reshape(-1).view(bits) for t in (left, right))
    return torch.equal(a, b.to(a.device))


def _difference(left: Tensor, right: Tensor) -> tuple[float, float]:
    """Return (max |left - right|, largest finite |right|) in float64; shapes are known to agree."""
    max_abs, scale = 0.0, 0.0
    a_all, b_all = left.detach().reshape(-1), right.detach().reshape(-1)
    for start in range(0, a_all.numel(), BLOCK_NUMEL):
        a = a_all[start : start + BLOCK_NUMEL].to("cpu", torch.float64)
        b = b_all[start : start + BLOCK_NUMEL].to("cpu", torch.float64)
        same = (a == b) | (a.isnan() & b.isnan())
        gap = (a - b).abs_().masked_fill_(same, 0.0).nan_to_num_(nan=math.inf, posinf=math.inf)
        max_abs = max(max_abs, gap.max().item())
        scale = max(scale, b.abs().masked_fill_(~b.isfinite(), 0.0).max().item())
    return max_abs, scale

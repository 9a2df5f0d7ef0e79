"""Which tensor each boundary between two ranks' shards cuts, with equal blocks told once.

Owns the grouping of boundaries by pattern. Leaves the cuts themselves to ``layout``.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardglass.layout import BoundaryCut, Layout, boundary_cuts
from shardglass.options import EngineOptions

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRow:
    """One kind of cut, and where it occurs.

    Attributes:
        left_rank: The rank whose shards end here; the next rank's begin.
        pattern: Names of the tensors cut, with the numbers of their blocks in braces, e.g.
            "model.layers.{0..29}.mlp.w"; of the units if no tensor is cut.
        is_tensor: Whether a tensor is cut; otherwise the boundary falls between two tensors or in padding.
        left: Elements of the tensor before the boundary, on all earlier ranks together.
        right: Elements behind it.
        count: Number of boundaries that are like this.
    """

    left_rank: int
    pattern: str
    is_tensor: bool
    left: int
    right: int
    count: int


def cut_rows(layout: Layout, options: EngineOptions) -> tuple[CutRow, ...]:
    """The boundaries of everything the stage cuts, in layout order.

    Args:
        layout: The layout of the run.
        options: A stage that keeps state whole has no cuts; one that keeps parameters whole has none in frozen buffers.

    Returns:
        Rows with equal elements on each side in equally named tensors of different blocks are one.
    """
    rules = options.rules
    cuts = boundary_cuts(layout) if rules.shards_state else ()
    return rows_of_cuts(layout, (cut for cut in cuts if layout.buffers[cut.buffer].trainable or rules.shards_params))


def rows_of_cuts(layout: Layout, cuts: Iterable[BoundaryCut]) -> tuple[CutRow, ...]:
    """Boundaries of a layout, those that are alike as one row."""
    members: dict[tuple[int, str, bool, int, int], list[int | None]] = {}
    for cut in cuts:
        buffer = layout.buffers[cut.buffer]
        name = buffer.unit if cut.name is None else cut.name
        stem, number = stem_of(name)
        key = (cut.left_rank, stem, cut.name is not None, cut.left, cut.right)
        members.setdefault(key, []).append(number)
    return tuple(
        CutRow(
            left_rank=left_rank,
            pattern=with_numbers(stem, numbers),
            is_tensor=is_tensor,
            left=left,
            right=right,
            count=len(numbers),
        )
        for (left_rank, stem, is_tensor, left, right), numbers in members.items()
    )


def stem_of(name: str) -> tuple[str, int | None]:
    """A name with its first number as ``{}``, and that number; the name itself and None if it has none."""
    number = _NUMBER.search(name)
    if number is None:
        return name, None
    return f"{name[: number.start()]}{{}}{name[number.end() :]}", int(number.group())


def with_numbers(stem: str, numbers: Sequence[int | None]) -> str:
    """A stem with the numbers of all names that have it."""
    return stem.replace("{}", _listed([n for n in numbers if n is not None]), 1)


def _listed(numbers: Sequence[int]) -> str:
    """``7`` for one number, ``{0..3,5}`` for several."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return "{" + ",".join(str(low) if low == high else f"{low}..{high}" for low, high in runs) + "}"

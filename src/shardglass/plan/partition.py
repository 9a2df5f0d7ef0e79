"""The exact partition, as a plan tells it: what each rank holds of each part, and what every boundary cuts.

Owns the rows. Leaves their arithmetic to ``layout``.

A part is what is cut by itself: an optimizer group under "deepspeed-flat", and all trainable parameters together under
a scheme that cuts many small buffers. Frozen parameters are a part of their own where a scheme cuts them too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from shardglass.layout import BoundaryCut, Buffer, Layout, held_numel, iter_boundary_cuts, num_boundary_cuts

MOST_RANKS = 64
"""Ranks that have rows of their own; of more, the first ones and the last are shown."""

MOST_CUTS = 4096
"""Rows of the cut table; more are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRow:
    """What one rank holds of one part.

    Attributes:
        part: Name of the part, such as "group 0".
        rank: The rank.
        numel: Elements of parameters.
        padding: Elements of padding.
        num_in: Tensors with elements on this rank.
        num_not_in: The other tensors of the part.
    """

    part: str
    rank: int
    numel: int
    padding: int
    num_in: int
    num_not_in: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CutLine:
    """What lies at the boundary between two ranks.

    Attributes:
        part: The part or buffer that is cut.
        left_rank: The rank that ends here.
        right_rank: The rank that begins here.
        tensor: The tensor that is cut; None if the boundary falls between two.
        index: Its index among all tensors in model order, from 0; None if none is cut.
        index_in_part: Its index in the part's own order, from 0; of the first tensor behind if none is cut.
        left: Its elements before the boundary.
        right: Its elements behind it.
        row: Row of its first element behind the boundary, for a matrix.
        column: Column of that element.
        before: The last tensor with elements before the boundary, if any.
        after: The first tensor with elements behind it, if any.
    """

    part: str
    left_rank: int
    right_rank: int
    tensor: str | None
    index: int | None
    index_in_part: int
    left: int
    right: int
    row: int | None
    column: int | None
    before: str | None
    after: str | None

    @property
    def left_percent(self) -> float:
        """Share of the tensor before the boundary, in per cent; 0 if none is cut."""
        return 100 * self.left / (self.left + self.right) if self.tensor is not None else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The whole partition.

    Attributes:
        scheme: Name of the layout scheme.
        used_by: Who lays out so.
        num_tensors: Tensors of the model.
        parts: A row for each part and rank, part by part.
        num_ranks_left_out: Ranks without rows.
        cuts: The cut table, part by part.
        num_cuts_left_out: Cuts without a row.
    """

    scheme: str
    used_by: str
    num_tensors: int
    parts: tuple[PartRow, ...]
    num_ranks_left_out: int
    cuts: tuple[CutLine, ...]
    num_cuts_left_out: int


def partition_of(layout: Layout, order: Sequence[str], *, used_by: str) -> Partition:
    """The partition that a layout is.

    Args:
        layout: The layout, of any scheme.
        order: Names of all parameters in model order.
        used_by: Who lays out so.
    """
    ranks = _ranks_shown(layout.world_size)
    parts: dict[str, list[Buffer]] = {}
    for buffer in layout.buffers:
        parts.setdefault(_part_of(layout, buffer), []).append(buffer)
    cuts = tuple(islice(iter_boundary_cuts(layout, order=order, left_ranks=ranks), MOST_CUTS))
    return Partition(
        scheme=layout.scheme,
        used_by=used_by,
        num_tensors=len(order),
        parts=tuple(_part_row(name, buffers, rank) for name, buffers in parts.items() for rank in ranks),
        num_ranks_left_out=layout.world_size - len(ranks),
        cuts=tuple(_cut_line(layout, cut) for cut in cuts),
        num_cuts_left_out=num_boundary_cuts(layout, left_ranks=ranks) - len(cuts),
    )


def _ranks_shown(world_size: int) -> tuple[int, ...]:
    """All ranks, or the first ones and the last."""
    if world_size <= MOST_RANKS:
        return tuple(range(world_size))
    return (*range(MOST_RANKS - 1), world_size - 1)


def _part_of(layout: Layout, buffer: Buffer) -> str:
    """The part a buffer belongs to; see the module's docstring."""
    if layout.scheme == "deepspeed-flat":
        return buffer.unit if buffer.label is None else "kept whole"
    return "trainable" if buffer.trainable else "frozen"


def _part_row(name: str, buffers: Sequence[Buffer], rank: int) -> PartRow:
    numel = padding = num_in = num_tensors = 0
    for buffer in buffers:
        num_tensors += len(buffer.params)
        shard = buffer.holders.shard_of(rank)
        if shard is None:
            continue
        held = held_numel(buffer, shard)
        numel += held
        padding += buffer.shard_numel - held
        num_in += sum(1 for k in buffer.members(shard) if next(buffer.runs(k, shard), None) is not None)
    return PartRow(part=name, rank=rank, numel=numel, padding=padding, num_in=num_in, num_not_in=num_tensors - num_in)


def _cut_line(layout: Layout, cut: BoundaryCut) -> CutLine:
    return CutLine(
        part=layout.buffers[cut.buffer].unit,
        left_rank=cut.left_rank,
        right_rank=cut.right_rank,
        tensor=cut.name,
        index=cut.index,
        index_in_part=cut.position,
        left=cut.left,
        right=cut.right,
        row=cut.row,
        column=cut.column,
        before=cut.before,
        after=cut.after,
    )

"""What the boundaries between shards cut.

Owns the rows of every cut table: which tensor, how much of it on each side, and where in it.

Who debugs a partition looks at the boundary between two ranks' shards. In a buffer that is one run, each boundary is
one row, also when it falls between two tensors. In a buffer that is cut parameter by parameter, each parameter has
boundaries of its own, and those behind its last element are no rows.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardglass.layout.buffer import Buffer
from shardglass.layout.spec import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryCut:
    """What lies at the boundary between two neighbouring shards of one buffer.

    Attributes:
        buffer: Index of the buffer.
        left_rank: The rank whose shard ends here; of several that hold it, the first.
        right_rank: The rank whose shard begins here.
        name: The tensor that is cut, or None if the boundary falls between two tensors or in padding.
        left: Elements of that tensor before the boundary (on all earlier ranks together).
        right: Elements behind it.
        index: Index of the tensor among all, from 0, in the order asked for; None if none is cut, or if that order
            does not have it.
        position: Index in memory order of the buffer: of the tensor that is cut, or else of the first with elements
            behind the boundary.
        shape: Shape of the tensor that is cut; empty if none is.
        first_right: Its first element behind the boundary, counted in the flattened tensor; 0 if none is cut.
        before: The last tensor with elements before the boundary, None if there is none.
        after: The first tensor with elements behind the boundary, None if there is none.
    """

    buffer: int
    left_rank: int
    right_rank: int
    name: str | None
    left: int
    right: int
    index: int | None
    position: int
    shape: tuple[int, ...]
    first_right: int
    before: str | None
    after: str | None

    @property
    def left_percent(self) -> float:
        """Share of the tensor before the boundary, in per cent; 0 if none is cut."""
        return 100 * self.left / (self.left + self.right) if self.name is not None else 0.0

    @property
    def right_percent(self) -> float:
        """Share of the tensor behind the boundary, in per cent; 0 if none is cut."""
        return 100 * self.right / (self.left + self.right) if self.name is not None else 0.0

    @property
    def row(self) -> int | None:
        """Row of the first element behind the boundary, if a 2-D tensor is cut."""
        return self.first_right // self.shape[1] if len(self.shape) == 2 else None

    @property
    def column(self) -> int | None:
        """Column of the first element behind the boundary, if a 2-D tensor is cut."""
        return self.first_right % self.shape[1] if len(self.shape) == 2 else None


def boundary_cuts(
    layout: Layout, *, order: Sequence[str] | None = None, left_rank: int | None = None
) -> tuple[BoundaryCut, ...]:
    """What every boundary between two shards cuts, buffer by buffer.

    Args:
        layout: The layout.
        order: Names in the order that ``index`` counts in, such as the model's; None for the layout's own order.
        left_rank: Only the boundaries where this rank's shard ends; None for all, which are world_size - 1 rows for a
            buffer that is one run, and up to as many for every parameter of another.

    Raises:
        UsageError: No such rank.
    """
    return tuple(iter_boundary_cuts(layout, order=order, left_ranks=None if left_rank is None else (left_rank,)))


def iter_boundary_cuts(
    layout: Layout, *, order: Sequence[str] | None = None, left_ranks: Sequence[int] | None = None
) -> Iterator[BoundaryCut]:
    """The rows of ``boundary_cuts`` one by one, for who needs only the first of very many.

    Args:
        layout: The layout.
        order: As ``boundary_cuts``.
        left_ranks: Only the boundaries where the shards of these ranks end; None for all.

    Raises:
        UsageError: No such rank.
    """
    _check_ranks(layout, left_ranks)
    numbers = _numbers(order)
    for b, buffer in enumerate(layout.buffers):
        for shard in _shards(buffer, left_ranks):
            if buffer.chunks is None:
                yield _row_in_run(layout, b, shard, numbers)
            else:
                yield from _cut_rows(layout, b, shard, numbers)


def num_boundary_cuts(layout: Layout, *, left_ranks: Sequence[int] | None = None) -> int:
    """How many rows ``iter_boundary_cuts`` gives, without making them.

    Args:
        layout: The layout.
        left_ranks: As ``iter_boundary_cuts``.

    Raises:
        UsageError: No such rank.
    """
    _check_ranks(layout, left_ranks)
    total = 0
    for buffer in layout.buffers:
        shards = _shards(buffer, left_ranks)
        total += len(shards) if buffer.chunks is None else sum(1 for shard in shards for _ in _cut_at(buffer, shard))
    return total


def _check_ranks(layout: Layout, ranks: Sequence[int] | None) -> None:
    for rank in ranks or ():
        layout.check_rank(rank)


def cuts_of(layout: Layout, name: str, *, order: Sequence[str] | None = None) -> tuple[BoundaryCut, ...]:
    """The boundaries that cut one tensor; none if one rank has all of it. O(answer).

    Raises:
        UsageError: No such parameter.
    """
    b, k = layout.find(name)
    buffer = layout.buffers[b]
    numel = buffer.params[k].numel
    if not numel:
        return ()
    shards = range(buffer.place(k, 0).shard, buffer.place(k, numel - 1).shard)
    numbers = _numbers(order)
    return tuple(_cut_row(layout, b, shard, k, numbers) for shard in shards)


def _numbers(order: Sequence[str] | None) -> Mapping[str, int] | None:
    """The number of every name in an order; None for the layout's own, which needs no list."""
    return None if order is None else {name: i for i, name in enumerate(order)}


def _shards(buffer: Buffer, left_ranks: Sequence[int] | None) -> Sequence[int]:
    """The shards behind which there is another one: all, or those that some ranks hold."""
    last = buffer.holders.num_shards - 1
    if left_ranks is None:
        return range(last)
    held = (buffer.holders.shard_of(rank) for rank in left_ranks)
    return [shard for shard in held if shard is not None and shard != last]


def _row_in_run(layout: Layout, b: int, shard: int, numbers: Mapping[str, int] | None) -> BoundaryCut:
    """The row of a boundary in a buffer that is one run. O(log P)."""
    buffer = layout.buffers[b]
    k = bisect_right(buffer.offsets, (shard + 1) * buffer.shard_numel) - 1  # the last that starts before or there
    left, _ = buffer.boundary(k, shard)
    if 0 < left < buffer.params[k].numel:
        return _cut_row(layout, b, shard, k, numbers)
    behind = k + 1 if left else k
    params = buffer.params
    position = next((j for j in range(behind, len(params)) if params[j].numel), len(params))
    before = next((params[j].name for j in range(behind - 1, -1, -1) if params[j].numel), None)
    return BoundaryCut(
        buffer=b,
        left_rank=buffer.holders.ranks_of(shard)[0],
        right_rank=buffer.holders.ranks_of(shard + 1)[0],
        name=None,
        left=0,
        right=0,
        index=None,
        position=position,
        shape=(),
        first_right=0,
        before=before,
        after=params[position].name if position < len(params) else None,
    )


def _cut_rows(layout: Layout, b: int, shard: int, numbers: Mapping[str, int] | None) -> Iterator[BoundaryCut]:
    """The rows of a boundary in a buffer that is cut parameter by parameter."""
    for k in _cut_at(layout.buffers[b], shard):
        yield _cut_row(layout, b, shard, k, numbers)


def _cut_at(buffer: Buffer, shard: int) -> Iterator[int]:
    """Indices of the parameters that the end of a shard cuts, in a buffer that is cut parameter by parameter."""
    return (k for k, param in enumerate(buffer.params) if 0 < buffer.boundary(k, shard)[0] < param.numel)


def _cut_row(layout: Layout, b: int, shard: int, k: int, numbers: Mapping[str, int] | None) -> BoundaryCut:
    """The row of a parameter that is cut at the end of a shard."""
    buffer = layout.buffers[b]
    param = buffer.params[k]
    left, first_right = buffer.boundary(k, shard)
    return BoundaryCut(
        buffer=b,
        left_rank=buffer.holders.ranks_of(shard)[0],
        right_rank=buffer.holders.ranks_of(shard + 1)[0],
        name=param.name,
        left=left,
        right=param.numel - left,
        index=layout.position(b, k) if numbers is None else numbers.get(param.name),
        position=k,
        shape=param.shape,
        first_right=first_right,
        before=param.name,
        after=param.name,
    )

"""Questions to a layout.

Owns every answer that follows from a Layout by arithmetic: where an element is, what a rank holds, what a boundary
cuts.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from shardglass.errors import UsageError
from shardglass.layout.spec import RUN_ALIGN, Buffer, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where one element is: the rank, the index of the buffer, and the offset in that rank's shard of it."""

    rank: int
    buffer: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A run of one parameter that lies in one rank's shard.

    Attributes:
        name: Name of the parameter.
        buffer: Index of the buffer.
        rank: Its owner.
        start: First element, counted in the flattened parameter.
        length: Number of elements, at least 1.
        offset: Where it starts in the rank's shard.
    """

    name: str
    buffer: int
    rank: int
    start: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRun:
    """The part of one rank's shard of a buffer that belongs to one optimizer group.

    Its padding between parameters and up to a whole vector is included, so it is one contiguous run and one tensor for
    the optimizer.

    Attributes:
        buffer: Index of the buffer.
        group: Index of the optimizer group.
        start: First element in the shard.
        stop: One past the last element in the shard.
        slices: The parameter slices in it, in memory order.
    """

    buffer: int
    group: int
    start: int
    stop: int
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryCut:
    """What lies at the boundary between two ranks' shards of one buffer.

    Attributes:
        buffer: Index of the buffer.
        left_rank: The rank whose shard ends here; the next rank's begins.
        name: The tensor that is cut, or None if the boundary falls between two tensors or in padding.
        left: Elements of that tensor before the boundary (on all earlier ranks together).
        right: Elements behind it.
    """

    buffer: int
    left_rank: int
    name: str | None
    left: int
    right: int


def locate(layout: Layout, name: str, element: int) -> Location:
    """Where element ``element`` of the flattened parameter ``name`` is. O(1).

    Raises:
        UsageError: No such parameter, or the element is outside it.
    """
    b, k = layout.find(name)
    buffer = layout.buffers[b]
    numel = buffer.params[k].numel
    if not 0 <= element < numel:
        raise UsageError(f"{name} has elements 0 to {numel - 1}; there is no element {element}")
    rank, offset = divmod(buffer.offsets[k] + element, buffer.shard_numel)
    return Location(rank=rank, buffer=b, offset=offset)


def slices_in(layout: Layout, buffer_index: int, rank: int) -> tuple[Slice, ...]:
    """The slices of one buffer that ``rank`` owns, in memory order. O(log P + answer)."""
    buffer = layout.buffers[buffer_index]
    low, high = rank * buffer.shard_numel, (rank + 1) * buffer.shard_numel
    first = max(0, bisect_right(buffer.offsets, low) - 1)
    last = bisect_left(buffer.offsets, high)
    found = []
    for k in range(first, last):
        param, offset = buffer.params[k], buffer.offsets[k]
        start, stop = max(low, offset), min(high, offset + param.numel)
        if start < stop:
            found.append(
                Slice(
                    name=param.name,
                    buffer=buffer_index,
                    rank=rank,
                    start=start - offset,
                    length=stop - start,
                    offset=start - low,
                )
            )
    return tuple(found)


def slices_of_rank(layout: Layout, rank: int) -> tuple[Slice, ...]:
    """Every slice that ``rank`` owns, buffer by buffer."""
    return tuple(s for b in range(len(layout.buffers)) for s in slices_in(layout, b, rank))


def group_runs(layout: Layout, rank: int, *, whole: bool = False) -> tuple[GroupRun, ...]:
    """What the optimizer of one rank works on: a run per (trainable buffer, group) that has elements there.

    Args:
        layout: The layout.
        rank: Whose shard.
        whole: Take each buffer whole, as a stage does that does not shard optimizer state; offsets then count in
            the buffer.
    """
    runs = []
    for b, buffer in enumerate(layout.buffers):
        if not buffer.trainable:
            continue
        slices = _whole_slices(buffer, b) if whole else slices_in(layout, b, rank)
        by_group: dict[int, list[Slice]] = {}
        for s in slices:
            group = buffer.params[layout.find(s.name)[1]].group
            if group is not None:
                by_group.setdefault(group, []).append(s)
        for group, members in by_group.items():
            last = members[-1]
            runs.append(
                GroupRun(
                    buffer=b,
                    group=group,
                    start=members[0].offset,
                    stop=-(-(last.offset + last.length) // RUN_ALIGN) * RUN_ALIGN,
                    slices=tuple(members),
                )
            )
    return tuple(runs)


def _whole_slices(buffer: Buffer, index: int) -> list[Slice]:
    """Each parameter of a buffer as one slice, at its offset in the whole buffer; rank is 0 by convention."""
    return [
        Slice(name=p.name, buffer=index, rank=0, start=0, length=p.numel, offset=offset)
        for p, offset in zip(buffer.params, buffer.offsets, strict=True)
        if p.numel
    ]


def boundary_cuts(layout: Layout) -> tuple[BoundaryCut, ...]:
    """What every boundary between two ranks cuts, buffer by buffer; world_size - 1 rows a buffer."""
    cuts = []
    for b, buffer in enumerate(layout.buffers):
        for left_rank in range(layout.world_size - 1):
            boundary = (left_rank + 1) * buffer.shard_numel
            k = bisect_right(buffer.offsets, boundary) - 1
            left = boundary - buffer.offsets[k]
            right = buffer.params[k].numel - left
            cut = left > 0 and right > 0
            cuts.append(
                BoundaryCut(
                    buffer=b,
                    left_rank=left_rank,
                    name=buffer.params[k].name if cut else None,
                    left=left if cut else 0,
                    right=right if cut else 0,
                )
            )
    return tuple(cuts)

"""Where an element is, and what a rank holds.

Owns the answers that concern single elements and slices. Leaves boundaries to ``cuts``, bytes to ``account`` and two
layouts side by side to ``moves``.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardglass.errors import InvariantError, UsageError
from shardglass.layout.buffer import Buffer
from shardglass.layout.spec import RUN_ALIGN, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where one element is.

    Attributes:
        rank: The first rank that holds it.
        buffer: Index of the buffer.
        offset: Where it is in a rank's shard of the buffer.
        ranks: All ranks that hold it, ascending.
    """

    rank: int
    buffer: int
    offset: int
    ranks: range


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


def locate(layout: Layout, name: str, element: int) -> Location:
    """Where element ``element`` of the flattened parameter ``name`` is. O(1).

    Raises:
        UsageError: No such parameter, or the element is outside it.
    """
    b, k = layout.find(name)
    buffer = layout.buffers[b]
    numel = buffer.params[k].numel
    if not 0 <= element < numel:
        held = f"elements 0 to {numel - 1}" if numel else "no elements"
        raise UsageError(f"{name} has {held}; there is no element {element}")
    place = buffer.place(k, element)
    ranks = buffer.holders.ranks_of(place.shard)
    return Location(rank=ranks[0], buffer=b, offset=place.offset, ranks=ranks)


def element_at(layout: Layout, buffer_index: int, rank: int, offset: int) -> tuple[str, int] | None:
    """Which element lies at an offset of a rank's shard: (name, element); None for padding. O(log P).

    Raises:
        UsageError: No such rank, or the offset is outside its shard.
    """
    layout.check_rank(rank)
    buffer = layout.buffers[buffer_index]
    shard = buffer.holders.shard_of(rank)
    shard_numel = 0 if shard is None else buffer.shard_numel
    if shard is None or not 0 <= offset < shard_numel:
        raise UsageError(f"rank {rank} has {shard_numel} elements of {buffer.key}; there is no offset {offset}")
    found = buffer.element_at(shard, offset)
    return None if found is None else (buffer.params[found[0]].name, found[1])


def slices_of(layout: Layout, name: str, rank: int) -> tuple[Slice, ...]:
    """What one rank holds of one parameter, in memory order; none or several runs. O(answer).

    Raises:
        UsageError: No such parameter or rank.
    """
    layout.check_rank(rank)
    b, k = layout.find(name)
    shard = layout.buffers[b].holders.shard_of(rank)
    return () if shard is None else tuple(_slices(layout.buffers[b], b, k, rank, shard))


def slices_in(layout: Layout, buffer_index: int, rank: int) -> tuple[Slice, ...]:
    """The slices of one buffer that ``rank`` owns, in memory order. O(log P + answer) if the buffer is one run."""
    buffer = layout.buffers[buffer_index]
    shard = buffer.holders.shard_of(rank)
    if shard is None:
        return ()
    return tuple(s for k in buffer.members(shard) for s in _slices(buffer, buffer_index, k, rank, shard))


def slices_of_rank(layout: Layout, rank: int) -> tuple[Slice, ...]:
    """Every slice that ``rank`` owns, buffer by buffer.

    Raises:
        UsageError: No such rank.
    """
    layout.check_rank(rank)
    return tuple(s for b in range(len(layout.buffers)) for s in slices_in(layout, b, rank))


def _slices(buffer: Buffer, index: int, k: int, rank: int, shard: int) -> Iterator[Slice]:
    """The runs that a shard has of one parameter."""
    name = buffer.params[k].name
    for start, length, offset in buffer.runs(k, shard):
        yield Slice(name=name, buffer=index, rank=rank, start=start, length=length, offset=offset)


def group_runs(layout: Layout, rank: int, *, whole: bool = False) -> tuple[GroupRun, ...]:
    """What the native optimizer of one rank works on: a run per (trainable buffer, group) that has elements there.

    Args:
        layout: A layout of scheme "units", whose padding makes the runs whole vectors.
        rank: Whose shard.
        whole: Take each buffer whole, as a stage does that does not shard optimizer state; offsets then count in
            the buffer.

    Raises:
        InvariantError: A layout of another scheme.
    """
    if layout.scheme != "units":
        raise InvariantError(f"optimizer runs are those of scheme units; this layout is of scheme {layout.scheme}")
    runs = []
    for b, buffer in enumerate(layout.buffers):
        if not buffer.trainable:
            continue
        slices = _whole_slices(buffer, b) if whole else slices_in(layout, b, rank)
        for group, start, stop in group_spans(buffer, None if whole else buffer.holders.shard_of(rank)):
            members = tuple(s for s in slices if start <= s.offset < stop)
            runs.append(GroupRun(buffer=b, group=group, start=start, stop=stop, slices=members))
    return tuple(runs)


def group_spans(buffer: Buffer, shard: int | None) -> Iterator[tuple[int, int, int]]:
    """Where ``group_runs`` of one trainable buffer of scheme "units" begin and end, without listing their slices.

    Args:
        buffer: The buffer; the parameters of one group lie together in it.
        shard: Which shard; None for the buffer as a whole.

    Returns:
        (group, first element, one past the last) of each, counted in the shard or in the whole buffer.
    """
    low, high = (0, buffer.numel) if shard is None else (shard * buffer.shard_numel, (shard + 1) * buffer.shard_numel)
    ends: dict[int, list[int]] = {}
    for k in range(len(buffer.params)) if shard is None else buffer.members(shard):
        param, offset = buffer.params[k], buffer.offsets[k]
        start, stop = max(low, offset), min(high, offset + param.numel)
        if start < stop and param.group is not None:
            ends.setdefault(param.group, [start, stop])[1] = stop
    for group, (start, stop) in ends.items():
        yield group, start - low, -(-(stop - low) // RUN_ALIGN) * RUN_ALIGN


def _whole_slices(buffer: Buffer, index: int) -> list[Slice]:
    """Each parameter of a buffer as one slice, at its offset in the whole buffer; rank is 0 by convention."""
    return [
        Slice(name=p.name, buffer=index, rank=0, start=0, length=p.numel, offset=offset)
        for p, offset in zip(buffer.params, buffer.offsets, strict=True)
        if p.numel
    ]

"""What must travel to get from one layout to another.

Owns the transfer list, between layouts of any two schemes and world sizes; a rank is the same one in both if it has the
same number. Leaves to ``differences`` how two layouts differ.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardglass.errors import UsageError, suggestion
from shardglass.layout.query import Slice, slices_in, slices_of
from shardglass.layout.spec import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A run of one parameter that goes from a place in one layout to a place in another.

    Attributes:
        name: The parameter.
        start: First element, counted in the flattened parameter.
        length: Number of elements, at least 1.
        source_rank: The rank it comes from.
        source_buffer: Index of the buffer there.
        source_offset: Where it starts in the source's shard.
        target_rank: The rank it goes to; the source itself if that holds it already.
        target_buffer: Index of the buffer there.
        target_offset: Where it starts in the target's shard.
    """

    name: str
    start: int
    length: int
    source_rank: int
    source_buffer: int
    source_offset: int
    target_rank: int
    target_buffer: int
    target_offset: int


def transfers(source: Layout, target: Layout) -> Iterator[Transfer]:
    """Everything that fills every rank's shards of ``target`` from those of ``source``, target rank by target rank.

    Args:
        source: Where the elements are. Parameters that only it has are not needed; ``difference`` names them.
        target: Where they shall be.

    Raises:
        UsageError: ``source`` lacks a parameter of ``target``, or has it in another shape.
    """
    for rank in range(target.world_size):
        yield from received_by(source, target, rank)


def received_by(source: Layout, target: Layout, rank: int, *, name: str | None = None) -> Iterator[Transfer]:
    """What fills one rank's shards of ``target``, in memory order. O(answer).

    Where several ranks hold an element, it comes from the target itself if that is one of them; otherwise the target
    takes its turn among them, so that the load is spread.

    Args:
        source: Where the elements are.
        target: Where they shall be.
        rank: The receiver, a rank of ``target``.
        name: Only this parameter; None for all.

    Raises:
        UsageError: As ``transfers``, or no such rank.
    """
    target.check_rank(rank)
    if name is not None:
        yield from _filled(source, target, slices_of(target, name, rank))
        return
    for b in range(len(target.buffers)):
        yield from _filled(source, target, slices_in(target, b, rank))


def sent_by(source: Layout, target: Layout, rank: int, *, name: str | None = None) -> Iterator[Transfer]:
    """What one rank of ``source`` sends, to itself too, in its memory order.

    Args:
        source: Where the elements are.
        target: Where they shall be.
        rank: The sender, a rank of ``source``.
        name: Only this parameter; None for all that ``target`` has.

    Raises:
        UsageError: A parameter has another shape in ``target``, or there is no such rank.
    """
    source.check_rank(rank)
    held = (
        (s for b in range(len(source.buffers)) for s in slices_in(source, b, rank) if target.has(s.name))
        if name is None
        else iter(slices_of(source, name, rank))
    )
    for s in held:
        b, k = _find_alike(target, source, s.name)
        here, there = source.buffers[s.buffer].holders, target.buffers[b].holders
        shard = here.shard_of(rank)
        for start, length, place in target.buffers[b].pieces(k, s.start, s.start + s.length):
            for receiver in there.ranks_of(place.shard):
                if shard is not None and _sender(here.ranks_of(shard), receiver) == rank:
                    yield Transfer(
                        name=s.name,
                        start=start,
                        length=length,
                        source_rank=rank,
                        source_buffer=s.buffer,
                        source_offset=s.offset + start - s.start,
                        target_rank=receiver,
                        target_buffer=b,
                        target_offset=place.offset,
                    )


def _filled(source: Layout, target: Layout, slices: Iterable[Slice]) -> Iterator[Transfer]:
    """What fills slices of ``target``."""
    for s in slices:
        b, k = _find_alike(source, target, s.name)
        for start, length, place in source.buffers[b].pieces(k, s.start, s.start + s.length):
            yield Transfer(
                name=s.name,
                start=start,
                length=length,
                source_rank=_sender(source.buffers[b].holders.ranks_of(place.shard), s.rank),
                source_buffer=b,
                source_offset=place.offset,
                target_rank=s.rank,
                target_buffer=s.buffer,
                target_offset=s.offset + start - s.start,
            )


def _sender(ranks: range, receiver: int) -> int:
    """Which of the ranks that hold an element gives it to a receiver."""
    return receiver if receiver in ranks else ranks[receiver % len(ranks)]


def _find_alike(layout: Layout, other: Layout, name: str) -> tuple[int, int]:
    """Where ``layout`` has a parameter of ``other``.

    Raises:
        UsageError: It has none of that name, or one of another shape.
    """
    if not layout.has(name):
        raise UsageError(
            f"{name} is in the layout of scheme {other.scheme} and not in that of scheme {layout.scheme}"
            f"{suggestion(name, layout.names)}; both must be of the same model"
        )
    shape, wanted = layout.spec(name).shape, other.spec(name).shape
    if shape != wanted:
        raise UsageError(f"{name} has shape {shape} in one layout and {wanted} in the other; load the same model")
    return layout.find(name)

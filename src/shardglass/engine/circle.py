"""Ranks that wait for each other in a circle.

Owns the one kind of hang that is certain: each rank of the circle waits in a collective that the next one has not
started, and none of them will start anything while it waits. Pure Python. Leaves what is done about it to ``board``.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """What a rank waits in.

    Attributes:
        what: The collective, readable.
        series: Collectives of one series match each other in the order they are started.
        number: Which one of its series it is, from 1.
        started: By series, how many this rank has started; what is not there it has never started.
    """

    what: str
    series: str
    number: int
    started: Mapping[str, int]

    def is_for(self, other: "Wait") -> bool:
        """Whether it waits for a rank that waits itself, in another collective, before it starts this one."""
        return other.started.get(self.series, 0) < self.number


def circle(waits: Mapping[int, Wait]) -> list[int] | None:
    """Ranks of which each waits for the next one, and the last for the first; None if there are none.

    Args:
        waits: By rank, what it waits in; ranks that do not wait are not there.
    """
    left = set(waits)
    while True:  # who waits for nobody of those that are left may go on, so nobody waits for it for ever
        stuck = {r for r in left if any(waits[r].is_for(waits[s]) for s in left if s != r)}
        if stuck == left:
            break
        left = stuck
    if not left:
        return None
    path = [min(left)]
    while True:
        here = waits[path[-1]]
        following = min(s for s in left if s != path[-1] and here.is_for(waits[s]))
        if following in path:
            return path[path.index(following) :]
        path.append(following)


def circle_line(ranks: list[int], waits: Mapping[int, Wait]) -> str:
    """Say who waits for whom in a circle, and what to do."""
    each = "; ".join(
        f"rank {r} waits in the {waits[r].what}, which rank {s} has not started"
        for r, s in zip(ranks, ranks[1:] + ranks[:1], strict=True)
    )
    return (
        f"ranks {', '.join(map(str, sorted(ranks)))} would wait for each other for ever: {each}. They took different "
        "paths: a module that ran once more, or a call of the engine that was made, on some of them alone. Make them "
        "run the same modules equally often (look for an `if` or a loop that depends on the data or the rank), or "
        "train at ZeRO stage 2, where a forward gathers nothing"
    )

"""Who waits for whom: within seconds, from every rank's own word.

Owns one small thread a rank. Each rank writes where it is on a board that all can read (torch.distributed's store), and
a rank that has waited for ``PATIENCE_S`` reads what the others wrote. So a hang is explained long before the collective
times out: the ranks that wait, in what, and the rank that is elsewhere, with the last thing it did.

A rank may be late for a good reason (a checkpoint, a slow data loader), and what it is late for then goes on; the
timeout stays the end of such a wait. Ranks that wait for each other in a circle will wait for ever: that is certain,
see ``circle``, and ends the run at once.
"""

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

from shardglass.engine.circle import Wait, circle, circle_line

log = logging.getLogger(__name__)

POLL_S = 2.0
"""Seconds between two looks of a rank at itself."""

PATIENCE_S = 10.0
"""Seconds of waiting after which a rank asks where the others are."""

MOST_RANKS = 8
"""Ranks that one line names."""

VERDICT = "verdict"
"""Key under which the first rank says that ranks wait in a circle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a rank is.

    Attributes:
        waits_in: The collective it waits in; None if it computes or does something else.
        since_s: Seconds that it has waited, or that went by since its last collective ended.
        last: The last collective that ended.
        wait: What it waits in and what it has started so far, once it has waited for a while.
    """

    waits_in: str | None
    since_s: float
    last: str
    wait: Wait | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often a rank looks at itself, and after how long a wait it asks; in seconds."""

    poll_s: float
    patience_s: float


Fail = Callable[[], None]


class Store(Protocol):
    """What the board needs of a store of torch.distributed."""

    def set(self, key: str, value: str) -> None:
        """Write."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""

    def get(self, key: str) -> bytes:
        """Read; waits for a key that is not there."""


class Board:
    """Writes this rank's position, and says who waits for whom once a wait is long."""

    def __init__(
        self, store: Store, rank: int, world_size: int, position: Callable[[], Position], *, pace: Pace, fail: Fail
    ) -> None:
        """Start the thread.

        Args:
            store: The board; its keys are this group's alone.
            rank: This rank.
            world_size: Number of ranks.
            position: Where this rank is; called on the thread.
            pace: How often it looks, and how long a wait is long.
            fail: Fails what this rank waits in; called on the thread when ranks wait in a circle.
        """
        self._store, self._rank, self._world_size = store, rank, world_size
        self._position, self._pace, self._fail = position, pace, fail
        self._told: str | None = None  # the wait that was told already
        self._beat = 0  # looks so far
        self._suspected: tuple[tuple[int, ...], dict[int, int]] | None = None  # a circle and its ranks' beats
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardglass-board", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; one that waits for the store ends by itself."""
        self._stop.set()
        self._thread.join(timeout=1.0)

    def verdict(self) -> str | None:
        """What the first rank said of ranks that wait in a circle; None if it said nothing."""
        try:
            return self._store.get(VERDICT).decode() if self._store.check([VERDICT]) else None
        except (RuntimeError, ValueError):  # the store is gone
            return None

    def _run(self) -> None:
        while not self._stop.wait(self._pace.poll_s):
            try:
                self._look()
                if self._store.check([VERDICT]):
                    self._fail()
                    return
            except (RuntimeError, ValueError) as error:  # the store is gone, as at the end of a run
                log.debug("rank %d: the board cannot be reached: %s", self._rank, error)
                return

    def _look(self) -> None:
        here = self._position()
        self._beat += 1
        self._store.set(str(self._rank), json.dumps({"beat": self._beat, **asdict(here)}))
        if here.waits_in is None:
            self._told = self._suspected = None
            return
        is_long = here.since_s >= self._pace.patience_s
        if self._rank == 0 and here.wait is not None:
            self._look_for_circle(here)
        if is_long and self._told != here.waits_in:
            self._tell(here)

    def _tell(self, here: Position) -> None:
        others = {rank: self._read(rank)[0] for rank in range(self._world_size) if rank != self._rank}
        line = waiting_line(self._rank, here, others)
        if line is not None:
            self._told = here.waits_in
            log.warning("%s", line)

    def _look_for_circle(self, here: Position) -> None:
        """Give the verdict once the same circle is seen in two positions of each of its ranks, one after the other.

        So none of them is a position of long ago, whose rank has moved on since.
        """
        read = {rank: self._read(rank) for rank in range(1, self._world_size)} | {0: (here, self._beat)}
        waits = {rank: p.wait for rank, (p, _) in read.items() if p is not None and p.wait is not None}
        found = circle(waits)
        if found is None:
            self._suspected = None
            return
        beats = {rank: read[rank][1] for rank in found}
        if self._suspected is None or self._suspected[0] != tuple(found):
            self._suspected = (tuple(found), beats)
        elif all(beats[rank] > self._suspected[1][rank] for rank in found):
            self._store.set(VERDICT, circle_line(found, waits))

    def _read(self, rank: int) -> tuple[Position | None, int]:
        """What a rank wrote last, and at which of its looks; None if it wrote nothing yet."""
        key = str(rank)
        if not self._store.check([key]):
            return None, 0
        told = json.loads(self._store.get(key))
        beat, wait = told.pop("beat", 0), told.pop("wait", None)
        return Position(**told, wait=None if wait is None else Wait(**wait)), beat


def waiting_line(rank: int, here: Position, others: dict[int, Position | None]) -> str | None:
    """Who waits for whom, in one line; None where another rank says it, which is the first of those that wait alike.

    Args:
        rank: The rank that waits.
        here: Where it is.
        others: The positions of the other ranks; None of one that wrote none.
    """
    alike = [r for r, p in others.items() if p is not None and p.waits_in == here.waits_in]
    elsewhere = {r: p for r, p in others.items() if r not in alike}
    if any(r < rank for r in alike) or not elsewhere:
        return None
    waiting = sorted([rank, *alike])
    shown = list(elsewhere.items())[:MOST_RANKS]
    places = "; ".join(f"rank {r} {_place(p)}" for r, p in shown)
    rest = f"; and {len(elsewhere) - len(shown)} ranks more" if len(elsewhere) > len(shown) else ""
    return (
        f"{_ranks(waiting)} ha{'s' if len(waiting) == 1 else 've'} waited for {here.since_s:.0f} s in the "
        f"{here.waits_in}, and not all ranks are there: {places}{rest}"
    )


def _place(position: Position | None) -> str:
    if position is None:
        return "has not come so far as to say where it is"
    if position.waits_in is not None:
        return f"waits in the {position.waits_in}"
    return f"is in no collective since {position.since_s:.0f} s, its last was the {position.last}"


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:MOST_RANKS]))
    more = f" and {len(ranks) - MOST_RANKS} more" if len(ranks) > MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"

"""Who waits for whom: within seconds, from every rank's own word.

Owns one small thread a rank. Each rank writes where it is on a board that all can read (torch.distributed's store), and
a rank that has waited for ``PATIENCE_S`` reads what the others wrote. So a hang is explained long before the collective
times out: the ranks that wait, in what, and the rank that is elsewhere, with the last thing it did.

It only speaks. A rank may be late for a good reason (a checkpoint, a slow data loader), and what it is late for then
goes on; the timeout stays the end of a run that hangs.
"""

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

log = logging.getLogger(__name__)

POLL_S = 2.0
"""Seconds between two looks of a rank at itself."""

PATIENCE_S = 10.0
"""Seconds of waiting after which a rank asks where the others are."""

MOST_RANKS = 8
"""Ranks that one line names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a rank is.

    Attributes:
        waits_in: The collective it waits in; None if it computes or does something else.
        since_s: Seconds that it has waited, or that went by since its last collective ended.
        last: The last collective that ended.
    """

    waits_in: str | None
    since_s: float
    last: str


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
        self,
        store: Store,
        rank: int,
        world_size: int,
        position: Callable[[], Position],
        *,
        poll_s: float,
        patience_s: float,
    ) -> None:
        """Start the thread.

        Args:
            store: The board; its keys are this group's alone.
            rank: This rank.
            world_size: Number of ranks.
            position: Where this rank is; called on the thread.
            poll_s: Seconds between two looks.
            patience_s: Seconds of waiting after which it asks.
        """
        self._store, self._rank, self._world_size, self._position = store, rank, world_size, position
        self._poll_s, self._patience_s = poll_s, patience_s
        self._told: str | None = None  # the wait that was told already
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardglass-board", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; one that waits for the store ends by itself."""
        self._stop.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._stop.wait(self._poll_s):
            try:
                self._look()
            except (RuntimeError, ValueError) as error:  # the store is gone, as at the end of a run
                log.debug("rank %d: the board cannot be reached: %s", self._rank, error)
                return

    def _look(self) -> None:
        here = self._position()
        self._store.set(str(self._rank), json.dumps(asdict(here)))
        if here.waits_in is None or here.since_s < self._patience_s:
            self._told = None
            return
        if self._told == here.waits_in:
            return
        others = {rank: self._read(rank) for rank in range(self._world_size) if rank != self._rank}
        line = waiting_line(self._rank, here, others)
        if line is not None:
            self._told = here.waits_in
            log.warning("%s", line)

    def _read(self, rank: int) -> Position | None:
        """What a rank wrote last; None if it wrote nothing yet."""
        key = str(rank)
        return Position(**json.loads(self._store.get(key))) if self._store.check([key]) else None


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

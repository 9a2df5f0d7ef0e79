"""Says where this rank is when a collective on a GPU does not end.

Owns one small thread. gloo's wait raises by itself when its time is over; NCCL's does not block the host, so a hang
shows only at the next host read, and NCCL's own watchdog then knows a sequence number and no tensor. The thread
polls the works instead.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

log = logging.getLogger(__name__)


class Work(Protocol):
    """What a collective in flight can be asked."""

    def is_completed(self) -> bool:
        """Whether it ended."""


class Watch:
    """Polls collectives and reports each that is older than ``timeout_s`` once."""

    def __init__(self, timeout_s: float, report: Callable[[str, float], None]) -> None:
        """Start the thread.

        Args:
            timeout_s: Age in seconds after which a collective is reported.
            report: Takes what the collective is for and its age; called on the thread.
        """
        self._timeout_s, self._report = timeout_s, report
        self._lock = threading.Lock()
        self._open: list[tuple[str, float, Sequence[Work]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardglass-watch", daemon=True)
        self._thread.start()

    def add(self, what: str, works: Sequence[Work]) -> None:
        """Watch a collective that was just started."""
        with self._lock:
            self._open.append((what, time.monotonic(), works))

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(min(5.0, self._timeout_s / 4)):
            now = time.monotonic()
            with self._lock:
                self._open = [row for row in self._open if not all(work.is_completed() for work in row[2])]
                late = [row for row in self._open if now - row[1] > self._timeout_s]
                self._open = [row for row in self._open if row not in late]
            for what, started, _ in late:
                self._report(what, now - started)

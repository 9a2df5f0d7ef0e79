"""What a logger says, in a process of ranks, where pytest's own fixture is not."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def heard(logger: str) -> Iterator[list[str]]:
    """The messages of a logger from here on, one after the other."""
    handler = _Lines()
    logging.getLogger(logger).addHandler(handler)
    try:
        yield handler.lines
    finally:
        logging.getLogger(logger).removeHandler(handler)

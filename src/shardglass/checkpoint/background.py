"""Saving beside training: a pause for a copy, then a thread that writes.

Owns the thread, the host buffers and the group apart. The thread does what a synchronous save does, over a gloo group
that training does not use; so one kind of folder comes of both.

[Note: when a failure is told] All ranks know of a failed save at nearly the same time, but must raise at the same step,
or those that did not would wait for the others. In the thread they agree on a step that none of them has reached.
"""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardglass.checkpoint.save import write_snapshot
from shardglass.checkpoint.snapshot import HostBuffers, Snapshot, take_snapshot
from shardglass.engine.handle import Handle

MOST_WRITING_S = 24 * 3600.0
"""Seconds that ranks may differ in how long they write."""


class BackgroundSaver:
    """Saves checkpoints of one sharded model, one at a time, while it trains."""

    def __init__(self, handle: Handle) -> None:
        """Make the group that the thread uses; collective."""
        self._handle = handle
        self._ranks = handle.group_apart(MOST_WRITING_S)
        self._buffers = HostBuffers()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._due = 0  # step at which the error is raised

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it keeps."""
        return self._buffers.nbytes

    def save(
        self,
        folder: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        write: Callable[[Path], None] | None = None,
        done: Callable[[], None] | None = None,
    ) -> None:
        """Copy the training state and begin to write it; collective. Waits for a save that is under way.

        Args:
            folder: As for ``save_checkpoint``.
            extra: As for ``save_checkpoint``.
            write: As for ``save_checkpoint``; called in the thread, so it must not use what training changes.
            done: Called in the thread on every rank when the folder is complete.

        Raises:
            CheckpointError: The save before failed.
            UsageError: Gradients are accumulated.
        """
        self.wait()
        snapshot = take_snapshot(self._handle, self._buffers)
        arguments = (Path(folder), snapshot, dict(extra or {}), write, done)
        self._thread = threading.Thread(target=self._run, args=arguments, name="shardglass-save")
        self._thread.start()

    def _run(
        self,
        target: Path,
        snapshot: Snapshot,
        extra: Mapping[str, Any],
        write: Callable[[Path], None] | None,
        done: Callable[[], None] | None,
    ) -> None:
        try:
            write_snapshot(self._ranks, target, snapshot, extra=extra, write=write)
            if done is not None:
                done()
        except BaseException as error:  # noqa: BLE001  the main thread raises it
            try:
                steps = self._ranks.agree("the step of a failure", self._handle.counters["step"])
                self._due = max(steps) + 2
            except RuntimeError:  # a rank is gone
                self._due = 0
            self._error = error

    def check(self) -> None:
        """Raise what the last save failed with, at the same step on all ranks; call it after every step.

        Raises:
            CheckpointError: As ``save_checkpoint``.
        """
        if self._error is not None and self._handle.counters["step"] >= self._due:
            self._raise()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            CheckpointError: As ``save_checkpoint``.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def is_writing(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Wait for the save under way and give the group back.

        Raises:
            CheckpointError: As ``save_checkpoint``.
        """
        try:
            self.wait()
        finally:
            self._ranks.close()

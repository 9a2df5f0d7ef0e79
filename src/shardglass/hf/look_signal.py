"""SIGUSR1: asks a run for snapshots without stopping it; and SIGUSR2, which asks it to save and stop, on its way there.

Owns the signal in a rank and in the launcher. Loads neither torch nor transformers, so that a rank takes the signal
over before these are loaded. Leaves what happens then to ``looking``.

[Note: no rank is ended by it] Who has no handler for SIGUSR1 is ended by it. So the launcher blocks it in all of its
threads before it starts the ranks, which inherit that: a signal that reaches a rank early waits until the rank has its
handler. The launcher itself takes it in a thread that waits for it and nothing else. At its end a process ignores the
signal: Python takes its handlers away before it is gone.
"""

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

SIGNAL = signal.SIGUSR1

PASSED_ON = {
    signal.SIGUSR1: "SIGUSR1 asks for snapshots",
    signal.SIGUSR2: "SIGUSR2 asks to save and stop",
}
"""Signals that the launcher sends on to the ranks, and what they ask for."""

WAIT_S = 1.0
"""Seconds after which the launcher's thread looks whether it is to end."""


class LookSignal:
    """Notes in a rank that somebody asked for a snapshot."""

    def __init__(self) -> None:
        self._asked = False

    def arm(self) -> None:
        """Take the signal over, which only the main thread may; elsewhere nothing happens."""
        if threading.current_thread() is not threading.main_thread():
            return
        signal.signal(SIGNAL, self._on_signal)
        signal.siginterrupt(SIGNAL, False)  # noqa: FBT003  # the name of the argument is not public
        os.register_at_fork(after_in_child=_ignore)  # a data loader's worker has no snapshot to give
        atexit.register(_ignore)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})

    def take(self) -> bool:
        """Whether somebody asked since the last call."""
        asked, self._asked = self._asked, False
        return asked

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked = True


def _ignore() -> None:
    signal.signal(SIGNAL, signal.SIG_IGN)


@contextmanager
def signal_passed_on(say: Callable[[str], None]) -> Iterator[None]:
    """Send each signal that comes inside on to the ranks; enter before any other thread is started.

    Afterwards the signal is ignored, as the run is over.

    Args:
        say: Writes a line, if there is no rank yet.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set(PASSED_ON))  # see [Note: no rank is ended by it]
    ended = threading.Event()
    threading.Thread(target=_pass_on, args=(say, ended), name="shardglass look signal", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        for number in PASSED_ON:
            signal.signal(number, signal.SIG_IGN)  # drops one that still waits
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pass_on(say: Callable[[str], None], ended: threading.Event) -> None:
    while not ended.is_set():
        came = signal.sigtimedwait(set(PASSED_ON), WAIT_S)
        if came is None:
            continue
        number = signal.Signals(came.si_signo)
        ranks = [child for child in psutil.Process().children() if _is_rank(child)]
        for rank in ranks:
            try:
                rank.send_signal(number)
            except psutil.NoSuchProcess:
                continue  # it ended meanwhile
        if not ranks:
            say(f"{PASSED_ON[number]}, and no rank is running yet: send it again when the run has begun")


def _is_rank(process: psutil.Process) -> bool:
    """Whether a child of the launcher is one of the processes that it starts to train."""
    try:
        return {"shardglass", "train"} <= set(process.cmdline())
    except psutil.Error:
        return False

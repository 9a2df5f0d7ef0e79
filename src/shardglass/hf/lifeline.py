"""How a process of a run ends before its time: a signal, or a launcher that is gone.

Owns the end and the one line about what was saved. Loads neither torch nor transformers, so that it holds while these
are loaded. Leaves the sense of the files to ``output_folder`` and ``checkpoint``.

[Note: ending at once] A thread of its own waits for signals and looks after the parent, since the main thread may sit
in a collective that no other rank will ever enter. It ends the process without unwinding: destructors of a process
group may wait for ranks that do not come, and files are safe at every moment (a checkpoint is complete or absent, the
final files are moved one by one).
"""

import ctypes
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from shardglass.checkpoint.folder import numbered
from shardglass.checkpoint.manifest import MANIFEST
from shardglass.hf.output_folder import SUMMARY_FILE, model_files

if TYPE_CHECKING:
    from collections.abc import Callable

STOPS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
"""Signals that end a run, as they are called in messages."""

PREEMPTS = {signal.SIGTERM: "SIGTERM", signal.SIGUSR2: "SIGUSR2"}
"""Signals that let a run finish its step and save; at other times, and when they come again, they end it at once."""

PREEMPTED_CODE = 75
"""Exit code of a run that was told to go and has saved: EX_TEMPFAIL, "try again later" (source: BSD, sysexits.h)."""

NAMES = {**STOPS, **PREEMPTS}
"""All of them."""

LOOK_S = 1.0
"""Seconds between two looks at the parent."""

DYING_S = 0.5
"""Seconds in which a launcher that has begun to die is gone."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Lifeline:
    """Ends this process when it is told to, or when its launcher is gone; see [Note: ending at once].

    Attributes:
        output_dir: Where the run saves, once that is known.
        preempt: While training is under way, what has it save and stop after the present step; else None.
    """

    def __init__(self, *, says_all: bool, says_signals: bool, parent: int | None) -> None:
        """Prepare; nothing happens before ``arm``.

        Args:
            says_all: This process is the one of its run that speaks.
            says_signals: It also says what a signal ended; otherwise the launcher does.
            parent: Process id of the launcher, without which this process must not go on; None: go on alone.
        """
        self.output_dir: Path | None = None
        self.preempt: Callable[[signal.Signals], None] | None = None
        self._was_asked = False
        self._says_all, self._says_signals, self._parent = says_all, says_signals, parent
        self._began = time.time()
        self._ending = threading.Lock()
        self._wake, self._woken = -1, -1  # file descriptors of a pipe: read, write

    def arm(self, *, by_kernel: bool = True) -> None:
        """Take the signals over, which only the main thread may, and begin to look after the parent.

        Args:
            by_kernel: Where Linux can tell of the parent's death, let it.
        """
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        if threading.current_thread() is threading.main_thread():
            for number in NAMES:
                signal.signal(number, self._on_signal)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, set(NAMES))  # the launcher passes one on, see ``look_signal``
            signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=_let_go)  # signals of a data loader's worker are not ours
        if self._parent is not None and by_kernel and sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        threading.Thread(target=self._watch, name="shardglass lifeline", daemon=True).start()

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._wake], [], [], LOOK_S)
            for byte in os.read(self._wake, 64) if ready else b"":
                # Whoever took a signal over since has a plan of its own for it.
                if byte in NAMES and signal.getsignal(byte) == self._on_signal:
                    self._on_byte(signal.Signals(byte))
            if self._is_orphan():
                self._end(signal.SIGTERM)

    def _on_byte(self, number: signal.Signals) -> None:
        """A signal came: the first one that preempts is a wish, all others end the process."""
        may_finish = number in PREEMPTS and self.preempt is not None and not self._was_asked
        if not may_finish or self.preempt is None or (number == signal.SIGTERM and self._becomes_orphan()):
            self._end(number)
            return
        self._was_asked = True
        self.preempt(number)
        if self._says_all:
            line = f"\nshardglass: {PREEMPTS[number]}: finishing the step, then saving; once more stops at once\n"
            os.write(2, line.encode())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, if that gets round to it; the other thread knows which signals came before."""
        if self.preempt is None or number not in PREEMPTS:
            self._end(signal.Signals(number))

    def _is_orphan(self) -> bool:
        return self._parent is not None and os.getppid() != self._parent

    def _becomes_orphan(self) -> bool:
        """Linux tells of the end of the parent's thread; the process may have others, which die a little later."""
        end = time.monotonic() + DYING_S
        while self._parent is not None and not self._is_orphan() and time.monotonic() < end:
            time.sleep(0.01)
        return self._is_orphan()

    def _end(self, number: signal.Signals) -> None:
        if not self._ending.acquire(blocking=False):
            return  # the other thread is about it
        is_orphan = self._becomes_orphan() if number == signal.SIGTERM else self._is_orphan()
        if self._says_all and (is_orphan or self._says_signals):
            why = "stopped, as its launcher is gone" if is_orphan else f"stopped by {NAMES[number]}"
            line = f"\nshardglass: {why}; {saved(self.output_dir, self._began)}\n"  # behind a progress bar
            os.write(2, line.encode())  # sys.stderr may be in the middle of a line of the other thread
        os._exit(128 + number)


def _let_go() -> None:
    """In a process that was forked from an armed one: a stop of its own is its own, and Ctrl-C is its parent's."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def saved(output_dir: Path | None, began: float) -> str:
    """Say what a run that was stopped has saved.

    Args:
        output_dir: Where it saves; None if that was not known yet.
        began: When it began, in seconds since the epoch.
    """
    if output_dir is None or not output_dir.is_dir():
        return "nothing was saved"
    since = began - 1.0  # a file system may keep whole seconds
    if _is_new(output_dir / SUMMARY_FILE, since):
        return f"the trained model is saved in {output_dir}"
    fresh = [name for name in model_files(output_dir) if _is_new(output_dir / name, since)]
    if fresh:
        return f"it was saving the trained model: {', '.join(fresh)} in {output_dir} are new, others may be missing"
    checkpoints = [folder for _, folder in numbered(output_dir)]
    of_this_run = [folder for folder in checkpoints if _is_new(folder, since)]
    if of_this_run:
        last = max(of_this_run, key=lambda folder: folder.stat().st_mtime)
        resumable = f"; go on with --resume_from_checkpoint {last}" if (last / MANIFEST).is_file() else ""
        return f"the last complete checkpoint is {last}{resumable}"
    before = f" ({checkpoints[-1]} is from before)" if checkpoints else ""
    return f"nothing was saved{before}"


def _is_new(path: Path, since: float) -> bool:
    return path.exists() and path.stat().st_mtime >= since

"""What a process's memory is by the kernel's account, without the allocator's leftovers."""

import ctypes
from pathlib import Path

M_MMAP_THRESHOLD = -3
"""Of mallopt(3)."""

LARGE = 1 << 17


def give_freed_runs_back() -> None:
    """Make glibc unmap each large run when it is freed; otherwise it keeps those up to 32 MiB in its heaps.

    How many it keeps differs from run to run, so that a bound on memory would be a bound on luck.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE)


def bytes_of(row: str) -> int:
    """One row of /proc/self/status, which is in KiB, in bytes."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return int(rows[row].split()[0]) * 1024

"""This machine: what is free of its memory, and what it is, for bug reports.

Owns the measuring. Leaves what is needed to ``plan``.
"""

from pathlib import Path

import psutil

_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Of control groups, version 2 and 1: limit, use, statistics, and the key of what they could drop."""


def free_host_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of RAM that processes can still take: what the system has left, or a container's limit if that is less.

    Args:
        cgroup: Where control groups are mounted.
    """
    free = int(psutil.virtual_memory().available)
    limited = cgroup_free_bytes(cgroup)
    return free if limited is None else min(free, limited)


def cgroup_free_bytes(cgroup: Path) -> int | None:
    """What a container's limit leaves; None without a limit."""
    for limit_file, use_file, stat_file, cache_key in _CGROUP_FILES:
        try:
            limit = (cgroup / limit_file).read_text(encoding="ascii").strip()
            used = int((cgroup / use_file).read_text(encoding="ascii"))
            stat = dict(line.split() for line in (cgroup / stat_file).read_text(encoding="ascii").splitlines())
        except (OSError, ValueError):
            continue
        if not limit.isdecimal():
            return None  # "max"
        return max(0, int(limit) - used + int(stat.get(cache_key, 0)))
    return None

"""A debugger in a rank: waiting for one, and what a rank under one does otherwise.

Owns the rank's side of debugpy. Leaves the entries of VS Code's launch.json to ``commands.debug_config``.

[Note: a rank that is held] While a breakpoint holds one rank, the others stand in a collective that it does not enter.
So wherever a debugger may come, every rank gets ``DEBUG_TIMEOUT_S`` for its collectives, those of the engine and those
of torch's default group, before any group is made.
"""

import os
import sys
import threading
from collections.abc import Callable, Mapping
from importlib import import_module

from shardglass.errors import ConfigError

DEBUG_TIMEOUT_S = 24 * 3600
"""How long ranks wait for one that a debugger holds."""

DEBUGGED = "SHARDGLASS_DEBUGGED"
"""Environment variable of a run whose processes are started under a debugger: the ranks that it may stop, or "all"."""

HOST = "127.0.0.1"
"""Where a rank listens: whoever reaches the port can run code in the process."""


def patience(values: Mapping[str, object]) -> dict[str, int]:
    """Timeouts that outlast a breakpoint, see [Note: a rank that is held]; longer ones of the user stay.

    Args:
        values: The values of the command's flags.
    """
    given = {name: values.get(name) for name in ("collective_timeout_s", "ddp_timeout")}
    return {
        name: DEBUG_TIMEOUT_S
        for name, value in given.items()
        if not isinstance(value, int | float) or value < DEBUG_TIMEOUT_S
    }


def held_note(who: str) -> str:
    """What the user should know of the timeouts."""
    return f"{who}: every rank waits for up to {DEBUG_TIMEOUT_S // 3600} hours in a collective, instead of failing"


def wait_for_debugger(rank: int, port: int, say: Callable[[str], None]) -> None:
    """Listen on a port and wait until a debugger is there.

    Args:
        rank: This rank.
        port: Where it listens, on this machine alone.
        say: Writes a line.

    Raises:
        ConfigError: debugpy is not installed, or the port cannot be used.
    """
    try:
        debugpy = import_module("debugpy")
    except ImportError as error:
        raise ConfigError(
            f"--debugpy_rank {rank}: debugpy cannot be used ({error}): pip install 'shardglass[debug]'"
        ) from None
    debugpy.configure(subProcess=False)  # workers of a data loader are not the rank
    try:
        debugpy.listen((HOST, port))
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"--debugpy_port {port}: rank {rank} cannot listen there: {str(error).strip().splitlines()[0]}; give "
            "another port"
        ) from None
    say(
        f"rank {rank} waits for a debugger at {HOST}:{port} (process {os.getpid()}); the other ranks wait for "
        f"up to {DEBUG_TIMEOUT_S // 3600} hours"
    )
    debugpy.wait_for_client()


def name_process(rank: int) -> None:
    """Give the main thread the rank's name, which debuggers show beside the process."""
    threading.main_thread().name = f"rank {rank}"


def run_free(rank: int, debugged: str | None) -> bool:
    """Let this rank run through breakpoints if its processes' debugger is meant for others.

    Args:
        rank: This rank.
        debugged: The value of ``DEBUGGED``; None where there is no such debugger.

    Returns:
        Whether it runs free.
    """
    if debugged in (None, "all") or str(rank) in str(debugged).split(",") or "pydevd" not in sys.modules:
        return False
    debugger = import_module("pydevd").get_global_debugger()
    if debugger is None:
        return False
    debugger.disable_tracing()  # what debugpy.trace_this_thread(False) does; debugpy itself need not be installed
    return True

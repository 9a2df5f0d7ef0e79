"""Whether a run that is about to start fits where it starts.

Owns measuring what this run may use, and the refusal. Leaves the plan to ``planning`` and its comparison to
``plan.check``.
"""

import psutil
import torch
from rich.console import Console

from shardglass.errors import ConfigError, ModelError
from shardglass.hf.machine import free_host_bytes
from shardglass.hf.run_planning import RunToPlan, plans_of_run
from shardglass.plan.check import FitCheck, check_fits
from shardglass.report.plan_terminal import render_check

SKIP_FLAG = "--skip_memory_check"


def check_memory(run: RunToPlan, *, skip: bool, decides: bool, console: Console | None) -> FitCheck | None:
    """Plan a run before its weights are loaded, show the plan in three lines, and refuse what cannot fit.

    Args:
        run: The run.
        skip: Go on whatever the plan says.
        decides: Whether this rank may refuse: on the CPU one rank for all of its machine, on CUDA each for its GPU.
        console: Where the plan is shown; None shows nothing.

    Returns:
        The comparison; None if the model cannot be planned, which is said and stops nothing.

    Raises:
        ConfigError: The run cannot fit; says by how much and how to go on all the same.
    """
    try:
        longest, shortest = plans_of_run(run)
    except ModelError as error:
        if console is not None:
            console.print(f"plan: none: {error}", soft_wrap=True, highlight=False, markup=False)
        return None
    free = free_device_bytes() if run.device == "cuda" else free_for_ranks()
    check = check_fits(longest, free=free, shortest=shortest)
    if console is not None:
        render_check(longest, check, console)
    if check.cannot_fit and decides and not skip:
        raise ConfigError(
            f"{check.sentence}. Use more ranks, a higher stage or a smaller model; `shardglass plan` finds out what "
            f"fits. {SKIP_FLAG} True trains all the same"
        )
    return check


def free_device_bytes() -> int:
    """Bytes that are free on this process's GPU."""
    return int(torch.cuda.mem_get_info()[0])


def free_for_ranks() -> int:
    """Bytes of RAM that the ranks of this machine may use in all: what is free, and what they hold already.

    A rank that is ahead of this one may have begun to load the model; what it has taken is a part of the need.
    """
    me = psutil.Process()
    parent = me.parent()
    ranks = {me.pid: me}
    if parent is not None:
        ranks |= {process.pid: process for process in parent.children() if process.name() == me.name()}
    return free_host_bytes() + sum(_own_bytes(process) for process in ranks.values())


def _own_bytes(process: psutil.Process) -> int:
    """Memory that would be free without a process; 0 if it is gone or nobody may look."""
    try:
        return int(process.memory_full_info().uss)
    except psutil.Error:
        return 0

"""From a checked config and the training arguments to the values of one run.

Never loads torch. ``values`` holds the types, ``filler`` fills one value and keeps contradictions, ``batch`` the batch
arithmetic, ``optimizer`` and ``scheduler`` those two sections, ``run`` puts them together.
"""

from shardglass.resolve.batch import note_of_short_data
from shardglass.resolve.run import resolve
from shardglass.resolve.values import (
    BatchNumbers,
    OptimizerSpec,
    Resolved,
    ResolvedValue,
    RunArguments,
    warmup_steps_of,
)
from shardglass.schedules import SchedulerSpec, lr_at

__all__ = [
    "BatchNumbers",
    "OptimizerSpec",
    "Resolved",
    "ResolvedValue",
    "RunArguments",
    "SchedulerSpec",
    "lr_at",
    "note_of_short_data",
    "resolve",
    "warmup_steps_of",
]

"""The learning rate of each optimizer step under the schedulers of the DeepSpeed JSON, as plain formulas.

Owns the formulas. Leaves to ``resolve`` where the numbers come from, and to the Trainer to put the rate into the
optimizer.

[Note: the first steps]
DeepSpeed's schedulers count from -1 and are advanced after each optimizer step. Before the first step they put the
lower rate into the optimizer (count -1); after it the count is 0, whose warm-up fraction is 0 again. So optimizer step
k runs at the rate of count k - 1, and the first **two** steps run at the lower rate (0 by default).
Source: deepspeed/runtime/lr_schedules.py and ``DeepSpeedEngine._take_model_step`` of release 0.19.8; the values in
tests/test_schedules.py were recorded from its schedulers.
"""

import math
from dataclasses import dataclass
from typing import Literal

from shardglass.errors import UsageError

SchedulerType = Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSpec:
    """One scheduler with its numbers.

    Attributes:
        type: The name in the JSON.
        warmup_min_lr: Rate at the start of the warm-up (WarmupLR, WarmupDecayLR).
        warmup_max_lr: Rate at the end of the warm-up; for WarmupCosineLR the optimizer's own rate.
        warmup_num_steps: Steps of the warm-up; fewer than 2 count as 2. None while the number is not known.
        total_num_steps: Steps until the end of the decay; None for WarmupLR, and while the number is not known.
        warmup_type: "log" (fraction log(count + 1) / log(steps)) or "linear" (count / steps).
        warmup_min_ratio: Start of the warm-up as a share of ``warmup_max_lr`` (WarmupCosineLR).
        cos_min_ratio: End of the decay as a share of ``warmup_max_lr`` (WarmupCosineLR).
    """

    type: SchedulerType
    warmup_min_lr: float = 0.0
    warmup_max_lr: float
    warmup_num_steps: int | None
    total_num_steps: int | None = None
    warmup_type: Literal["log", "linear"] = "log"
    warmup_min_ratio: float = 0.0
    cos_min_ratio: float = 0.0001


def lr_at(spec: SchedulerSpec, step: int) -> float:
    """Return the learning rate of optimizer step ``step``, counted from 0; see [Note: the first steps].

    Args:
        spec: The scheduler.
        step: Number of optimizer steps that came before. A skipped step does not count.

    Raises:
        UsageError: ``step`` is negative, or a number of steps is still unknown.
    """
    if step < 0:
        raise UsageError(f"lr_at: step is {step}; optimizer steps count from 0")
    if spec.warmup_num_steps is None or (spec.total_num_steps is None and spec.type != "WarmupLR"):
        raise UsageError(f"lr_at: the number of steps of {spec.type} is not known yet; resolve again once it is")
    warmup = max(2, spec.warmup_num_steps)
    if spec.type == "WarmupCosineLR":
        return spec.warmup_max_lr * _cosine_ratio(spec, step - 1, warmup)
    return spec.warmup_min_lr + (spec.warmup_max_lr - spec.warmup_min_lr) * _fraction(spec, step - 1, warmup)


def _warmup_fraction(spec: SchedulerSpec, count: int, warmup: int) -> float:
    if spec.warmup_type == "linear":
        return count / warmup
    return math.log(count + 1) / math.log(warmup)


def _fraction(spec: SchedulerSpec, count: int, warmup: int) -> float:
    if count < 0:
        return 0.0
    if count < warmup:
        return _warmup_fraction(spec, count, warmup)
    if spec.type == "WarmupLR" or spec.total_num_steps is None:
        return 1.0
    return max(0.0, (spec.total_num_steps - count) / max(1, spec.total_num_steps - warmup))


def _cosine_ratio(spec: SchedulerSpec, count: int, warmup: int) -> float:
    if count < 0:
        return 0.0  # not warmup_min_ratio: DeepSpeed sets the rate to 0 before the first step
    if count < warmup:
        return spec.warmup_min_ratio + (1.0 - spec.warmup_min_ratio) * _warmup_fraction(spec, count, warmup)
    total = warmup if spec.total_num_steps is None else spec.total_num_steps
    progress = min(1.0, (count - warmup + 1) / max(1, total - warmup))
    return spec.cos_min_ratio + (1.0 - spec.cos_min_ratio) * (1.0 + math.cos(math.pi * progress)) / 2.0

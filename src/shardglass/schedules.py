"""The learning rate, and Adam's decay rates, of each optimizer step under the schedulers of the DeepSpeed JSON.

Owns the plain formulas. Leaves to ``resolve`` where the numbers come from, and to the Trainer to put them into the
optimizer.

[Note: the first steps]
DeepSpeed's schedulers count from -1 and are advanced after each optimizer step. Before the first step they put the
lower rate into the optimizer (count -1); after it the count is 0, whose warm-up fraction is 0 again. So optimizer step
k runs at the rate of count k - 1, and under the schedulers that warm up the first **two** steps run at the lower rate
(0 by default). LRRangeTest and OneCycle take the count plus 1, so that step k is the k-th of the range or cycle; only
the first step of OneCycle has the lower momentum beside the lower rate.
Source: deepspeed/runtime/lr_schedules.py and ``DeepSpeedEngine._take_model_step`` of release 0.19.8; the values in
tests/test_schedules.py were recorded from its schedulers.
"""

import math
from dataclasses import dataclass
from typing import Literal

from shardglass.errors import UsageError

SchedulerType = Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]

SECOND_BETA = 0.99
"""Adam's second decay rate under a OneCycle that cycles the first one; DeepSpeed has this number in its code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSpec:
    """One scheduler that warms up, with its numbers.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeTestSpec:
    """LRRangeTest: the rate grows by ``step_rate`` times itself in every ``step_size`` steps.

    Attributes:
        min_lr: Rate of the first step.
        step_size: Steps of an interval.
        step_rate: Growth in an interval, as a share of ``min_lr``.
        is_staircase: Whether it grows at the end of an interval alone.
        type: The name in the JSON.
    """

    min_lr: float
    step_size: int
    step_rate: float
    is_staircase: bool
    type: Literal["LRRangeTest"] = "LRRangeTest"


@dataclass(frozen=True, slots=True, kw_only=True)
class OneCycleSpec:
    """OneCycle: the rate goes up and down once, then decays; the momentum goes the other way.

    Attributes:
        min_lr: Rate at both ends of the cycle.
        max_lr: Rate at its top.
        first_size: Steps up.
        second_size: Steps down.
        first_stairs: Stairs on the way up; 0 means a straight line.
        second_stairs: Stairs on the way down.
        decay_size: Steps of an interval of the decay; 0 means no decay.
        decay_rate: What the divisor of ``min_lr`` grows by in an interval.
        momentum: The lowest and the highest first decay rate of Adam; None leaves both rates alone.
        type: The name in the JSON.
    """

    min_lr: float
    max_lr: float
    first_size: int
    second_size: int
    first_stairs: int = 0
    second_stairs: int = 0
    decay_size: int = 0
    decay_rate: float = 0.0
    momentum: tuple[float, float] | None = None
    type: Literal["OneCycle"] = "OneCycle"

    @property
    def size(self) -> int:
        """Steps of the cycle."""
        return self.first_size + self.second_size


Schedule = SchedulerSpec | RangeTestSpec | OneCycleSpec
"""A scheduler of the JSON; ``lr_at`` and ``betas_at`` take each."""


def lr_at(spec: Schedule, step: int) -> float:
    """Return the learning rate of optimizer step ``step``, counted from 0; see [Note: the first steps].

    Args:
        spec: The scheduler.
        step: Number of optimizer steps that came before. A skipped step does not count.

    Raises:
        UsageError: ``step`` is negative, or a number of steps is still unknown.
    """
    if step < 0:
        raise UsageError(f"lr_at: step is {step}; optimizer steps count from 0")
    if isinstance(spec, RangeTestSpec):
        intervals = step / spec.step_size
        return spec.min_lr * (1 + spec.step_rate * (math.floor(intervals) if spec.is_staircase else intervals))
    if isinstance(spec, OneCycleSpec):
        return _cycled_rate(spec, step)
    if spec.warmup_num_steps is None or (spec.total_num_steps is None and spec.type != "WarmupLR"):
        raise UsageError(f"lr_at: the number of steps of {spec.type} is not known yet; resolve again once it is")
    warmup = max(2, spec.warmup_num_steps)
    if spec.type == "WarmupCosineLR":
        return spec.warmup_max_lr * _cosine_ratio(spec, step - 1, warmup)
    return spec.warmup_min_lr + (spec.warmup_max_lr - spec.warmup_min_lr) * _fraction(spec, step - 1, warmup)


def betas_at(spec: Schedule, step: int) -> tuple[float, float] | None:
    """Return Adam's decay rates at optimizer step ``step``, counted from 0; None if the scheduler leaves them alone."""
    if not isinstance(spec, OneCycleSpec) or spec.momentum is None:
        return None
    low, high = spec.momentum
    if step == 0:
        return low, SECOND_BETA
    height = _height(spec, step) if step <= spec.size else 0.0
    return high - (high - low) * height, SECOND_BETA


def _cycled_rate(spec: OneCycleSpec, step: int) -> float:
    if step <= spec.size:
        return spec.min_lr + (spec.max_lr - spec.min_lr) * _height(spec, step)
    if not spec.decay_size:
        return spec.min_lr
    return spec.min_lr / (1 + spec.decay_rate * (step - spec.size) / spec.decay_size)


def _height(spec: OneCycleSpec, step: int) -> float:
    """How far up a step of the cycle is, from 0 to 1; the last step is at 0 again."""
    place = step % spec.size
    if place <= spec.first_size:
        climbed, length, stairs = place, spec.first_size, spec.first_stairs
    else:
        climbed, length, stairs = spec.size - place, spec.second_size, spec.second_stairs
    return (climbed * stairs // length) / stairs if stairs else climbed / length


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

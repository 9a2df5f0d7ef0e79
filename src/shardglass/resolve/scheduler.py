"""The scheduler section, filled; see [Note: missing params] in ``optimizer``."""

from typing import Literal, cast

from shardglass.config import AUTO, DeepSpeedConfig
from shardglass.config.types import SchedulerParams
from shardglass.resolve.filler import Filler
from shardglass.resolve.values import warmup_steps_of
from shardglass.schedules import SECOND_BETA, OneCycleSpec, RangeTestSpec, Schedule, SchedulerSpec, SchedulerType

_PARAMS = "scheduler.params."
_WARMUP_STEPS = 1000  # DeepSpeed's default
_DECAY_MAX_LR = 0.001  # DeepSpeed's default for WarmupDecayLR; WarmupLR takes the optimizer's rate
_COS_MIN_RATIO = 0.0001
_HALF_CYCLE = 2000  # DeepSpeed's default of LRRangeTest and OneCycle
_WARMUP_FLAGS = ("warmup_steps", "warmup_ratio")
_WARMUP_FLAG = ", --".join(_WARMUP_FLAGS)


def fill_scheduler(config: DeepSpeedConfig, filler: Filler, lr: float) -> Schedule | None:
    """Decide the scheduler's values; None when the config leaves it to the Trainer.

    Args:
        config: The config.
        filler: Collects values and faults.
        lr: The optimizer's rate, wherever it came from.
    """
    section = config.scheduler
    if section is None or section.type is None:
        _put_trainers_own(filler)
        return None
    filler.put("scheduler.type", section.type, "json")
    params = section.params or SchedulerParams()
    if section.type == "LRRangeTest":
        return _range_test(params, filler)
    if section.type == "OneCycle":
        return _one_cycle(params, filler)
    kind = cast("SchedulerType", section.type)  # the schema lets no other type through
    warmup_type = cast("Literal['log', 'linear']", filler.own(f"{_PARAMS}warmup_type", params.warmup_type, "log"))
    steps = _warmup_steps(params, filler)
    if kind == "WarmupCosineLR":
        spec = SchedulerSpec(
            type=kind,
            warmup_max_lr=lr,
            warmup_num_steps=steps,
            total_num_steps=_total_steps(kind, params, filler),
            warmup_type=warmup_type,
            warmup_min_ratio=filler.own(f"{_PARAMS}warmup_min_ratio", params.warmup_min_ratio, 0.0),
            cos_min_ratio=filler.own(f"{_PARAMS}cos_min_ratio", params.cos_min_ratio, _COS_MIN_RATIO),
        )
    else:
        spec = SchedulerSpec(
            type=kind,
            warmup_min_lr=_min_lr(params, filler),
            warmup_max_lr=_max_lr(kind, params, filler, lr),
            warmup_num_steps=steps,
            total_num_steps=None if kind == "WarmupLR" else _total_steps(kind, params, filler),
            warmup_type=warmup_type,
        )
    _notes(spec, filler)
    return spec


def _range_test(params: SchedulerParams, filler: Filler) -> RangeTestSpec:
    """Decide the values of LRRangeTest; what is missing is DeepSpeed's default."""
    name = f"{_PARAMS}lr_range_test_"
    spec = RangeTestSpec(
        min_lr=filler.own(f"{name}min_lr", params.lr_range_test_min_lr, 1e-3),
        step_size=filler.own(f"{name}step_size", params.lr_range_test_step_size, _HALF_CYCLE),
        step_rate=filler.own(f"{name}step_rate", params.lr_range_test_step_rate, 1.0),
        is_staircase=filler.own(f"{name}staircase", params.lr_range_test_staircase, missing=False),
    )
    _note_own_rate(spec, filler, f"the rate grows from {spec.min_lr:g} to the end of the run")
    return spec


def _one_cycle(params: SchedulerParams, filler: Filler) -> OneCycleSpec:
    """Decide the values of OneCycle; what is missing is DeepSpeed's default."""
    key, ends = _PARAMS, {"cycle_min_lr": params.cycle_min_lr, "cycle_max_lr": params.cycle_max_lr}
    filler.faults += [
        f"{key}{name} is missing; OneCycle needs it: write a number" for name, value in ends.items() if value is None
    ]
    first = filler.own(f"{key}cycle_first_step_size", params.cycle_first_step_size, _HALF_CYCLE)
    stairs = filler.own(f"{key}cycle_first_stair_count", params.cycle_first_stair_count, 0)
    cycles = filler.own(f"{key}cycle_momentum", params.cycle_momentum, missing=True)
    low = filler.own(f"{key}cycle_min_mom", params.cycle_min_mom, 0.8)
    high = filler.own(f"{key}cycle_max_mom", params.cycle_max_mom, 0.9)
    spec = OneCycleSpec(
        min_lr=params.cycle_min_lr or 0.0,
        max_lr=params.cycle_max_lr or 0.0,
        first_size=first,
        second_size=_as_other(f"{key}cycle_second_step_size", params.cycle_second_step_size, first, filler),
        first_stairs=stairs,
        second_stairs=_as_other(f"{key}cycle_second_stair_count", params.cycle_second_stair_count, stairs, filler),
        decay_size=filler.own(f"{key}decay_step_size", params.decay_step_size, 0),
        decay_rate=filler.own(f"{key}decay_lr_rate", params.decay_lr_rate, 0.0),
        momentum=(low, high) if cycles else None,
    )
    _note_own_rate(spec, filler, f"the rate goes from {spec.min_lr:g} to {spec.max_lr:g} and back in {spec.size} steps")
    if cycles:
        filler.notes.append(
            f"OneCycle moves Adam's first decay rate between {low:g} and {high:g} and sets the second to "
            f"{SECOND_BETA:g}, as in DeepSpeed; cycle_momentum false leaves both alone"
        )
    return spec


def _as_other(key: str, json_value: int | None, other: int, filler: Filler) -> int:
    """A number of the way down, which is that of the way up if it is missing."""
    filler.put(key, other if json_value is None else json_value, "derived" if json_value is None else "json")
    return other if json_value is None else json_value


def _note_own_rate(spec: RangeTestSpec | OneCycleSpec, filler: Filler, how: str) -> None:
    """Say that the scheduler has rates of its own."""
    filler.notes.append(
        f"the scheduler section wins over {filler.named('lr_scheduler_type')} {filler.args.lr_scheduler_type} and over "
        f"the optimizer's rate: {spec.type}, {how}"
    )
    filler.note_idle(f"{spec.type} decides", "learning_rate", "lr_scheduler_kwargs", *_WARMUP_FLAGS)


def _put_trainers_own(filler: Filler) -> None:
    """Record what the Trainer makes its scheduler from; a number of steps that is not known yet is left open."""
    filler.put_flag("scheduler.type", filler.args.lr_scheduler_type, "lr_scheduler_type")
    filler.put_flag(f"{_PARAMS}warmup_num_steps", warmup_steps_of(filler.args), *_WARMUP_FLAGS)


def _min_lr(params: SchedulerParams, filler: Filler) -> float:
    auto = params.warmup_min_lr == AUTO
    value = 0.0 if auto or params.warmup_min_lr is None else float(params.warmup_min_lr)
    filler.put(f"{_PARAMS}warmup_min_lr", value, "default" if auto or params.warmup_min_lr is None else "json")
    return value


def _max_lr(kind: SchedulerType, params: SchedulerParams, filler: Filler, lr: float) -> float:
    """Decide the upper rate; without the flag, ``auto`` is the optimizer's rate, so that the two agree."""
    key, given = f"{_PARAMS}warmup_max_lr", filler.gave("learning_rate")
    flag_value = filler.args.learning_rate if given else lr
    missing = lr if kind == "WarmupLR" else _DECAY_MAX_LR
    value = float(filler.take(key, params.warmup_max_lr, "learning_rate", flag_value, missing))
    if not given and (params.warmup_max_lr == AUTO or (params.warmup_max_lr is None and kind == "WarmupLR")):
        filler.put(key, value, "derived", flag="learning_rate")
    return value


def _warmup_steps(params: SchedulerParams, filler: Filler) -> int | None:
    key, json_value = f"{_PARAMS}warmup_num_steps", params.warmup_num_steps
    given, flag_steps = filler.gave(*_WARMUP_FLAGS), warmup_steps_of(filler.args)
    if json_value is None and not given:
        filler.put(key, _WARMUP_STEPS, "default", flag=_WARMUP_FLAG)
        return _WARMUP_STEPS
    if json_value is None or isinstance(json_value, str):
        if flag_steps is None:
            filler.wait(key, _WARMUP_FLAG)
            return None
        steps = max(1, flag_steps)  # transformers fills 1 where there is no warm-up
        exact = given and filler.args.warmup_steps >= 1
        filler.put(key, steps, "flag" if exact else "derived" if given else "default", flag=_WARMUP_FLAG)
        return steps
    if given and flag_steps is not None and max(1, flag_steps) != max(1, json_value):
        flag = "warmup_steps" if filler.args.warmup_steps else "warmup_ratio"
        filler.contradict(key, json_value, filler.named(flag), f"{flag_steps} steps")
    filler.put(key, json_value, "json", flag=_WARMUP_FLAG)
    return json_value


def _total_steps(kind: SchedulerType, params: SchedulerParams, filler: Filler) -> int | None:
    key, json_value, args = f"{_PARAMS}total_num_steps", params.total_num_steps, filler.args
    if json_value is None:
        filler.faults.append(f'{key} is missing; {kind} needs it: write a number or "auto"')
        return None
    given = filler.gave("max_steps") and args.max_steps > 0
    if isinstance(json_value, str):
        if args.steps is None:
            filler.wait(key, "max_steps")
        else:
            filler.put(key, args.steps, "flag" if given else "derived", flag="max_steps")
        return args.steps
    if given and json_value != args.max_steps:
        filler.contradict(key, json_value, filler.named("max_steps"), args.max_steps)
    elif args.steps is not None and json_value != args.steps:
        filler.notes.append(f"the scheduler ends its decay at step {json_value}, the run has {args.steps} steps")
    filler.put(key, json_value, "json", flag="max_steps")
    return json_value


def _notes(spec: SchedulerSpec, filler: Filler) -> None:
    after = {
        "WarmupLR": "stays constant after the warm-up",
        "WarmupDecayLR": "falls in a straight line after the warm-up",
        "WarmupCosineLR": "falls along a cosine after the warm-up",
    }
    first = "first step runs at 0"
    if spec.type != "WarmupCosineLR":
        first = f"first two steps run at {spec.warmup_min_lr:g}"
    filler.notes.append(
        f"the scheduler section wins over {filler.named('lr_scheduler_type')} {filler.args.lr_scheduler_type}: "
        f"{spec.type} {after[spec.type]}; as in DeepSpeed, the {first}"
    )
    filler.note_idle("the scheduler section decides", "lr_scheduler_kwargs")

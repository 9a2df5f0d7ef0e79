"""The scheduler section, filled; see [Note: missing params] in ``optimizer``."""

from typing import Literal, cast

from shardglass.config import AUTO, DeepSpeedConfig
from shardglass.config.types import SchedulerParams
from shardglass.resolve.filler import Filler
from shardglass.resolve.values import warmup_steps_of
from shardglass.schedules import SchedulerSpec, SchedulerType

_PARAMS = "scheduler.params."
_WARMUP_STEPS = 1000  # DeepSpeed's default
_DECAY_MAX_LR = 0.001  # DeepSpeed's default for WarmupDecayLR; WarmupLR takes the optimizer's rate
_COS_MIN_RATIO = 0.0001
_WARMUP_FLAGS = ("warmup_steps", "warmup_ratio")
_WARMUP_FLAG = ", --".join(_WARMUP_FLAGS)


def fill_scheduler(config: DeepSpeedConfig, filler: Filler, lr: float) -> SchedulerSpec | None:
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
    kind = cast("SchedulerType", section.type)  # the schema lets no other type through
    filler.put("scheduler.type", kind, "json")
    params = section.params or SchedulerParams()
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

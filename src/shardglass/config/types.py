"""The optimizer and scheduler sections: which types there are, and which params each takes.

Owns the tables ``OPTIMIZERS`` and ``SCHEDULERS`` and the two sections' schema. What the params mean is in ``resolve``
(defaults) and ``schedules`` (formulas).
"""

from dataclasses import dataclass
from typing import Annotated

from shardglass.config.keys import (
    Auto,
    NoEffect,
    OffSwitch,
    Section,
    adam_betas,
    flag,
    honoured,
    not_yet,
    real,
    whole,
    word,
)


class OptimizerParams(Section):
    """``optimizer.params`` of all types; ``OPTIMIZERS`` says which type takes which."""

    lr: Annotated[float | Auto | None, honoured(real(auto=True))] = None
    betas: Annotated[tuple[float, float] | Auto | None, honoured(adam_betas)] = None
    eps: Annotated[float | Auto | None, honoured(real(auto=True))] = None
    weight_decay: Annotated[float | Auto | None, honoured(real(auto=True))] = None
    adam_w_mode: Annotated[bool | None, honoured(flag())] = None
    torch_adam: Annotated[bool | None, honoured(flag())] = None
    amsgrad: Annotated[bool | None, honoured(flag())] = None
    momentum: Annotated[float | None, honoured(real())] = None
    dampening: Annotated[float | None, honoured(real())] = None
    nesterov: Annotated[bool | None, honoured(flag())] = None
    lr_decay: Annotated[float | None, honoured(real())] = None
    initial_accumulator_value: Annotated[float | None, honoured(real())] = None
    bias_correction: Annotated[bool | None, not_yet(flag(), fine=(True,))] = None
    maximize: OffSwitch = None
    capturable: OffSwitch = None
    differentiable: OffSwitch = None
    foreach: NoEffect = None
    fused: NoEffect = None
    set_grad_none: NoEffect = None
    fp32_optimizer_states: NoEffect = None
    max_grad_norm: Annotated[object, not_yet(fine=(), say="DeepSpeed refuses it too; use gradient_clipping")] = None


class SchedulerParams(Section):
    """``scheduler.params`` of all types; ``SCHEDULERS`` says which type takes which."""

    warmup_min_lr: Annotated[float | Auto | None, honoured(real(auto=True))] = None
    warmup_max_lr: Annotated[float | Auto | None, honoured(real(auto=True))] = None
    warmup_num_steps: Annotated[int | Auto | None, honoured(whole(auto=True))] = None
    total_num_steps: Annotated[int | Auto | None, honoured(whole(low=1, auto=True))] = None
    warmup_min_ratio: Annotated[float | None, honoured(real(high=1.0))] = None
    cos_min_ratio: Annotated[float | None, honoured(real(high=1.0))] = None
    warmup_type: Annotated[str | None, honoured(word("log", "linear"))] = None
    last_batch_iteration: Annotated[int | None, not_yet(whole(low=-1), fine=(-1,))] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeRow:
    """One ``type`` of optimizer or scheduler: the params it takes, or None when it is not supported yet."""

    params: frozenset[str] | None


def _row(params: str | None) -> TypeRow:
    return TypeRow(params=None if params is None else frozenset(params.split()))


_ADAM = (
    "lr betas eps weight_decay adam_w_mode torch_adam amsgrad bias_correction maximize capturable differentiable "
    "foreach fused set_grad_none fp32_optimizer_states max_grad_norm"
)

OPTIMIZERS = {
    "Adam": _row(_ADAM),
    "AdamW": _row(_ADAM),
    "SGD": _row(
        "lr momentum dampening weight_decay nesterov maximize differentiable foreach fused max_grad_norm",
    ),
    "Adagrad": _row(
        "lr lr_decay weight_decay initial_accumulator_value eps maximize differentiable foreach fused max_grad_norm",
    ),
    "Lamb": _row(None),
    "OneBitAdam": _row(None),
    "ZeroOneAdam": _row(None),
    "OneBitLamb": _row(None),
    "Lion": _row(None),
    "Muon": _row(None),
    "MuAdam": _row(None),
    "MuAdamW": _row(None),
    "MuSGD": _row(None),
}

SCHEDULERS = {
    "WarmupLR": _row("warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration"),
    "WarmupDecayLR": _row(
        "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps last_batch_iteration"
    ),
    "WarmupCosineLR": _row(
        "warmup_min_ratio warmup_num_steps warmup_type total_num_steps cos_min_ratio last_batch_iteration"
    ),
    "LRRangeTest": _row(None),
    "OneCycle": _row(None),
}


def _supported(rows: dict[str, TypeRow]) -> tuple[str, ...]:
    return tuple(name for name, row in rows.items() if row.params is not None)


class Optimizer(Section):
    """``optimizer``."""

    type: Annotated[
        str | None,
        honoured(word(*OPTIMIZERS), fine=_supported(OPTIMIZERS), say="use " + ", ".join(_supported(OPTIMIZERS))),
    ] = None
    params: OptimizerParams | None = None
    legacy_fusion: OffSwitch = None


class Scheduler(Section):
    """``scheduler``."""

    type: Annotated[
        str | None,
        honoured(word(*SCHEDULERS), fine=_supported(SCHEDULERS), say="use " + ", ".join(_supported(SCHEDULERS))),
    ] = None
    params: SchedulerParams | None = None

"""The optimizer and scheduler sections: which types there are, and which params each takes.

Owns the tables ``OPTIMIZERS`` and ``SCHEDULERS`` and the two sections' schema. What the params mean is in ``resolve``
(defaults) and ``schedules`` (formulas).
"""

from dataclasses import dataclass
from typing import Annotated

from shardglass.config.keys import Section, honoured, no_effect, not_yet, off
from shardglass.config.readers import Auto, adam_betas, decay_rate, flag, real, whole, word

_KERNEL = "the fused kernel is always used where torch has one"


class OptimizerParams(Section):
    """``optimizer.params`` of all types.

    ``OPTIMIZERS`` says which type takes which.
    """

    lr: Annotated[float | Auto | None, honoured("learning rate", real(auto=True))] = None
    betas: Annotated[tuple[float, float] | Auto | None, honoured("Adam's two decay rates", adam_betas)] = None
    eps: Annotated[float | Auto | None, honoured("added to the denominator", real(auto=True))] = None
    weight_decay: Annotated[float | Auto | None, honoured("weight decay, of biases and norms too", real(auto=True))] = (
        None
    )
    adam_w_mode: Annotated[
        bool | None, honoured("whether the type Adam decouples weight decay; AdamW always does", flag())
    ] = None
    torch_adam: Annotated[
        bool | None, honoured("a missing weight_decay is then torch's own; the kernel is torch's anyway", flag())
    ] = None
    amsgrad: Annotated[bool | None, honoured("the AMSGrad variant of Adam", flag())] = None
    momentum: Annotated[float | None, honoured("momentum of SGD", real())] = None
    dampening: Annotated[float | None, honoured("dampening of SGD's momentum", real())] = None
    nesterov: Annotated[bool | None, honoured("Nesterov's momentum of SGD", flag())] = None
    lr_decay: Annotated[float | None, honoured("decay of Adagrad's rate", real())] = None
    initial_accumulator_value: Annotated[float | None, honoured("start of Adagrad's sums", real())] = None
    bias_correction: Annotated[
        bool | None, not_yet("Adam without bias correction when false", flag(), fine=(True,))
    ] = None
    maximize: Annotated[bool | None, off("climb instead of descend")] = None
    capturable: Annotated[bool | None, off("for CUDA graphs")] = None
    differentiable: Annotated[bool | None, off("differentiate through the step")] = None
    foreach: Annotated[object, no_effect(_KERNEL)] = None
    fused: Annotated[object, no_effect(_KERNEL)] = None
    set_grad_none: Annotated[object, no_effect("gradients are always dropped after a step")] = None
    fp32_optimizer_states: Annotated[object, no_effect("optimizer states are always float32")] = None
    max_grad_norm: Annotated[
        object, not_yet("clipping", fine=(), say="DeepSpeed refuses it too; use gradient_clipping")
    ] = None


class SchedulerParams(Section):
    """``scheduler.params`` of all types.

    ``SCHEDULERS`` says which type takes which.
    """

    warmup_min_lr: Annotated[float | Auto | None, honoured("rate at the start of the warm-up", real(auto=True))] = None
    warmup_max_lr: Annotated[
        float | Auto | None, honoured("rate at the end of the warm-up; derived: the optimizer's rate", real(auto=True))
    ] = None
    warmup_num_steps: Annotated[int | Auto | None, honoured("steps of the warm-up", whole(auto=True))] = None
    total_num_steps: Annotated[
        int | Auto | None, honoured("steps until the end of the decay", whole(low=1, auto=True))
    ] = None
    warmup_min_ratio: Annotated[
        float | None, honoured("start of the warm-up as a share of the rate", real(high=1.0))
    ] = None
    cos_min_ratio: Annotated[float | None, honoured("end of the cosine as a share of the rate", real(high=1.0))] = None
    warmup_type: Annotated[str | None, honoured("log or linear warm-up", word("log", "linear"))] = None
    last_batch_iteration: Annotated[int | None, not_yet("start in the middle", whole(low=-1), fine=(-1,))] = None
    lr_range_test_min_lr: Annotated[float | None, honoured("rate of the first step", real())] = None
    lr_range_test_step_size: Annotated[int | None, honoured("steps of an interval", whole(low=1))] = None
    lr_range_test_step_rate: Annotated[
        float | None, honoured("growth in an interval, as a share of the first rate", real())
    ] = None
    lr_range_test_staircase: Annotated[
        bool | None, honoured("whether the rate grows at the end of an interval alone", flag())
    ] = None
    cycle_min_lr: Annotated[float | None, honoured("rate at both ends of the cycle", real())] = None
    cycle_max_lr: Annotated[float | None, honoured("rate at the top of the cycle", real())] = None
    cycle_first_step_size: Annotated[int | None, honoured("steps up", whole(low=1))] = None
    cycle_second_step_size: Annotated[int | None, honoured("steps down; derived: as many as up", whole())] = None
    cycle_first_stair_count: Annotated[
        int | None, honoured("stairs on the way up; 0 means a straight line", whole())
    ] = None
    cycle_second_stair_count: Annotated[
        int | None, honoured("stairs on the way down; derived: as many as up", whole())
    ] = None
    decay_step_size: Annotated[
        int | None, honoured("steps of an interval of the decay after the cycle; 0 means no decay", whole())
    ] = None
    decay_lr_rate: Annotated[
        float | None, honoured("what the divisor of the rate grows by in an interval of the decay", real())
    ] = None
    cycle_momentum: Annotated[
        bool | None, honoured("whether Adam's first decay rate goes the other way; the second is then 0.99", flag())
    ] = None
    cycle_min_mom: Annotated[float | None, honoured("that rate at the top of the cycle", decay_rate)] = None
    cycle_max_mom: Annotated[float | None, honoured("that rate at its ends", decay_rate)] = None
    decay_mom_rate: Annotated[
        float | None,
        not_yet("momentum after the cycle", real(), fine=(0.0,), say="it would grow beyond 1; leave it out"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeRow:
    """One ``type`` of optimizer or scheduler.

    Attributes:
        params: The params it takes; None when it is not supported yet.
        needs: Those of them that must be given.
    """

    params: frozenset[str] | None
    needs: tuple[str, ...] = ()


def _row(params: str | None, *, needs: str = "") -> TypeRow:
    return TypeRow(params=None if params is None else frozenset(params.split()), needs=tuple(needs.split()))


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
        "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps last_batch_iteration",
        needs="total_num_steps",
    ),
    "WarmupCosineLR": _row(
        "warmup_min_ratio warmup_num_steps warmup_type total_num_steps cos_min_ratio last_batch_iteration",
        needs="total_num_steps",
    ),
    "LRRangeTest": _row(
        "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase "
        "last_batch_iteration"
    ),
    "OneCycle": _row(
        "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count "
        "cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate "
        "last_batch_iteration",
        needs="cycle_min_lr cycle_max_lr",
    ),
}


def _supported(rows: dict[str, TypeRow]) -> tuple[str, ...]:
    return tuple(name for name, row in rows.items() if row.params is not None)


class Optimizer(Section):
    """``optimizer``."""

    type: Annotated[
        str | None,
        honoured(
            "the optimizer's class; one group holds all parameters",
            word(*OPTIMIZERS),
            fine=_supported(OPTIMIZERS),
            say="use " + ", ".join(_supported(OPTIMIZERS)),
        ),
    ] = None
    params: OptimizerParams | None = None
    legacy_fusion: Annotated[bool | None, off("an old fused kernel")] = None


class Scheduler(Section):
    """``scheduler``."""

    type: Annotated[
        str | None,
        honoured(
            "how the learning rate goes; wins over --lr_scheduler_type",
            word(*SCHEDULERS),
        ),
    ] = None
    params: SchedulerParams | None = None

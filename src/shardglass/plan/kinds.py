"""What a memory plan must know of engine, optimizer and steps, beside the layout.

Owns the table of optimizer states, the shape of a step, and the options of an engine that is only planned. Leaves every
formula to ``memory``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from shardglass.errors import InvariantError
from shardglass.options import STAGES, EngineOptions, Stage

_ENGINE = EngineOptions()


class Sharding(Protocol):
    """What the formulas read of an engine's options; EngineOptions has it, and PlannedOptions for every stage."""

    @property
    def rules(self) -> Stage:
        """The stage's row."""

    @property
    def reduce_dtype(self) -> str | None:
        """What gradients travel in; None means the parameter's dtype."""

    @property
    def accum_dtype(self) -> str:
        """What gradients are accumulated in."""

    @property
    def prefetch_units(self) -> int:
        """How many units are gathered ahead of their use."""

    @property
    def max_live_numel(self) -> int | None:
        """Elements of whole parameters beyond which no unit is gathered ahead; None sets no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOptions:
    """Options of an engine that is planned and need not run: any stage of ``STAGES``.

    Attributes:
        stage: 0 to 3.
        reduce_dtype: dtype gradients travel in; None means the parameter's.
        accum_dtype: dtype gradients are accumulated in.
        prefetch_units: Units gathered ahead of their use, at a stage that gathers them.
        max_live_numel: Elements of whole parameters there beyond which no unit is gathered ahead; None sets no limit.
    """

    stage: int
    reduce_dtype: str | None = None
    accum_dtype: str = "float32"
    prefetch_units: int = _ENGINE.prefetch_units
    max_live_numel: int | None = _ENGINE.max_live_numel

    @property
    def rules(self) -> Stage:
        """The row of ``STAGES`` for this stage."""
        return STAGES[self.stage]


STATES: Mapping[str, tuple[str, ...]] = {
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Adam": ("exp_avg", "exp_avg_sq"),
    "SGD": (),
    "Adagrad": ("sum",),
    "Adadelta": ("square_avg", "acc_delta"),
    "Adamax": ("exp_avg", "exp_inf"),
    "NAdam": ("exp_avg", "exp_avg_sq"),
    "RAdam": ("exp_avg", "exp_avg_sq"),
    "RMSprop": ("square_avg",),
    "Rprop": ("prev", "step_size"),
    "ASGD": ("ax",),
}
"""States as large as the parameter, by class of torch.optim; source: ``_init_group`` of each class in torch 2.13."""

SCALARS: Mapping[str, tuple[str, ...]] = {"SGD": (), "NAdam": ("step", "mu_product"), "ASGD": ("step", "eta", "mu")}
"""States that are one fp32 number per tensor of the optimizer; classes not listed have "step"."""

SCALAR_BYTES = 4
"""Of one such number: torch.optim makes them in fp32 unless the default dtype is fp64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKind:
    """What decides the state of an optimizer.

    Attributes:
        name: Name of its class, e.g. "AdamW".
        groups: Options of each param_group, as ``optimizer.param_groups`` has them (other keys are ignored): "amsgrad",
            "momentum" and "centered" add states. A group without an entry has none of them.
    """

    name: str
    groups: tuple[Mapping[str, object], ...] = ()

    def states(self, group: int) -> tuple[str, ...]:
        """Names of the states of a group's tensors that are as large as the tensor; empty for an unknown class."""
        options = self.groups[group] if group < len(self.groups) else {}
        found = STATES.get(self.name, ())
        if options.get("amsgrad") and self.name in ("Adam", "AdamW"):
            found += ("max_exp_avg_sq",)
        if options.get("momentum") and self.name in ("SGD", "RMSprop"):
            found += ("momentum_buffer",)
        if options.get("centered") and self.name == "RMSprop":
            found += ("grad_avg",)
        return found

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the states that are one number per tensor; empty for an unknown class."""
        return SCALARS.get(self.name, ("step",)) if self.name in STATES else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """How the steps of a run use the engine.

    Attributes:
        micro_batches: Every number of micro-batches that a step of the run has: the accumulation, and the rest at the
            end of an epoch if there is one.
        accumulates_locally: All micro-batches of a step but the last run under ``no_sync()``; so does the Trainer at
            stages that do not shard gradients.
        backend: "gloo" on the CPU or "nccl" on CUDA; it decides the form of the exchange.
    """

    micro_batches: tuple[int, ...] = (1,)
    accumulates_locally: bool = False
    backend: str = "gloo"

    def __post_init__(self) -> None:
        """Check both values.

        Raises:
            InvariantError: A number of micro-batches below 1, or a backend that the engine does not use.
        """
        if not self.micro_batches or min(self.micro_batches) < 1:
            raise InvariantError(f"micro_batches is {self.micro_batches}; every step has at least 1")
        if self.backend not in ("gloo", "nccl"):
            raise InvariantError(f"backend is {self.backend!r}; the engine uses gloo or nccl")

    @property
    def uses_local(self) -> bool:
        """Whether some step adds up gradients on its rank before it reduces them."""
        return self.accumulates_locally and max(self.micro_batches) > 1

    @property
    def uses_direct(self) -> bool:
        """Whether some step sends the gradients of a backward as they come."""
        return not self.accumulates_locally or min(self.micro_batches) == 1

    @property
    def adds_to_shard(self) -> bool:
        """Whether a step reduces more than once, so that a reduction adds to the mean that is there."""
        return not self.accumulates_locally and max(self.micro_batches) > 1


PLAIN_STEP = StepShape()
"""One micro-batch a step, gloo."""


def unknown_state(optimizer: OptimizerKind) -> str | None:
    """A sentence on what the plan cannot tell of this optimizer; None if it knows its states."""
    if optimizer.name in STATES:
        return None
    return (
        f"the optimizer states of {optimizer.name} are not in the plan: its class is none of torch.optim's "
        f"{', '.join(STATES)}"
    )

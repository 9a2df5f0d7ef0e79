"""Plans of a run that is about to start, from its arguments.

Owns how what config and flags decided becomes a model's facts and a ``Setup``. Leaves the names of optimizers to
``planning``.
"""

from dataclasses import dataclass, replace

from shardglass.hf.meta import facts_of
from shardglass.hf.model_config import FoundConfig
from shardglass.hf.planning import kind_of, optimizer_kind
from shardglass.layout import Layout, units_layout
from shardglass.plan.kinds import OptimizerKind, PlannedOptions
from shardglass.plan.model import ModelFacts
from shardglass.plan.plan import Plan, make_plan
from shardglass.plan.setup import Setup
from shardglass.resolve import Resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class RunToPlan:
    """A training run as far as its plan needs to know it.

    Attributes:
        config: The model's config, with the name the user gave.
        resolved: What config and flags decided.
        optim: The Trainer's optimizer.
        dtype_as_loaded: ``--dtype``; None or "auto" is the checkpoint's.
        attention: ``--attn_implementation``; None is transformers' default.
        longest: Tokens of the longest sequence; or None if it is not known before it is drawn.
        model_max_length: Tokens after which a sequence is cut.
        recomputes: Gradient checkpointing.
        device: Where it runs.
        ranks_per_node: Ranks on this machine.
    """

    config: FoundConfig
    resolved: Resolved
    optim: str
    dtype_as_loaded: str | None
    attention: str | None
    longest: int | None
    model_max_length: int
    recomputes: bool
    device: str
    ranks_per_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEngine:
    """What the plan of a run says of its engine.

    Attributes:
        layout: Which rank holds which elements.
        options: What the stage cuts, and dtypes.
        optimizer: Which states there are.
    """

    layout: Layout
    options: PlannedOptions
    optimizer: OptimizerKind


def planned_engine(run: RunToPlan) -> PlannedEngine:
    """The engine's side of the plan, which needs config and flags alone, no weights.

    Raises:
        ShardglassError: The model's config makes no model.
    """
    facts, setup = _facts_and_setup(run)
    return PlannedEngine(
        layout=units_layout(facts.params, setup.world_size),
        options=setup.options,
        optimizer=setup.optimizer,
    )


def plans_of_run(run: RunToPlan) -> tuple[Plan, Plan]:
    """The plan with the longest sequences, and that with the shortest ones if the longest are not known.

    Raises:
        ShardglassError: The model's config makes no model.
    """
    facts, setup = _facts_and_setup(run)
    longest = make_plan(facts, setup)
    return longest, longest if run.longest is not None else make_plan(facts, replace(setup, length=2))


def _facts_and_setup(run: RunToPlan) -> tuple[ModelFacts, Setup]:
    """Model and run, as a plan takes them."""
    num_groups = 2 if run.resolved.optimizer is None else 1
    dtype = run.resolved.param_dtype
    facts = facts_of(run.config, dtype=dtype, num_groups=num_groups)
    if run.dtype_as_loaded not in (None, "auto"):
        facts = replace(facts, stored_dtype=str(run.dtype_as_loaded))
    spec = run.resolved.optimizer
    setup = Setup(
        world_size=run.resolved.batch.world_size,
        stage=run.resolved.stage,
        dtype=dtype,
        reduce_dtype=run.resolved.reduce_dtype,
        accum_dtype=run.resolved.accum_dtype,
        prefetch_units=run.resolved.options.prefetch_units,
        max_live_numel=run.resolved.options.max_live_numel,
        optimizer=optimizer_kind(run.optim, num_groups=2) if spec is None else kind_of(run.resolved, 1),
        num_groups=num_groups,
        micro_batch=run.resolved.batch.micro,
        accumulation=run.resolved.batch.accumulation,
        length=run.model_max_length if run.longest is None else run.longest,
        recomputes=run.recomputes,
        attention="eager" if run.attention == "eager" else "sdpa",
        device="cuda" if run.device == "cuda" else "cpu",
        ranks_per_node=run.ranks_per_node,
    )
    return facts, setup

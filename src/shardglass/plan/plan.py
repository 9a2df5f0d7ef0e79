"""A plan: one value with everything that is told of a run before it starts, and its JSON form.

Owns Plan and how it is put together. Leaves the terms to ``stages``, the partition to ``partition``, RAM and disk to
``host``, the search to ``fit``; views read the value and compute nothing.
"""

import json
from dataclasses import dataclass

from shardglass.errors import UsageError
from shardglass.json_form import from_tree, to_tree
from shardglass.layout import SchemeOptions, find_scheme, make_layout, units_layout
from shardglass.options import STAGES
from shardglass.plan.fit import Fit, count_of, find_fit, gib, verdict
from shardglass.plan.host import CheckpointPlan, HostPlan, checkpoint_plan, host_plan
from shardglass.plan.kinds import unknown_state
from shardglass.plan.model import ModelFacts
from shardglass.plan.partition import Partition, partition_of
from shardglass.plan.setup import Setup
from shardglass.plan.simulation import Simulation
from shardglass.plan.stages import (
    CONTEXT_BYTES,
    FRAGMENTATION,
    NCCL_BYTES,
    PROCESS_BYTES,
    StagePlan,
    engine_side,
    stage_plan,
)

PLAN_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLine:
    """The model, in a line.

    Attributes:
        name: What the user called it.
        model_type: Transformers' name of its kind.
        source: Where its config came from.
        num_tensors: Parameters; a tied one counts once.
        numel: Their elements.
        num_trainable: Trained parameters.
        trainable_numel: Their elements.
        num_units: Units that are gathered, reduced and updated together.
        num_tied: Second names of tied parameters.
        stored_dtype: dtype of the checkpoint.
        stored_bytes: Bytes of the checkpoint's weights.
        compute_bytes: Bytes in the dtype that the run computes in.
    """

    name: str
    model_type: str
    source: str
    num_tensors: int
    numel: int
    num_trainable: int
    trainable_numel: int
    num_units: int
    num_tied: int
    stored_dtype: str
    stored_bytes: int
    compute_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """The run, in a line; the attributes are those of ``Setup``, with the optimizer by its name and states."""

    world_size: int
    stage: int
    scheme: str
    dtype: str
    reduce_dtype: str
    accum_dtype: str
    optimizer: str
    states: tuple[str, ...]
    num_groups: int
    micro_batch: int
    accumulation: int
    length: int
    recomputes: bool
    attention: str
    device: str
    ranks_per_node: int
    memory: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that is told of a run before it starts.

    Attributes:
        version: Of this form.
        verdict: Whether it fits, in a sentence; says what is missing for an answer if the memory is not known.
        model: The model.
        run: The run.
        partition: Which rank holds what, in the scheme that was asked for.
        stages: The memory of the heaviest rank, stage by stage, of the native engine.
        host: RAM of the machine with the most ranks.
        checkpoint: Bytes of a checkpoint.
        fit: What fits; None if the memory is not known.
        notes: What a reader must know of this plan.
        assumptions: What no formula or measurement stands behind.
        simulation: What a simulated step had; None if none was asked for.
    """

    version: int
    verdict: str
    model: ModelLine
    run: RunLine
    partition: Partition
    stages: tuple[StagePlan, ...]
    host: HostPlan
    checkpoint: CheckpointPlan
    fit: Fit | None
    notes: tuple[str, ...]
    assumptions: tuple[str, ...]
    simulation: Simulation | None = None

    @property
    def stage(self) -> StagePlan:
        """The memory at the run's own stage."""
        return next(stage for stage in self.stages if stage.stage == self.run.stage)

    def to_json(self) -> str:
        """The versioned JSON form; ``from_json`` gives back an equal plan."""
        return json.dumps(to_tree(self), indent=2)

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Read what ``to_json`` wrote.

        Raises:
            UsageError: It is no plan, or one of another version.
        """
        try:
            tree = json.loads(text)
        except ValueError as error:
            raise UsageError(f"plan: not JSON: {error}") from None
        version = tree.get("version") if isinstance(tree, dict) else None
        if version != PLAN_VERSION:
            raise UsageError(f"plan: version {version!r}, and version {PLAN_VERSION} is understood; plan again")
        return from_tree(Plan, tree, "plan")


def make_plan(
    facts: ModelFacts, setup: Setup, *, scheme_options: SchemeOptions | None = None, notes: tuple[str, ...] = ()
) -> Plan:
    """Plan a run.

    Args:
        facts: The model.
        setup: The run.
        scheme_options: What the layout scheme can be told beside.
        notes: What the caller has to say of its inputs.

    Raises:
        UsageError: The scheme does not exist, or refuses the model.
    """
    scheme = find_scheme(setup.scheme)
    order = [p.name for p in facts.params]
    shown = make_layout(scheme.name, facts.params, setup.world_size, scheme_options or SchemeOptions())
    native = units_layout(facts.params, setup.world_size)
    stages = tuple(stage_plan(facts, setup, engine_side(facts, setup, native, stage)) for stage in STAGES)
    own = next(plan for plan in stages if plan.stage == setup.stage)
    fit = None if setup.memory is None or setup.device == "cpu" else find_fit(facts, setup, setup.memory)
    host = host_plan(facts, setup, own)
    return Plan(
        version=PLAN_VERSION,
        verdict=_verdict_of_host(setup, host) if fit is None else verdict(setup, own, fit),
        model=_model_line(facts),
        run=_run_line(setup),
        partition=partition_of(shown, order, used_by=scheme.used_by),
        stages=stages,
        host=host,
        checkpoint=checkpoint_plan(facts, setup),
        fit=fit,
        notes=(*notes, *_notes(facts, setup)),
        assumptions=_assumptions(setup),
    )


def _verdict_of_host(setup: Setup, host: HostPlan) -> str:
    """The first line if no GPU's memory was given: on the CPU the machine's RAM decides."""
    if setup.device == "cuda":
        return "no verdict: the memory of a GPU was not given"
    what = f"stage {setup.stage} with {count_of(host.ranks, 'rank')} on one machine: {gib(host.need)} of RAM needed"
    if host.free is None:
        return f"no verdict: {what}; how much is free is not known"
    return f"{'fits' if host.fits else 'does not fit'}: {what}, {gib(host.free)} free"


def _model_line(facts: ModelFacts) -> ModelLine:
    trained = [p for p in facts.params if p.trainable]
    return ModelLine(
        name=facts.name,
        model_type=facts.model_type,
        source=facts.source,
        num_tensors=len(facts.params),
        numel=facts.numel,
        num_trainable=len(trained),
        trainable_numel=sum(p.numel for p in trained),
        num_units=len({p.unit for p in facts.params}),
        num_tied=len(facts.tied),
        stored_dtype=facts.stored_dtype,
        stored_bytes=facts.stored_bytes,
        compute_bytes=facts.compute_bytes,
    )


def _run_line(setup: Setup) -> RunLine:
    return RunLine(
        world_size=setup.world_size,
        stage=setup.stage,
        scheme=find_scheme(setup.scheme).name,
        dtype=setup.dtype,
        reduce_dtype=setup.reduce_dtype or setup.dtype,
        accum_dtype=setup.accum_dtype,
        optimizer=setup.optimizer.name,
        states=setup.optimizer.states(0),
        num_groups=setup.num_groups,
        micro_batch=setup.micro_batch,
        accumulation=setup.accumulation,
        length=setup.length,
        recomputes=setup.recomputes,
        attention=setup.attention,
        device=setup.device,
        ranks_per_node=setup.ranks_per_node,
        memory=setup.memory,
    )


def _notes(facts: ModelFacts, setup: Setup) -> tuple[str, ...]:
    found = []
    if facts.geometry is None:
        found.append(
            f"activations of {facts.model_type} models have no closed form here: they and the logits are missing in "
            "every total"
        )
    if facts.max_length is not None and setup.length > facts.max_length:
        found.append(f"{setup.length} tokens are more than the {facts.max_length} that the model was made for")
    if setup.dtype == "float16":
        found.append("float16 needs loss scaling, which the engine does not have yet; its bytes are bfloat16's")
    if (missing := unknown_state(setup.optimizer)) is not None:
        found.append(missing)
    return tuple(found)


def _assumptions(setup: Setup) -> tuple[str, ...]:
    found = []
    if setup.reserve is None and setup.device == "cuda":
        found.append(
            f"reserve: {CONTEXT_BYTES / 2**30:g} GiB for the CUDA context, {NCCL_BYTES / 2**30:g} GiB for NCCL with "
            f"several ranks, and {FRAGMENTATION:.0%} of the rest for fragmentation; assumed, not measured on a GPU"
        )
    elif setup.reserve is None:
        found.append(
            f"reserve: {PROCESS_BYTES / 2**30:g} GiB for a process and {FRAGMENTATION:.0%} of the rest for "
            "fragmentation; assumed"
        )
    found.append(f"machine: {PROCESS_BYTES / 2**30:g} GiB of RAM for each process beside what is counted; assumed")
    if setup.micro_batch > 1:
        found.append("sequences of a micro-batch differ in length, so attention is given a mask")
    return tuple(found)

"""The memory of one rank at one stage: every term, when it is there, and which moment needs the most.

Owns the list of terms and the assumptions on what no formula knows. Leaves the engine's bytes to ``memory`` and those
of forward and backward to ``activations``.

[Note: moments] A rank's memory has four moments that can be the highest: while the model is loaded and cut, at the loss
(the end of forward and the beginning of backward), inside a block's backward, and at the optimizer's step. The engine
keeps its gradients and states from the first step on, so they are there at all three of a step's moments. What is alive
at one moment is added up; the highest sum and the reserve are the need.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from shardglass.layout import Layout, group_runs
from shardglass.options import DTYPE_BYTES
from shardglass.plan.activations import Activations, MicroBatch, activations
from shardglass.plan.kinds import PlannedOptions
from shardglass.plan.memory import (
    accum_dtype,
    gathered_bytes,
    heaviest_rank,
    in_backward_bytes,
    master_dtype,
    planned_bytes,
)
from shardglass.plan.model import ModelFacts
from shardglass.plan.setup import GIB, Setup

LOADING, LOSS, BACKWARD, STEP = "loading", "loss", "backward", "step"
MOMENTS = (LOADING, LOSS, BACKWARD, STEP)
IN_STEP = (LOSS, BACKWARD, STEP)

GATHERED = "gathered units"
"""Name of the term for whole parameters at a stage that shards them."""

CONTEXT_BYTES = 3 * GIB // 4
"""Assumed on CUDA, not measured: the context, the kernels' code and cuBLAS's workspaces."""

NCCL_BYTES = GIB // 2
"""Assumed on CUDA with several ranks, not measured: NCCL's channels and buffers."""

PROCESS_BYTES = 3 * GIB // 4
"""Assumed for a process on the CPU: Python with torch, transformers and datasets; 0.6 GiB was measured."""

FRAGMENTATION = 0.05
"""Assumed: the share of the need that an allocator holds in pieces nobody can use."""

EVERY_RANK_UP_TO = 16
"""World size up to which every rank is planned to find the heaviest; see ``_rank_and_bytes``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One term of a rank's memory.

    Attributes:
        name: What it is.
        bytes: How much.
        moments: When it is there, see [Note: moments].
    """

    name: str
    bytes: int
    moments: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Category:
    """Bytes of one category of ``Handle.memory()``."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The memory of the heaviest rank at one stage.

    Attributes:
        stage: The stage.
        rank: The rank with the most engine-owned bytes.
        engine: The engine's own bytes, by category; whole parameters of stage 3 are a term of their own.
        terms: All terms of the need but the reserve; ``engine`` is among them.
        activations_known: Whether the model has a form that activations are known for; otherwise they are missing.
        reserve: Bytes for what no form knows.
    """

    stage: int
    rank: int
    engine: tuple[Category, ...]
    terms: tuple[Term, ...]
    activations_known: bool
    reserve: int

    def at(self, moment: str) -> int:
        """Bytes at one moment, without the reserve."""
        return sum(term.bytes for term in self.terms if moment in term.moments)

    @property
    def highest(self) -> str:
        """The moment that needs the most."""
        return max(MOMENTS, key=self.at)

    @property
    def total(self) -> int:
        """Bytes needed: the highest moment and the reserve."""
        return self.at(self.highest) + self.reserve

    @property
    def binding(self) -> Term:
        """The largest term at the highest moment: the one to make smaller first."""
        return max((t for t in self.terms if self.highest in t.moments), key=lambda term: term.bytes)

    @property
    def engine_bytes(self) -> int:
        """The engine's own bytes in all."""
        return sum(category.bytes for category in self.engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSide:
    """What does not depend on the micro-batch: the engine's side of a rank's memory at one stage.

    Attributes:
        stage: The stage.
        rank: The heaviest rank.
        engine: The engine's own bytes, by category.
        gathered: Bytes of gathered units.
        in_flight: Bytes that gradients travel in, where they are let go of after backward.
        temporaries: Bytes that the step makes and drops.
        loading: Bytes at the highest moment of loading.
    """

    stage: int
    rank: int
    engine: tuple[Category, ...]
    gathered: int
    in_flight: int
    temporaries: int
    loading: int


def engine_side(facts: ModelFacts, setup: Setup, layout: Layout, stage: int) -> EngineSide:
    """The engine's side at a stage; the layout is of scheme "units" for the setup's world size."""
    setup = replace(setup, stage=stage)
    options = setup.options
    rank, engine = _rank_and_bytes(setup, layout, options)
    return EngineSide(
        stage=stage,
        rank=rank,
        engine=tuple(Category(name=name, bytes=size) for name, size in engine.items()),
        gathered=gathered_bytes(layout, options),
        in_flight=in_backward_bytes(layout, options, setup.shape),
        temporaries=_step_temporaries(setup, layout, options, rank),
        loading=_loading_bytes(facts, layout, options, engine),
    )


def stage_plan(facts: ModelFacts, setup: Setup, side: EngineSide) -> StagePlan:
    """The memory of one rank at the side's stage; the setup's own stage does not count."""
    forward = forward_backward(facts, setup)
    terms = [Term(name=_NAMES.get(c.name, c.name), bytes=c.bytes, moments=IN_STEP) for c in side.engine]
    terms.append(Term(name="module buffers", bytes=facts.buffer_bytes, moments=MOMENTS))
    terms.append(Term(name=GATHERED, bytes=side.gathered, moments=(LOSS, BACKWARD)))
    if forward is not None:
        terms += _forward_terms(forward)
    terms.append(Term(name="gradients in flight", bytes=side.in_flight, moments=(BACKWARD,)))
    terms.append(Term(name="a tensor's gradient", bytes=_gradient_in_flight(facts), moments=(BACKWARD,)))
    terms.append(Term(name="step temporaries", bytes=side.temporaries, moments=(STEP,)))
    terms.append(Term(name="model as loaded", bytes=side.loading, moments=(LOADING,)))
    plan = StagePlan(
        stage=side.stage,
        rank=side.rank,
        engine=side.engine,
        terms=tuple(term for term in terms if term.bytes),
        activations_known=forward is not None,
        reserve=0,
    )
    reserve = setup.reserve if setup.reserve is not None else assumed_reserve(setup, plan.total)
    return replace(plan, reserve=reserve)


def forward_backward(facts: ModelFacts, setup: Setup) -> Activations | None:
    """Activations of a micro-batch; None for a model of another form."""
    if facts.geometry is None:
        return None
    micro = MicroBatch(
        batch=setup.micro_batch,
        length=setup.length,
        dtype=setup.dtype,
        attention=setup.attention,
        recomputes=setup.recomputes,
        is_padded=setup.micro_batch > 1,
        on_cuda=setup.device == "cuda",
    )
    return activations(facts.geometry, micro)


def assumed_reserve(setup: Setup, need: int) -> int:
    """The reserve if none is given: see the constants above."""
    fixed = PROCESS_BYTES
    if setup.device == "cuda":
        fixed = CONTEXT_BYTES + (NCCL_BYTES if setup.world_size > 1 else 0)
    return fixed + int(need * FRAGMENTATION)


_NAMES = {"parameters": "weights"}


def _rank_and_bytes(setup: Setup, layout: Layout, options: PlannedOptions) -> tuple[int, dict[str, int]]:
    """The heaviest rank and the engine's bytes on it.

    Of many ranks, rank 0 stands for all: its shards are the first ones, so they hold the least padding; another rank
    can be heavier by a few scalars of the optimizer at most.
    """
    if layout.world_size <= EVERY_RANK_UP_TO:
        return heaviest_rank(layout, options, optimizer=setup.optimizer, shape=setup.shape)
    return 0, planned_bytes(layout, options, 0, optimizer=setup.optimizer, shape=setup.shape)


def _forward_terms(forward: Activations) -> Iterator[Term]:
    yield Term(name="activations of blocks", bytes=forward.kept, moments=(LOSS, BACKWARD))
    yield Term(name="activations of the head", bytes=forward.head, moments=(LOSS,))
    yield Term(name="logits and loss", bytes=forward.logits, moments=(LOSS,))
    yield Term(name="recomputed block", bytes=forward.recomputed, moments=(BACKWARD,))
    yield Term(name="gradients of activations", bytes=forward.backward, moments=(BACKWARD,))


def _gradient_in_flight(facts: ModelFacts) -> int:
    """What autograd makes before the engine's hook takes it: one parameter's gradient at a time.

    Of a tied weight two are alive when the embedding's comes at the end of backward: autograd keeps the output
    layer's until then to add them.
    """
    return facts.largest_param_bytes * (2 if facts.tied else 1)


def _step_temporaries(setup: Setup, layout: Layout, options: PlannedOptions, rank: int) -> int:
    """What the step makes and drops.

    Gradients in another dtype than the master weights are cast for it (source: ``engine.optim.decide``). A fused kernel
    needs nothing more. Without it torch.optim's multi-tensor form, the default on CUDA, makes one fp32 tensor for each
    of the optimizer's; the single-tensor form, two for one of them (source: ``torch.optim.adamw``, torch 2.13).
    """
    runs = group_runs(layout, rank, whole=not options.rules.shards_state)
    sizes = []
    cast = 0
    for run in runs:
        dtype = layout.buffers[run.buffer].dtype
        master = master_dtype(dtype)
        sizes.append((run.stop - run.start) * DTYPE_BYTES[master])
        cast += sizes[-1] if accum_dtype(dtype, options) != master else 0
    groups = setup.optimizer.groups
    if not sizes or not setup.optimizer.states(0) or (groups and all(group.get("fused") for group in groups)):
        return cast
    return cast + (sum(sizes) if setup.device == "cuda" else 2 * max(sizes))


def _loading_bytes(facts: ModelFacts, layout: Layout, options: PlannedOptions, engine: dict[str, int]) -> int:
    """The model in the checkpoint's dtype turning, unit by unit, into buffers and master weights.

    Before the first unit there is the whole model as stored, after the last one the engine's buffers; beside the
    higher of the two one unit's copies in both dtypes (source: ``engine.buffers.ParamBuffer``). At a stage that shards
    parameters a rank reads only its own part of each unit, so the model is whole nowhere: beside what is kept there are
    a unit's room and the part that is read, as stored and cast (source: ``hf.sharded_start``).
    """
    stored = DTYPE_BYTES[facts.stored_dtype]
    if options.rules.shards_params:
        unit = max(b.numel * b.itemsize + 2 * b.shard_numel * stored for b in layout.buffers)
        return engine["parameters"] + engine["master weights"] + unit
    units = [list(group) for _, group in groupby(layout.buffers, key=lambda buffer: buffer.unit)]
    copies = max(sum(b.numel * (stored + (b.itemsize if b.itemsize != stored else 0)) for b in unit) for unit in units)
    kept = engine["parameters"] + engine["master weights"]
    return max(facts.stored_bytes, kept) + copies

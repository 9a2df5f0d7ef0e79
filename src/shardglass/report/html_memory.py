"""Memory as the page charts it: each world size, stage and rank.

Owns which of them are charted. Leaves every number to ``plan``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardglass.layout import Layout, units_layout
from shardglass.options import STAGES
from shardglass.plan.memory import planned_bytes
from shardglass.plan.model import ModelFacts
from shardglass.plan.setup import Setup
from shardglass.plan.stages import Category, Term, engine_side, stage_plan

MOST_TENSOR_RANKS = 100_000
"""Tensors times ranks up to which every rank is planned; of more the heaviest rank stands for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The native engine's memory at one stage.

    Attributes:
        stage: The stage.
        rank: The heaviest rank.
        terms: Its terms; the engine's categories are among them.
        highest: The moment that needs the most.
        reserve: Bytes for what no form knows.
        total: Bytes needed.
        accounts: Accounts of ranks that differ: the engine's bytes by category.
        account_of: Index in ``accounts`` of each rank; empty if only the heaviest rank is planned.
    """

    stage: int
    rank: int
    terms: tuple[Term, ...]
    highest: str
    reserve: int
    total: int
    accounts: tuple[tuple[Category, ...], ...]
    account_of: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldMemory:
    """The native engine's memory at one world size, stage by stage."""

    world_size: int
    stages: tuple[StageMemory, ...]


def page_memory(facts: ModelFacts, setup: Setup, sizes: Sequence[int]) -> tuple[WorldMemory, ...]:
    """The memory of a run if it had another stage or world size.

    Args:
        facts: The model.
        setup: The run.
        sizes: World sizes.
    """
    return tuple(_world_memory(facts, replace(setup, world_size=world_size)) for world_size in sizes)


def _world_memory(facts: ModelFacts, setup: Setup) -> WorldMemory:
    layout = units_layout(facts.params, setup.world_size)
    stages = tuple(_stage_memory(facts, replace(setup, stage=stage), layout) for stage in STAGES)
    return WorldMemory(world_size=setup.world_size, stages=stages)


def _stage_memory(facts: ModelFacts, setup: Setup, layout: Layout) -> StageMemory:
    plan = stage_plan(facts, setup, engine_side(facts, setup, layout, setup.stage))
    accounts: dict[tuple[Category, ...], int] = {}
    account_of: tuple[int, ...] = ()
    if len(facts.params) * setup.world_size <= MOST_TENSOR_RANKS:
        account_of = tuple(
            accounts.setdefault(_account(setup, layout, rank), len(accounts)) for rank in range(setup.world_size)
        )
    else:
        accounts[plan.engine] = 0
    return StageMemory(
        stage=plan.stage,
        rank=plan.rank,
        terms=plan.terms,
        highest=plan.highest,
        reserve=plan.reserve,
        total=plan.total,
        accounts=tuple(accounts),
        account_of=account_of,
    )


def _account(setup: Setup, layout: Layout, rank: int) -> tuple[Category, ...]:
    """The engine's bytes on a rank."""
    options = setup.options
    sizes = planned_bytes(layout, options, rank, optimizer=setup.optimizer, shape=setup.shape)
    return tuple(Category(name=name, bytes=size) for name, size in sizes.items())

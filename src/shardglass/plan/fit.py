"""What fits in a given memory: the smallest number of ranks, the stage and the micro-batch.

Owns the search and the verdict's words. Every trial is a whole plan of a rank, so what is found is what ``stages``
says.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from shardglass.layout import Layout, units_layout
from shardglass.options import STAGES
from shardglass.plan.model import ModelFacts
from shardglass.plan.setup import GIB, Setup
from shardglass.plan.stages import EngineSide, StagePlan, engine_side, stage_plan

MOST_RANKS = 4096
"""World size at which the search ends."""

MOST_SEQUENCES = 1024
"""Largest micro-batch that is tried."""

Trial = Callable[[Setup], bool]
"""Whether a variant of a run fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOption:
    """A run that fits, on as few ranks as can be.

    Attributes:
        world_size: Number of ranks.
        stage: The lowest stage that fits there.
        recomputes: Whether it needs gradient checkpointing.
    """

    world_size: int
    stage: int
    recomputes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest micro-batch that fits at a stage; 0 if one sequence does not."""

    stage: int
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRow:
    """What fits on one number of ranks, stage by stage."""

    world_size: int
    largest: tuple[LargestBatch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What fits.

    Attributes:
        memory: Bytes that a rank may use.
        fits: Whether the planned run fits.
        options: The smallest runs that fit with the micro-batch asked for: as asked, and with gradient checkpointing if
            that takes fewer ranks.
        rows: What fits on several numbers of ranks, as asked.
    """

    memory: int
    fits: bool
    options: tuple[FitOption, ...]
    rows: tuple[FitRow, ...]


def find_fit(facts: ModelFacts, setup: Setup, memory: int) -> Fit:
    """Search what fits.

    Args:
        facts: The model.
        setup: The planned run.
        memory: Bytes that a rank may use.
    """
    fits = _trial(facts, setup, memory)
    options = _options(setup, fits)
    worlds = {setup.world_size, *(option.world_size for option in options if option.recomputes == setup.recomputes)}
    worlds |= {size for size in (1, 2, 4, 8, 16, 32, 64) if size <= max(8, 2 * max(worlds))}
    return Fit(
        memory=memory,
        fits=fits(setup),
        options=tuple(options),
        rows=tuple(_row(replace(setup, world_size=world), fits) for world in sorted(worlds)),
    )


def smallest_fit(facts: ModelFacts, setup: Setup, memory: int, *, stage: int | None = None) -> Setup:
    """The setup on as few ranks as fit, at the lowest stage that does; unchanged if none fits.

    Args:
        facts: The model.
        setup: The planned run; its world size does not count.
        memory: Bytes that a rank may use.
        stage: The only stage to try; None for all.
    """
    fits = _trial(facts, setup, memory)
    found = _smallest(setup, fits, tuple(STAGES) if stage is None else (stage,))
    return setup if found is None else replace(setup, world_size=found.world_size, stage=found.stage)


def _trial(facts: ModelFacts, setup: Setup, memory: int) -> Trial:
    """Whether a variant of the setup fits; what does not depend on the micro-batch is worked out once."""

    @cache
    def layout_of(world_size: int) -> Layout:
        return units_layout(facts.params, world_size)

    @cache
    def side_of(world_size: int, stage: int) -> EngineSide:
        return engine_side(facts, replace(setup, world_size=world_size), layout_of(world_size), stage)

    return lambda trial: stage_plan(facts, trial, side_of(trial.world_size, trial.stage)).total <= memory


def _options(setup: Setup, fits: Trial) -> list[FitOption]:
    """The smallest run as asked, and the smallest one that recomputes if that takes fewer ranks."""
    found: list[FitOption] = []
    for recomputes in (False, True) if not setup.recomputes else (True,):
        option = _smallest(replace(setup, recomputes=recomputes), fits, tuple(STAGES))
        if option is not None and all(option.world_size < other.world_size for other in found):
            found.append(option)
    return found


def _smallest(setup: Setup, fits: Trial, stages: tuple[int, ...]) -> FitOption | None:
    """The smallest run that fits; None if none does."""
    for world in _worlds(setup.ranks_per_node):
        for stage in stages:
            if fits(replace(setup, world_size=world, stage=stage)):
                return FitOption(world_size=world, stage=stage, recomputes=setup.recomputes)
    return None


def _worlds(ranks_per_node: int) -> Iterator[int]:
    """Numbers of ranks worth trying: each on one machine, then whole machines, doubling from eight on."""
    yield from range(1, ranks_per_node + 1)
    nodes = 2
    while nodes * ranks_per_node <= MOST_RANKS:
        yield nodes * ranks_per_node
        nodes += 1 if nodes < 8 else nodes


def _row(setup: Setup, fits: Trial) -> FitRow:
    """The largest micro-batch at every stage."""
    largest = [LargestBatch(stage=stage, micro_batch=_largest(replace(setup, stage=stage), fits)) for stage in STAGES]
    return FitRow(world_size=setup.world_size, largest=tuple(largest))


def _largest(setup: Setup, fits: Trial) -> int:
    """The largest micro-batch that fits, 0 if one sequence does not; the need grows with it."""
    low, high = 0, 1
    while high <= MOST_SEQUENCES and fits(replace(setup, micro_batch=high)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(replace(setup, micro_batch=middle)) else (low, middle)
    return low


def verdict(setup: Setup, stage: StagePlan, fit: Fit) -> str:
    """The first line of a plan: whether the run fits."""
    what = (
        f"stage {setup.stage} on {count_of(setup.world_size, 'GPU')} of {gib(fit.memory)}, micro-batch "
        f"{setup.micro_batch}: {gib(stage.total)} needed on each"
    )
    if not fit.fits:
        return f"does not fit: {what}, {gib(stage.total - fit.memory)} too much"
    return f"fits: {what}, {gib(fit.memory - stage.total)} free"


def count_of(count: int, noun: str) -> str:
    """A number with its noun."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def gib(size: int) -> str:
    """A size as people say it."""
    return f"{size / GIB:,.2f} GiB"

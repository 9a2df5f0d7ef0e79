"""The grid of training setups: which combinations exist, and a small set that covers every pair of values."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations, product

VALUES = {
    "stage": (0, 1, 2, 3),
    "dtype": ("float32", "bfloat16"),
    "accumulation": ("1", "3", "3 no_sync"),
    "clip": (False, True),
    "tied": (False, True),
    "frozen": (False, True),
    "groups": ("one", "several"),
    "optimizer": ("adamw", "adamw fused", "sgd"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One setup; the fields are explained by ``VALUES`` and used by tests/engine/test_matrix.py."""

    world_size: int
    stage: int
    dtype: str
    accumulation: str
    clip: bool
    tied: bool
    frozen: bool
    groups: str
    optimizer: str

    @property
    def micro_batches(self) -> int:
        return int(self.accumulation[0])

    @property
    def no_sync(self) -> bool:
        return self.accumulation.endswith("no_sync")

    def __str__(self) -> str:
        flags = [name for name in ("clip", "tied", "frozen") if getattr(self, name)]
        parts = [f"ws{self.world_size}", f"stage{self.stage}", self.dtype, f"acc {self.accumulation}", *flags]
        return "-".join([*parts, f"{self.groups} group{'s' * (self.groups != 'one')}", self.optimizer]).replace(
            " ", "_"
        )

    def at_stage(self, stage: int) -> "Case":
        return replace(self, stage=stage)


def every_case(world_size: int) -> list[Case]:
    """The whole grid."""
    rows = product(*VALUES.values())
    return [Case(world_size=world_size, **dict(zip(VALUES, row, strict=True))) for row in rows]


def pairs_of(case: Case) -> set[tuple]:
    """Every pair of (field, value) a case has."""
    names = [f.name for f in fields(Case)]
    return {(a, getattr(case, a), b, getattr(case, b)) for a, b in combinations(names, 2)}


def covering(cases: Sequence[Case]) -> list[Case]:
    """A small subset in which every pair of values that occurs in ``cases`` occurs: greedy, first come first taken."""
    pairs = {case: pairs_of(case) for case in cases}
    open_pairs = set().union(*pairs.values())
    chosen = []
    while open_pairs:
        best = max(cases, key=lambda case: len(pairs[case] & open_pairs))
        chosen.append(best)
        open_pairs -= pairs[best]
    return chosen

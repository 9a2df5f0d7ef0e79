"""Whether a planned run can be started where it is about to start.

Owns the comparison of a plan with free memory, and its words. Leaves measuring what is free to the caller.

[Note: what is certain] The engine's bytes are exact. Sequences may be shorter than planned, and the reserve is an
assumption. So a run is refused only if it could not fit with the shortest sequences and without a reserve; if it may
not fit as planned, that is said and the run begins.
"""

from dataclasses import dataclass

from shardglass.plan.fit import count_of, gib
from shardglass.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class FitCheck:
    """A plan against the memory that is free.

    Attributes:
        what: What is compared, such as "RAM of this machine (2 ranks)".
        need: Bytes needed as planned, the reserve included.
        least: Bytes that are needed in any case; see [Note: what is certain].
        free: Bytes that are free.
        largest: The largest term of the need, in words.
    """

    what: str
    need: int
    least: int
    free: int
    largest: str

    @property
    def fits(self) -> bool:
        """Whether it fits as planned."""
        return self.need <= self.free

    @property
    def cannot_fit(self) -> bool:
        """Whether it fits in no case."""
        return self.least > self.free

    @property
    def sentence(self) -> str:
        """What a user should read."""
        numbers = f"{self.what}: {gib(self.need)} needed, {gib(self.free)} free; the largest part is {self.largest}"
        if self.cannot_fit:
            return f"cannot fit: {numbers}; {gib(self.least)} are needed whatever the data is"
        return f"fits: {numbers}" if self.fits else f"may not fit: {numbers}"


def check_fits(plan: Plan, *, free: int, shortest: Plan | None = None) -> FitCheck:
    """Hold a plan against free memory: of the GPU of one rank, or on the CPU of the machine.

    Args:
        plan: The plan with the longest sequences.
        free: Bytes that are free now.
        shortest: The same run with the shortest sequences; None if ``plan`` has the true ones.
    """
    least = plan if shortest is None else shortest
    binding = plan.stage.binding
    if plan.run.device == "cuda":
        return FitCheck(
            what="memory of a GPU",
            need=plan.stage.total,
            least=least.stage.at(least.stage.highest),
            free=free,
            largest=f"{binding.name}, {gib(binding.bytes)}",
        )
    ranks = plan.host.ranks
    return FitCheck(
        what=f"RAM of this machine for {count_of(ranks, 'rank')}",
        need=plan.host.need,
        least=ranks * least.stage.at(least.stage.highest),
        free=free,
        largest=f"{binding.name}, {gib(binding.bytes)} a rank",
    )

"""What a simulated step measured: pure values, a part of a plan.

Owns the values. Leaves the simulation to ``hf.simulation``.
"""

from dataclasses import dataclass

from shardglass.plan.stages import Category


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMoment:
    """The highest point of one moment of a step on one rank.

    Attributes:
        moment: "forward", "backward" or "step".
        bytes: Bytes of live tensors.
        module: The module that ran; "" outside every module.
        categories: The bytes by category, the largest first.
    """

    moment: str
    bytes: int
    module: str
    categories: tuple[Category, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A training step of the real engine on tensors without memory.

    Attributes:
        rank: The rank that was simulated.
        kernels: The device whose kernels decided what is made and kept: "cpu" or "cuda".
        backend: The backend whose collectives decided what is sent from and received in.
        engine: The engine's own bytes afterwards, by category.
        moments: In the order of the step.
    """

    rank: int
    kernels: str
    backend: str
    engine: tuple[Category, ...]
    moments: tuple[SimulatedMoment, ...]

    @property
    def highest(self) -> SimulatedMoment:
        """The moment with the most live bytes."""
        return max(self.moments, key=lambda moment: moment.bytes)

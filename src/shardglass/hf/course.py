"""The course of a run through its data: where it is, and what steps are left, also after a change of the batch.

Pure arithmetic. Leaves samplers and the Trainer to ``resuming``.

[Note: one order] The samples of an epoch have one order, which depends on the seed and the epoch alone. A micro-step
takes the next samples of it, one batch for each rank. So a place in the data is an epoch and a number of samples used
of it, and means the same at every world size and batch size.

[Note: steps] A step is an update of the weights, whatever its batch was: the numbers of steps, checkpoints and of the
schedule go on from where they were. What is left is counted in steps of the present batch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How samples become steps.

    Attributes:
        world_size: Ranks.
        per_device: Samples of a micro-batch on one rank.
        accumulation: Micro-batches of a step.
        samples: Samples of an epoch.
        drop_last: Whether a last micro-step that is not full is left out; otherwise it is filled up.
    """

    world_size: int
    per_device: int
    accumulation: int
    samples: int
    drop_last: bool = False

    @property
    def micro(self) -> int:
        """Samples of a micro-step of all ranks."""
        return self.world_size * self.per_device

    @property
    def whole(self) -> int:
        """Samples of a full step."""
        return self.micro * self.accumulation

    def micro_steps(self, samples: int) -> int:
        """Micro-steps that so many samples make."""
        return samples // self.micro if self.drop_last else math.ceil(samples / self.micro)

    def steps(self, samples: int) -> int:
        """Steps that so many samples make, the last one perhaps shorter."""
        return math.ceil(self.micro_steps(samples) / self.accumulation)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch; at least 1, as the Trainer counts."""
        return max(1, self.steps(self.samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place in the data: whole epochs that are behind, and samples used of the next."""

    epoch: int
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A run's way from a place on.

    Attributes:
        batching: The present one.
        start: Where it begins.
        step: Steps taken before.
    """

    batching: Batching
    start: Place
    step: int

    @property
    def left(self) -> int:
        """Samples left of the epoch it begins in."""
        return self.batching.samples - self.start.used

    @property
    def first_steps(self) -> int:
        """Steps left in the epoch it begins in."""
        return self.batching.steps(self.left)

    def at(self, step: int) -> Place:
        """Where the run is after a step."""
        taken = step - self.step
        if taken < self.first_steps:
            return Place(epoch=self.start.epoch, used=self.start.used + taken * self.batching.whole)
        epochs, within = divmod(taken - self.first_steps, self.batching.steps_per_epoch)
        return Place(epoch=self.start.epoch + 1 + epochs, used=within * self.batching.whole)

    def total_steps(self, epochs: float) -> int:
        """The step that ends a run of so many epochs."""
        rest = epochs - self.start.epoch - self.start.used / self.batching.samples
        first = self.left / self.batching.samples
        if rest <= first:
            return self.step + max(0, min(self.first_steps, self.batching.steps(round(rest * self.batching.samples))))
        return self.step + self.first_steps + math.ceil(round((rest - first) * self.batching.steps_per_epoch, 6))

    @property
    def is_regular(self) -> bool:
        """Whether the present batching, from the very first step on, would have come to the same place."""
        epoch, within = divmod(self.step, self.batching.steps_per_epoch)
        return self.start == Place(epoch=epoch, used=within * self.batching.whole)


def place_of(written: Mapping[str, Any], epochs: float | None) -> Place | None:
    """The place at which a checkpoint was written; None if that cannot be known.

    Args:
        written: What the checkpoint says of its batching and its place; nothing of one of another writer.
        epochs: Epochs behind it, as the Trainer's state has them.
    """
    if "epoch" in written:
        return Place(epoch=int(written["epoch"]), used=int(written["used"]))
    samples = written.get("samples")
    if samples is None or epochs is None:
        return None
    epoch = math.floor(epochs + 1e-9)
    return Place(epoch=epoch, used=min(int(samples), round((epochs - epoch) * samples)))

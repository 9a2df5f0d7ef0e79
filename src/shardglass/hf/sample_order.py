"""An epoch of a data loader that begins behind its first samples.

Owns how the sampler is put aside for it. Leaves how many samples that is to ``course``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import Sampler

from shardglass.errors import CheckpointError
from shardglass.words import Words


class _From(Sampler[int]):
    """The samples of an epoch from one of them on, in the same order."""

    def __init__(self, whole: Any, used: int) -> None:
        self._whole, self._used = whole, used

    def __iter__(self) -> Iterator[int]:
        samples: Iterator[int] = iter(self._whole)
        for _ in range(self._used):
            next(samples, None)
        return samples

    def __len__(self) -> int:
        return max(0, len(self._whole) - self._used)

    def set_epoch(self, epoch: int) -> None:
        """Passed on: the order depends on it."""
        if hasattr(self._whole, "set_epoch"):
            self._whole.set_epoch(epoch)


@contextmanager
def from_sample(dataloader: Any, used: int, words: Words) -> Iterator[None]:
    """Let a data loader begin its next epoch behind so many samples.

    Raises:
        CheckpointError: It has no sampler that could be told.
    """
    holder: Any = getattr(dataloader, "batch_sampler", None)
    while hasattr(holder, "batch_sampler"):  # Accelerate's share of a rank, around the whole one
        holder = holder.batch_sampler
    if not used:
        yield
        return
    if getattr(holder, "sampler", None) is None:
        raise CheckpointError(
            "the training data has no sampler, so it cannot go on in the middle of an epoch with other batches; keep "
            f"the world size and the batch sizes, or give {words.given('ignore_data_skip', value=True)}"
        )
    whole, holder.sampler = holder.sampler, _From(holder.sampler, used)
    try:
        yield
    finally:
        holder.sampler = whole

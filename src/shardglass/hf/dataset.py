"""Samples of a data file, by index: cutting and counting.

Owns drawing of samples and what is counted over them. Leaves reading to ``records``, tokens and labels to ``labels``,
padding to ``data``.

A sample is cut at ``model_max_length``. One that has no label left after that gives no gradient, and a batch of only
such samples would have no loss (0 / 0): an eager data set drops them, a lazy one, whose length must be known before,
gives the next sample that has labels in their place. Both are counted and said.
"""

import logging
from collections import Counter
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.utils.data import Dataset

from shardglass.errors import DataError
from shardglass.hf.data_options import DataOptions, DataStatistics
from shardglass.hf.labels import IGNORED, Encoder
from shardglass.hf.records import BadRecord, Conversation, Conversations, refuse_or_skip

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """One cut sample, kept in 32 bits; token ids are below 2**31."""

    input_ids: Tensor  # [num_tokens] int32
    labels: Tensor  # [num_tokens] int32
    num_labels: int
    was_cut: bool

    @property
    def is_trainable(self) -> bool:
        """A label at the first token predicts nothing: the model shifts labels by one."""
        return bool((self.labels[1:] != IGNORED).any())

    def item(self) -> dict[str, Tensor]:
        return {
            "input_ids": self.input_ids.long(),
            "attention_mask": torch.ones_like(self.input_ids, dtype=torch.long),
            "labels": self.labels.long(),
        }


class ConversationDataset(Dataset[dict[str, Tensor]]):
    """Samples of a data file, by index.

    An item holds ``input_ids``, ``attention_mask`` (all ones) and ``labels``, each [num_tokens] int64, unpadded.
    """

    def __init__(
        self, conversations: Conversations, encoder: Encoder, options: DataOptions, *, is_main: bool = True
    ) -> None:
        """Tokenize everything, or (lazy) one record of every sequence of roles, to find what the template refuses.

        Args:
            conversations: The usable records.
            encoder: The label policy with its tokenizer.
            options: How to cut, and whether to tokenize lazily.
            is_main: This rank shows progress and tells what was left out.

        Raises:
            DataError: Records cannot be rendered, or no sample is left.
        """
        self._path = conversations.path
        self._encoder = encoder
        self._options = options
        self._is_main = is_main
        self._num_bad = len(conversations.skipped)
        self._num_records = len(conversations.records) + self._num_bad
        self._records: list[Conversation] = []  # lazy: the records samples are made from
        self._samples: list[_Sample] = []  # eager: the samples themselves
        self._counted: set[int] = set()
        self._unlabelled: set[int] = set()
        self._sums: Counter[str] = Counter()
        if options.lazy:
            self._probe(conversations)
        else:
            self._tokenize(conversations)

    def __len__(self) -> int:
        return len(self._records) if self._options.lazy else len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sample, unpadded.

        Raises:
            IndexError: The index is out of range.
            DataError: A lazily tokenized record cannot be rendered, or no record has labels.
        """
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"sample {index} of {size}")
        if not self._options.lazy:
            return self._samples[index].item()
        for offset in range(size):
            at = (index + offset) % size
            sample = self._draw(at)
            if sample is not None:
                self._count(at, sample)
                return sample.item()
        raise DataError(self._nothing_left())

    def __repr__(self) -> str:
        kind = "lazy" if self._options.lazy else "eager"
        return f"ConversationDataset({self._path!r}, {len(self)} samples, {kind}, {self._options.label_policy})"

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sample, after cutting; None in a lazy data set, which does not know."""
        return None if self._options.lazy else max(len(sample.input_ids) for sample in self._samples)

    def statistics(self) -> DataStatistics:
        """Return what was counted so far."""
        return DataStatistics(
            num_records=self._num_records,
            num_bad_records=self._num_bad,
            num_samples=len(self),
            num_counted=len(self._counted),
            num_cut=self._sums["cut"],
            num_unlabelled=len(self._unlabelled),
            num_tokens=self._sums["tokens"],
            num_label_tokens=self._sums["labels"],
        )

    def _encode(self, record: Conversation) -> _Sample:
        encoded = self._encoder.encode(record)
        length = self._options.model_max_length
        labels = torch.tensor(encoded.labels[:length], dtype=torch.int32)
        return _Sample(
            input_ids=torch.tensor(encoded.input_ids[:length], dtype=torch.int32),
            labels=labels,
            num_labels=int((labels != IGNORED).sum()),
            was_cut=len(encoded.input_ids) > length,
        )

    def _count(self, index: int, sample: _Sample) -> None:
        if index in self._counted:
            return
        self._counted.add(index)
        self._sums["cut"] += sample.was_cut
        self._sums["tokens"] += len(sample.input_ids)
        self._sums["labels"] += sample.num_labels

    def _tokenize(self, conversations: Conversations) -> None:
        bad: list[BadRecord] = []
        with Progress(console=Console(stderr=True), transient=True, disable=not self._is_main) as progress:
            for index, record in enumerate(progress.track(conversations.records, description="Tokenizing")):
                try:
                    sample = self._encode(record)
                except DataError as error:
                    bad.append(BadRecord(place=record.place, reason=str(error)))
                    continue
                if sample.is_trainable:
                    self._count(len(self._samples), sample)
                    self._samples.append(sample)
                else:
                    self._unlabelled.add(index)
        self._refuse_or_skip(bad, len(conversations.records))
        if not self._samples:
            raise DataError(self._nothing_left())
        self._tell_losses()

    def _probe(self, conversations: Conversations) -> None:
        """Leave out the records that the template refuses.

        What a template refuses depends on the roles and their order, so one record of each sequence of roles is tried;
        only where that fails are all of that sequence.
        """
        by_roles: dict[tuple[str, ...], list[int]] = {}
        for index, record in enumerate(conversations.records):
            by_roles.setdefault(tuple(turn.role for turn in record.turns), []).append(index)
        bad: dict[int, BadRecord] = {}
        for indexes in by_roles.values():
            for index in indexes:
                record = conversations.records[index]
                try:
                    self._encoder.encode(record)
                except DataError as error:
                    bad[index] = BadRecord(place=record.place, reason=str(error))
                else:
                    if index == indexes[0]:
                        break
        self._refuse_or_skip([bad[index] for index in sorted(bad)], len(conversations.records))
        self._records = [record for index, record in enumerate(conversations.records) if index not in bad]

    def _draw(self, index: int) -> _Sample | None:
        """Return the sample, or None if it gives nothing to learn from."""
        record = self._records[index]
        try:
            sample = self._encode(record)
        except DataError as error:
            if not self._options.skip_bad_records:
                raise DataError(f"{self._path}: {record.place}: {error}") from None
            reason = str(error)
        else:
            if sample.is_trainable:
                return sample
            reason = self._no_label()
        if index not in self._unlabelled:
            self._unlabelled.add(index)
            logger.warning("%s: %s is replaced by the next record: %s", self._path, record.place, reason)
        return None

    def _refuse_or_skip(self, bad: list[BadRecord], num_records: int) -> None:
        refuse_or_skip(self._path, bad, num_records, skip=self._options.skip_bad_records, is_main=self._is_main)
        self._num_bad += len(bad)

    def _tell_losses(self) -> None:
        if not self._is_main:
            return
        counts = self.statistics()
        if counts.num_unlabelled:
            logger.warning("%s: %d samples dropped: %s", self._path, counts.num_unlabelled, self._no_label())
        if counts.num_cut:
            logger.warning("%s: %d of %d samples cut at %s", self._path, counts.num_cut, len(self), self._limit())

    def _no_label(self) -> str:
        return f"nothing that counts in the loss within {self._limit()}"

    def _nothing_left(self) -> str:
        return (
            f"{self._path}: no sample has anything that counts in the loss within {self._limit()}; "
            "raise --model_max_length"
        )

    def _limit(self) -> str:
        return f"model_max_length {self._options.model_max_length}"

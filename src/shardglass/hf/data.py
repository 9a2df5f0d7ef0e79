"""From a data file to batches: what a Trainer is given.

Owns the two builders and the collator, and names everything of the data part in one place. Leaves reading to
``records``, tokens and labels to ``labels``, samples to ``dataset``.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from shardglass.hf.data_options import DataOptions, DataStatistics
from shardglass.hf.dataset import ConversationDataset
from shardglass.hf.labels import IGNORED, encoder_for
from shardglass.hf.records import Conversations, load_conversations

__all__ = [
    "ConversationDataset",
    "Conversations",
    "DataOptions",
    "DataStatistics",
    "PadToLongest",
    "build_collator",
    "build_dataset",
    "load_conversations",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PadToLongest:
    """Collator: pads samples on the right to the longest of the batch.

    The mask follows the length of each sample, not its ids: a pad token that also ends turns is seen where it is text.

    Attributes:
        pad_token_id: Fills ``input_ids``; never seen by the model, as mask and labels leave it out.
        pad_to_multiple_of: Round the length up to a multiple; None: do not.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None

    def __call__(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return ``input_ids``, ``attention_mask`` and ``labels``, each [num_samples, length] int64."""
        length = max(len(sample["input_ids"]) for sample in samples)
        if self.pad_to_multiple_of is not None:
            length += -length % self.pad_to_multiple_of
        fill = {"input_ids": self.pad_token_id, "attention_mask": 0, "labels": IGNORED}
        batch = {key: torch.full((len(samples), length), value) for key, value in fill.items()}
        for row, sample in enumerate(samples):
            size = len(sample["input_ids"])
            batch["input_ids"][row, :size] = sample["input_ids"]
            batch["attention_mask"][row, :size] = 1
            batch["labels"][row, :size] = sample["labels"]
        return batch


def build_dataset(
    source: str | os.PathLike[str] | Conversations,
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    *,
    is_main: bool = True,
) -> ConversationDataset:
    """Return the data set of a file.

    Args:
        source: The data file, or its records if it was already read (before the model was loaded).
        tokenizer: The model's tokenizer.
        options: Label policy, length, lazy or not.
        is_main: This rank shows progress and tells what was left out; the data set is the same on all ranks.

    Raises:
        DataError: The file or records in it cannot be used.
        ModelError: The tokenizer does not fit the label policy.
    """
    encoder = encoder_for(options.label_policy, tokenizer)
    if not isinstance(source, Conversations):
        source = load_conversations(source, skip_bad_records=options.skip_bad_records, is_main=is_main)
    return ConversationDataset(source, encoder, options, is_main=is_main)


def build_collator(tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> PadToLongest:
    """Return the collator; it pads with the tokenizer's pad token, else its end token, else id 0."""
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    pad = next((token for token in known if token is not None), 0)
    return PadToLongest(pad_token_id=pad, pad_to_multiple_of=options.pad_to_multiple_of)

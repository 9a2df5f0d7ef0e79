"""The options of a data set, and what is counted over it, as values."""

from dataclasses import dataclass

from shardglass.errors import ConfigError
from shardglass.hf.labels import check_label_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """How a data file becomes batches.

    Attributes:
        label_policy: "assistant", "all" or "qwen"; see ``labels``.
        model_max_length: Tokens after which a sample is cut.
        lazy: Tokenize a sample each time it is drawn, instead of all before training.
        skip_bad_records: Go on without records that cannot be used.
        pad_to_multiple_of: Pad batches to a multiple of this many tokens; None: to their longest sample.
    """

    label_policy: str = "assistant"
    model_max_length: int = 2048
    lazy: bool = False
    skip_bad_records: bool = False
    pad_to_multiple_of: int | None = None

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            ConfigError: Names the first that cannot be used.
        """
        check_label_policy(self.label_policy)
        if self.model_max_length < 2:
            raise ConfigError(
                f"model_max_length is {self.model_max_length}; it must be at least 2, as one token predicts the next"
            )
        if self.pad_to_multiple_of is not None and self.pad_to_multiple_of < 1:
            raise ConfigError(f"pad_to_multiple_of is {self.pad_to_multiple_of}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataStatistics:
    """What was counted over a data set.

    An eager data set has counted all its samples. A lazy one counts each sample when it is first drawn in this
    process: it knows the samples of its own rank, and none that worker processes of a data loader draw.

    Attributes:
        num_records: Records in the file.
        num_bad_records: Records left out by ``skip_bad_records``.
        num_samples: Length of the data set.
        num_counted: Samples that the next numbers are about.
        num_cut: Those longer than ``model_max_length``.
        num_unlabelled: Samples without a label after cutting; dropped or replaced, not in ``num_counted``.
        num_tokens: Tokens after cutting.
        num_label_tokens: Those of them whose label is not -100.
    """

    num_records: int
    num_bad_records: int
    num_samples: int
    num_counted: int
    num_cut: int
    num_unlabelled: int
    num_tokens: int
    num_label_tokens: int

    @property
    def cut_share(self) -> float:
        """Share of the counted samples that were cut; 0.0 before any was counted."""
        return self.num_cut / self.num_counted if self.num_counted else 0.0

    @property
    def label_share(self) -> float:
        """Share of the counted tokens that the loss counts; 0.0 before any was counted."""
        return self.num_label_tokens / self.num_tokens if self.num_tokens else 0.0

"""The errors a user can meet, and the form of their messages.

Owns the exception tree and the nearest-name suggestion. Every message says what is wrong, where (file, key, flag, rank,
tensor) and what to do; the code that raises supplies the three parts.

    ShardglassError
    ├── ConfigError           a DeepSpeed JSON or a flag that cannot be honoured
    ├── DataError             a data file that cannot be read as conversations
    ├── ModelError            a model that cannot be loaded or cut in units
    ├── CheckpointError       a checkpoint that cannot be written, is incomplete, or does not fit the run
    ├── OptimizerError        an optimizer that cannot be sharded, or does not fit the model
    ├── UsageError            a call that is not legal in the present state
    ├── NonFiniteError        too many steps in a row with inf or nan gradients
    ├── CollectiveError       ranks that disagree, or a collective that failed or did not end
    └── InvariantError        a fault of shardglass itself
"""

import difflib
from collections.abc import Iterable


class ShardglassError(Exception):
    """Base of every error that shardglass raises on purpose.

    A command that ends with one prints its message without a traceback and exits with code 2.

    Args:
        text: The message.
        is_shared: Every rank raises the same one at the same point, so one of them can tell it for all.
    """

    def __init__(self, text: str, *, is_shared: bool = False) -> None:
        """Keep the message as an exception's argument."""
        super().__init__(text)
        self.is_shared = is_shared


class ConfigError(ShardglassError):
    """A configuration file or flag is wrong, contradictory or not supported yet."""


class DataError(ShardglassError):
    """A data file or a record in it cannot be used."""


class ModelError(ShardglassError):
    """A model cannot be loaded, or cannot be cut in units."""


class CheckpointError(ShardglassError):
    """A checkpoint cannot be written or read, is incomplete, or does not fit the run."""


class OptimizerError(ShardglassError):
    """An optimizer cannot be sharded, or does not belong to the model."""


class UsageError(ShardglassError):
    """A call that is not legal in the present state of the engine."""


class NonFiniteError(ShardglassError):
    """Gradients were inf or nan in too many steps in a row; names the first bad tensors."""


class CollectiveError(ShardglassError):
    """Ranks disagree, or a collective failed or did not end in time; says where each rank is."""


class InvariantError(ShardglassError):
    """Something shardglass guarantees does not hold: please report it."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that is closest to ``word``, or None if none is close.

    Args:
        word: What the user wrote.
        known: The names that would have been understood.
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return close[0] if close else None


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` with the nearest known name, or an empty string."""
    name = nearest(word, known)
    return f" (did you mean {name!r}?)" if name else ""

"""Work that all ranks do, or none.

Owns the agreement behind each part of saving and loading, and the form of the message when a rank could not.
"""

from collections.abc import Callable
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from shardglass.checkpoint.ranks import Ranks
from shardglass.errors import CheckpointError, ShardglassError


def together(ranks: Ranks, target: Path, done: str, work: Callable[[], object], advice: str = "") -> None:
    """Do a part of the work on every rank and fail on all if it failed on one.

    Args:
        ranks: All of them.
        target: The checkpoint's folder.
        done: What is done with it, such as "read".
        work: This rank's part.
        advice: What a user can do, behind the reasons.

    Raises:
        CheckpointError: Names the ranks and their reasons.
    """
    fault: str | None = None
    cause: BaseException | None = None
    try:
        work()
    except CheckpointException as error:  # DCP's own, with every rank's reason, on every rank
        own = error.failures.get(ranks.rank)
        cause = error
        fault = _text_of(own[0]) if own is not None else None
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks must hear of it; it is raised below
        fault, cause = _text_of(error), error
    faults = ranks.agree(f"a checkpoint to be {done}", fault)
    told = [f"rank {rank}: {text}" for rank, text in enumerate(faults) if text is not None]
    if told:
        if len(told) == len(faults) and len(set(faults)) == 1:
            same = str(faults[0])
            text = same if isinstance(cause, ShardglassError) else f"{target}: not {done}: {same}{advice}"
            raise CheckpointError(text, is_shared=True) from cause
        raise CheckpointError(f"{target}: not {done}: {'; '.join(told)}{advice}", is_shared=True) from cause


def _text_of(error: BaseException) -> str:
    """The message, with the class where only that says what happened."""
    return str(error) if isinstance(error, ShardglassError) else f"{type(error).__name__}: {error}"

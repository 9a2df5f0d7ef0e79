"""A hook on a user's module.

Owns what becomes of a hook when the module is copied or pickled: it drives one engine's collectives, so a copy of the
model must not have it, and a pickle cannot.
"""

from collections.abc import Callable
from typing import Any

import torch

from shardglass.errors import UsageError


class ModuleHook:
    """Calls ``work`` with what torch hands to the hook; kept out of torch.compile's graphs."""

    def __init__(self, work: Callable[..., None]) -> None:
        self._work = torch.compiler.disable(work)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run."""
        self._work(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModuleHook":
        """A copy of the model is a plain model: its hooks do nothing."""
        return ModuleHook(_nothing)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Raise UsageError: processes cannot be pickled."""
        raise UsageError(
            "a sharded model cannot be pickled or saved whole: save handle.full_state_dict(), or call handle.close() "
            "first"
        )


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What the hook of a copy does."""

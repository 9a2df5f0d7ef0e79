"""Which model is sharded by which handle.

Owns a table beside the user's objects, so that nothing is written on them: a second ``shard()`` of one model is an
error that says so, and a handle is found from a model or an optimizer alone.
"""

import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from shardglass.engine.handle import Handle

_BY_MODEL: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Handle]]" = weakref.WeakKeyDictionary()


def note(model: nn.Module, handle: "Handle") -> None:
    """Remember that ``handle`` shards ``model``."""
    _BY_MODEL[model] = weakref.ref(handle)


def forget(model: nn.Module) -> None:
    """The model is sharded no more."""
    _BY_MODEL.pop(model, None)


def live_handles() -> list["Handle"]:
    """The open handles of this process, in the order they were made."""
    return [handle for reference in list(_BY_MODEL.values()) if (handle := reference()) is not None]


def live_handle(model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None) -> "Handle | None":
    """The open handle that shards this model, or a part of it, or the model this optimizer updates; None if none."""
    modules = set() if model is None else set(model.modules())
    for sharded, reference in list(_BY_MODEL.items()):
        handle = reference()
        if handle is not None and (sharded in modules or (optimizer is not None and handle.optimizer is optimizer)):
            return handle
    return None

"""Weights that autograd saves in forward and reads in backward.

Owns the wrapping of saved tensors while a forward runs, so that a sharded weight is gathered when backward unpacks it.
Leaves gathering to ``gathers``.

[Note: other hooks] Only the innermost hooks on saved tensors are called. What is no weight of ours goes to the hooks
that were there before (``save_on_cpu`` around the model, for instance). Inside a backward, where checkpointing runs
forwards again, nothing is wrapped: checkpointing keeps those tensors by hooks of its own, and the backward of the
module follows at once.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class SavedWeights:
    """Hooks on saved tensors, in force from the first ``enter`` to the last ``leave``."""

    def __init__(self, unit_of: Mapping[int, str], need: Callable[[str], None]) -> None:
        """Make them.

        Args:
            unit_of: The unit of each storage of parameters, by its key.
            need: Called with the unit of a weight before backward reads it.
        """
        self._unit_of, self._need = unit_of, need
        self._depth = 0
        self._hooks: Any = None
        self._outer: Any = None

    @property
    def is_open(self) -> bool:
        """Whether a forward is under way."""
        return self._depth > 0

    def enter(self) -> None:
        """A forward begins."""
        self._depth += 1
        in_backward = torch._C._current_graph_task_id() != -1  # see [Note: other hooks]
        if self._depth == 1 and not in_backward:
            self._outer = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()

    def leave(self) -> None:
        """It ended; one end too many does nothing."""
        if self._depth:
            self._depth -= 1
            if self._depth == 0 and self._hooks is not None:
                self._hooks.__exit__(None, None, None)
                self._hooks = None

    def _pack(self, tensor: Tensor) -> object:
        """(unit, weight, None), or (None, what the outer hooks made of the tensor, how they read it again)."""
        unit = self._unit_of.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
        if unit is not None or self._outer is None:
            return unit, tensor, None
        pack, unpack = self._outer
        return None, pack(tensor), unpack

    def _unpack(self, packed: Any) -> Tensor:
        unit, kept, unpack = packed
        if unit is not None:
            self._need(unit)
        tensor: Tensor = kept if unpack is None else unpack(kept)
        return tensor

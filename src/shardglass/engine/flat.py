"""Whole gradients of one buffer in one run of elements.

Owns their memory and the note of what is written in it. Leaves to ``grads`` when they are filled and reduced.
"""

import torch
from torch import Tensor

from shardglass.engine.buffers import ParamBuffer
from shardglass.engine.sums import Scratch, add_into


class FlatPool:
    """Flat gradient buffers, reused by buffers of the same form so that the gaps between parameters stay zero."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[object, list[Tensor]] = {}
        self._all: list[Tensor] = []

    def take(self, form: object, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat of this form; its gaps are zero, its parameters' places are not."""
        free = self._free.setdefault(form, [])
        if free:
            return free.pop()
        flat = torch.zeros(numel, dtype=dtype, device=self._device)
        self._all.append(flat)
        return flat

    def give(self, form: object, flat: Tensor) -> None:
        """Return a flat nobody reads any more."""
        self._free.setdefault(form, []).append(flat)

    def clear(self) -> None:
        """Let go of every flat; all of them were given back."""
        self._free.clear()
        self._all.clear()

    def tensors(self) -> list[Tensor]:
        """Every flat there is."""
        return self._all


class WholeGrad:
    """Gradients of one buffer's parameters in one run of elements, with a note of which are written."""

    def __init__(self, tensor: Tensor, buffer: ParamBuffer, scratch: Scratch) -> None:
        self.tensor = tensor
        self._views = buffer.views(tensor)
        self._scratch = scratch
        self._has: set[int] = set()

    def add(self, k: int, grad: Tensor) -> None:
        """Write, or add to, the gradient of the k-th parameter."""
        if k in self._has:
            add_into(self._views[k], grad, self._scratch)
        else:
            self._views[k].copy_(grad)
            self._has.add(k)

    def complete(self) -> Tensor:
        """The run, with zeros for what was not written; what it has is then forgotten."""
        for k, view in enumerate(self._views):
            if k not in self._has:
                view.zero_()
        self.forget()
        return self.tensor

    def forget(self) -> None:
        """Nothing in it counts any more."""
        self._has.clear()

    @property
    def is_empty(self) -> bool:
        """Whether nothing in it counts."""
        return not self._has

"""Counts of tensor bytes: what autograd saved, and what is alive at the highest moment."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def saved_bytes(model, inputs):
    """Bytes of the storages that a forward saved for backward, without parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen.setdefault(storage.data_ptr(), (storage.nbytes(), tensor))  # alive, so that no address occurs twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**inputs)
    return sum(size for size, _ in seen.values())


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages alive, and the most there were; those of ``outside`` do not count."""

    def __init__(self, outside):
        super().__init__()
        self._sizes = {t.untyped_storage()._cdata: 0 for t in outside}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def _add(self, storage):
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += self._sizes[key]
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key):
        self.now -= self._sizes.pop(key)


def peak_bytes(model, inputs):
    """The most bytes alive in forward and backward, without parameters; gradients are dropped as they come."""

    def drop(param):
        param.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(drop)
    with LiveBytes([*model.parameters(), *model.buffers(), *inputs.values()]) as live:
        model(**inputs).loss.backward()
    return live.peak

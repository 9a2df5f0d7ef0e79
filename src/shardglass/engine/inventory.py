"""What this rank has in memory of each buffer of a layout: the tensors themselves, with their place.

Owns the lists of the native engine's tensors. Leaves to ``lens`` what is said about them; it lists other engines'
tensors in the same form.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardglass.engine.buffers import ParamBuffer
from shardglass.engine.comm import Comm
from shardglass.engine.grads import Gradients
from shardglass.engine.optim import OptimizerShards


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldTensor:
    """A tensor on this rank with elements of one buffer of a layout.

    Attributes:
        buffer: Index of the buffer.
        kind: "param", "master", "grad", or a key of the optimizer's state.
        cut: Whether it belongs to the rank's shard; otherwise to the whole buffer.
        first: Where it begins there.
        tensor: [numel] or of any shape that is those elements in order.
        attribute: Where a debugger finds it.
    """

    buffer: int
    kind: str
    cut: bool
    first: int
    tensor: Tensor
    attribute: str


def inventory(
    buffers: Sequence[ParamBuffer], grads: Gradients, shards: OptimizerShards, *, cuts_state: bool
) -> list[HeldTensor]:
    """The native engine's tensors, buffer by buffer: parameters, master weights, gradients, then optimizer state.

    Args:
        buffers: Its buffers.
        grads: Their gradients; a mean counts once it is there.
        shards: The optimizer's tensors.
        cuts_state: Whether master weights, means and states are those of the rank's shard.
    """
    found = []
    for b, buffer in enumerate(buffers):
        path = f"handle.buffers[{b}]"
        if buffer.kept is not None:
            found.append(_held(b, "param", buffer.kept, f"{path}.kept", cut=True))
        if buffer.is_whole:
            found.append(_held(b, "param", buffer.whole, f"{path}.whole", cut=False))
        if buffer.master is not None:
            found.append(_held(b, "master", buffer.master, f"{path}.master", cut=cuts_state))
    for k, bucket in enumerate(grads.buckets):
        if bucket.total is not None and bucket.total_full:
            path = f"handle.buckets[{k}].total"
            found.append(_held(bucket.buffer.index, "grad", bucket.total, path, cut=cuts_state))
    places = {
        id(param): f"optimizer.param_groups[{g}]['params'][{k}]"
        for g, group in enumerate(shards.optimizer.param_groups)
        for k, param in enumerate(group["params"])
    }
    for owned in shards.runs:
        for key, value in shards.optimizer.state.get(owned.param, {}).items():
            if isinstance(value, Tensor) and value.numel() == owned.param.numel() and value.dim():
                path = f"optimizer.state[{places[id(owned.param)]}][{key!r}]"
                found.append(_held(owned.run.buffer, key, value, path, cut=cuts_state, first=owned.run.start))
    return found


def tensors_by_category(
    buffers: Sequence[ParamBuffer], grads: Gradients, shards: OptimizerShards, comm: Comm
) -> dict[str, list[Tensor]]:
    """Every tensor of the engine, by the categories of ``Handle.memory``."""
    found = {
        "parameters": [t for b in buffers for t in (b.whole, b.kept) if t is not None],
        "master weights": [b.master for b in buffers if b.master is not None],
        "gradients": list(grads.tensors()),
    }
    for state in shards.optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                found.setdefault(f"optimizer {key}", []).append(value)
    found["communication"] = comm.buffer_tensors()
    return found


def _held(buffer: int, kind: str, tensor: Tensor, attribute: str, *, cut: bool, first: int = 0) -> HeldTensor:
    with torch.no_grad():
        flat = tensor.detach()
    return HeldTensor(buffer=buffer, kind=kind, cut=cut, first=first, tensor=flat, attribute=attribute)


def bytes_by_category(categories: Mapping[str, Sequence[Tensor]]) -> dict[str, int]:
    """Bytes of the storages behind the tensors; one that stands in two categories counts in the first."""
    seen: set[int] = set()
    return {name: _bytes_of(tensors, seen) for name, tensors in categories.items()}


def _bytes_of(tensors: Sequence[Tensor], seen: set[int]) -> int:
    """Bytes of the storages behind the tensors that were not counted yet."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total

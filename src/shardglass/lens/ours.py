"""The native engine, read from its handle.

Owns nothing that the handle does not know: layout, tensors and bytes are its own.
"""

from typing import Any

from torch import Tensor

from shardglass.engine.freed import FreedParameter
from shardglass.engine.handle import Handle
from shardglass.layout import slices_of
from shardglass.lens.reading import ParamTensor, Reading, Root, named, own_grad


def read_handle(handle: Handle) -> Reading:
    """What this rank's engine holds.

    Args:
        handle: An open handle.
    """
    params = []
    for names, param in named(handle.model, clean=False):
        params.append(
            ParamTensor(
                name=names[0],
                aliases=tuple(names[1:]),
                param=param,
                shape=handle.layout.spec(names[0]).shape,
                status="freed" if isinstance(param, FreedParameter) else "whole",
                shard=_kept(handle, names[0]),
                grad=own_grad(param),
            )
        )
    held = handle.inventory()
    groups: list[dict[str, Any]] = handle.optimizer.param_groups
    return Reading(
        engine="shardglass",
        stage=handle.options.stage,
        rank=handle.rank,
        world_size=handle.world_size,
        step=handle.counters["step"],
        layout=handle.layout,
        params=params,
        held=held,
        param_groups=groups,
        roots=[Root(label=h.attribute, tensor=h.tensor) for h in held if h.kind == "param"],
        memory=handle.memory(),
        device=params[0].param.device,
    )


def _kept(handle: Handle, name: str) -> Tensor | None:
    """This rank's part of a frozen parameter, where the stage shards parameters."""
    b, _ = handle.layout.find(name)
    kept = handle.buffers[b].kept
    mine = slices_of(handle.layout, name, handle.rank)
    return None if kept is None or not mine else kept[mine[0].offset : mine[-1].offset + mine[-1].length]

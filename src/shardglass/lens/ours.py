"""The native engine, read from its handle.

Owns nothing that the handle does not know: layout, tensors and bytes are its own.
"""

from typing import Any

from shardglass.engine.handle import Handle
from shardglass.lens.reading import ParamTensor, Reading, Root, named, own_grad


def read_handle(handle: Handle) -> Reading:
    """What this rank's engine holds.

    Args:
        handle: An open handle.
    """
    params = []
    for names, param in named(handle.model, clean=False):
        shape = handle.layout.spec(names[0]).shape
        params.append(
            ParamTensor(
                name=names[0],
                aliases=tuple(names[1:]),
                param=param,
                shape=shape,
                status="whole" if tuple(param.shape) == shape else "freed",
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

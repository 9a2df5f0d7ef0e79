"""Models of which every rank has all: DDP, one process, and whatever else leaves parameters whole; read live.

Owns the innermost optimizer's states by parameter, which FSDP2's reader takes from here too.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardglass.engine.inventory import HeldTensor
from shardglass.errors import UsageError
from shardglass.layout import make_layout
from shardglass.lens.chains import is_kind, links
from shardglass.lens.reading import ParamTensor, Reading, Scalar, as_plain, named, own_grad, spec
from shardglass.lens.wrappers import MODELS

DDP = "torch.nn.parallel.distributed.DistributedDataParallel"


def read_whole(model: nn.Module, owner: nn.Module, optimizer: Any) -> Reading:
    """What this rank holds.

    Args:
        model: The outermost wrapper.
        owner: The module whose parameters have the names.
        optimizer: The innermost optimizer; None if there is none.

    Raises:
        UsageError: The model has no parameters.
    """
    ddp = next((value for value, _ in links(model, MODELS) if is_kind(value, DDP)), None)
    group = None if ddp is None else ddp.process_group
    rank, world_size = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    found = list(named(owner))
    if not found:
        raise UsageError(f"look(): {type(model).__name__} has no parameters")
    groups = group_of(optimizer)
    specs = [
        spec(names[0], p.shape, p.dtype, trainable=p.requires_grad, group=groups.get(id(p)), unit=names[0])
        for names, p in found
    ]
    layout = make_layout("replicated", specs, world_size)
    params, held, scalars = [], [], []
    for names, p in found:
        name, (b, _) = names[0], layout.find(names[0])
        grad = own_grad(p)
        params.append(
            ParamTensor(name=name, aliases=tuple(names[1:]), param=p, shape=tuple(p.shape), status="whole", grad=grad)
        )
        held.append(_held(b, "param", p.detach(), f"{name}.data"))
        if grad is not None:
            held.append(_held(b, "grad", grad, f"{name}.grad"))
        of_state, numbers = held_states(optimizer, p, b, numel=p.numel(), cut=False)
        held += of_state
        scalars += numbers
    return Reading(
        engine="none" if ddp is None else "ddp",
        stage=None,
        rank=rank,
        world_size=world_size,
        step=step_of(optimizer),
        layout=layout,
        params=params,
        held=[h for h in held if h.tensor.numel()],
        scalars=scalars,
        param_groups=[] if optimizer is None else optimizer.param_groups,
        group=group,
        device=found[0][1].device,
    )


def _held(buffer: int, kind: str, tensor: Tensor, attribute: str) -> HeldTensor:
    return HeldTensor(buffer=buffer, kind=kind, cut=False, first=0, tensor=tensor, attribute=attribute)


# ---- the innermost optimizer ----


def group_of(optimizer: Any) -> dict[int, int]:
    """The group of each parameter, by id."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {id(p): g for g, group in enumerate(groups) for p in group["params"]}


def held_states(
    optimizer: Any, param: Tensor, buffer: int, *, numel: int, cut: bool
) -> tuple[list[HeldTensor], list[Scalar]]:
    """The states of one parameter: those with a number per element, and those of one number.

    Args:
        optimizer: The innermost optimizer; None if there is none.
        param: What it has in its groups.
        buffer: The layout's buffer of the parameter.
        numel: Elements of it on this rank.
        cut: Whether that is this rank's shard.
    """
    held: list[HeldTensor] = []
    scalars: list[Scalar] = []
    states = {} if optimizer is None else optimizer.state.get(param, {})
    for key, value in states.items():
        if not isinstance(value, torch.Tensor):
            continue
        local = as_plain(value)
        if local.dim() and local.numel() == numel:
            where = f"optimizer.state[{_place(optimizer, param)}][{key!r}]"
            held.append(HeldTensor(buffer=buffer, kind=key, cut=cut, first=0, tensor=local, attribute=where))
        elif local.numel() == 1:
            scalars.append(Scalar(buffer=buffer, kind=key, tensor=local))
    return held, scalars


def _place(optimizer: Any, param: Tensor) -> str:
    """Where an optimizer has a parameter."""
    for g, group in enumerate(optimizer.param_groups):
        for k, p in enumerate(group["params"]):
            if p is param:
                return f"optimizer.param_groups[{g}]['params'][{k}]"
    return "a parameter that is in no group any more"


def step_of(optimizer: Any) -> int | None:
    """Steps taken, as the optimizer's states count them; None if they do not."""
    if optimizer is None:
        return None
    steps = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
    return max(steps, default=None)

"""What the readers of DeepSpeed's optimizers have in common.

Owns the names of parameters, the process group, and the tensors of the optimizer inside. Everything is read from live
objects of DeepSpeed 0.19; nothing of it is imported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shardglass.engine.inventory import HeldTensor
from shardglass.errors import UsageError
from shardglass.lens.reading import Attribute, Scalar
from shardglass.lens.whereabouts import clean_name


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Zero:
    """A live ZeRO optimizer of DeepSpeed with what is around it.

    Attributes:
        optimizer: DeepSpeed's optimizer.
        path: How a debugger reaches it, such as "optimizer.optimizer".
        engine: The DeepSpeedEngine; None if only the optimizer was given.
        names: Every parameter's name, in model order.
        aliases: Other names of tied parameters, by name.
        rank: This process's rank in the data parallel group.
        world_size: The size of that group.
    """

    optimizer: Any
    path: str
    engine: Any
    names: Mapping[Tensor, str]
    aliases: Mapping[str, tuple[str, ...]]
    rank: int
    world_size: int

    @property
    def inner(self) -> Any:
        """The optimizer inside, whose param_groups have the fp32 tensors."""
        return self.optimizer.optimizer

    @property
    def step(self) -> int | None:
        """Steps taken, if the engine is known."""
        return None if self.engine is None else int(self.engine.global_steps)

    def names_of(self, params: Sequence[Tensor]) -> tuple[str, ...]:
        """Names of parameters."""
        return tuple(self.names[p] for p in params)


def zero_of(optimizer: Any, path: str, engine: Any, model: nn.Module | None) -> Zero:
    """What is around a live ZeRO optimizer.

    Raises:
        UsageError: It has experts, whose groups of ranks this lens does not follow.
    """
    if getattr(optimizer, "has_moe_layers", False):
        raise UsageError(
            "this DeepSpeed optimizer has mixture-of-experts groups, which the lens does not read from a live engine; "
            "plan them with the scheme deepspeed-flat and expert_parallel"
        )
    names = {param: clean_name(name) for param, name in optimizer.param_names.items()}
    aliases: dict[str, tuple[str, ...]] = {}
    module = engine.module if engine is not None else model
    if module is not None:
        for name, param in module.named_parameters(remove_duplicate=False):
            first = names.get(param)
            if first is not None and clean_name(name) != first:
                aliases[first] = (*aliases.get(first, ()), clean_name(name))
    group = optimizer.dp_process_group
    return Zero(
        optimizer=optimizer,
        path=path,
        engine=engine,
        names=names,
        aliases=aliases,
        rank=dist.get_rank(group),
        world_size=dist.get_world_size(group),
    )


def states(zero: Zero, masters: Sequence[Tensor]) -> tuple[list[HeldTensor], list[Scalar]]:
    """The optimizer's states of the fp32 tensors, one tensor per buffer of the layout.

    Args:
        zero: The optimizer.
        masters: Its fp32 tensors, in the order of the layout's buffers.
    """
    held, scalars = [], []
    for b, master in enumerate(masters):
        for key, value in zero.inner.state.get(master, {}).items():
            if not isinstance(value, Tensor):
                continue
            if value.numel() == master.numel() and value.dim():
                path = f"{zero.path}.optimizer.state[{master_path(zero, b)}][{key!r}]"
                held.append(HeldTensor(buffer=b, kind=key, cut=True, first=0, tensor=value, attribute=path))
            elif value.numel() == 1:
                scalars.append(Scalar(buffer=b, kind=key, tensor=value))
    return held, scalars


def master_path(zero: Zero, index: int) -> str:
    """Where a debugger finds the fp32 tensor of a group or sub-group."""
    for name in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat"):
        if hasattr(zero.optimizer, name):
            return f"{zero.path}.{name}[{index}]"
    raise UsageError(f"{type(zero.optimizer).__name__} has none of the fp32 partitions that DeepSpeed 0.19 has")


def inner_groups(zero: Zero, *, per: str) -> list[Attribute]:
    """The param_groups of the optimizer inside.

    Args:
        zero: The optimizer.
        per: What there is one tensor of, in words.
    """
    return [
        Attribute(
            attribute=f"{zero.path}.optimizer.param_groups[{g}]['params']",
            meaning=f"what the optimizer inside updates: {per}, in place of the model's parameters",
            value=list(group["params"]),
            group=g,
        )
        for g, group in enumerate(zero.inner.param_groups)
    ]


def pieces(buffer: int, tensors: Sequence[Tensor], path: str) -> list[HeldTensor]:
    """Gradients that lie one after the other in a rank's partition."""
    found, first = [], 0
    for k, tensor in enumerate(tensors):
        found.append(
            HeldTensor(buffer=buffer, kind="grad", cut=True, first=first, tensor=tensor, attribute=f"{path}[{k}]")
        )
        first += tensor.numel()
    return found

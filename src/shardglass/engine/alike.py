"""Checks before the first tensor moves: what can be sharded, and that all ranks have the same.

Owns the messages that name the first difference.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardglass.engine.comm import Comm
from shardglass.engine.units import dtype_name
from shardglass.errors import CollectiveError, ConfigError, ModelError
from shardglass.layout import Layout
from shardglass.options import DTYPE_BYTES, EngineOptions


def check_model(model: nn.Module, options: EngineOptions) -> None:
    """Refuse a model that cannot be trained here.

    Raises:
        ModelError: It is no module, is wrapped by another engine, has nothing to train, or a dtype that is not known.
        ConfigError: It trains in fp16.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"shard(model, optimizer): {type(model).__name__} is no torch.nn.Module")
    if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
        raise ModelError(f"the model is wrapped in {type(model).__name__}, which reduces gradients: give model.module")
    params = dict(model.named_parameters())
    renormed = [name for name, m in model.named_modules() if getattr(m, "max_norm", None) is not None]
    if renormed:
        raise ModelError(
            f"{renormed[0]} has max_norm: its forward rewrites weights, on each rank other ones, and neither master "
            "weights nor other ranks would see that; leave max_norm out"
        )
    wrapped = [name for name, p in params.items() if isinstance(p, DTensor)]
    if wrapped:
        raise ModelError(f"{wrapped[0]} is a DTensor: FSDP or tensor parallelism shards it already")
    if params and not any(p.requires_grad for p in params.values()):
        raise ModelError("no parameter of the model is trainable; set requires_grad on what is to be trained")
    strange = [name for name, p in params.items() if dtype_name(p.dtype) not in DTYPE_BYTES]
    if strange:
        dtype = dtype_name(params[strange[0]].dtype)
        raise ModelError(f"{strange[0]} has dtype {dtype}; parameters of this dtype cannot be sharded")
    half = [name for name, p in params.items() if p.requires_grad and p.dtype == torch.float16]
    if half and options.param_dtype is None:
        raise ConfigError(
            f"{half[0]} is trained in float16, which needs loss scaling; that is not supported yet. Use "
            "EngineOptions(param_dtype='bfloat16') or load the model in float32"
        )


def device_of(model: nn.Module) -> torch.device:
    """The one device of a model's parameters.

    Raises:
        ModelError: There are none, or several devices, or parameters without memory.
    """
    devices: dict[torch.device, str] = {}
    for name, param in model.named_parameters():
        devices.setdefault(param.device, name)
    if not devices:
        raise ModelError("the model has no parameters; there is nothing to shard")
    if len(devices) > 1:
        listed = ", ".join(f"{device} (first: {name})" for device, name in devices.items())
        raise ModelError(f"the model's parameters are on several devices: {listed}; move the model to one")
    device, name = next(iter(devices.items()))
    if device.type == "meta":
        raise ModelError(f"{name} is on the meta device and has no values; load the weights before shard()")
    return device


def check_alike(
    comm: Comm, layout: Layout, options: EngineOptions, optimizer: torch.optim.Optimizer, *, reads: Sequence[str] = ()
) -> None:
    """Compare model, options and optimizer over ranks before the first tensor moves; collective.

    Args:
        comm: The ranks.
        layout: This rank's layout.
        options: Its options.
        optimizer: Its optimizer.
        reads: What it reads its part of the weights from, and the parameters it has already; nothing if it gets them.

    Raises:
        CollectiveError: Names the first rank that differs from rank 0, and in what.
    """
    groups = [{k: repr(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    mine: dict[str, Any] = {
        "layout": layout.fingerprint,
        "optimizer": type(optimizer).__name__,
        "param_groups": groups,
        "weights read by each rank": list(reads),
        **asdict(options),
    }
    everyone: list[dict[str, Any]] = comm.exchange("layout and options", mine)
    for rank, theirs in enumerate(everyone):
        key = next((k for k in mine if theirs.get(k) != everyone[0].get(k)), None)
        if key == "layout":
            texts = comm.exchange("layouts", layout.to_json())
            raise CollectiveError(
                f"rank {rank} has another model than rank 0: {_first_difference(texts[0], texts[rank])}; load the same "
                "model, with the same frozen parameters and groups, on every rank"
            )
        if key is not None:
            raise CollectiveError(
                f"rank {rank} has {key} = {theirs.get(key)!r}, rank 0 has {everyone[0].get(key)!r}; start every rank "
                "with the same options"
            )


def _first_difference(left: str, right: str) -> str:
    """The first parameter in which two layouts differ."""
    a, b = Layout.from_json(left), Layout.from_json(right)
    for name in dict.fromkeys((*a.names, *b.names)):
        places = []
        for layout in (a, b):
            if name not in layout.names:
                places.append("absent")
                continue
            buffer, k = layout.find(name)
            places.append(repr(layout.buffers[buffer].params[k]))
        if places[0] != places[1]:
            return f"{name} is {places[0]} on rank 0 and {places[1]} there"
    return f"world size {a.world_size} on rank 0 and {b.world_size} there, or another order of parameters"

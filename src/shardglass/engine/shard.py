"""``shard()``: a model and its optimizer, cut over the ranks in place.

Owns the order in which the engine's parts are made. A plain loop stays as it was:

    handle = shard(model, optimizer, stage=2)
    loss = model(**batch).loss
    loss.backward()
    handle.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from shardglass.engine import registry
from shardglass.engine.alike import check_alike, check_model, device_of
from shardglass.engine.buffers import make_buffers, torch_dtype
from shardglass.engine.comm import Comm
from shardglass.engine.gathers import Gathers
from shardglass.engine.grads import Gradients
from shardglass.engine.handle import Handle
from shardglass.engine.links import GroupLinks, Links
from shardglass.engine.optim import OptimizerShards, check_optimizer
from shardglass.engine.parts import Parts
from shardglass.engine.registry import live_handle
from shardglass.engine.runtime import Runtime
from shardglass.engine.sources import BesideOwn, is_hollow, take_source
from shardglass.engine.units import build_units, param_specs
from shardglass.errors import ModelError, UsageError
from shardglass.layout import units_layout
from shardglass.options import EngineOptions


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    stage: int | None = None,
    options: EngineOptions | None = None,
    units: Sequence[str | nn.Module] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Handle:
    """Shard a model's training state over the ranks, in place; collective.

    Afterwards the model's parameters are views of flat buffers with rank 0's values, and the optimizer's
    param_groups hold this rank's flat slices of the master weights. Forward, backward, ``optimizer.step()``,
    schedulers and both ``zero_grad()`` work as before. The gradient is the mean over ranks.

    Args:
        model: Any module whose parameters are on one device.
        optimizer: An element-wise torch.optim optimizer over the model's trainable parameters; state it has is kept.
        stage: ZeRO stage; overrides ``options.stage``.
        options: Everything else; see EngineOptions.
        units: Modules, or their dotted names, that are reduced and gathered as one; default: each block of the model's
            repeated list.
        process_group: Ranks to shard over; default: all.

    Returns:
        The handle.

    Raises:
        ConfigError: An option cannot be used.
        UsageError: torch.distributed is not initialised.
        ModelError: The model cannot be cut in units, or has parameters on several devices.
        OptimizerError: The optimizer cannot be sharded or does not fit the model.
        CollectiveError: Ranks have different models or options; names the first difference.
    """
    options = options if options is not None else EngineOptions()
    options = options if stage is None else replace(options, stage=stage)
    check_optimizer(optimizer, options)
    check_model(model, options)
    other = live_handle(model)
    if other is not None:
        raise UsageError(f"this model is sharded already ({other!r}): call handle.close() first")
    links = GroupLinks(
        device_of(model),
        options.collective_timeout_s,
        process_group,
        gathers_apart=options.rules.shards_params,
    )
    return shard_over(links, model, optimizer, options=options, units=units)


def shard_over(
    links: Links,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    options: EngineOptions,
    units: Sequence[str | nn.Module] | None = None,
) -> Handle:
    """What ``shard`` does once it is known over which ranks; ``links`` carries everything between them."""
    comm = Comm(device_of(model), options.collective_timeout_s, links)
    cut = build_units(model, units)
    dtype = torch_dtype(options.param_dtype) if options.param_dtype is not None else None
    specs = param_specs(cut, optimizer, dtype)
    layout = units_layout(specs, comm.world_size)
    params = {name: p for unit in cut for name, p in unit.params.items()}
    source = take_source(model)
    weights = BesideOwn(source, params) if source is not None else None
    reads_own = weights is not None and weights.on_every_rank
    reads = [weights.identity, *weights.own] if weights is not None and reads_own else []
    check_alike(comm, layout, options, optimizer, reads=reads)
    if weights is None and comm.rank == 0 and is_hollow(model):
        raise ModelError("rank 0's model has no values to spread: load it there, or note where they are for every rank")
    if weights is not None and reads_own:
        for name, tensor in weights.own.items():
            comm.broadcast(f"the initial {name}", tensor)
    buffers = make_buffers(layout, params, comm, options.rules, weights)
    for name, tensor in model.named_buffers():
        comm.broadcast(f"the module buffer {name}", tensor)
    parts = Parts(
        comm=comm,
        buffers=buffers,
        gathers=Gathers(model, cut, buffers, comm, options),
        grads=Gradients(buffers, comm, options),
        shards=OptimizerShards(optimizer, layout, buffers, comm, options),
    )
    runtime = Runtime(model, cut, parts)
    handle = Handle(model=model, options=options, layout=layout, parts=parts, runtime=runtime)
    runtime.owner = handle
    registry.note(model, handle)
    return handle

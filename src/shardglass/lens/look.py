"""Looking at a live run: ``look``, ``where`` and ``state_of``.

Owns which reader reads what it is given. ``look`` and ``where`` read this process's memory and never communicate;
``state_of`` does.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardglass.engine.comm import Comm
from shardglass.engine.handle import Handle
from shardglass.engine.links import GroupLinks
from shardglass.engine.registry import live_handle
from shardglass.errors import UsageError
from shardglass.lens.chains import innermost, is_kind, links, model_chain, optimizer_chain, scheduler_chain
from shardglass.lens.deepspeed import engine_in, read_deepspeed
from shardglass.lens.fsdp2 import is_sharded, read_fsdp2
from shardglass.lens.ours import read_handle
from shardglass.lens.reading import (
    Reading,
    Storages,
    attribute_row,
    group_rows,
    held_row,
    memory_rows,
    param_row,
)
from shardglass.lens.rows import LIVE
from shardglass.lens.snapshot import Snapshot
from shardglass.lens.values import whole_values
from shardglass.lens.whereabouts import Whereabouts, known_name, whereabouts
from shardglass.lens.whole import read_whole
from shardglass.lens.wrappers import MODELS, OPTIMIZERS

FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"

VALUES_TIMEOUT_S = 600.0
"""How long ``state_of`` waits for the other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Subject:
    """What somebody looks at.

    Attributes:
        model: The outermost model.
        optimizer: The outermost optimizer, or None.
        scheduler: The outermost scheduler, or None.
        roots: What the three are called.
        named: Other names that objects in the chain have.
        handle: Our handle, if one shards it.
    """

    model: nn.Module
    optimizer: Any
    scheduler: Any
    roots: tuple[str, str, str]
    named: dict[str, Any]
    handle: Handle | None


def look(model: Any, optimizer: Any = None, *, scheduler: Any = None) -> Snapshot:
    """What this rank holds now: layout, memory, and the wrappers around model, optimizer and scheduler; no collective.

    Args:
        model: A model in any wrappers: sharded by ``shard()``, a DeepSpeedEngine (ZeRO 1, 2 or 3), FSDP2, DDP,
            ``torch.compile``, PEFT, prepared by Accelerate; or a Trainer, which has all three.
        optimizer: Its optimizer, in any wrappers. A sharded model and a DeepSpeedEngine know their own.
        scheduler: Its learning rate scheduler.

    Returns:
        The snapshot.

    Raises:
        UsageError: ``model`` is no model, or is sharded in a way that is not read; the message says which.
    """
    subject = _subject(model, optimizer, scheduler)
    reading = _read(subject)
    storages = Storages()
    for root in reading.roots:
        storages.view(root.tensor, root.label)
    held = tuple(held_row(h, storages) for h in reading.held)
    params = tuple(param_row(p, storages) for p in reading.params)
    attributes = tuple(attribute_row(a, storages) for a in reading.attributes)
    own, own_root = _own_optimizer(subject)
    return Snapshot(
        source=LIVE,
        engine=reading.engine,
        stage=reading.stage,
        rank=reading.rank,
        world_size=reading.world_size,
        step=reading.step,
        layout=reading.layout,
        model_chain=model_chain(subject.model, subject.roots[0], subject.named, subject.handle),
        optimizer_chain=optimizer_chain(own, own_root, subject.handle),
        scheduler_chain=scheduler_chain(subject.scheduler, subject.roots[2]),
        params=params,
        held=held,
        attributes=attributes,
        groups=group_rows(reading),
        memory=memory_rows(reading),
        storages=storages.rows(),
    )


def where(model: Any, name: str, optimizer: Any = None) -> Whereabouts:
    """Where one parameter is, rank by rank: element ranges, offsets, buffers, dtypes, bytes; no collective.

    Args:
        model: As ``look`` takes it, or a Snapshot.
        name: The parameter's full dotted name.
        optimizer: As ``look`` takes it; without one only what the model has is shown.

    Raises:
        UsageError: No parameter has this name (the message has the nearest), or as ``look``.
    """
    if not isinstance(name, str):
        raise UsageError(f"where(model, name, optimizer): the name is {name!r}; it must be a parameter's dotted name")
    snapshot = model if isinstance(model, Snapshot) else look(model, optimizer)
    return whereabouts(snapshot, name)


def state_of(model: Any, name: str, optimizer: Any = None) -> dict[str, Tensor]:
    """Everything the ranks hold of one parameter, whole; collective over the ranks it is sharded over.

    Args:
        model: As ``look`` takes it.
        name: The parameter's full dotted name.
        optimizer: As ``look`` takes it; without one there are no optimizer states.

    Returns:
        "param", and where the engine has it "master", "grad" (the accumulated mean) and each of the optimizer's states
        by torch's key, in the parameter's shape; scalars such as "step" as 0-d.

    Raises:
        UsageError: As ``where``.
    """
    subject = _subject(model, optimizer, None)
    if subject.handle is not None:
        return subject.handle.state_of(known_name(look(model, optimizer), name))
    reading = _read(subject)
    known = known_name(look(model, optimizer), name)
    needs_others = reading.world_size > 1 and any(h.cut for h in reading.held)
    comm = None
    if needs_others:
        comm = Comm(reading.device, VALUES_TIMEOUT_S, GroupLinks(reading.device, VALUES_TIMEOUT_S, reading.group))
    try:
        return whole_values(reading, known, comm)
    finally:
        if comm is not None:
            comm.close()


def _subject(model: Any, optimizer: Any, scheduler: Any) -> _Subject:
    """Take apart what was given.

    Raises:
        UsageError: It is no model.
    """
    roots, named = ("model", "optimizer", "scheduler"), {}
    if not isinstance(model, nn.Module) and isinstance(getattr(model, "model_wrapped", None), nn.Module):
        trainer = model
        roots = ("trainer.model_wrapped", "trainer.optimizer", "trainer.lr_scheduler")
        named = {"trainer.model": trainer.model}
        optimizer = trainer.optimizer if optimizer is None else optimizer
        scheduler = trainer.lr_scheduler if scheduler is None else scheduler
        model = trainer.model_wrapped
    if not isinstance(model, nn.Module):
        raise UsageError(f"look() takes a model (torch.nn.Module) or a Trainer, not {type(model).__name__}")
    inner = innermost(optimizer, OPTIMIZERS) if optimizer is not None else None
    handle = live_handle(model, inner if isinstance(inner, torch.optim.Optimizer) else None)
    return _Subject(model=model, optimizer=optimizer, scheduler=scheduler, roots=roots, named=named, handle=handle)


def _own_optimizer(subject: _Subject) -> tuple[Any, str]:
    """The outermost optimizer and what it is called: the one given, else the one that handle or engine know."""
    model_root, root, _ = subject.roots
    if subject.optimizer is not None:
        return subject.optimizer, root
    if subject.handle is not None:
        return subject.handle.optimizer, "handle.optimizer"
    engine = engine_in(subject.model)
    return (None, root) if engine is None else (engine.optimizer, f"{model_root}.optimizer")


def _read(subject: _Subject) -> Reading:
    """The reading of whichever engine it is.

    Raises:
        UsageError: It is sharded in a way that is not read.
    """
    if subject.handle is not None:
        return read_handle(subject.handle)
    optimizer, root = _own_optimizer(subject)
    found = read_deepspeed(subject.model, optimizer, root=root)
    if found is not None:
        return found
    if any(is_kind(module, FSDP1) for module in subject.model.modules()):
        raise UsageError("this model is sharded by FSDP version 1, whose flat parameters are not read; use fully_shard")
    owner = _owner(subject.model)
    inner = None if optimizer is None else innermost(optimizer, OPTIMIZERS)
    inner = inner if hasattr(inner, "param_groups") and hasattr(inner, "state") else None
    return read_fsdp2(owner, inner) if is_sharded(owner) else read_whole(subject.model, owner, inner)


def _owner(model: nn.Module) -> nn.Module:
    """The module whose parameters have the names: what is inside DDP and torch.compile, with PEFT's adapters."""
    for value, kind in links(model, MODELS):
        if kind is None or kind.kind.startswith("PEFT"):
            owner: nn.Module = value
            return owner
    return model

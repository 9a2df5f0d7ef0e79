"""Loading the training state of a sharded model.

Owns the checks that a state fits, and how it is put in force on all ranks. Leaves what is on disk to the ``source``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardglass.checkpoint.kinds import open_checkpoint
from shardglass.checkpoint.known import known_model
from shardglass.checkpoint.snapshot import persistent_buffers
from shardglass.checkpoint.source import Source
from shardglass.checkpoint.together import together
from shardglass.engine.handle import Handle
from shardglass.errors import CheckpointError
from shardglass.layout import Layout

MOST_NAMES = 5
"""Names that an error lists of each kind of misfit."""


def load_checkpoint(handle: Handle, folder: str | Path, *, weights_only: bool = False) -> Source:
    """Bring a sharded model to the state that was saved; collective.

    World size, stage and units of the writer may be others than now: every rank reads the elements that it has now.

    Args:
        handle: The model, sharded; its present weights and optimizer state are dropped.
        folder: A checkpoint of ``save_checkpoint``, of the Hugging Face Trainer, or of DeepSpeed (ZeRO 1 to 3).
        weights_only: Leave the optimizer and the counters as they are.

    Returns:
        What the checkpoint says of itself.

    Raises:
        CheckpointError: It is incomplete, or does not fit the model or the optimizer; says in what. Unless reading
            itself failed, the model is as it was.
    """
    path = Path(folder)
    opened: list[Source] = []
    together(handle, path, "read", lambda: opened.append(_checked(handle, path, weights_only=weights_only)))
    source = opened[0]
    buffers = persistent_buffers(handle)
    flat = {name: buffer.detach().reshape(-1).clone() for name, buffer in buffers.items()}
    pieces = handle.pieces_to_load(None if weights_only else source.states)
    together(handle, path, "read", lambda: source.fill(pieces, flat))
    for name, buffer in buffers.items():
        buffer.copy_(flat[name].view(buffer.shape))
    handle.adopt_pieces()
    if not weights_only:
        _restore_groups(handle.optimizer, source.groups)
        handle.counters = source.counters
    return source


def _checked(handle: Handle, folder: Path, *, weights_only: bool) -> Source:
    """A checkpoint that fits.

    Raises:
        CheckpointError: It does not; all reasons at once.
    """
    source = open_checkpoint(folder, known_model(handle.model, handle.layout))
    faults = _misfits(source, handle.layout)
    if not weights_only:
        faults += _optimizer_misfits(source, handle)
    if faults:
        raise CheckpointError(f"{folder} does not fit this run:\n" + "\n".join(f"  {fault}" for fault in faults))
    return source


def _misfits(source: Source, ours: Layout) -> list[str]:
    """In what the parameters of a checkpoint differ from the model's."""
    then = source.shapes
    now = {p.name: p for b in ours.buffers for p in b.params}
    missing = [f"{name} is not in the checkpoint" for name in now if name not in then]
    foreign = [f"{name} is in the checkpoint only" for name in then if name not in now]
    other = []
    for name in now.keys() & then.keys():
        if tuple(now[name].shape) != tuple(then[name]):
            other.append(f"{name} has shape {list(now[name].shape)} here and {list(then[name])} there")
        elif source.trained is not None and now[name].trainable is not (name in source.trained):
            words = ("trained", "frozen") if now[name].trainable else ("frozen", "trained")
            other.append(f"{name} is {words[0]} here and was {words[1]} there")
    return [line for lines in (missing, foreign, sorted(other)) for line in _first_of(lines)]


def _optimizer_misfits(source: Source, handle: Handle) -> list[str]:
    """In what the optimizer of a checkpoint differs from this run's."""
    now = handle.optimizer
    if source.optimizer is not None and source.optimizer != type(now).__name__:
        return [f"written with {source.optimizer}, this run has {type(now).__name__}"]
    if source.groups is not None and len(source.groups) != len(now.param_groups):
        return [f"written with {len(source.groups)} param_groups, this run has {len(now.param_groups)}"]
    if source.group_of is None:
        return []
    here = {p.name: p.group for b in handle.layout.buffers for p in b.params if p.trainable}
    moved = [
        f"{name} is in param_group {group} here and was in param_group {source.group_of[name]} there"
        for name, group in here.items()
        if name in source.group_of and source.group_of[name] != group
    ]
    return _first_of(moved)


def _first_of(lines: list[str]) -> list[str]:
    return lines[:MOST_NAMES] + ([f"and {len(lines) - MOST_NAMES} more"] if len(lines) > MOST_NAMES else [])


def _restore_groups(optimizer: torch.optim.Optimizer, groups: Any) -> None:
    """Give each param_group the options it had, as ``Optimizer.load_state_dict`` does."""
    if groups is None:
        return
    for group, then in zip(optimizer.param_groups, groups, strict=True):
        restore_group(group, then)


def restore_group(group: dict[str, Any], then: Mapping[str, Any]) -> None:
    """Give one param_group the options it had; what this release of torch does not know is left out."""
    for key, value in then.items():
        now = group.get(key)
        if isinstance(now, Tensor):
            now.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(now, tuple) else value

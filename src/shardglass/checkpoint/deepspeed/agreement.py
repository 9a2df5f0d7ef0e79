"""Whether the files of one folder are of one save.

Owns the comparisons: files of the ranks with one another, parts with the sizes that the layout asks for, steps of the
optimizer with those of the engine. Nothing in a file names its save, so what must be equal is compared.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from shardglass.checkpoint.deepspeed.model_states import ModelStates
from shardglass.checkpoint.deepspeed.optim_states import OptimStates
from shardglass.checkpoint.deepspeed.places import Places, part_of
from shardglass.errors import CheckpointError

ELEMENTWISE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "sum", "square_avg")
"""States that have an element for each of the parameter's, whatever the optimizer."""

_MIXED = "files of two saves are mixed in one folder; use another checkpoint"


def check_models(models: Sequence[ModelStates]) -> None:
    """Hold the stage 3 files of all ranks against rank 0's.

    Raises:
        CheckpointError: They are of different saves, or a part of a frozen parameter has another size; names the file.
    """
    first = models[0]
    for model in models:
        _same(model.path, first.path, "DeepSpeed", model.version, first.version)
        _same(model.path, first.path, "world size", model.world_size, first.world_size)
        _same(model.path, first.path, "global step", model.global_steps, first.global_steps)
        _same(model.path, first.path, "skipped steps", model.skipped_steps, first.skipped_steps)
        if [list(shapes.items()) for shapes in model.trained] != [list(shapes.items()) for shapes in first.trained]:
            raise CheckpointError(f"{model.path}: other parameters or shapes than in {first.path.name}: {_MIXED}")
        if model.frozen != first.frozen:
            raise CheckpointError(f"{model.path}: other frozen parameters than in {first.path.name}: {_MIXED}")


def check_frozen(models: Sequence[ModelStates], *, is_partitioned: bool) -> None:
    """See that frozen parameters have as many elements as their shapes say; at stage 3 each rank's part of them.

    Raises:
        CheckpointError: One has not; names it.
    """
    for model in models:
        for name, shape in model.frozen.items():
            found, wanted = tuple(model.pieces[name].shape), shape
            if is_partitioned:
                found, wanted = (model.pieces[name].numel(),), (part_of(shape, model.world_size),)
            if found != wanted:
                raise CheckpointError(f"{model.path}: frozen {name} has shape {found} and needs {wanted}: {_MIXED}")


def check_optims(optims: Sequence[OptimStates], model: ModelStates) -> None:
    """Hold the optimizer files of all ranks against rank 0's, and their number against what they say.

    Raises:
        CheckpointError: They are of different saves or world sizes; names the file.
    """
    first, world_size = optims[0], len(optims)
    _same(first.path, model.path, "DeepSpeed", first.version, model.version)
    for optim in optims:
        if set(optim.partition_counts) - {world_size}:
            raise CheckpointError(
                f"{optim.path}: {max(optim.partition_counts)} ranks share its buffers (partition_count "
                f"{sorted(set(optim.partition_counts))}), and the checkpoint has {world_size} ranks: {_MIXED}, or it "
                "is one of experts (MoE) or of MiCS, which cannot be read yet"
            )
        _same(optim.path, first.path, "DeepSpeed", optim.version, first.version)
        _same(optim.path, first.path, "stage", optim.stage, first.stage)
        _same(optim.path, first.path, "number of buffers", len(optim.masters), len(first.masters))
        steps, wanted = ([state.step for state in found.states] for found in (optim, first))
        _same(optim.path, first.path, "step of the optimizer", steps, wanted)
        if (optim.groups, optim.group_of, optim.paddings) != (first.groups, first.group_of, first.paddings):
            raise CheckpointError(f"{optim.path}: other param_groups than in {first.path.name}: {_MIXED}")
        for state, other in zip(optim.states, first.states, strict=True):
            _same(optim.path, first.path, "states", sorted(state.elementwise), sorted(other.elementwise))


def check_parts(optims: Sequence[OptimStates], places: Places, *, on_nvme: bool) -> None:
    """See that every rank's parts of the buffers have the sizes that the layout asks for.

    Args:
        optims: Those of all ranks.
        places: The layout that follows from names and shapes.
        on_nvme: Whether the run kept the optimizer on NVMe, where its files leave gaps.

    Raises:
        CheckpointError: One is too short or too long; names file and buffer.
    """
    why = (
        "the run kept its optimizer on NVMe, whose parts lie in other files that cannot be read yet; save with the "
        "optimizer in memory"
        if on_nvme
        else _MIXED
    )
    for rank, optim in enumerate(optims):
        if len(optim.masters) != len(places.buffers):
            raise CheckpointError(
                f"{optim.path}: {len(optim.masters)} buffers, and the model file lists {len(places.buffers)}: {_MIXED}"
            )
        for number, buffer in enumerate(places.buffers):
            state = optim.states[number].elementwise
            known = {key: state[key] for key in ELEMENTWISE if key in state}
            for key, part in {"the master weights": optim.masters[number], **known}.items():
                if not buffer.least(rank) <= part.numel() <= buffer.size:
                    raise CheckpointError(
                        f"{optim.path}: {key} of buffer {number}: {part.numel()} elements, and the parameters that "
                        f"the model file lists need {buffer.size}: {why}"
                    )


def readable_keys(optims: Sequence[OptimStates], places: Places) -> tuple[tuple[str, ...], ...]:
    """For each buffer, the states that have an element for each of the parameters' on every rank."""
    return tuple(
        tuple(
            key
            for key in optims[0].states[number].elementwise
            if all(
                buffer.least(rank) <= optim.states[number].elementwise[key].numel() <= buffer.size
                for rank, optim in enumerate(optims)
            )
        )
        for number, buffer in enumerate(places.buffers)
    )


def check_same_weights(model: Path, optim: Path, pairs: Iterable[tuple[str, Tensor, Tensor]]) -> None:
    """See that 16-bit weights are the rounded masters, where steps leave a doubt that they are of one save.

    Args:
        model: The model file.
        optim: An optimizer file.
        pairs: Name, weights and masters of the same elements.

    Raises:
        CheckpointError: They are not.
    """
    for name, weight, master in pairs:
        rounded = master.to(weight.dtype)
        if not bool(((rounded == weight) | (rounded.isnan() & weight.isnan())).all()):
            raise CheckpointError(f"{model}: {name} is not the rounded master weight of {optim.name}: {_MIXED}")


def _same(path: Path, first: Path, what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise CheckpointError(f"{path}: {what} {found}, and {wanted} in {first.name}: {_MIXED}")

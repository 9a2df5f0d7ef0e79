"""The model files of a DeepSpeed checkpoint: names, shapes, 16-bit weights and counters.

Owns their keys (source: ``_common_checkpoint_state`` in ``runtime/engine.py``) and which parameters are frozen.

[Note: frozen parameters] Stage 2 keeps them whole beside the rest (``frozen_param_fragments``), stage 3 a part of each
in every rank's file. Stage 1 keeps no list of them, and DeepSpeed's own zero_to_fp32 loses them: they are those tensors
of ``module`` that are neither trained nor buffers nor second names. A save with ``exclude_frozen_parameters``, as the
Trainer makes of PEFT models, has none of them at any stage. Parameters without elements, trained or not, are stored
like frozen ones, and nothing tells them apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shardglass.checkpoint.deepspeed.fields import Fields, shapes_in, tensors_in
from shardglass.checkpoint.deepspeed.places import Shape
from shardglass.checkpoint.deepspeed.unpickling import load_file
from shardglass.errors import CheckpointError

_INSTEAD = "which cannot be read yet; make a plain model of it with DeepSpeed and start from that"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    """What one model file says.

    Attributes:
        path: The file.
        version: ``ds_version``.
        world_size: Number of data parallel ranks.
        global_steps: Calls of the engine's step that did something or were skipped for an overflow.
        skipped_steps: Those of them that were skipped.
        global_samples: Samples seen by all ranks.
        lr_scheduler: State of the scheduler that DeepSpeed drives.
        config: The DeepSpeed JSON of the run.
        trained: Shape by name of each group (stage 3: sub-group), in flat order.
        frozen: Shape by name.
        pieces: Frozen by name: whole at stages 1 and 2, at stage 3 this rank's part, flat.
        shared: Stored name by second name; empty in the stage 3 files of other ranks than 0.
        module: The model's state dict; stage 3 has (0,) tensors for parameters.
        buffers: Persistent buffers by name.
    """

    path: Path
    version: str | None
    world_size: int
    global_steps: int
    skipped_steps: int
    global_samples: int
    lr_scheduler: dict[str, Any] | None
    config: dict[str, Any]
    trained: tuple[dict[str, Shape], ...]
    frozen: Mapping[str, Shape]
    pieces: Mapping[str, Tensor]
    shared: Mapping[str, str]
    module: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


def read_model_states(path: Path, *, is_partitioned: bool) -> ModelStates:
    """Open one model file.

    Args:
        path: The file.
        is_partitioned: Whether it is one of stage 3's, whose state dict has placeholders for parameters.

    Raises:
        CheckpointError: It cannot be read, is not of a ZeRO checkpoint, or of one with more than data parallelism.
    """
    fields = Fields(path, load_file(path))
    _refuse_kinds(fields)
    trained = tuple(
        shapes_in(path, shapes, f"['param_shapes'][{number}]")
        for number, shapes in enumerate(fields.list_of("param_shapes", dict))
    )
    names = [name for shapes in trained for name in shapes]
    if len(set(names)) < len(names):
        raise fields.fault("param_shapes", "names a parameter twice")
    module = tensors_in(path, fields.get("module", dict), "['module']")
    buffers = _buffers(fields, module)
    shared = {str(name): str(stored) for name, stored in (fields.optional("shared_params", dict) or {}).items()}
    # DeepSpeed takes tensors without elements for one another, as all of them have one address.
    tied = {name for name in shared if is_partitioned or name not in module or module[name].numel()}
    rest = {} if is_partitioned else {n: v for n, v in module.items() if n not in {*names, *buffers, *tied}}
    frozen, pieces = _frozen(fields, rest)
    known = set(names) | set(frozen)
    # Where frozen parameters are left out, the second names of theirs are still listed.
    shared = {name: stored for name, stored in shared.items() if name not in known and stored in known}
    return ModelStates(
        path=path,
        version=fields.optional("ds_version", str),
        world_size=fields.get("dp_world_size", int),
        global_steps=fields.get("global_steps", int),
        skipped_steps=fields.get("skipped_steps", int),
        global_samples=fields.get("global_samples", int),
        lr_scheduler=fields.optional("lr_scheduler", dict),
        config=fields.optional("ds_config", dict) or {},
        trained=trained,
        frozen=frozen,
        pieces=pieces,
        shared=shared,
        module=module,
        buffers=buffers,
    )


def _refuse_kinds(fields: Fields) -> None:
    """Refuse what is no ZeRO checkpoint of plain data parallelism.

    Raises:
        CheckpointError: Says what it is.
    """
    data, path = fields.data, fields.path
    degrees = data.get("checkpoint_parallel_dimensions")
    degrees = degrees if isinstance(degrees, Mapping) else {}
    if data.get("mp_world_size", 1) != 1 or degrees.get("tp_degree", 1) != 1:
        raise CheckpointError(f"{path}: written with tensor parallelism, {_INSTEAD}")
    if degrees.get("pp_degree", 1) != 1 or ("module" in data and data["module"] is None):
        raise CheckpointError(f"{path}: written with pipeline parallelism, {_INSTEAD}")
    if any(data.get(key) for key in ("ds_autoep_layers", "autoep_layers", "num_experts", "folding")):
        raise CheckpointError(f"{path}: written with experts (MoE), {_INSTEAD}")
    if "param_shapes" in data and data["param_shapes"] is None:
        raise CheckpointError(
            f"{path}: written without ZeRO (stage 0, or with no optimizer), so there are no partitions to read; load "
            "its 'module' as a plain state dict"
        )


def _buffers(fields: Fields, module: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The persistent buffers by name.

    Raises:
        CheckpointError: One is listed and not there.
    """
    names = fields.list_of("buffer_names", str)
    for name in names:
        if name not in module:
            raise fields.fault("buffer_names", f"has {name}, which is not in ['module']")
    return {name: module[name] for name in names}


def _frozen(fields: Fields, rest: Mapping[str, Tensor]) -> tuple[dict[str, Shape], dict[str, Tensor]]:
    """Shapes and tensors of what is frozen, see [Note: frozen parameters].

    Args:
        fields: The file.
        rest: What is in its state dict and is nothing else.

    Raises:
        CheckpointError: Shapes and tensors are not of the same parameters.
    """
    listed = fields.optional("frozen_param_shapes", dict)
    if listed is None:
        pieces = {name: value for name, value in rest.items() if name.rpartition(".")[2] != "_extra_state"}
        return {name: tuple(value.shape) for name, value in pieces.items()}, pieces
    shapes = shapes_in(fields.path, listed, "['frozen_param_shapes']")
    pieces = tensors_in(fields.path, fields.get("frozen_param_fragments", dict), "['frozen_param_fragments']")
    if set(shapes) != set(pieces):
        raise fields.fault("frozen_param_fragments", "and ['frozen_param_shapes'] have other names")
    return shapes, pieces

"""The optimizer files of a DeepSpeed checkpoint: a rank's part of the masters and of the optimizer's state.

Owns their keys (sources: ``state_dict`` in ``runtime/zero/stage_1_and_2.py``, ``stage3.py``, ``bf16_optimizer.py``) and
the form common to all of them.

[Note: three writers] DeepSpeedZeroOptimizer (stages 1, 2) cuts the padding at the end off the masters and keeps it in
the optimizer's state; with ``elastic_checkpoint`` it cuts it off there too and keeps no param_group options.
BF16_Optimizer (stage 1 with gradients summed in fp32) keeps it in both, and writes no ``zero_stage``. Stage 3 pads each
parameter and keeps that. So a part may be shorter than its buffer; what lacks is padding, and that is checked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shardglass.checkpoint.deepspeed.fields import Fields
from shardglass.checkpoint.deepspeed.unpickling import load_file
from shardglass.errors import CheckpointError

Number = int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferState:
    """The optimizer's state of one flat buffer.

    Attributes:
        elementwise: Tensors [elements] by key, such as "exp_avg".
        step: Steps that the optimizer made; None if it counts none.
        others: Keys of what is neither.
    """

    elementwise: Mapping[str, Tensor]
    step: Number | None
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStates:
    """What one rank's optimizer file says.

    Attributes:
        path: The file.
        version: ``ds_version``.
        stage: ``zero_stage``; None from BF16_Optimizer.
        is_partitioned: Whether it has stage 3's layout.
        partition_counts: Ranks that share each buffer.
        masters: This rank's part of each buffer [elements], fp32 unless the run lowered it.
        states: The optimizer's state of each buffer.
        groups: Options of each param_group, no tensors; empty dicts from ``elastic_checkpoint``.
        group_of: The param_group of each buffer.
        paddings: Zeros behind each parameter of each group; None if there are none.
        loss_scaler: Attributes of the loss scaler; None if there is none.
    """

    path: Path
    version: str | None
    stage: int | None
    is_partitioned: bool
    partition_counts: tuple[int, ...]
    masters: tuple[Tensor, ...]
    states: tuple[BufferState, ...]
    groups: tuple[dict[str, Any], ...]
    group_of: tuple[int, ...]
    paddings: tuple[tuple[int, ...], ...] | None
    loss_scaler: dict[str, Any] | None


def read_optim_states(path: Path) -> OptimStates:
    """Open one rank's optimizer file.

    Raises:
        CheckpointError: It cannot be read, or is not of ZeRO stage 1, 2 or 3.
    """
    top = Fields(path, load_file(path))
    fields = top.below("optimizer_state_dict")
    if fields.data.get("ds_zero_partition_groups") is not None:
        raise CheckpointError(
            f"{path}: written with experts (MoE), which cannot be read yet; make a plain model of it with DeepSpeed "
            "and start from that"
        )
    is_partitioned = "fp32_flat_groups" in fields.data
    masters = tuple(fields.list_of("fp32_flat_groups" if is_partitioned else "single_partition_of_fp32_groups", Tensor))
    if any(master.dim() != 1 for master in masters):
        raise CheckpointError(f"{path}: a partition of the masters is not flat; the file is no ZeRO checkpoint")
    if not is_partitioned and isinstance(fields.data.get("base_optimizer_state"), list):
        states, groups, group_of = _elastic(fields)
    else:
        key = "optimizer_state_dict" if is_partitioned else "base_optimizer_state"
        states, groups, group_of = _of_torch(fields.below(key))
    if len(states) != len(masters):
        raise CheckpointError(
            f"{path}: masters of {len(masters)} buffers and state of {len(states)}; the file is damaged"
        )
    scaler = fields.data.get("loss_scaler")
    return OptimStates(
        path=path,
        version=top.optional("ds_version", str),
        stage=None if fields.data.get("zero_stage") is None else int(fields.get("zero_stage", int)),
        is_partitioned=is_partitioned,
        partition_counts=_counts(fields, len(masters)),
        masters=masters,
        states=states,
        groups=groups,
        group_of=group_of,
        paddings=None if is_partitioned else _paddings(fields),
        loss_scaler=None if scaler is None else dict(vars(scaler)),
    )


def _counts(fields: Fields, num_buffers: int) -> tuple[int, ...]:
    """How many ranks share each buffer: one number at stage 3, a list at stages 1 and 2.

    Raises:
        CheckpointError: It is missing.
    """
    if isinstance(fields.data.get("partition_count"), int):
        return (fields.get("partition_count", int),) * num_buffers
    return tuple(fields.list_of("partition_count", int))


def _paddings(fields: Fields) -> tuple[tuple[int, ...], ...] | None:
    """``param_alignment_paddings``; None in files of releases and optimizers that have no such padding.

    Raises:
        CheckpointError: It is something else than numbers.
    """
    if fields.optional("param_alignment_paddings", list) is None:
        return None
    rows = fields.list_of("param_alignment_paddings", list)
    if not all(isinstance(zeros, int) and zeros >= 0 for row in rows for zeros in row):
        raise fields.fault("param_alignment_paddings", "has something else than numbers of elements")
    return tuple(tuple(row) for row in rows)


def _of_torch(
    fields: Fields,
) -> tuple[tuple[BufferState, ...], tuple[dict[str, Any], ...], tuple[int, ...]]:
    """States of the buffers, options of the groups, group of each buffer: from a state dict as torch makes it.

    Raises:
        CheckpointError: It is something else, or has groups of experts.
    """
    state = fields.below("state")
    states: list[BufferState] = []
    groups: list[dict[str, Any]] = []
    group_of: list[int] = []
    for number, group in enumerate(fields.list_of("param_groups", dict)):
        if group.get("moe"):
            raise CheckpointError(
                f"{fields.path}: param_group {number} is one of experts (MoE), which cannot be read yet; make a plain "
                "model of the checkpoint with DeepSpeed and start from that"
            )
        options = {key: _plain(value) for key, value in group.items() if key != "params"}
        groups.append(options)
        for index in Fields(fields.path, group, f"['param_groups'][{number}]").get("params", list):
            if index != len(states):
                raise fields.fault("param_groups", "does not count the buffers from 0 on")
            one = state.below(index).data if index in state.data else {}
            states.append(_buffer_state(one, options.get("step")))
            group_of.append(number)
    return tuple(states), tuple(groups), tuple(group_of)


def _elastic(
    fields: Fields,
) -> tuple[tuple[BufferState, ...], tuple[dict[str, Any], ...], tuple[int, ...]]:
    """The same of a file that ``elastic_checkpoint`` wrote: a list of states, and no options.

    Raises:
        CheckpointError: It is something else.
    """
    rows = fields.list_of("base_optimizer_state", dict)
    states = tuple(_buffer_state(row, fields.data.get("base_optimizer_state_step")) for row in rows)
    return states, tuple({} for _ in rows), tuple(range(len(rows)))


def _buffer_state(state: Mapping[Any, Any], step_elsewhere: object) -> BufferState:
    """Sort one buffer's state by what it is.

    Args:
        state: What the optimizer keeps of the buffer.
        step_elsewhere: Where it keeps no step there, such as apex' FusedAdam: that of the param_group.
    """
    step = _plain(state.get("step", step_elsewhere))
    found = {str(key): value for key, value in state.items() if isinstance(value, Tensor) and value.dim() == 1}
    found.pop("step", None)
    others = [str(key) for key, value in state.items() if value is not None and key != "step" and key not in found]
    return BufferState(
        elementwise=found, step=step if isinstance(step, int | float) else None, others=tuple(sorted(others))
    )


def _plain(value: object) -> Any:
    """A value without tensors: a number for a tensor of one element, None for a larger one."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return tuple(_plain(item) for item in value) if isinstance(value, tuple) else value

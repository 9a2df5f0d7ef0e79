"""DeepSpeed's two layouts: ZeRO-1/2 and ZeRO-3, by arithmetic.

Owns the order, padding and cuts of DeepSpeed 0.19.8 (sources: ``runtime/zero/stage_1_and_2.py``, ``stage3.py``,
``partition_parameters.py``; the tests hold recordings of real runs against them). Leaves what DeepSpeed's attributes
say about a layout to ``partitions``.

[Note: what DeepSpeed keeps whole] At stages 1 and 2 a parameter that is frozen, empty or in no optimizer group enters
no partition: every rank holds it whole. At stage 3 it is cut like any other, but lies outside of the flat sub-groups.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardglass.errors import UsageError
from shardglass.layout.buffer import Buffer, Holders, ParamSpec, own_buffer
from shardglass.layout.scheme_options import DEFAULTS, SchemeOptions
from shardglass.layout.schemes import check_world_size, round_up
from shardglass.layout.spec import Layout
from shardglass.options import DTYPE_BYTES

START_ALIGN = 2
"""``nccl_start_alignment_factor``: elements to which a partition is padded, whatever the dtype."""

PARAM_ALIGN_BYTES = 16
"""What ``parameter_alignment`` aligns to."""

_EXPERT = re.compile(r"(?<=deepspeed_experts\.)\d+(?=\.)")


def deepspeed_flat_layout(params: Sequence[ParamSpec], world_size: int, options: SchemeOptions = DEFAULTS) -> Layout:
    """The layout of ZeRO stages 1 and 2: each optimizer group is one run, padded and cut in equal partitions.

    Both optimizers that DeepSpeed uses there lay out alike, but its BF16_Optimizer reads neither of
    ``round_robin_gradients`` and ``parameter_alignment``; see ``partitions.has_bf16_optimizer``.

    Args:
        params: Those of a group in the order the optimizer has them.
        world_size: Number of data parallel ranks, at least 1.
        options: ``round_robin_gradients``, ``parameter_alignment`` and ``expert_parallel`` are read. Experts are given
            with one rank's names; the layout has every rank's, numbered through as DeepSpeed's checkpoints do.

    Returns:
        A buffer per group, groups ascending (an expert group: one per rank of an expert parallel group), then those
        kept whole; see [Note: what DeepSpeed keeps whole].

    Raises:
        UsageError: DeepSpeed fails too: a group has no element to train, or two dtypes; or experts do not divide.
    """
    check_world_size(world_size)
    groups, outside = _by_group(params)
    for p in outside:
        if p.trainable and p.group is not None and p.group not in groups:
            raise UsageError(
                f"no parameter of optimizer group {p.group} has elements ({p.name} has shape {p.shape}); DeepSpeed "
                "cannot flatten such a group, so leave it out of the optimizer"
            )
    for group in options.expert_parallel:
        if group not in groups:
            raise UsageError(f"expert_parallel: there is no optimizer group {group}; groups are {sorted(groups)}")
    buffers: list[Buffer] = []
    for group, members in groups.items():
        if group in options.expert_parallel:
            buffers += _expert_buffers(group, members, world_size, options)
        else:
            buffers.append(_flat_buffer(f"group {group}", members, Holders(num_shards=world_size), options))
    everywhere = Holders(num_shards=1, copies=world_size)
    buffers += [own_buffer(p, everywhere) for p in outside]
    return Layout(scheme="deepspeed-flat", world_size=world_size, buffers=tuple(buffers))


def _by_group(params: Iterable[ParamSpec]) -> tuple[dict[int, list[ParamSpec]], list[ParamSpec]]:
    """What DeepSpeed optimizes, by group, groups ascending; and all other parameters."""
    groups: dict[int, list[ParamSpec]] = {}
    outside = []
    for p in params:
        if p.trainable and p.group is not None and p.numel:
            groups.setdefault(p.group, []).append(p)
        else:
            outside.append(p)
    for members in groups.values():
        other = next((p for p in members if p.dtype != members[0].dtype), None)
        if other is not None:
            raise UsageError(
                f"{members[0].name} is {members[0].dtype} and {other.name} is {other.dtype}; DeepSpeed keeps one "
                "optimizer group in one dtype: plan with the dtype it casts the model to, or split the group"
            )
    return dict(sorted(groups.items())), outside


def _flat_buffer(unit: str, members: Sequence[ParamSpec], holders: Holders, options: SchemeOptions) -> Buffer:
    """Flatten parameters in DeepSpeed's order and cut the run in equal partitions."""
    num_ranks = holders.num_shards
    if options.round_robin_gradients:
        members = [p for start in range(num_ranks) for p in members[start::num_ranks]]
    itemsize = DTYPE_BYTES[members[0].dtype]
    align = PARAM_ALIGN_BYTES // math.gcd(PARAM_ALIGN_BYTES, itemsize) if options.parameter_alignment else 1
    offsets, end = [], 0
    for p in members:
        offsets.append(round_up(end, align))
        end = offsets[-1] + p.numel
    return Buffer(
        unit=unit,
        dtype=members[0].dtype,
        trainable=True,
        params=tuple(members),
        offsets=tuple(offsets),
        shard_numel=round_up(end, START_ALIGN * num_ranks) // num_ranks,
        holders=holders,
    )


def _expert_buffers(group: int, members: Sequence[ParamSpec], world_size: int, options: SchemeOptions) -> list[Buffer]:
    """A group of experts: rank e of every expert parallel group has experts of its own, shared by the e-th ranks.

    Expert parallel groups are neighbouring ranks, so those with the same experts are ``size`` ranks apart.
    """
    size = options.expert_parallel[group]
    if size < 1 or world_size % size:
        raise UsageError(f"expert_parallel: size {size} of group {group} does not divide {world_size} ranks")
    stems = {p.name: _EXPERT.sub("{}", p.name, count=1) for p in members}
    foreign = next((name for name, stem in stems.items() if name == stem), None)
    if foreign is not None:
        raise UsageError(
            f"expert_parallel: {foreign} of group {group} is no expert; their names have 'deepspeed_experts.<number>.'"
        )
    num_local = Counter(stems.values())
    buffers = []
    for rank in range(size):
        named = [replace(p, name=_global_name(p.name, rank * num_local[stems[p.name]])) for p in members]
        holders = Holders(num_shards=world_size // size, first=rank, stride=size)
        buffers.append(_flat_buffer(f"group {group}, expert rank {rank}", named, holders, options))
    return buffers


def _global_name(name: str, first: int) -> str:
    """An expert's name in the whole model, from one rank's (source: ``engine._save_moe_checkpoint``)."""
    return _EXPERT.sub(lambda number: str(int(number.group()) + first), name, count=1)


def deepspeed_param_layout(params: Sequence[ParamSpec], world_size: int, options: SchemeOptions = DEFAULTS) -> Layout:
    """The layout of ZeRO stage 3: each parameter is flattened and cut; partitions lie in flat sub-groups.

    A partition has ceil(numel / world_size) elements; the last ranks' may hold fewer, or padding alone.

    Args:
        params: Those of a group in the order the optimizer has them.
        world_size: Number of data parallel ranks, at least 1.
        options: ``sub_group_size`` is read. A sub-group is closed once its partitions have that many elements, so it
            may have more.

    Returns:
        A buffer per sub-group, groups ascending, then those outside; see [Note: what DeepSpeed keeps whole].

    Raises:
        UsageError: A group has two dtypes.
    """
    check_world_size(world_size)
    groups, outside = _by_group(params)
    holders = Holders(num_shards=world_size)
    buffers = []
    for group, members in groups.items():
        for number, part in enumerate(_sub_groups(members, world_size, options.sub_group_size)):
            buffers.append(_sub_group_buffer(f"group {group}, sub-group {number}", part, holders))
    buffers += [own_buffer(p, holders, chunk=partition_numel(p, world_size)) for p in outside]
    return Layout(scheme="deepspeed-param", world_size=world_size, buffers=tuple(buffers))


def partition_numel(param: ParamSpec, world_size: int) -> int:
    """Elements that every rank's partition of a parameter has at stage 3, padding included."""
    return -(-param.numel // world_size)


def _sub_groups(members: Sequence[ParamSpec], world_size: int, limit: int) -> list[list[ParamSpec]]:
    """Cut a group in sub-groups (source: ``stage3._create_fp16_sub_groups``)."""
    parts: list[list[ParamSpec]] = [[]]
    filled = 0
    for p in members:
        if filled >= limit and parts[-1]:
            parts.append([])
            filled = 0
        parts[-1].append(p)
        filled += partition_numel(p, world_size)
    return parts


def _sub_group_buffer(unit: str, members: Sequence[ParamSpec], holders: Holders) -> Buffer:
    """A rank's partitions behind each other, their padding inside."""
    chunks = [partition_numel(p, holders.num_shards) for p in members]
    offsets, end = [], 0
    for chunk in chunks:
        offsets.append(end)
        end += chunk
    return Buffer(
        unit=unit,
        dtype=members[0].dtype,
        trainable=True,
        params=tuple(members),
        offsets=tuple(offsets),
        shard_numel=end,
        holders=holders,
        chunks=tuple(chunks),
    )


def secondary_layout(params: Sequence[ParamSpec], world_size: int, hpz_size: int) -> Layout:
    """The second copy that ZeRO++ keeps at stage 3 (``zero_hpz_partition_size``): each parameter cut within a node.

    A partition is as long as those of ``world_size // hpz_size`` ranks together, so it may end in more padding than a
    cut in ``hpz_size`` would need.

    Args:
        params: In any order.
        world_size: Number of data parallel ranks.
        hpz_size: Neighbouring ranks that hold a whole copy together.

    Raises:
        UsageError: ``hpz_size`` does not divide the ranks.
    """
    check_world_size(world_size)
    if hpz_size < 1 or world_size % hpz_size:
        raise UsageError(f"zero_hpz_partition_size {hpz_size} does not divide {world_size} ranks")
    copies = world_size // hpz_size
    holders = Holders(num_shards=hpz_size, copies=copies)
    buffers = tuple(own_buffer(p, holders, chunk=partition_numel(p, world_size) * copies) for p in params)
    return Layout(scheme="deepspeed-hpz", world_size=world_size, buffers=buffers)

"""The rules that put parameters in buffers.

Owns one function per scheme: a sequence of ParamSpec and a world size in, a Layout out. Checkpoints persist the order
that ``units_layout`` gives, so a change here is a new layout version.
"""

from collections.abc import Sequence

from shardglass.errors import InvariantError
from shardglass.layout.spec import RUN_ALIGN, Buffer, Layout, ParamSpec
from shardglass.options import DTYPE_BYTES

ALIGN_BYTES = 16
"""Start of every parameter: what vector loads and NCCL like."""


def units_layout(params: Sequence[ParamSpec], world_size: int) -> Layout:
    """The layout of the native engine.

    One buffer per (unit, dtype, trainable): trainable buffers before frozen ones, dtypes in order of first
    appearance. In a buffer the parameters of one optimizer group lie together, groups ascending, each in model
    order. Each start is aligned to 16 bytes, the start of a group and of a shard to ``RUN_ALIGN`` elements. The end is
    padded so that ``world_size`` equal shards come out.

    [Note: whole vectors] A fused optimizer kernel rounds the last elements of a tensor, which do not fill a vector
    register, differently from the others. What the optimizer is given starts and ends at multiples of ``RUN_ALIGN``
    elements (the end lies in padding), so no element is ever among the last ones, wherever the shards are cut: stages
    and world sizes agree bit for bit.

    Args:
        params: In model order; units in forward order of their first appearance.
        world_size: Number of ranks, at least 1.

    Returns:
        The layout, the same on every rank for the same arguments.
    """
    if world_size < 1:
        raise InvariantError(f"world_size is {world_size}; it must be at least 1")
    order: dict[str, dict[tuple[bool, str], list[ParamSpec]]] = {}
    for p in params:
        order.setdefault(p.unit, {}).setdefault((not p.trainable, p.dtype), []).append(p)
    buffers = []
    for by_kind in order.values():
        for frozen, dtype in sorted(by_kind, key=lambda kind: kind[0]):
            members = by_kind[frozen, dtype]
            members = sorted(members, key=lambda p: -1 if p.group is None else p.group)
            buffers.append(_fill(tuple(members), world_size))
    return Layout(scheme="units", world_size=world_size, buffers=tuple(buffers))


def _fill(members: tuple[ParamSpec, ...], world_size: int) -> Buffer:
    """Lay parameters of one kind behind each other and cut the run in equal shards."""
    first = members[0]
    align = max(1, ALIGN_BYTES // DTYPE_BYTES[first.dtype])
    offsets: list[int] = []
    end = 0
    for p in members:
        is_first = bool(offsets) and p.group != members[len(offsets) - 1].group
        start = _round_up(end, RUN_ALIGN if is_first else align)
        offsets.append(start)
        end = start + p.numel
    return Buffer(
        unit=first.unit,
        dtype=first.dtype,
        trainable=first.trainable,
        params=members,
        offsets=tuple(offsets),
        shard_numel=_round_up(end, RUN_ALIGN * world_size) // world_size,
        world_size=world_size,
    )


def _round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below ``value``."""
    return -(-value // multiple) * multiple

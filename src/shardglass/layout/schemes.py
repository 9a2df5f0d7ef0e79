"""The rules that put parameters in buffers: the native engine's, FSDP2's, and that of whole copies.

Owns one function per scheme: a sequence of ParamSpec and a world size in, a Layout out. Leaves DeepSpeed's to
``deepspeed`` and names to ``registry``. Checkpoints persist the order that ``units_layout`` gives, so a change there is
a new layout version.
"""

from collections.abc import Sequence

from shardglass.errors import InvariantError, UsageError, suggestion
from shardglass.layout.buffer import Buffer, Holders, ParamSpec, own_buffer
from shardglass.layout.scheme_options import DEFAULTS, SchemeOptions
from shardglass.layout.spec import RUN_ALIGN, Layout
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
    check_world_size(world_size)
    order: dict[str, dict[tuple[bool, str], list[ParamSpec]]] = {}
    for p in params:
        order.setdefault(p.unit, {}).setdefault((not p.trainable, p.dtype), []).append(p)
    holders = Holders(num_shards=world_size)
    buffers = []
    for by_kind in order.values():
        for frozen, dtype in sorted(by_kind, key=lambda kind: kind[0]):
            members = by_kind[frozen, dtype]
            members = sorted(members, key=lambda p: -1 if p.group is None else p.group)
            buffers.append(_fill(tuple(members), holders))
    return Layout(scheme="units", world_size=world_size, buffers=tuple(buffers))


def _fill(members: tuple[ParamSpec, ...], holders: Holders) -> Buffer:
    """Lay parameters of one kind behind each other and cut the run in equal shards."""
    first = members[0]
    align = max(1, ALIGN_BYTES // DTYPE_BYTES[first.dtype])
    offsets: list[int] = []
    end = 0
    for p in members:
        is_first = bool(offsets) and p.group != members[len(offsets) - 1].group
        start = round_up(end, RUN_ALIGN if is_first else align)
        offsets.append(start)
        end = start + p.numel
    return Buffer(
        unit=first.unit,
        dtype=first.dtype,
        trainable=first.trainable,
        params=members,
        offsets=tuple(offsets),
        shard_numel=round_up(end, RUN_ALIGN * holders.num_shards) // holders.num_shards,
        holders=holders,
    )


def dim0_layout(params: Sequence[ParamSpec], world_size: int, options: SchemeOptions = DEFAULTS) -> Layout:
    """The layout of FSDP2 (``torch.distributed.fsdp.fully_shard``): each parameter in chunks along a dimension.

    A chunk has ceil(size / world_size) indices, as ``torch.chunk`` cuts; the last ranks' may be shorter or empty. Every
    rank's piece has memory of its own, padded to a whole chunk (source: ``FSDPParam._init_sharded_param``, torch 2.13).

    Args:
        params: In model order.
        world_size: Number of ranks, at least 1.
        options: ``shard_dims`` is read.

    Raises:
        UsageError: A parameter that FSDP2 refuses: without dimensions, or cut unevenly along a dimension behind the
            first; or ``shard_dims`` has a name or dimension that does not exist.
    """
    check_world_size(world_size)
    known = {p.name for p in params}
    for name in options.shard_dims:
        if name not in known:
            raise UsageError(f"shard_dims: no parameter is named {name!r}{suggestion(name, known)}")
    holders = Holders(num_shards=world_size)
    buffers = []
    for p in params:
        dim = _shard_dim(p, options.shard_dims.get(p.name, 0), world_size)
        buffers.append(own_buffer(p, holders, chunk=-(-p.shape[dim] // world_size), dim=dim))
    return Layout(scheme="dim0", world_size=world_size, buffers=tuple(buffers))


def _shard_dim(param: ParamSpec, dim: int, world_size: int) -> int:
    """The dimension a parameter is cut along, counted from the front, if FSDP2 takes it."""
    if not param.shape:
        raise UsageError(
            f"{param.name} is a scalar, which cannot be cut along a dimension; give it shape (1,), as FSDP2 asks"
        )
    if not -len(param.shape) <= dim < len(param.shape):
        raise UsageError(f"shard_dims: {param.name} has shape {param.shape} and no dimension {dim}")
    dim %= len(param.shape)
    if dim > 0 and param.shape[dim] % world_size:
        raise UsageError(
            f"{param.name} has {param.shape[dim]} indices along dimension {dim}, which {world_size} ranks do not "
            "divide; FSDP2 cuts unevenly along dimension 0 only"
        )
    return dim


def replicated_layout(params: Sequence[ParamSpec], world_size: int) -> Layout:
    """The layout of DistributedDataParallel, or of one process: every rank holds every parameter, each by itself.

    Args:
        params: In model order.
        world_size: Number of ranks, at least 1.
    """
    check_world_size(world_size)
    holders = Holders(num_shards=1, copies=world_size)
    return Layout(scheme="replicated", world_size=world_size, buffers=tuple(own_buffer(p, holders) for p in params))


def check_world_size(world_size: int) -> None:
    """Refuse a world without ranks.

    Raises:
        InvariantError: Fewer than one rank.
    """
    if world_size < 1:
        raise InvariantError(f"world_size is {world_size}; it must be at least 1")


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below ``value``."""
    return -(-value // multiple) * multiple

"""Bytes that the engine's tensors take on one rank, as closed forms over a layout.

Owns the formulas, category by category those of ``Handle.memory()`` and equal to them to the byte once every kind of
step of the run was taken. Leaves activations and the rest of the process to whoever measures them.

[Note: what is assumed] Every trainable parameter gets a gradient in every micro-batch, and gradients come unit by
unit in reverse layout order, as a model gives them that registers its modules in forward order. A unit's trainable
buffers (more than one only if its dtypes differ) fill together. Where a model does otherwise, only the number of
gradient flats differs: each buffer that cannot be launched in its turn holds its flat longer, and buffers of its form
cannot use it meanwhile.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from shardglass.errors import InvariantError
from shardglass.layout import Buffer, Layout, group_spans
from shardglass.options import DTYPE_BYTES, REDUCTIONS_IN_FLIGHT, SUM_CHUNK
from shardglass.plan.kinds import PLAIN_STEP, SCALAR_BYTES, OptimizerKind, Sharding, StepShape


def planned_bytes(
    layout: Layout, options: Sharding, rank: int, *, optimizer: OptimizerKind, shape: StepShape = PLAIN_STEP
) -> dict[str, int]:
    """Bytes of the engine's tensors on one rank, by category; see [Note: what is assumed].

    Args:
        layout: The layout of the run.
        options: The engine's options; the stage's row decides what is cut.
        rank: Whose tensors.
        optimizer: Class and options of the optimizer.
        shape: How its steps use the engine.

    Returns:
        The categories of ``Handle.memory()``, with the values it has after a step of every shape. "optimizer <state>"
        is there for each state of which this rank has a tensor; none for an optimizer whose states are not known, see
        ``unknown_state``.

    Raises:
        InvariantError: There is no such rank.
    """
    if not 0 <= rank < layout.world_size:
        raise InvariantError(f"rank is {rank}; the layout has ranks 0 to {layout.world_size - 1}")
    account = _same_on_all_ranks(layout, options, shape)
    communication = account.pop("communication")
    return account | _state_bytes(layout, options, rank, optimizer) | {"communication": communication}


def _same_on_all_ranks(layout: Layout, options: Sharding, shape: StepShape) -> dict[str, int]:
    """The account without the optimizer's states."""
    trainable = [b for b in layout.buffers if b.trainable]
    return {
        "parameters": sum(_param_numel(b, options) * b.itemsize for b in layout.buffers),
        "master weights": sum(_master_bytes(b, options) for b in trainable),
        "gradients": sum(_mean_bytes(b, options) for b in trainable)
        + sum(_local_bytes(b, options) for b in trainable if shape.uses_local)
        + (0 if options.rules.shards_params else _flat_bytes(layout, options, shape)),
        "communication": _scratch_bytes(layout, options, shape)
        + (0 if options.rules.shards_params else _receive_bytes(layout, options, shape)),
    }


def in_backward_bytes(layout: Layout, options: Sharding, shape: StepShape = PLAIN_STEP) -> int:
    """What gradients travel in and arrive in, at a stage that lets go of it when backward ends; 0 at the others.

    They keep it from step to step, so it is in ``planned_bytes``.
    """
    if not options.rules.shards_params:
        return 0
    return _flat_bytes(layout, options, shape) + _receive_bytes(layout, options, shape)


def heaviest_rank(
    layout: Layout, options: Sharding, *, optimizer: OptimizerKind, shape: StepShape = PLAIN_STEP
) -> tuple[int, dict[str, int]]:
    """The rank with the most planned bytes, the first of equals, and its account.

    Shards are even, so ranks differ in optimizer state alone: padding at the end of a shard has none.
    """
    ranks = range(layout.world_size if options.rules.shards_state else 1)  # whole states are the same everywhere
    heaviest = max(ranks, key=lambda rank: sum(_state_bytes(layout, options, rank, optimizer).values()))
    return heaviest, planned_bytes(layout, options, heaviest, optimizer=optimizer, shape=shape)


# ---- dtypes, as the engine derives them ----


def master_dtype(dtype: str) -> str:
    """The dtype of master weights and optimizer state: at least fp32 (source: ``engine.buffers.master_dtype``)."""
    return promoted(dtype, "float32")


def accum_dtype(dtype: str, options: Sharding) -> str:
    """The dtype means are kept in: the wider of option and parameter (source: ``engine.grads.Gradients._bucket``)."""
    return promoted(options.accum_dtype, dtype)


def wire_dtype(dtype: str, options: Sharding) -> str:
    """The dtype gradients travel in: the option's, else the parameter's."""
    return options.reduce_dtype or dtype


def promoted(a: str, b: str) -> str:
    """The dtype that holds both: for two different ones of bfloat16, float16, float32 and float64."""
    if a == b:
        return a
    return "float64" if "float64" in (a, b) else "float32"


# ---- formulas ----


def _param_numel(buffer: Buffer, options: Sharding) -> int:
    """Elements of a buffer's parameters that stay between uses.

    At a stage that shards parameters a frozen buffer's shard, and nothing of a trainable one: it is gathered from the
    ranks' master weights.
    """
    if not options.rules.shards_params:
        return buffer.numel
    return 0 if buffer.trainable else buffer.shard_numel


def gathered_bytes(layout: Layout, options: Sharding) -> int:
    """Whole parameters at a stage that gathers them for use: the unit in use and what is gathered ahead.

    The most over all units, since the order of use is the layout's in forward and the reverse in backward. 0 at stages
    that keep parameters whole. Not in ``planned_bytes``: it lasts for a part of the step.
    """
    if not options.rules.shards_params:
        return 0
    groups = [list(buffers) for _, buffers in groupby(layout.buffers, key=lambda b: b.unit)]
    units = [(sum(b.numel for b in group), sum(b.numel * b.itemsize for b in group)) for group in groups]
    orders = (units, units[::-1])
    return max((_live_bytes(order[k:], options) for order in orders for k in range(len(order))), default=0)


def _live_bytes(units: Sequence[tuple[int, int]], options: Sharding) -> int:
    """Bytes that are whole while the first of ``units`` is in use, each given as (elements, bytes)."""
    live, size = units[0]
    for numel, nbytes in units[1 : 1 + options.prefetch_units]:
        if options.max_live_numel is not None and live + numel > options.max_live_numel:
            break
        live, size = live + numel, size + nbytes
    return size


def _state_numel(buffer: Buffer, options: Sharding) -> int:
    """Elements of a buffer whose mean and state one rank holds: its shard, or all if the stage does not cut them."""
    return buffer.shard_numel if options.rules.shards_state else buffer.numel


def _master_bytes(buffer: Buffer, options: Sharding) -> int:
    """A copy in the master dtype of the part whose state is here; none if parameters that stay have that dtype."""
    master = master_dtype(buffer.dtype)
    is_view = master == buffer.dtype and not options.rules.shards_params
    return 0 if is_view else _state_numel(buffer, options) * DTYPE_BYTES[master]


def _mean_bytes(buffer: Buffer, options: Sharding) -> int:
    """The accumulated mean of the part whose state is here, made at the first reduction and kept."""
    return _state_numel(buffer, options) * DTYPE_BYTES[accum_dtype(buffer.dtype, options)]


def _local_bytes(buffer: Buffer, options: Sharding) -> int:
    """The sum of local micro-batches: a whole gradient in the accumulation dtype, kept from step to step."""
    return buffer.numel * DTYPE_BYTES[accum_dtype(buffer.dtype, options)]


def _flat_bytes(layout: Layout, options: Sharding, shape: StepShape) -> int:
    """The pool of flats that gradients travel in.

    The pool does not shrink during a backward, so it holds for each form as many flats as were out at once. A flat is
    out from its unit's first gradient until its reduction was waited for, which is just before the reduction after the
    next ``REDUCTIONS_IN_FLIGHT`` starts. Hence 2 flats for a form that occurs in neighbouring units, 1 for others. With
    a local sum a flat is needed only to cast it, and is taken after the wait: 1 for each form; none if the sum has the
    wire's dtype and travels itself.
    """
    pool = _Pool()
    units = [[_flat_of(buffer, options) for buffer in unit] for unit in _units_in_reduce_order(layout)]
    if shape.uses_direct:
        pool.run_step(units, local=False)
    if shape.uses_local:
        pool.run_step(units, local=True)
    return pool.made_bytes


def _units_in_reduce_order(layout: Layout) -> list[list[Buffer]]:
    """Trainable buffers from the last to the first, unit by unit."""
    trainable = [b for b in reversed(layout.buffers) if b.trainable]
    return [list(buffers) for _, buffers in groupby(trainable, key=lambda b: b.unit)]


class _Flat(NamedTuple):
    """What one buffer's gradient travels in."""

    form: object  # flats of one form are used again, as by ``engine.grads.Bucket.form``
    nbytes: int
    is_local_sum: bool  # a local sum has the wire's dtype, and travels itself


def _flat_of(buffer: Buffer, options: Sharding) -> _Flat:
    wire = wire_dtype(buffer.dtype, options)
    return _Flat(
        form=(wire, buffer.shard_numel, buffer.offsets, tuple(p.numel for p in buffer.params)),
        nbytes=buffer.numel * DTYPE_BYTES[wire],
        is_local_sum=accum_dtype(buffer.dtype, options) == wire,
    )


class _Pool:
    """Counts the flats that ``engine.grads.FlatPool`` makes, by going through a step as the engine does."""

    def __init__(self) -> None:
        self._free: Counter[object] = Counter()
        self.made_bytes = 0

    def run_step(self, units: Sequence[Sequence[_Flat]], *, local: bool) -> None:
        """One reduction of every buffer."""
        flying: list[_Flat | None] = []
        for unit in units:
            if not local:
                for flat in unit:
                    self._take(flat)
            for flat in unit:
                while len(flying) >= REDUCTIONS_IN_FLIGHT:
                    self._give(flying.pop(0))
                travels_itself = local and flat.is_local_sum
                if local and not travels_itself:
                    self._take(flat)
                flying.append(None if travels_itself else flat)
        for flown in flying:
            self._give(flown)

    def _take(self, flat: _Flat) -> None:
        if self._free[flat.form]:
            self._free[flat.form] -= 1
        else:
            self.made_bytes += flat.nbytes

    def _give(self, flat: _Flat | None) -> None:
        if flat is not None:
            self._free[flat.form] += 1


def _state_bytes(layout: Layout, options: Sharding, rank: int, optimizer: OptimizerKind) -> dict[str, int]:
    """Each state of the optimizer: as many elements as its tensors have, in the master dtype; scalars once per tensor.

    A tensor of the optimizer is a run of one group in one buffer, from its first to its last parameter element on this
    rank; padding behind the last one is outside.
    """
    counts: Counter[int] = Counter()
    sizes: Counter[int] = Counter()  # [group] bytes of one state; ranks x buffers pass here, so nothing more is done
    for buffer in layout.buffers:
        if not buffer.trainable:
            continue
        itemsize = DTYPE_BYTES[master_dtype(buffer.dtype)]
        shard = buffer.holders.shard_of(rank) if options.rules.shards_state else None
        for group, start, stop in group_spans(buffer, shard):
            counts[group] += 1
            sizes[group] += (stop - start) * itemsize
    totals: Counter[str] = Counter()
    for group, count in counts.items():
        for state in optimizer.scalars:
            totals[f"optimizer {state}"] += count * SCALAR_BYTES
        for state in optimizer.states(group):
            totals[f"optimizer {state}"] += sizes[group]
    return dict(totals)


def _receive_bytes(layout: Layout, options: Sharding, shape: StepShape) -> int:
    """What the peers' parts arrive in on gloo: a shard for each peer, kept by (elements, wire dtype).

    One reduction is waited for before the next starts, so buffers with shards of one size share them. NCCL's own
    reduce-scatter writes into a tensor that is gone when it is done.
    """
    if shape.backend != "gloo":
        return 0
    kinds = {(b.shard_numel, wire_dtype(b.dtype, options)) for b in layout.buffers if b.trainable}
    return sum((layout.world_size - 1) * numel * DTYPE_BYTES[wire] for numel, wire in kinds)


def _scratch_bytes(layout: Layout, options: Sharding, shape: StepShape) -> int:
    """Two pieces of ``SUM_CHUNK`` elements per accumulation dtype in which something is summed in pieces; none on CUDA.

    Shards are summed in pieces if there are several ranks, or if they are added to a mean that is there (one rank's
    first mean is copied); so are gradients of another dtype that are added to a local sum.
    """
    if shape.backend != "gloo":
        return 0
    used = set()
    for buffer in layout.buffers:
        if not buffer.trainable or not buffer.real_numel:
            continue
        accum = accum_dtype(buffer.dtype, options)
        if layout.world_size > 1 or shape.adds_to_shard or (shape.uses_local and accum != buffer.dtype):
            used.add(accum)
    return sum(2 * SUM_CHUNK * DTYPE_BYTES[accum] for accum in used)

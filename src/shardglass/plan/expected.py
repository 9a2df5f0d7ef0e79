"""What a rank should hold by the plan, in the form that a look at the run has.

Owns the planned Snapshot and the comparison of a live one with it. Leaves bytes to ``memory``, what differs between two
snapshots to ``lens.changes``, and memory against its own layout to ``lens.check``.
"""

from collections.abc import Iterator
from dataclasses import replace

from shardglass.layout import Layout, group_runs
from shardglass.lens.changes import SnapshotChange
from shardglass.lens.rows import PLAN, Held, MemoryRow
from shardglass.lens.snapshot import Snapshot
from shardglass.plan.kinds import OptimizerKind, PlannedOptions, StepShape
from shardglass.plan.memory import master_dtype, planned_bytes

STATE_FROM_THE_START = ("Adagrad",)
"""Classes of torch.optim that make their state with the optimizer, not at the first step."""


def planned_snapshot(
    layout: Layout,
    options: PlannedOptions,
    rank: int,
    *,
    optimizer: OptimizerKind,
    step: int,
    shape: StepShape | None,
) -> Snapshot:
    """What one rank of the native engine should hold between two steps.

    Args:
        layout: The layout by plan, of scheme "units".
        options: The engine's options by plan.
        rank: Whose.
        optimizer: Class and options of the optimizer.
        step: Steps that the training state has seen.
        shape: The steps that this process took; None if it took none yet, and then no bytes are planned, since buffers
            are made when they are first used.
    """
    has_state = step > 0 or optimizer.name in STATE_FROM_THE_START
    account = {} if shape is None else planned_bytes(layout, options, rank, optimizer=optimizer, shape=shape)
    return Snapshot(
        source=PLAN,
        engine="shardglass",
        stage=options.stage,
        rank=rank,
        world_size=layout.world_size,
        step=step,
        layout=layout,
        held=(*_weights(layout, options), *(_states(layout, options, rank, optimizer) if has_state else ())),
        memory=tuple(MemoryRow(category=category, nbytes=nbytes) for category, nbytes in account.items()),
    )


def against_plan(plan: Snapshot, live: Snapshot) -> tuple[SnapshotChange, ...]:
    """Every place where a live snapshot is not as planned; ``left`` is the plan's word, ``right`` what is there."""
    return plan.diff(live if plan.memory else replace(live, memory=()))


def _weights(layout: Layout, options: PlannedOptions) -> Iterator[Held]:
    """Parameters and master weights."""
    rules = options.rules
    for b, buffer in enumerate(layout.buffers):
        if not (rules.shards_params and buffer.trainable):  # those are gathered from the master weights
            numel = _numel(layout, b, cut=rules.shards_params)
            yield _held(b, "param", buffer.dtype, cut=rules.shards_params, numel=numel)
        if buffer.trainable:  # of whole fp32 parameters the master weights are a view
            numel = _numel(layout, b, cut=rules.shards_state)
            yield _held(b, "master", master_dtype(buffer.dtype), cut=rules.shards_state, numel=numel)


def _states(layout: Layout, options: PlannedOptions, rank: int, optimizer: OptimizerKind) -> Iterator[Held]:
    """The states of the optimizer that have a number per element."""
    cut = options.rules.shards_state
    for run in group_runs(layout, rank, whole=not cut):
        dtype = master_dtype(layout.buffers[run.buffer].dtype)
        for kind in optimizer.states(run.group):
            yield _held(run.buffer, kind, dtype, cut=cut, numel=run.stop - run.start, first=run.start)


def _numel(layout: Layout, b: int, *, cut: bool) -> int:
    buffer = layout.buffers[b]
    return buffer.shard_numel if cut else buffer.numel


def _held(buffer: int, kind: str, dtype: str, *, cut: bool, numel: int, first: int = 0) -> Held:
    return Held(buffer=buffer, kind=kind, dtype=dtype, cut=cut, first=first, numel=numel, attribute="", view=None)

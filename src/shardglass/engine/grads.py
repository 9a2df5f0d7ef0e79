"""Gradients, from autograd's hooks to this rank's shard of the mean.

Owns the counting of gradients, the order of reductions, accumulation over micro-batches and the two ways a user clears
gradients. Leaves the sum itself to ``comm`` and the step to ``optim``.

[Note: one backward] Each backward is a round. A gradient is copied into its buffer's flat as soon as autograd has
it, and its own memory is dropped. When all of a buffer's gradients are here, and every buffer behind it in forward
order was launched, its reduction starts while backward goes on. When backward ends, what is missing counts as zero
and is launched in the same order. A gradient that comes after its buffer was launched (a module used again under
reentrant checkpointing, a second backward) waits; at the end of the round all ranks exchange one row of numbers,
always, and a buffer that has late gradients on any rank is reduced once more by all. So the sequence of collectives
follows from the layout and that row alone.

[Note: local] Under ``no_sync`` a round communicates nothing: gradients are added to a whole buffer in the
accumulation dtype. The next round outside (or the step) reduces that sum.

[Note: cleared] What is accumulated counts as long as the optimizer's slices still have their ``.grad`` and the
parameters their placeholder: ``optimizer.zero_grad()`` and ``model.zero_grad()`` both take one of them away, and that
is how a clear is seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from shardglass.engine.buffers import ParamBuffer, owned_range, torch_dtype
from shardglass.engine.comm import Chained, Comm, Pending
from shardglass.engine.flat import FlatPool, WholeGrad
from shardglass.engine.sums import ShardSum
from shardglass.errors import CollectiveError, InvariantError, UsageError
from shardglass.options import REDUCTIONS_IN_FLIGHT, EngineOptions


class Phase(Enum):
    """Where one buffer is in the present round."""

    EMPTY = "no gradient yet"
    FILLING = "some gradients are here; the flat is owned by the hooks"
    LAUNCHED = "being reduced; the flat is owned by the collective"
    REDUCED = "the mean is in the shard; the flat is back in the pool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Extremes of one parameter's gradient in one micro-batch, before the reduction; read on failure only."""

    name: str
    micro_batch: int
    smallest: Tensor  # 0-d
    largest: Tensor  # 0-d

    def is_bad(self) -> bool:
        """Whether an element was inf or nan; waits for the device."""
        return not bool(torch.isfinite(self.smallest) & torch.isfinite(self.largest))


@dataclass(slots=True)
class Bucket:
    """The gradient side of one trainable buffer."""

    buffer: ParamBuffer
    wire: torch.dtype  # what travels
    accum: torch.dtype  # what micro-batches are added in
    phase: Phase = Phase.EMPTY
    arrived: set[int] = field(default_factory=set)  # parameters with a gradient in this round
    late: bool = False  # flat holds gradients that came after the launch
    flat: WholeGrad | None = None  # [numel] wire dtype, from the pool
    local: WholeGrad | None = None  # [numel] accum dtype: sums not yet reduced, see [Note: local]
    total: Tensor | None = None  # accum dtype: the accumulated mean, the optimizer's gradient
    total_full: bool = False  # whether ``total`` counts

    @property
    def has_local(self) -> bool:
        """Whether gradients wait in ``local``."""
        return self.local is not None and not self.local.is_empty

    @property
    def expected(self) -> int:
        """Parameters that get a gradient in a full backward."""
        return len(self.buffer.params)

    def form(self, dtype: torch.dtype) -> object:
        """What two flats must agree in to stand for each other."""
        spec = self.buffer.layout
        return dtype, spec.shard_numel, spec.offsets, tuple(p.numel for p in spec.params)


class Gradients:
    """All buckets of a model, in reduce order, and the rounds that fill them."""

    def __init__(self, buffers: Sequence[ParamBuffer], comm: Comm, options: EngineOptions) -> None:
        self._comm, self._options = comm, options
        self._pool = FlatPool(comm.device)
        self.buckets = [self._bucket(b) for b in reversed(buffers) if b.layout.trainable]
        self._next = 0  # index of the next bucket to launch in this round
        self._flying: list[tuple[Bucket, Pending, Tensor]] = []
        self._settling: list[Chained] = []
        self.in_round = False
        self._round_is_local = False
        self.local_mode = False  # set by no_sync
        self.step = 0
        self.micro_batch = 0  # rounds since the last step
        self.observations: list[Observation] = []
        self.note = 0  # a number of the caller's that ranks exchange at the end of a round
        self.notes: list[int] = []  # of every rank, of the last round
        self.flag = 0  # 1: this rank wants all to know of something at the end of a round
        self.flagged = False  # whether any rank wanted that, in the last round
        self._on_total: Callable[[Bucket], None] = _nothing

    def _bucket(self, buffer: ParamBuffer) -> Bucket:
        dtype = torch_dtype(buffer.layout.dtype)
        reduce_dtype = self._options.reduce_dtype
        accum = torch.promote_types(torch_dtype(self._options.accum_dtype), dtype)
        if self._options.accum_dtype != "float32" and dtype == torch.float32:
            accum = torch.float32
        return Bucket(buffer=buffer, wire=torch_dtype(reduce_dtype) if reduce_dtype else dtype, accum=accum)

    def on_total(self, callback: Callable[[Bucket], None]) -> None:
        """Call back when a bucket's accumulated mean changed, so that the optimizer's slices show it."""
        self._on_total = callback

    # ---- arrival ----

    def arrive(self, bucket: Bucket, k: int, param: nn.Parameter) -> None:
        """Take one gradient from autograd; called after it was accumulated in ``param.grad``."""
        grad = param.grad
        if grad is None:
            return
        if grad.requires_grad:
            raise UsageError(
                f"{bucket.buffer.layout.params[k].name}: backward(create_graph=True) needs whole gradients that stay "
                "alive; sharded training does not support it"
            )
        if grad.is_sparse:
            raise UsageError(
                f"{bucket.buffer.layout.params[k].name} gets a sparse gradient; make its embedding with sparse=False"
            )
        self.open_round()
        if bucket.phase in (Phase.LAUNCHED, Phase.REDUCED):
            bucket.late = True
        self._observe(bucket, k, grad)
        in_local = self._round_is_local or bucket.has_local
        self._place(bucket, local=in_local).add(k, grad)
        param.grad = None
        bucket.arrived.add(k)
        if bucket.phase is Phase.EMPTY:
            bucket.phase = Phase.FILLING
        if not self._round_is_local:
            self._advance()

    def open_round(self) -> None:
        """Begin a round if none is open."""
        if not self.in_round:
            self.in_round = True
            self._round_is_local = self.local_mode
            self._next = 0
            self._comm.position = f"step {self.step}, micro-batch {self.micro_batch}, backward"

    def _place(self, bucket: Bucket, *, local: bool) -> WholeGrad:
        """Where gradients go in this round; allocated when the first one comes."""
        buffer, numel, device = bucket.buffer, bucket.buffer.layout.numel, self._comm.device
        if local:
            if bucket.local is None:
                zeros = torch.zeros(numel, dtype=bucket.accum, device=device)
                bucket.local = WholeGrad(zeros, buffer, self._comm.scratch)
            return bucket.local
        if bucket.flat is None:
            taken = self._pool.take(bucket.form(bucket.wire), numel, bucket.wire)
            bucket.flat = WholeGrad(taken, buffer, self._comm.scratch)
        return bucket.flat

    def _observe(self, bucket: Bucket, k: int, grad: Tensor) -> None:
        """Remember the extremes of a gradient: inf and nan show in them, and nothing waits for the device."""
        if grad.numel():
            low, high = torch.aminmax(grad)
            name = bucket.buffer.layout.params[k].name
            self.observations.append(Observation(name=name, micro_batch=self.micro_batch, smallest=low, largest=high))

    # ---- launching ----

    def _advance(self) -> None:
        """Launch every complete bucket whose turn it is."""
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.phase is not Phase.FILLING or len(bucket.arrived) < bucket.expected:
                return
            self._launch(bucket)
            self._next += 1

    def launch_passed(self, ahead: set[str]) -> None:
        """Launch the buckets whose turn it is and whose units are not ahead in this backward; missing is zero."""
        if not self.in_round or self._round_is_local:
            return
        while self._next < len(self.buckets) and self.buckets[self._next].buffer.layout.unit not in ahead:
            self._launch(self.buckets[self._next])
            self._next += 1

    def _launch(self, bucket: Bucket) -> None:
        """Start the reduction of what the bucket has; missing gradients count as zero."""
        while len(self._flying) >= REDUCTIONS_IN_FLIGHT:
            self._finish_oldest()
        flat = self._outgoing(bucket)
        spec = bucket.buffer.layout
        stage = self._options.rules
        if bucket.total is None:
            low, high = owned_range(spec, self._comm.rank, stage)
            bucket.total = torch.zeros(high - low, dtype=bucket.accum, device=self._comm.device)
        scale = 1.0 / self._comm.world_size
        if stage.shards_state:
            into = ShardSum(out=bucket.total, scale=scale, add=bucket.total_full)
            pending = self._comm.reduce_shard(bucket.buffer.index, spec.key, flat, into)
        else:
            own = slice(self._comm.rank * spec.shard_numel, (self._comm.rank + 1) * spec.shard_numel)
            out = bucket.total[own] if self._comm.direct else bucket.total
            into = ShardSum(out=out, scale=scale, add=bucket.total_full)
            pending = self._comm.reduce_whole(bucket.buffer.index, spec.key, flat, into, bucket.total)
        bucket.phase, bucket.late, bucket.flat = Phase.LAUNCHED, False, None
        self._flying.append((bucket, pending, flat))

    def _outgoing(self, bucket: Bucket) -> Tensor:
        """What to reduce, in the wire dtype: the local sum if there is one, else this round's flat."""
        if not bucket.has_local or bucket.local is None:
            return self._place(bucket, local=False).complete()
        total = bucket.local.complete()
        return total if bucket.accum == bucket.wire else self._place(bucket, local=False).tensor.copy_(total)

    def _finish_oldest(self) -> None:
        """Wait for the oldest reduction and give its flat back."""
        bucket, pending, flat = self._flying.pop(0)
        pending.wait()
        if isinstance(pending, Chained):
            self._settling.append(pending)
        if bucket.local is None or flat is not bucket.local.tensor:
            self._pool.give(bucket.form(bucket.wire), flat)
        bucket.total_full = True
        bucket.phase = Phase.REDUCED

    # ---- the end of a round ----

    def finish_round(self) -> None:
        """End the present backward; collective unless the round is local.

        Raises:
            CollectiveError: Ranks are in different steps or micro-batches.
        """
        if not self.in_round:
            return
        if not self._round_is_local:
            self._flush()
        self.in_round = False
        self.micro_batch += 1
        for bucket in self.buckets:
            bucket.phase = Phase.EMPTY
            bucket.arrived.clear()
            self._on_total(bucket)

    def reduce_local(self) -> None:
        """Reduce what ``no_sync`` rounds left, as the step is due; collective.

        Ranks agree first, since only some may have had a gradient.
        """
        left = [int(bucket.has_local) for bucket in self.buckets]
        if not any(any(row) for row in self._comm.exchange_numbers("local gradient sums", left)):
            return
        self.open_round()
        self._round_is_local = False
        self._flush()
        self.in_round = False
        for bucket in self.buckets:
            bucket.phase = Phase.EMPTY
            self._on_total(bucket)

    def _flush(self) -> None:
        """Launch what is missing, then what is late on any rank, and wait for all."""
        while self._next < len(self.buckets):
            self._launch(self.buckets[self._next])
            self._next += 1
        row = [self.step, self.micro_batch, self.note, self.flag] + [int(b.late) for b in self.buckets]
        rows = self._comm.exchange_numbers("late gradients", row)
        self._check_together([r[:2] for r in rows])
        self.notes = [r[2] for r in rows]
        self.flagged = any(r[3] for r in rows)
        for b, bucket in enumerate(self.buckets):
            if any(r[4 + b] for r in rows):
                self._wait_for(bucket)
                self._launch(bucket)
        while self._flying:
            self._finish_oldest()
        for chained in self._settling:
            chained.settle()
        self._settling.clear()
        if self._options.rules.shards_params:  # who shards parameters wants memory more than the time of new pages
            self._pool.clear()
            self._comm.release()

    def _wait_for(self, bucket: Bucket) -> None:
        """End a bucket's reduction before its second one, which adds to the same shard."""
        while any(flying is bucket for flying, _, _ in self._flying):
            self._finish_oldest()
        for chained in self._settling:
            chained.settle()
        self._settling.clear()

    def _check_together(self, places: Sequence[Sequence[int]]) -> None:
        """Refuse to add gradients of different micro-batches."""
        if any(place != places[0] for place in places):
            listed = "; ".join(f"rank {r}: step {s}, micro-batch {m}" for r, (s, m) in enumerate(places))
            raise CollectiveError(
                f"ranks are at different places: {listed}. Every rank must call backward() and step() equally often; "
                "look for a loop that ends earlier on some ranks, such as a data loader of another length"
            )

    # ---- clearing ----

    def drop(self) -> None:
        """Forget everything accumulated since the last step; ends an open round first so that ranks stay together."""
        self.finish_round()
        self.forget()

    def abandon(self) -> None:
        """End the round of a backward that broke off, or did not begin, on every rank; collective."""
        self.open_round()
        self._round_is_local = False
        self.finish_round()
        self.micro_batch = 0

    def forget(self) -> None:
        """What is accumulated does not count any more."""
        for bucket in self.buckets:
            bucket.total_full = False
            if bucket.local is not None:
                bucket.local.forget()

    def next_step(self) -> None:
        """The step was taken or skipped: the next gradients are new."""
        self.forget()
        self.observations.clear()
        self.step += 1
        self.micro_batch = 0

    def bad_gradients(self, rank: int) -> list[str]:
        """Name this rank's gradients that were inf or nan since the last step; waits for the device."""
        return [
            f"rank {rank}, {seen.name}, micro-batch {seen.micro_batch}" for seen in self.observations if seen.is_bad()
        ]

    def tensors(self) -> list[Tensor]:
        """Every gradient tensor it holds, for the memory account."""
        held: list[Any] = [*self._pool.tensors()]
        for bucket in self.buckets:
            held += [bucket.total, bucket.local.tensor if bucket.local is not None else None]
        return [t for t in held if t is not None]


def _nothing(bucket: Bucket) -> None:
    """Default of ``on_total``."""
    raise InvariantError(f"nobody takes the gradients of {bucket.buffer.layout.key}")

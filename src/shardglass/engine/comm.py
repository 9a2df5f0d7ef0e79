"""Every collective of the engine.

Owns the form a collective takes on each backend, the record of what each rank is in, and the errors of a collective
that fails. Leaves the raw calls to ``links``, and to the callers the order: it must be the same on all ranks, see
[Note: order].

[Note: order] Ranks match collectives by their order (NCCL) or by tag (gloo's point to point, where the tag is the
kind and the buffer). Callers launch reductions in reverse layout order, gathers after a step in layout order, and
gathers before use in the sequence of ``order``: never in the order hooks fire.

[Note: forms] On NCCL the single-tensor collectives. On gloo a direct exchange: every rank sends each peer its shard
of the buffer and receives its own shard from each peer: (n - 1) / n of the buffer each way, as a ring, in one hop,
without the intermediate sums of gloo's own reduce_scatter. The parts are added in rank order in
the accumulation dtype, so the sum does not depend on timing, and bfloat16 gradients lose nothing between ranks.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardglass.engine import board
from shardglass.engine.circle import Wait
from shardglass.engine.links import Links
from shardglass.engine.sums import Scratch, ShardSum, sum_parts
from shardglass.engine.watch import Watch
from shardglass.errors import CollectiveError, ShardglassError

log = logging.getLogger(__name__)

REDUCE, GATHER, GATHER_GRADS = range(3)
MESSAGE_BYTES = 16 << 20
"""Largest point-to-point message: gloo overlaps the messages of one exchange."""


@dataclass(slots=True)
class Record:
    """What one collective is for; kept for the error text and the profiler."""

    kind: str
    what: str
    where: str
    series: str  # collectives of one series match each other, across ranks, in the order they are started
    number: int  # which one of its series, from 1
    started: float
    finished: float | None = None

    @property
    def name(self) -> str:
        """What it is, of what, and when."""
        return f"{self.kind} of {self.what} at {self.where}"

    def __str__(self) -> str:
        return f"{self.name} ({'finished' if self.finished is not None else 'started, not finished'})"


class Pending:
    """A collective in flight: its works, its buffers and what remains to do when the data is here."""

    def __init__(self, comm: "Comm", record: Record, works: Sequence[Any], then: Callable[[], None] | None) -> None:
        self._comm, self._record, self._works, self._then = comm, record, works, then
        comm.watch(record, works)

    def wait(self) -> None:
        """Block until it is done, then run what remains; legal once.

        Raises:
            CollectiveError: It failed or did not end in time; names the rank and what it was for.
        """
        with self._comm.guard(self._record, ends=True):
            for work in self._works:
                work.wait()
        if self._then is not None:
            self._then()

    def __repr__(self) -> str:
        return f"Pending({self._record})"


class Comm:
    """The engine's own process groups and its collectives.

    The ranks are counted from 0 in the group it works over; ``links`` carries the data.
    """

    def __init__(self, device: torch.device, timeout_s: float, links: Links) -> None:
        self._links = links
        self.rank, self.world_size, self.backend = links.rank, links.world_size, links.backend
        self.device = device
        self.timeout_s = timeout_s
        self.direct = self.backend == "gloo"
        self._watch = None if self.direct else Watch(timeout_s, self._report_late)
        self.position = "start"
        self.waiting: tuple[Record, float] | None = None  # the collective this rank blocks in, and since when
        self.last_started: Record | None = None
        self.last_finished: Record | None = None
        self.scratch = Scratch(device)
        self._receive: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._started: dict[str, int] = {}  # by series, collectives so far
        self._board = self._make_board()

    def _make_board(self) -> board.Board | None:
        """What says who waits for whom; None for one rank, or where nobody could read it."""
        store = self._links.board() if self.world_size > 1 else None
        if store is None:
            return None
        pace = board.Pace(poll_s=board.POLL_S, patience_s=board.PATIENCE_S)
        where = self._where_for_others
        return board.Board(store, self.rank, self.world_size, where, pace=pace, fail=self._links.break_off)

    def verdict(self) -> str | None:
        """What was said of ranks that wait for each other for ever; None if nothing was."""
        return None if self._board is None else self._board.verdict()

    def close(self) -> None:
        """End the watch and give the groups back."""
        if self._board is not None:
            self._board.close()
        if self._watch is not None:
            self._watch.close()
        self._links.close()

    @property
    def control(self) -> Any:
        """The gloo group for what is agreed on the host."""
        return self._links.control

    def begin(self, kind: str, what: str, series: str) -> Record:
        """Note that this rank enters a collective, the next one of its series."""
        number = self._started[series] = self._started.get(series, 0) + 1
        record = Record(kind, what, self.position, series, number, time.monotonic())
        self.last_started = record
        return record

    def guard(self, record: Record, *, ends: bool) -> "_Guard":
        """Turn a failure inside into a CollectiveError that says where this rank was; ``ends`` notes the end."""
        return _Guard(self, record, ends=ends)

    def watch(self, record: Record, works: Sequence[Any]) -> None:
        """Have a collective in flight reported if it does not end in time."""
        if self._watch is not None:
            self._watch.add(str(record), works)

    def _report_late(self, what: str, age: float) -> None:
        log.error("rank %d: the %s has not ended after %.0f s; %s", self.rank, what, age, self.where())

    def _where_for_others(self) -> board.Position:
        """Where this rank is, as the board takes it; called on the board's thread."""
        now, waiting, last = time.monotonic(), self.waiting, self.last_finished
        ended = "none" if last is None else last.name
        if waiting is not None:
            record, since = waiting
            wait = None
            if now - since >= board.POLL_S:
                started = dict(self._started)
                wait = Wait(what=record.name, series=record.series, number=record.number, started=started)
            return board.Position(waits_in=record.name, since_s=now - since, last=ended, wait=wait)
        finished = last.finished if last is not None else None
        return board.Position(waits_in=None, since_s=now - finished if finished is not None else 0.0, last=ended)

    def where(self) -> str:
        """One line: the last collective started and the last finished on this rank."""
        return f"rank {self.rank}: last started: {self.last_started}; last finished: {self.last_finished}"

    # ---- tensors of the model's device ----

    def reduce_shard(self, buffer: int, what: str, flat: Tensor, into: ShardSum) -> Pending:
        """Sum a whole buffer over ranks; this rank's shard of the mean is added to or put in ``into``.

        Args:
            buffer: Index of the buffer, the tag of the exchange.
            what: Its readable name.
            flat: [numel] in the reduce dtype; must not change until waited for.
            into: Where the shard of the mean goes.
        """
        record = self.begin("reduce-scatter", what, self._series(REDUCE, buffer))
        shard = flat.numel() // self.world_size
        if self.direct:
            with self.guard(record, ends=False):
                received = self._take_receive(flat, shard)
                works = []
                for k, peer, source in self._peers():
                    works += self._post(
                        flat[peer * shard : (peer + 1) * shard], peer, self._tag(REDUCE, buffer), send=True
                    )
                    works += self._post(received[k], source, self._tag(REDUCE, buffer), send=False)
            own = flat[self.rank * shard : (self.rank + 1) * shard]

            def finish() -> None:
                parts = {source: received[k] for k, _, source in self._peers()} | {self.rank: own}
                sum_parts([parts[r] for r in range(self.world_size)], into, self.scratch)
                self._receive.setdefault((shard, flat.dtype), []).extend(received)

            return Pending(self, record, works, finish)
        with self.guard(record, ends=False):
            out = flat.new_empty(shard)
            work = self._links.reduce_scatter(out, flat)
        return Pending(self, record, [work], lambda: sum_parts([out], into, self.scratch))

    def reduce_whole(self, buffer: int, what: str, flat: Tensor, into: ShardSum, whole: Tensor) -> Pending:
        """As ``reduce_shard``, with the mean wanted whole on every rank (stage 0).

        On gloo ``into.out`` must be this rank's shard of ``whole``: the summed shards are gathered in place, so
        every stage computes the same bits. On NCCL one all_reduce, and ``into.out`` must be ``whole`` itself.
        """
        if self.direct:
            first = self.reduce_shard(buffer, what, flat, into)
            return Chained(first, lambda: self.gather(buffer, what, whole, kind=GATHER_GRADS))
        record = self.begin("all-reduce", what, self._series(REDUCE, buffer))
        with self.guard(record, ends=False):
            work = self._links.all_reduce(flat)
        return Pending(self, record, [work], lambda: sum_parts([flat], into, self.scratch))

    def gather(self, buffer: int, what: str, whole: Tensor, *, kind: int = GATHER) -> Pending:
        """Fill ``whole`` [numel] from every rank's shard of it, in place."""
        record = self.begin("all-gather", what, self._series(kind, buffer))
        shard = whole.numel() // self.world_size
        own = whole[self.rank * shard : (self.rank + 1) * shard]
        with self.guard(record, ends=False):
            if not self.direct:
                work = self._links.all_gather(whole, own)
                return Pending(self, record, [work], None)
            works = []
            tag = self._tag(kind, buffer)
            for _, peer, source in self._peers():
                works += self._post(own, peer, tag, send=True)
                works += self._post(whole[source * shard : (source + 1) * shard], source, tag, send=False)
            return Pending(self, record, works, None)

    def broadcast(self, what: str, tensor: Tensor, source: int = 0) -> None:
        """Give every rank the tensor of rank ``source``, in place."""
        record = self.begin("broadcast", what, "broadcast" if self.direct else "data")
        with self.guard(record, ends=True):
            self._links.broadcast(tensor, source)

    # ---- host decisions ----

    def sum_scalar(self, what: str, value: float) -> float:
        """The sum of one number over ranks in fp64; the same bits on every rank."""
        return float(sum(self.exchange(what, value)))

    def read(self, number: Tensor) -> float:
        """A 0-d tensor as a number of Python; waits for the device."""
        return self._links.read(number)

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Every rank's small picklable value, by rank."""
        record = self.begin("exchange", what, "control")
        with self.guard(record, ends=True):
            return self._links.objects(value)

    def exchange_numbers(self, what: str, row: Sequence[int]) -> list[list[int]]:
        """Every rank's row of integers, by rank; rows must be of one length."""
        record = self.begin("exchange", what, "control")
        with self.guard(record, ends=True):
            return self._links.rows(row)

    # ---- the direct exchange ----

    def _peers(self) -> list[tuple[int, int, int]]:
        """(k, rank to send to, rank to receive from) for each step of the exchange; no rank is everybody's first."""
        n = self.world_size
        return [(d - 1, (self.rank + d) % n, (self.rank - d) % n) for d in range(1, n)]

    def _tag(self, kind: int, buffer: int) -> int:
        return buffer * 4 + kind

    def _series(self, kind: int, buffer: int) -> str:
        """What a collective is matched within: its tag on gloo, the order in its group on NCCL."""
        if self.direct:
            return str(self._tag(kind, buffer))
        return "gathers" if kind == GATHER else "data"

    def _post(self, tensor: Tensor, peer: int, tag: int, *, send: bool) -> list[Any]:
        """Start sending or receiving a run of elements in messages of limited size."""
        step = max(1, MESSAGE_BYTES // tensor.element_size())
        move = self._links.send if send else self._links.receive
        return [move(part, peer, tag) for part in tensor.split(step)]

    def _take_receive(self, flat: Tensor, shard: int) -> list[Tensor]:
        """Buffers to receive the peers' parts in, reused."""
        free = self._receive.setdefault((shard, flat.dtype), [])
        count = self.world_size - 1
        taken = [free.pop() for _ in range(min(count, len(free)))]
        return taken + [flat.new_empty(shard) for _ in range(count - len(taken))]

    def release(self) -> None:
        """Let go of the buffers that parts were received in; no reduction is under way."""
        self._receive.clear()

    def buffer_tensors(self) -> list[Tensor]:
        """The tensors it keeps, for the memory account."""
        return [*self.scratch.tensors(), *(t for free in self._receive.values() for t in free)]


class Chained(Pending):
    """A collective that starts a second one when it is done; ``wait`` ends the first, ``settle`` both."""

    def __init__(self, first: Pending, then: Callable[[], Pending]) -> None:
        self._first, self._start, self._second = first, then, None

    def wait(self) -> None:
        """End the first and start the second."""
        self._first.wait()
        self._second = self._start()

    def settle(self) -> None:
        """End the second."""
        if self._second is not None:
            self._second.wait()
            self._second = None

    _second: Pending | None

    def __repr__(self) -> str:
        return f"Chained({self._first!r})"


class _Guard:
    """Context of one collective: a plain error of the backend becomes ours, with rank, unit and step."""

    def __init__(self, comm: Comm, record: Record, *, ends: bool) -> None:
        self._comm, self._record, self._ends = comm, record, ends

    def __enter__(self) -> None:
        self._comm.waiting = (self._record, time.monotonic())

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._comm.waiting = None
        if error is None:
            if self._ends:
                self._record.finished = time.monotonic()
                self._comm.last_finished = self._record
        elif isinstance(error, (RuntimeError, ValueError)) and not isinstance(error, ShardglassError):
            comm, record = self._comm, self._record
            waited = time.monotonic() - record.started
            verdict = comm.verdict()
            if verdict is not None:
                raise CollectiveError(verdict, is_shared=True) from error
            raise CollectiveError(
                f"rank {comm.rank}: the {record.name} failed after {waited:.1f} s: "
                f"{error}. Either another rank ended (look for the first error of all ranks) or it took another path "
                f"and never came here; last finished here: {comm.last_finished}"
            ) from error

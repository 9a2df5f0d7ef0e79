"""What carries data between ranks: the calls of torch.distributed, or nothing in a simulation.

Owns process groups and every raw call to them. ``comm`` alone calls this module; form, order, records and errors of a
collective are its work, and the same in a simulation.
"""

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from shardglass.errors import CollectiveError, UsageError

log = logging.getLogger(__name__)

_UNUSED_TAG = 1 << 30  # of a message that nobody sends


class Links(Protocol):
    """Ways from this rank to the others. What returns a work is asynchronous: it has ``wait`` and ``is_completed``."""

    rank: int
    world_size: int
    backend: str  # "nccl" or "gloo"
    data: Any  # the group that carries tensors
    control: Any  # a gloo group for what is agreed on the host, so that agreeing on a flag never drains a GPU

    def send(self, tensor: Tensor, peer: int, tag: int) -> Any:
        """Start sending to one rank."""

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Any:
        """Start receiving from one rank, in place."""

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Any:
        """Start summing ``whole`` over ranks; ``out`` gets this rank's shard of the sum."""

    def all_reduce(self, whole: Tensor) -> Any:
        """Start summing over ranks, in place."""

    def all_gather(self, whole: Tensor, own: Tensor) -> Any:
        """Start filling ``whole`` with every rank's ``own``."""

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give every rank the tensor of one, in place."""

    def objects(self, value: Any) -> list[Any]:
        """Every rank's picklable value."""

    def rows(self, row: Sequence[int]) -> list[list[int]]:
        """Every rank's row of whole numbers; rows are of one length."""

    def read(self, number: Tensor) -> float:
        """A 0-d tensor as a number of Python; waits for the device."""

    def board(self) -> Any:
        """A store in which ranks may write where they are, with keys of this group's own; None if there is none."""

    def break_off(self) -> None:
        """Fail whatever this rank waits in; from another thread. The links are of no use afterwards."""

    def close(self) -> None:
        """Give the groups back."""


class GroupLinks:
    """Links over process groups of the engine's own, with exactly the ranks of the group given.

    [Note: gathers apart] Where parameters are gathered during backward, gathers and reductions each have an order that
    ranks share, and how the two interleave may differ: a rank that skips a layer reduces its zeros later. NCCL needs
    one order for each communicator, so gathers get one of their own. gloo matches messages by their tags.
    """

    def __init__(
        self, device: torch.device, timeout_s: float, group: dist.ProcessGroup | None, *, gathers_apart: bool = False
    ) -> None:
        """Make the groups; collective.

        Args:
            device: Where tensors are; decides the backend.
            timeout_s: Seconds after which a collective fails.
            group: Its ranks take part; None is all ranks.
            gathers_apart: See [Note: gathers apart].

        Raises:
            UsageError: torch.distributed is not initialised, or this process is not in the group.
            CollectiveError: Another rank did not come.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise UsageError(
                "torch.distributed is not initialised: start the program with torchrun (or python -m "
                "torch.distributed.run) and call torch.distributed.init_process_group() before shard()"
            )
        self._ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self.rank, self.world_size = dist.get_rank(group), len(self._ranks)
        if self.rank < 0:
            raise UsageError(
                f"this process, rank {dist.get_rank()}, is not in the process_group given to shard(), which has ranks "
                f"{self._ranks}: call shard() on those alone"
            )
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=timeout_s)
        # NCCL's own watchdog ends the process; ours must have spoken before.
        longer = timeout if self.backend == "gloo" else timeout + timedelta(seconds=30)
        self.data = self._new_group(self.backend, longer)
        apart = gathers_apart and self.backend == "nccl"
        self._gathers = self._new_group(self.backend, longer) if apart else self.data
        self.control = self._new_group("gloo", timeout)

    def _new_group(self, backend: str, timeout: timedelta) -> Any:
        try:
            return dist.new_group(self._ranks, backend=backend, timeout=timeout)
        except RuntimeError as error:  # torch's own: the store gave up waiting, or a connection broke
            raise CollectiveError(
                f"rank {self.rank}: the ranks could not meet in shard(): {str(error).splitlines()[0]}. Another rank "
                "ended or never called shard(); look for the first error of all ranks"
            ) from error

    def send(self, tensor: Tensor, peer: int, tag: int) -> Any:
        """Start sending to one rank."""
        return dist.isend(tensor, self._ranks[peer], group=self.data, tag=tag)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Any:
        """Start receiving from one rank, in place."""
        return dist.irecv(tensor, self._ranks[peer], group=self.data, tag=tag)

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Any:
        """Start summing over ranks."""
        return dist.reduce_scatter_single(out, whole, group=self.data, async_op=True)

    def all_reduce(self, whole: Tensor) -> Any:
        """Start summing over ranks, in place."""
        return dist.all_reduce(whole, group=self.data, async_op=True)

    def all_gather(self, whole: Tensor, own: Tensor) -> Any:
        """Start filling ``whole``."""
        return dist.all_gather_single(whole, own, group=self._gathers, async_op=True)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give every rank the tensor of one."""
        dist.broadcast(tensor, src=self._ranks[source], group=self.data)

    def objects(self, value: Any) -> list[Any]:
        """Every rank's picklable value."""
        out: list[Any] = [None] * self.world_size
        dist.all_gather_object(out, value, group=self.control)
        return out

    def rows(self, row: Sequence[int]) -> list[list[int]]:
        """Every rank's row of numbers."""
        mine = torch.tensor(row, dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(rows, mine, group=self.control)
        return [r.tolist() for r in rows]

    def read(self, number: Tensor) -> float:
        """A 0-d tensor as a number."""
        return float(number)

    def board(self) -> Any:
        """The store that the groups met in, over a connection of its own: another thread may wait in the first."""
        try:
            store: Any = dist.distributed_c10d._get_default_store()
            while isinstance(store, c10d.PrefixStore):
                store = store.underlying_store
            return c10d.PrefixStore(f"shardglass/board/{self.control.group_name}", store.clone())
        except (AttributeError, NotImplementedError, RuntimeError):  # a store that cannot, or another release of torch
            return None

    def break_off(self) -> None:
        """Fail whatever waits.

        gloo has no call for it (its ``abort`` wakes nobody), but a receive that times out closes the connections of
        its group, and whatever waits on them fails, here and at the peers.
        """
        for group in dict.fromkeys((self.data, self._gathers, self.control)):
            try:
                if group is self.control or self.backend == "gloo":
                    peer = self._ranks[(self.rank + 1) % self.world_size]
                    work: Any = dist.irecv(torch.empty(1), peer, group=group, tag=_UNUSED_TAG)
                    work.wait(timedelta(milliseconds=1))
                else:
                    group.abort()
            except RuntimeError as error:
                log.debug("rank %d: broken off: %s", self.rank, error)

    def close(self) -> None:
        """Give the groups back."""
        for group in dict.fromkeys((self.data, self._gathers, self.control)):
            dist.destroy_process_group(group)
        self.data = self._gathers = self.control = (
            None  # the last references: connections end now, and peers that wait are told
        )


class GroupApart:
    """The ranks of a group over a gloo group of its own, for a thread beside training.

    Nothing that training does waits for it, and its collectives meet none of training's.
    """

    def __init__(self, group: Any, timeout_s: float) -> None:
        """Make the group; collective.

        Args:
            group: The ranks.
            timeout_s: Seconds that a rank may be late to an agreement.
        """
        members = dist.get_process_group_ranks(group)
        self.rank, self.world_size = dist.get_rank(group), len(members)
        self._group: Any = dist.new_group(members, backend="gloo", timeout=timedelta(seconds=timeout_s))

    @property
    def host_group(self) -> dist.ProcessGroup:
        """The group."""
        group: dist.ProcessGroup = self._group
        return group

    def agree(self, what: str, value: Any) -> list[Any]:
        """Every rank's small picklable value, by rank; collective."""
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def close(self) -> None:
        """Give the group back."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


class _Done:
    """A work of the simulation."""

    def wait(self) -> bool:
        """There is nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """It always is."""
        return True


class SimulatedLinks:
    """One rank among ``world_size`` that are not there: nothing moves, and every rank answers as this one.

    Under fake tensors the engine then allocates what it would allocate in a real run.
    """

    data: Any = None
    control: Any = None

    def __init__(self, rank: int, world_size: int, backend: str) -> None:
        self.rank, self.world_size, self.backend = rank, world_size, backend

    def send(self, tensor: Tensor, peer: int, tag: int) -> Any:
        """Nothing moves."""
        return _Done()

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Any:
        """Nothing moves."""
        return _Done()

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Any:
        """Nothing moves."""
        return _Done()

    def all_reduce(self, whole: Tensor) -> Any:
        """Nothing moves."""
        return _Done()

    def all_gather(self, whole: Tensor, own: Tensor) -> Any:
        """Nothing moves."""
        return _Done()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Nothing moves."""

    def objects(self, value: Any) -> list[Any]:
        """As if every rank had the same."""
        return [value] * self.world_size

    def rows(self, row: Sequence[int]) -> list[list[int]]:
        """As if every rank had the same."""
        return [list(row)]

    def read(self, number: Tensor) -> float:
        """A fake tensor has no value; this one is finite and needs no clipping."""
        return 0.0

    def board(self) -> Any:
        """Nobody is there to read it."""
        return None

    def break_off(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """There is nothing to give back."""

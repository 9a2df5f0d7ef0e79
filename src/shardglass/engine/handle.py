"""What a user holds of a sharded model: the Handle that ``shard()`` returns.

Owns the public face of the engine.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardglass.engine import registry
from shardglass.engine.buffers import ParamBuffer
from shardglass.engine.inventory import HeldTensor, bytes_by_category, inventory, tensors_by_category
from shardglass.engine.links import GroupApart
from shardglass.engine.optim import OwnedRun
from shardglass.engine.parts import Parts
from shardglass.engine.runtime import Runtime
from shardglass.engine.state import Piece, StateKind, TrainingState, copied_state
from shardglass.engine.units import Named, parameters_named
from shardglass.errors import UsageError
from shardglass.layout import Layout, params_in_partition, params_not_in_partition
from shardglass.layout.line import rank_line
from shardglass.options import EngineOptions


class Handle:
    """A sharded model and its optimizer.

    Attributes:
        layout: Which rank holds which slice of which tensor.
        options: The options it was made with.
    """

    def __init__(
        self, *, model: nn.Module, options: EngineOptions, layout: Layout, parts: Parts, runtime: Runtime
    ) -> None:
        self.layout, self.options = layout, options
        self._model, self._parts, self._runtime = model, parts, runtime
        self._state = TrainingState(layout, parts.buffers, parts.grads, parts.shards, parts.comm, options)
        self._closed = False

    @property
    def rank(self) -> int:
        """This process's rank in the group it shards over."""
        return self._parts.comm.rank

    @property
    def world_size(self) -> int:
        """Number of ranks it shards over."""
        return self._parts.comm.world_size

    @property
    def backend(self) -> str:
        """What carries tensors between ranks: "nccl" or "gloo"."""
        return self._parts.comm.backend

    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm of the last step before clipping; None before the first."""
        return self._parts.shards.grad_norm

    @property
    def clipped_grad_norm(self) -> float | None:
        """Global gradient norm the last step was taken with."""
        return self._parts.shards.clipped_grad_norm

    @property
    def step_skipped(self) -> bool:
        """Whether the last ``optimizer.step()`` was skipped because of inf or nan; then do not step the scheduler."""
        return self._parts.shards.step_skipped

    @property
    def steps_skipped(self) -> int:
        """Number of steps skipped so far."""
        return self._parts.shards.steps_skipped

    @property
    def last_nonfinite(self) -> tuple[str, ...]:
        """Rank, parameter and micro-batch of each bad gradient of the last skipped step."""
        return self._parts.shards.last_nonfinite

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the accumulated gradients so that their global L2 norm is at most ``max_norm``; collective.

        Returns:
            The norm before, a 0-d fp32 tensor, equal on all ranks; computed in fp64 to a relative 1e-6.
        """
        self._check_usable()
        if not max_norm >= 0:
            raise UsageError(f"clip_grad_norm_({max_norm}): the norm must be 0 or above")
        self._runtime.prepare_step()
        norm = self._parts.shards.clip(self._parts.grads, float(max_norm))
        return torch.tensor(norm, dtype=torch.float32, device=self._parts.comm.device)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """In it, backward adds gradients up on each rank and communicates nothing.

        The next backward outside, or the step, reduces the sum. Costs a whole gradient in the accumulation dtype a
        rank.
        """
        self._check_usable()
        grads = self._parts.grads
        before, grads.local_mode = grads.local_mode, True
        try:
            yield
        finally:
            grads.local_mode = before

    def zero_grad(self) -> None:
        """Forget every gradient since the last step, as ``optimizer.zero_grad()`` and ``model.zero_grad()`` do."""
        self._runtime.clear()

    def compile_units(self, **options: Any) -> int:
        """Compile the forward of every block with ``torch.compile``, so that reductions still overlap backward.

        A whole model compiled by ``torch.compile(model)`` trains right too, cut at every block; what lies between the
        cuts is compiled.

        Args:
            options: Of ``torch.compile``, such as ``backend``, ``mode`` and ``dynamic``.

        Returns:
            The number of blocks; 0 if the model has none.
        """
        self._check_usable()
        return self._runtime.compile_units(**options)

    def abandon_step(self) -> None:
        """Forget the gradients of a step that failed on every rank, out of memory for instance; collective.

        Ranks may have failed at different places of backward: what one has reduced already, all reduce.
        """
        self._check_usable()
        self._runtime.break_off()
        self._parts.grads.abandon()
        self._runtime.clear()

    def break_off(self) -> None:
        """Let the other ranks go on with a forward or backward that failed on this one, out of memory for instance.

        They come further and fail there too, as ranks do that run out of memory at different blocks; then all call
        ``abandon_step``. A rank that ends its backward instead waits there for the others' gradients, and the run ends
        with an error at the timeout. Where parameters are whole nobody waits in forward, and this does nothing.
        """
        self._check_usable()
        self._runtime.break_off()

    def wait(self) -> None:
        """Make sure raw reads of parameters see the last step; forwards and ``state_dict()`` do this by themselves."""
        self._parts.gathers.settle()

    @contextmanager
    def gathered(self, what: Named = None, *, modifier_rank: int | None = None) -> Iterator[None]:
        """Whole parameters to read, or to change on one rank; collective.

        Args:
            what: A module of the model, parameters, or names of parameters or modules; None is the whole model.
            modifier_rank: The rank whose changes inside are taken over by all. None is to read alone: what is written
                then is lost at stage 3, and at other stages makes ranks differ.

        Raises:
            UsageError: No parameter or module has this name, there is no such rank, or parameters were replaced.
        """
        self._check_usable()
        places = [self.layout.find(name) for name in parameters_named(self._model, what)]
        if modifier_rank is not None and modifier_rank not in range(self.world_size):
            raise UsageError(f"gathered(modifier_rank={modifier_rank!r}): the ranks are 0 to {self.world_size - 1}")
        units = list(dict.fromkeys(self.layout.buffers[b].unit for b, _ in places))
        self._runtime.end_backward()
        self._parts.gathers.pin(units)
        try:
            yield
            if modifier_rank is not None:
                self._runtime.check_unchanged()  # what was put in place of a parameter is no change of it
                self._parts.gathers.take_over(places, modifier_rank)
        finally:
            self._parts.gathers.unpin(units)

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        """The model's state dict as copies on the CPU, each with memory of its own but for tied names, which share one.

        Collective at stage 3, where one unit at a time is whole.

        Args:
            rank0_only: Keep nothing on the other ranks.

        Returns:
            Every name of ``model.state_dict()``, in the model's dtype and the original shapes; on other ranks than 0
            nothing with ``rank0_only``.

        Raises:
            UsageError: Parameters were replaced or added since ``shard``; names them.
        """
        self._check_usable()
        return copied_state(self._model, self._parts.gathers.each_unit_whole(), keeps=self.rank == 0 or not rank0_only)

    def state_of(self, name: str) -> dict[str, Tensor]:
        """Everything the ranks hold of one parameter, whole; collective.

        Args:
            name: Its full dotted name.

        Returns:
            "param" in the model's dtype; for a trainable one also "master" (fp32), "grad" (the accumulated mean, if
            there is one) and each state of the optimizer by torch's key, in the parameter's shape; scalars such as
            "step" as 0-d.

        Raises:
            UsageError: No parameter has this name.
        """
        self._check_usable()
        name = self._first_name(name)
        b, k = self.layout.find(name)
        self._parts.gathers.settle()
        self._runtime.end_backward()
        buffer = self._parts.buffers[b]
        with self.gathered([name]):
            result = {"param": buffer.params[k].detach().clone()}
        if buffer.layout.trainable:
            result |= self._state.whole(name)
        return result

    def _first_name(self, name: str) -> str:
        """The name under which a parameter is kept: a tied one's first, any other as it is."""
        if self.layout.has(name):
            return name
        every = dict(self._model.named_parameters(remove_duplicate=False))
        return next((first for first, p in self._model.named_parameters() if p is every.get(name)), name)

    # ---- for the lens ----

    @property
    def buffers(self) -> list[ParamBuffer]:
        """The buffers of this rank, in layout order."""
        return list(self._parts.buffers)

    @property
    def runs(self) -> list[OwnedRun]:
        """What the optimizer has in place of the model's parameters, in layout order."""
        return list(self._parts.shards.runs)

    def inventory(self) -> list[HeldTensor]:
        """Every tensor of this rank with elements of the layout's buffers; a local call."""
        parts = self._parts
        return inventory(parts.buffers, parts.grads, parts.shards, cuts_state=self.options.rules.shards_state)

    @property
    def params_in_partition(self) -> dict[int, tuple[str, ...]]:
        """Names of the parameters of which this rank optimizes elements, by optimizer group, in memory order."""
        return params_in_partition(self.layout, self.rank, whole=not self.options.rules.shards_state)

    @property
    def params_not_in_partition(self) -> dict[int, tuple[str, ...]]:
        """Names of the other parameters that are optimized, by optimizer group, in memory order."""
        return params_not_in_partition(self.layout, self.rank, whole=not self.options.rules.shards_state)

    # ---- for checkpoints ----

    def pieces_to_save(self) -> list[Piece]:
        """This rank's part of the training state; over all ranks each element occurs once. A local call.

        Raises:
            UsageError: Gradients are accumulated: they are in no checkpoint.
        """
        self._check_usable()
        self._runtime.end_backward()
        self._runtime.take_note_of_clear()
        if any(bucket.total_full or bucket.has_local for bucket in self._parts.grads.buckets):
            raise UsageError(
                "gradients are accumulated, and a checkpoint does not keep them: save after optimizer.step(), or call "
                "handle.zero_grad() first"
            )
        self._parts.gathers.settle()
        return self._state.to_save()

    def pieces_to_load(self, states: Mapping[str, Mapping[str, StateKind]] | None) -> list[Piece]:
        """Drop gradients and optimizer state, and return the pieces to fill; then call ``adopt_pieces``.

        Args:
            states: By trainable parameter, the optimizer states that are stored of it; None leaves the present ones.
        """
        self._check_usable()
        self._runtime.clear()
        self._parts.gathers.settle()
        return self._state.to_load(states)

    def adopt_pieces(self) -> None:
        """Train on from the pieces that were filled; collective.

        Raises:
            OptimizerError: Parameters that are updated together were stepped a different number of times.
        """
        self._state.adopt()
        self._runtime.spread()
        self._parts.gathers.settle()

    @property
    def counters(self) -> dict[str, int]:
        """Steps so far, and how many were skipped in all and last in a row."""
        return {"step": self._parts.grads.step, **self._parts.shards.skipped_counts}

    @counters.setter
    def counters(self, values: Mapping[str, int]) -> None:
        self._parts.grads.step = values["step"]
        self._parts.shards.skipped_counts = values

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that was sharded."""
        return self._parts.shards.optimizer

    @property
    def model(self) -> nn.Module:
        """The model that was sharded."""
        return self._model

    @property
    def host_group(self) -> dist.ProcessGroup:
        """The engine's gloo group of its ranks, for what is agreed on the host."""
        group: dist.ProcessGroup = self._parts.comm.control
        return group

    def raise_flag(self) -> None:
        """Let all ranks see ``flagged`` from the end of the next backward on; from any thread, and on any rank."""
        self._parts.grads.flag = 1

    @property
    def flagged(self) -> bool:
        """Whether any rank had raised its flag before the last backward ended; the same on all ranks."""
        return self._parts.grads.flagged

    def agree(self, what: str, value: Any) -> list[Any]:
        """Every rank's small picklable value, by rank; collective."""
        return self._parts.comm.exchange(what, value)

    def group_apart(self, timeout_s: float) -> GroupApart:
        """A gloo group of the same ranks for work beside training; collective. The caller closes it.

        Args:
            timeout_s: Seconds that a rank may be late to an agreement in it.
        """
        return GroupApart(self._parts.comm.control, timeout_s)

    def memory(self) -> dict[str, int]:
        """Bytes this rank's tensors of the engine take, by category; each storage counts once.

        Returns:
            "parameters", "master weights" (0 if they are the parameters themselves), "gradients",
            "optimizer <state>" for each state, and "communication".
        """
        return bytes_by_category(self.tensors_by_category())

    def tensors_by_category(self) -> dict[str, list[Tensor]]:
        """The tensors that ``memory`` counts; those of two categories may share a storage, which is the first's."""
        parts = self._parts
        return tensors_by_category(parts.buffers, parts.grads, parts.shards, parts.comm)

    def where(self) -> str:
        """One line: the last collective this rank started and the last it finished."""
        return self._parts.comm.where()

    def close(self) -> None:
        """Take every hook off; parameters get memory of their own, and the optimizer gets them back."""
        if self._closed:
            return
        self._runtime.end_backward()
        for buffers in self._parts.gathers.each_unit_whole():
            for buffer in buffers:
                buffer.detach()
        self._runtime.remove()
        self._parts.shards.restore_groups()
        self._parts.comm.close()
        self._runtime.owner = None
        registry.forget(self._model)
        self._closed = True

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def _check_usable(self) -> None:
        """Refuse to go on where the handle is closed, or the model has other parameters than in ``shard``."""
        if self._closed:
            raise UsageError("this handle is closed; call shard() again")
        self._runtime.check_unchanged()

    def __repr__(self) -> str:
        """State in one line, without a collective."""
        stage, step = f"ZeRO stage {self.options.stage}", self._parts.grads.step
        if self._closed:
            return f"closed handle · {stage}, step {step}"
        skipped = f", {self.steps_skipped} skipped" if self.steps_skipped else ""
        line = rank_line(self.layout, self.rank, whole=not self.options.rules.shards_state)
        return f"{line} · {stage}, step {step}{skipped}"

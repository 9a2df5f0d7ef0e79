"""Storage of parameters and master weights, allocated from the layout.

Owns the whole parameter buffers (the model's parameters become views of them), the master weights, and the first
spread of rank 0's values. Leaves to ``grads`` and ``optim`` what happens to them in a step.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardglass.engine.comm import Comm
from shardglass.engine.freed import FreedParameter, UseOfFreed, freed_class
from shardglass.engine.sources import WeightSource, take_guard_off
from shardglass.layout import Buffer, Layout
from shardglass.layout.line import held_line
from shardglass.options import Stage


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype with this name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the master weights, states and gradient sums of parameters of ``dtype``: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


class ParamBuffer:
    """One buffer of the layout in memory.

    The model's parameters are views of ``whole``. ``master`` is what the optimizer updates: the same memory if the
    model's dtype is precise enough, else a copy in fp32 made from the numbers the parameters had before they were
    cast. At a stage that shards parameters ``whole`` has memory only from ``make_room`` to ``drop``, and is filled
    from the ranks' master weights, or from ``kept`` if it is frozen.
    """

    whole: Tensor  # [numel] in the model's dtype
    master: Tensor | None  # [shard_numel], or [numel] at stage 0, fp32; None for a frozen buffer
    kept: Tensor | None = None  # [shard_numel] in the model's dtype: a frozen buffer's shard where ``whole`` is dropped

    def __init__(
        self,
        layout: Buffer,
        index: int,
        params: Mapping[str, nn.Parameter],
        comm: Comm,
        stage: Stage,
        weights: WeightSource | None = None,
    ) -> None:
        """Move the parameters into one buffer and spread rank 0's values; collective.

        Args:
            layout: What it holds.
            index: Its index in the layout.
            params: The model's parameters by name.
            comm: For the broadcast.
            stage: Says whether the master weights are cut.
            weights: Where each rank reads the values of hollow parameters; None spreads rank 0's.
        """
        self.layout, self.index, self.rank = layout, index, comm.rank
        self.params = [params[spec.name] for spec in layout.params]
        device = self.params[0].device
        dtype = torch_dtype(layout.dtype)
        self.state_range = owned_range(layout, comm.rank, stage)
        self.keeps_whole = not stage.shards_params
        source = dtype
        for p in self.params:
            source = torch.promote_types(source, p.dtype) if p.is_floating_point() else dtype
        self._freed: list[type] = []  # the class of each parameter without values, see ``freed``
        low, high = self.state_range
        reads_own = weights is not None and weights.on_every_rank
        if weights is not None and reads_own and not self.keeps_whole:
            own = self._read(weights, low, high, source, device)
            self.whole = torch.empty(layout.numel, dtype=dtype, device=device)
        else:
            staging = self._staged(weights, source, device)
            if not reads_own:
                comm.broadcast(f"the initial {layout.key}", staging)
            self.whole = staging if source == dtype else staging.to(dtype)
            own = staging[low:high] if self.keeps_whole else staging[low:high].clone()
        for p, view in zip(self.params, self.views(self.whole), strict=True):
            take_guard_off(p)
            p.data = view
        self.master = self._make_master(own) if layout.trainable else None
        if not self.keeps_whole:
            self.kept = None if layout.trainable else own.to(dtype)
            self.whole.untyped_storage().resize_(0)  # at once: the units after this one are still whole as loaded

    def _staged(self, weights: WeightSource | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[numel] The whole buffer, in the dtype the values come in; zeros where this rank does not know them."""
        if weights is not None:
            return self._read(weights, 0, self.layout.numel, dtype, device)
        staging = torch.zeros(self.layout.numel, dtype=dtype, device=device)
        for p, offset in zip(self.params, self.layout.offsets, strict=True):
            if not take_guard_off(p):
                staging[offset : offset + p.numel()].copy_(p.detach().reshape(-1))
        return staging

    def _read(self, weights: WeightSource, low: int, high: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[high - low] A range of the whole buffer, read from where the values are; its gaps are zero."""
        run = torch.zeros(high - low, dtype=dtype, device=device)
        for spec, offset in zip(self.layout.params, self.layout.offsets, strict=True):
            start, stop = max(low, offset), min(high, offset + spec.numel)
            if start < stop:
                run[start - low : stop - low].copy_(weights.read(spec.name, start - offset, stop - offset))
        return run

    def _make_master(self, own: Tensor) -> Tensor:
        """The master weights of this rank, from the numbers before the cast."""
        low, high = self.state_range
        wanted = master_dtype(self.whole.dtype)
        if self.whole.dtype == wanted and self.keeps_whole:
            return self.whole[low:high]
        return own.to(wanted, copy=self.keeps_whole)  # elsewhere ``own`` has memory of its own already

    @property
    def shares_memory(self) -> bool:
        """Whether the master weights are the parameters themselves."""
        return self.keeps_whole and self.master is not None and self.master.dtype == self.whole.dtype

    # ---- where parameters are sharded ----

    @property
    def storage_key(self) -> int:
        """Identifies the memory of ``whole``, with and without content."""
        key: int = self.whole.untyped_storage()._cdata
        return key

    @property
    def is_whole(self) -> bool:
        """Whether ``whole`` has memory."""
        return self.whole.untyped_storage().nbytes() > 0 or not self.layout.numel

    def guard(self, on_use: UseOfFreed) -> None:
        """Drop the parameters' memory; what wants their values before they are gathered asks ``on_use``."""
        self._freed = [freed_class(type(p), on_use) for p in self.params]
        self.drop()

    def make_room(self) -> None:
        """Give ``whole`` memory and put this rank's part in it; the rest is to be gathered."""
        storage = self.whole.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.layout.numel * self.whole.element_size())
        source = self.master if self.master is not None else self.kept
        if source is not None:
            self.own_part().copy_(source)

    def show_whole(self) -> None:
        """The values are here: parameters can be used."""
        for p in self.params:
            if isinstance(p, FreedParameter):
                p.__class__ = type(p)._class_when_whole

    def drop(self) -> None:
        """Free the memory of the whole parameters."""
        for p, cls in zip(self.params, self._freed, strict=True):
            p.__class__ = cls
        self.whole.untyped_storage().resize_(0)

    def take_over(self, k: int, comm: Comm, source: int) -> None:
        """Take one rank's values of the k-th parameter for all; it is whole, collective.

        Elements that did not change keep the low bits of their master weights.
        """
        low, high = self.state_range
        offset, numel = self.layout.offsets[k], self.layout.params[k].numel
        run = self.whole[offset : offset + numel]
        comm.broadcast(f"the changed {self.layout.params[k].name}", run, source)
        start, stop = max(low, offset), min(high, offset + numel)
        target = self.master if self.master is not None else self.kept
        if start >= stop or target is None or self.shares_memory:
            return
        new, old = self.whole[start:stop], target[start - low : stop - low]
        old.copy_(torch.where(old.to(new.dtype) == new, old, new.to(old.dtype)))

    # ---- parts ----

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of a whole buffer, in its shape."""
        return [
            flat[offset : offset + spec.numel].view(spec.shape)
            for spec, offset in zip(self.layout.params, self.layout.offsets, strict=True)
        ]

    def own_part(self) -> Tensor:
        """The part of ``whole`` this rank updates: its shard, or all of it at stage 0."""
        low, high = self.state_range
        return self.whole[low:high]

    def write_back(self) -> None:
        """Cast the updated master weights into the model's parameters, own part only."""
        if self.master is not None and not self.shares_memory:
            self.own_part().copy_(self.master)

    def refresh_master(self) -> None:
        """Take the master weights anew from the parameters, after somebody else changed these."""
        if self.master is not None and not self.shares_memory:
            self.master.copy_(self.own_part())

    @property
    def params_in_partition(self) -> tuple[str, ...]:
        """Names of its parameters of which this rank has elements of the state, in memory order."""
        return tuple(name for name, held in self._partition() if held)

    @property
    def params_not_in_partition(self) -> tuple[str, ...]:
        """Names of its other parameters, in memory order."""
        return tuple(name for name, held in self._partition() if not held)

    def _partition(self) -> list[tuple[str, bool]]:
        """Each parameter's name, and whether elements of it are in this rank's range."""
        low, high = self.state_range
        return [
            (spec.name, max(low, offset) < min(high, offset + spec.numel))
            for spec, offset in zip(self.layout.params, self.layout.offsets, strict=True)
        ]

    def __repr__(self) -> str:
        """State in one line, without a collective."""
        layout = self.layout
        held = held_line([layout], self.rank, whole=self.state_range == (0, layout.numel))
        master = "" if self.master is None else f" · master {str(self.master.dtype).removeprefix('torch.')}"
        return f"{layout.key} · rank {self.rank} of {layout.holders.num_shards} · {held}{master}"

    def detach(self) -> None:
        """Give every parameter memory of its own again; the parameters are whole."""
        for p in self.params:
            p.data = p.data.clone()
        self.params, self._freed = [], []


def owned_range(layout: Buffer, rank: int, stage: Stage) -> tuple[int, int]:
    """First and one-past-last element of a buffer whose state ``rank`` holds under a stage."""
    if not stage.shards_state:
        return 0, layout.numel
    return rank * layout.shard_numel, (rank + 1) * layout.shard_numel


def make_buffers(
    layout: Layout,
    params: Mapping[str, nn.Parameter],
    comm: Comm,
    stage: Stage,
    weights: WeightSource | None = None,
) -> list[ParamBuffer]:
    """Every buffer of the layout in memory, one after the other so that at most one is held twice; collective."""
    return [ParamBuffer(buffer, b, params, comm, stage, weights) for b, buffer in enumerate(layout.buffers)]

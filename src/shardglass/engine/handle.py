"""What a user holds: ``shard()`` and the Handle it returns.

Owns the public face of the engine. A plain loop stays as it was:

    handle = shard(model, optimizer, stage=2)
    loss = model(**batch).loss
    loss.backward()
    handle.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardglass.engine.buffers import ParamBuffer, make_buffers, torch_dtype
from shardglass.engine.comm import Comm
from shardglass.engine.grads import Gradients
from shardglass.engine.optim import OptimizerShards, check_optimizer
from shardglass.engine.runtime import Runtime
from shardglass.engine.units import build_units, param_specs
from shardglass.errors import CollectiveError, ModelError, UsageError
from shardglass.layout import Layout, Slice, units_layout
from shardglass.options import EngineOptions


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    stage: int | None = None,
    options: EngineOptions | None = None,
    units: Sequence[str | nn.Module] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> "Handle":
    """Shard a model's training state over the ranks, in place; collective.

    Afterwards the model's parameters are views of flat buffers with rank 0's values, and the optimizer's
    param_groups hold this rank's flat slices of the master weights. Forward, backward, ``optimizer.step()``,
    schedulers and both ``zero_grad()`` work as before. The gradient is the mean over ranks.

    Args:
        model: Any module whose parameters are on one device.
        optimizer: An element-wise torch.optim optimizer over the model's trainable parameters; state it has is kept.
        stage: ZeRO stage; overrides ``options.stage``.
        options: Everything else; see EngineOptions.
        units: Modules, or their dotted names, that are reduced and gathered as one; default: each block of the model's
            repeated list.
        process_group: Ranks to shard over; default: all.

    Returns:
        The handle.

    Raises:
        ConfigError: An option cannot be used.
        UsageError: torch.distributed is not initialised.
        ModelError: The model cannot be cut in units, or has parameters on several devices.
        OptimizerError: The optimizer cannot be sharded or does not fit the model.
        CollectiveError: Ranks have different models or options; names the first difference.
    """
    options = options if options is not None else EngineOptions()
    options = options if stage is None else replace(options, stage=stage)
    check_optimizer(optimizer, options)
    device = _device_of(model)
    cut = build_units(model, units)
    dtype = torch_dtype(options.param_dtype) if options.param_dtype is not None else None
    specs = param_specs(cut, optimizer, dtype)
    comm = Comm(device, options.collective_timeout_s, process_group)
    layout = units_layout(specs, comm.world_size)
    _check_alike(comm, layout, options, optimizer)
    params = {name: p for unit in cut for name, p in unit.params.items()}
    buffers = make_buffers(layout, params, comm, options.rules)
    for name, tensor in model.named_buffers():
        comm.broadcast(f"the module buffer {name}", tensor)
    grads = Gradients(buffers, comm, options)
    shards = OptimizerShards(optimizer, layout, buffers, comm, options)
    runtime = Runtime(model, cut, buffers, grads, shards, comm)
    return Handle(model=model, options=options, layout=layout, parts=_Parts(comm, buffers, grads, shards, runtime))


class _Parts:
    """The engine's objects behind a handle."""

    def __init__(
        self,
        comm: Comm,
        buffers: list[ParamBuffer],
        grads: Gradients,
        shards: OptimizerShards,
        runtime: Runtime,
    ) -> None:
        self.comm, self.buffers, self.grads, self.shards, self.runtime = comm, buffers, grads, shards, runtime


class Handle:
    """A sharded model and its optimizer.

    Attributes:
        layout: Which rank holds which slice of which tensor.
        options: The options it was made with.
    """

    def __init__(self, *, model: nn.Module, options: EngineOptions, layout: Layout, parts: _Parts) -> None:
        self.layout, self.options = layout, options
        self._model, self._parts = model, parts
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
        self._check_open()
        self._parts.runtime.prepare_step()
        norm = self._parts.shards.clip(self._parts.grads, float(max_norm))
        return torch.tensor(norm, dtype=torch.float32, device=self._parts.comm.device)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """In it, backward adds gradients up on each rank and communicates nothing.

        The next backward outside, or the step, reduces the sum. Costs a whole gradient in the accumulation dtype a
        rank.
        """
        self._check_open()
        grads = self._parts.grads
        before, grads.local_mode = grads.local_mode, True
        try:
            yield
        finally:
            grads.local_mode = before

    def zero_grad(self) -> None:
        """Forget every gradient since the last step, as ``optimizer.zero_grad()`` and ``model.zero_grad()`` do."""
        self._parts.runtime.clear()

    def wait(self) -> None:
        """Make sure raw reads of parameters see the last step; forwards and ``state_dict()`` do this by themselves."""
        self._parts.runtime.wait_params()

    def full_state_dict(self) -> dict[str, Tensor]:
        """The model's state dict as copies on the CPU, each with memory of its own but for tied names, which share one.

        Returns:
            Every name of ``model.state_dict()``, in the model's dtype and the original shapes.
        """
        self._check_open()
        copies: dict[int, Tensor] = {}
        whole = self._model.state_dict(keep_vars=True)
        for tensor in whole.values():
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().to("cpu", copy=True).contiguous()
        return {name: copies[id(tensor)] for name, tensor in whole.items()}

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
        self._check_open()
        b, k = self.layout.find(name)
        self._parts.runtime.wait_params()
        self._parts.runtime.end_backward()
        buffer = self._parts.buffers[b]
        result = {"param": buffer.params[k].detach().clone()}
        if buffer.layout.trainable:
            result |= self._gather_state(name, buffer)
        return result

    def _gather_state(self, name: str, buffer: ParamBuffer) -> dict[str, Tensor]:
        """Whole tensors of a trainable parameter's state, put together from their owners."""
        comm, spec = self._parts.comm, buffer.layout.params[self.layout.find(name)[1]]
        mine = self._own_pieces(name)
        offered = comm.exchange(
            f"state of {name}",
            [(key, piece.start, piece.length, value.dtype, value.dim() == 0) for key, piece, value in mine],
        )
        values = {(key, piece.start): value for key, piece, value in mine}
        whole: dict[str, Tensor] = {}
        owners = offered if self.options.rules.shards_state else offered[:1]
        for owner, pieces in enumerate(owners):
            for key, start, length, dtype, is_scalar in pieces:
                part = values.get((key, start)) if owner == comm.rank or len(owners) == 1 else None
                if part is None:
                    part = torch.empty(() if is_scalar else (length,), dtype=dtype, device=comm.device)
                # Scalars may live on the host (torch keeps "step" there), the group carries the model's device.
                part = part.detach().to(comm.device).contiguous().clone()
                if len(owners) > 1:
                    comm.broadcast(f"{key} of {name}", part, source=owner)
                if is_scalar:
                    whole[key] = part.cpu()
                else:
                    flat = whole.setdefault(key, torch.zeros(spec.numel, dtype=dtype, device=comm.device))
                    flat[start : start + length] = part
        return {key: v if v.dim() == 0 else v.view(spec.shape) for key, v in whole.items()}

    def _own_pieces(self, name: str) -> list[tuple[str, Slice, Tensor]]:
        """(key, slice, flat piece or scalar) of everything this rank holds of a parameter."""
        found: list[tuple[str, Slice, Tensor]] = []
        shards = self._parts.shards
        totals = {bucket.buffer.index: bucket for bucket in self._parts.grads.buckets}
        for owned in shards.runs:
            for piece in owned.run.slices:
                if piece.name != name:
                    continue
                at = piece.offset - owned.run.start
                where = slice(at, at + piece.length)
                found.append(("master", piece, owned.param.detach()[where]))
                bucket = totals[owned.run.buffer]
                if bucket.total_full and bucket.total is not None:
                    found.append(("grad", piece, bucket.total[owned.where][where]))
                for key, value in shards.optimizer.state.get(owned.param, {}).items():
                    if isinstance(value, Tensor):
                        found.append((key, piece, value if value.dim() == 0 else value.view(-1)[where]))
        return found

    def memory(self) -> dict[str, int]:
        """Bytes this rank's tensors of the engine take, by category; each storage counts once.

        Returns:
            "parameters", "master weights" (0 if they are the parameters themselves), "gradients",
            "optimizer <state>" for each state, and "communication".
        """
        parts = self._parts
        seen: set[int] = set()
        account = {"parameters": _bytes_of([b.whole for b in parts.buffers], seen)}
        account["master weights"] = _bytes_of([b.master for b in parts.buffers if b.master is not None], seen)
        account["gradients"] = _bytes_of(parts.grads.tensors(), seen)
        by_key: dict[str, list[Tensor]] = {}
        for state in parts.shards.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    by_key.setdefault(f"optimizer {key}", []).append(value)
        for key, tensors in by_key.items():
            account[key] = _bytes_of(tensors, seen)
        account["communication"] = _bytes_of(parts.comm.buffer_tensors(), seen)
        return account

    def where(self) -> str:
        """One line: the last collective this rank started and the last it finished."""
        return self._parts.comm.where()

    def close(self) -> None:
        """Take every hook off; parameters get memory of their own, and the optimizer gets them back."""
        if self._closed:
            return
        self._parts.runtime.wait_params()
        self._parts.runtime.remove()
        for buffer in self._parts.buffers:
            buffer.detach()
        self._parts.shards.restore_groups()
        self._parts.comm.close()
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this handle is closed; call shard() again")

    def __repr__(self) -> str:
        """State in one line, without a collective."""
        return (
            f"Handle(stage={self.options.stage}, rank={self.rank}/{self.world_size}, units={len(self.layout.units)}, "
            f"parameters={len(self.layout.names)}, step={self._parts.grads.step}, skipped={self.steps_skipped})"
        )


def _bytes_of(tensors: Sequence[Tensor], seen: set[int]) -> int:
    """Bytes of the storages behind the tensors that were not counted yet."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _device_of(model: nn.Module) -> torch.device:
    """The one device of a model's parameters.

    Raises:
        ModelError: There are none, or several devices, or parameters without memory.
    """
    devices: dict[torch.device, str] = {}
    for name, param in model.named_parameters():
        devices.setdefault(param.device, name)
    if not devices:
        raise ModelError("the model has no parameters; there is nothing to shard")
    if len(devices) > 1:
        listed = ", ".join(f"{device} (first: {name})" for device, name in devices.items())
        raise ModelError(f"the model's parameters are on several devices: {listed}; move the model to one")
    device, name = next(iter(devices.items()))
    if device.type == "meta":
        raise ModelError(f"{name} is on the meta device and has no values; load the weights before shard()")
    return device


def _check_alike(comm: Comm, layout: Layout, options: EngineOptions, optimizer: torch.optim.Optimizer) -> None:
    """Compare model, options and optimizer over ranks before the first tensor moves; collective.

    Raises:
        CollectiveError: Names the first rank that differs from rank 0, and in what.
    """
    groups = [{k: repr(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    mine: dict[str, Any] = {
        "layout": layout.fingerprint,
        "optimizer": type(optimizer).__name__,
        "param_groups": groups,
        **asdict(options),
    }
    everyone: list[Mapping[str, Any]] = comm.exchange("layout and options", mine)
    for rank, theirs in enumerate(everyone):
        key = next((k for k in mine if theirs.get(k) != everyone[0].get(k)), None)
        if key == "layout":
            texts = comm.exchange("layouts", layout.to_json())
            raise CollectiveError(
                f"rank {rank} has another model than rank 0: {_first_difference(texts[0], texts[rank])}; load the same "
                "model, with the same frozen parameters and groups, on every rank"
            )
        if key is not None:
            raise CollectiveError(
                f"rank {rank} has {key} = {theirs.get(key)!r}, rank 0 has {everyone[0].get(key)!r}; start every rank "
                "with the same options"
            )


def _first_difference(left: str, right: str) -> str:
    """The first parameter in which two layouts differ."""
    a, b = Layout.from_json(left), Layout.from_json(right)
    for name in dict.fromkeys((*a.names, *b.names)):
        places = []
        for layout in (a, b):
            if name not in layout.names:
                places.append("absent")
                continue
            buffer, k = layout.find(name)
            places.append(repr(layout.buffers[buffer].params[k]))
        if places[0] != places[1]:
            return f"{name} is {places[0]} on rank 0 and {places[1]} there"
    return f"world size {a.world_size} on rank 0 and {b.world_size} there, or another order of parameters"

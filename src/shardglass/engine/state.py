"""What the ranks hold of each parameter, by its name: for ``state_of`` and for checkpoints.

Owns the way from flat shards to named pieces and back. Leaves files to ``checkpoint`` and the step to ``optim``.

A piece is a run of one flattened tensor. The kinds of a trainable parameter are "master", "grad" and the keys of the
optimizer's state; of a frozen one "param". A scalar of the optimizer, such as "step", is a piece of one element.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardglass.engine.buffers import ParamBuffer
from shardglass.engine.comm import Comm
from shardglass.engine.grads import Gradients
from shardglass.engine.optim import OptimizerShards, OwnedRun
from shardglass.errors import OptimizerError
from shardglass.layout import Layout, Slice, slices_in
from shardglass.options import EngineOptions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A run of one tensor that belongs to a parameter.

    Attributes:
        kind: "master", "grad", "param" or a key of the optimizer's state.
        name: The parameter.
        start: First element in the flattened tensor.
        numel: Elements of the whole tensor; 1 for a scalar.
        is_scalar: Whether the whole tensor is 0-d.
        value: [length] in memory; a view unless it is a scalar.
    """

    kind: str
    name: str
    start: int
    numel: int
    is_scalar: bool
    value: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKind:
    """What a stored optimizer state is: its dtype, and whether it is one number for the whole parameter."""

    dtype: torch.dtype
    is_scalar: bool


class TrainingState:
    """The training state of one rank as pieces."""

    def __init__(
        self,
        layout: Layout,
        buffers: Sequence[ParamBuffer],
        grads: Gradients,
        shards: OptimizerShards,
        comm: Comm,
        options: EngineOptions,
    ) -> None:
        self._layout, self._buffers, self._grads, self._shards = layout, buffers, grads, shards
        self._comm, self._options = comm, options
        self._numel = {p.name: p.numel for buffer in layout.buffers for p in buffer.params}
        self._scalars: list[tuple[OwnedRun, str, list[Piece]]] = []  # loaded, not yet in the optimizer's state

    # ---- reading ----

    def held(self, name: str | None = None) -> list[Piece]:
        """Everything this rank holds of one trainable parameter, or of all; whole at a stage that shards no state."""
        totals = {bucket.buffer.index: bucket for bucket in self._grads.buckets}
        found: list[Piece] = []
        for owned in self._shards.runs:
            bucket = totals[owned.run.buffer]
            states = self._shards.optimizer.state.get(owned.param, {})
            for piece in owned.run.slices:
                if name is not None and piece.name != name:
                    continue
                where = _within(owned, piece)
                found.append(self._piece("master", piece, owned.param.detach()[where]))
                if bucket.total_full and bucket.total is not None:
                    found.append(self._piece("grad", piece, bucket.total[owned.where][where]))
                for key, value in states.items():
                    if isinstance(value, Tensor):
                        flat = value if value.dim() == 0 else value.view(-1)[where]
                        found.append(self._piece(key, piece, flat))
        return found

    def _piece(self, kind: str, piece: Slice, value: Tensor) -> Piece:
        is_scalar = value.dim() == 0
        return Piece(
            kind=kind,
            name=piece.name,
            start=0 if is_scalar else piece.start,
            numel=1 if is_scalar else self._numel[piece.name],
            is_scalar=is_scalar,
            value=value,
        )

    def to_save(self) -> list[Piece]:
        """This rank's part of what a checkpoint keeps: over all ranks each element occurs once, gradients never."""
        shares = {
            (s.name, s.buffer): s
            for b in range(len(self._layout.buffers))
            for s in slices_in(self._layout, b, self._comm.rank)
        }
        kept = []
        for piece in self.held():
            share = shares.get((piece.name, self._layout.find(piece.name)[0]))
            if share is None or piece.kind == "grad":
                continue
            if piece.is_scalar:
                if share.start == 0:
                    kept.append(piece)
                continue
            low = share.start - piece.start
            value = piece.value[low : low + share.length]
            kept.append(
                Piece(
                    kind=piece.kind,
                    name=piece.name,
                    start=share.start,
                    numel=piece.numel,
                    is_scalar=False,
                    value=value,
                )
            )
        return kept + self._frozen()

    def _frozen(self) -> list[Piece]:
        """This rank's shares of the frozen parameters."""
        found = []
        for b, buffer in enumerate(self._buffers):
            if buffer.layout.trainable:
                continue
            shard = buffer.kept if buffer.kept is not None else self._own_shard(buffer)
            for s in slices_in(self._layout, b, self._comm.rank):
                found.append(self._piece("param", s, shard[s.offset : s.offset + s.length]))
        return found

    def _own_shard(self, buffer: ParamBuffer) -> Tensor:
        """This rank's shard of a buffer that is whole, at every stage."""
        numel = buffer.layout.shard_numel
        return buffer.whole[self._comm.rank * numel : (self._comm.rank + 1) * numel]

    def whole(self, name: str) -> dict[str, Tensor]:
        """Every kind of one trainable parameter in its shape, put together from the owners; collective."""
        comm = self._comm
        b, k = self._layout.find(name)
        spec = self._layout.buffers[b].params[k]
        mine = self.held(name)
        offered = comm.exchange(
            f"state of {name}", [(p.kind, p.start, p.value.numel(), p.value.dtype, p.is_scalar) for p in mine]
        )
        values = {(p.kind, p.start): p.value for p in mine}
        found: dict[str, Tensor] = {}
        owners = offered if self._options.rules.shards_state else offered[:1]
        for owner, pieces in enumerate(owners):
            for kind, start, length, dtype, is_scalar in pieces:
                part = values.get((kind, start)) if owner == comm.rank or len(owners) == 1 else None
                if part is None:
                    part = torch.empty(() if is_scalar else (length,), dtype=dtype, device=comm.device)
                # Scalars may live on the host (torch keeps "step" there), the group carries the model's device.
                part = part.detach().to(comm.device).contiguous().clone()
                if len(owners) > 1:
                    comm.broadcast(f"{kind} of {name}", part, source=owner)
                if is_scalar:
                    found[kind] = part.cpu()
                else:
                    flat = found.setdefault(kind, torch.zeros(spec.numel, dtype=dtype, device=comm.device))
                    flat[start : start + length] = part
        return {kind: v if v.dim() == 0 else v.view(spec.shape) for kind, v in found.items()}

    # ---- writing ----

    def to_load(self, states: Mapping[str, Mapping[str, StateKind]] | None) -> list[Piece]:
        """Make room for a stored state and return the pieces to fill; ``adopt`` then puts it in force.

        Args:
            states: By trainable parameter, the optimizer states that are stored of it; None leaves the present ones.
        """
        self._scalars.clear()
        if states is not None:
            self._shards.optimizer.state.clear()
        pieces = self._frozen()
        for owned in self._shards.runs:
            pieces += self._room(owned, states or {})
        return pieces

    def _room(self, owned: OwnedRun, states: Mapping[str, Mapping[str, StateKind]]) -> list[Piece]:
        """The pieces of one run; its tensors of the optimizer's state are allocated."""
        pieces = []
        scalars: dict[str, list[Piece]] = {}
        state = self._shards.optimizer.state
        for s in owned.run.slices:
            where = _within(owned, s)
            pieces.append(self._piece("master", s, owned.param.detach()[where]))
            for key, kind in states.get(s.name, {}).items():
                if kind.is_scalar:
                    value = torch.zeros(1, dtype=kind.dtype)
                    piece = Piece(kind=key, name=s.name, start=0, numel=1, is_scalar=True, value=value)
                    scalars.setdefault(key, []).append(piece)
                else:
                    if key not in state[owned.param]:
                        state[owned.param][key] = torch.zeros_like(owned.param.detach(), dtype=kind.dtype)
                    piece = self._piece(key, s, state[owned.param][key][where])
                pieces.append(piece)
        self._scalars += [(owned, key, found) for key, found in scalars.items()]
        return pieces

    def adopt(self) -> None:
        """Put the filled pieces in force, as far as this rank goes; frozen parameters are gathered, collective.

        Raises:
            OptimizerError: Parameters that are updated together were stepped a different number of times.
        """
        for owned, key, pieces in self._scalars:
            first = pieces[0]
            for piece in pieces[1:]:
                if not torch.equal(piece.value, first.value):
                    raise OptimizerError(
                        f"optimizer state {key!r} is {first.value.item():g} of {first.name} and "
                        f"{piece.value.item():g} of {piece.name}; they are in one param_group and unit, which are "
                        "updated together, so both must have been stepped equally often"
                    )
            on_device = self._keeps_scalars_on_device(owned.run.group)
            device = owned.param.device if on_device else torch.device("cpu")
            self._shards.optimizer.state[owned.param][key] = first.value[0].clone().to(device)
        self._scalars.clear()
        for buffer in self._buffers:
            if not buffer.layout.trainable and buffer.keeps_whole:
                self._comm.gather(buffer.index, buffer.layout.key, buffer.whole).wait()

    def _keeps_scalars_on_device(self, group: int) -> bool:
        """Fused and capturable kernels read "step" on the device, the others on the host."""
        options = self._shards.optimizer.param_groups[group]
        return bool(options.get("fused") or options.get("capturable"))


def _within(owned: OwnedRun, piece: Slice) -> slice:
    """A slice's place in its run."""
    at = piece.offset - owned.run.start
    return slice(at, at + piece.length)


def copied_state(model: nn.Module, units: Iterable[Sequence[ParamBuffer]], *, keeps: bool) -> dict[str, Tensor]:
    """Copies of a model's state dict on the CPU; names that share a tensor share its copy.

    Args:
        model: The model.
        units: Every unit's buffers, each whole while it is handed out, which may be a collective.
        keeps: Whether this rank wants the copies, or only takes part.
    """
    copies: dict[int, Tensor] = {}
    for buffers in units:
        for param in (p for buffer in buffers for p in buffer.params if keeps):
            copies[id(param)] = param.detach().to("cpu", copy=True).contiguous()
    if not keeps:
        return {}
    whole = model.state_dict(keep_vars=True)
    for tensor in whole.values():
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().to("cpu", copy=True).contiguous()
    return {name: copies[id(tensor)] for name, tensor in whole.items()}

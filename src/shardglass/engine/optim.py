"""The user's optimizer on this rank's shards.

Owns the edit of ``param_groups``, the gradient norm, clipping, and the decision whether a step is taken. Leaves
gradients to ``grads`` and the spread of updated parameters to ``runtime``.

[Note: slices] Each entry of a param_group becomes the rank's own runs of the master weights, one per buffer, as
views: the group keeps its options, so schedulers, weight decay and per-group rates hold. Padding in a run has
weight, gradient and state zero, and every element-wise update leaves zero there.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardglass.engine.buffers import ParamBuffer
from shardglass.engine.comm import Comm
from shardglass.engine.grads import Bucket, Gradients
from shardglass.engine.placeholder import GradientElsewhere
from shardglass.engine.sums import sum_of_squares
from shardglass.errors import InvariantError, NonFiniteError, OptimizerError
from shardglass.layout import GroupRun, Layout, group_runs
from shardglass.options import EngineOptions

log = logging.getLogger(__name__)

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Optimizers whose update of one element reads that element's weight, gradient and state alone."""


def check_optimizer(optimizer: torch.optim.Optimizer, options: EngineOptions) -> None:
    """Refuse an optimizer that a cut would change.

    Raises:
        OptimizerError: It is no optimizer of torch, or its class is not known to be element-wise.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(f"shard(model, optimizer): {type(optimizer).__name__} is no torch.optim.Optimizer")
    if isinstance(optimizer, ELEMENTWISE) or options.allow_any_optimizer:
        return
    known = ", ".join(cls.__name__ for cls in ELEMENTWISE)
    raise OptimizerError(
        f"{type(optimizer).__name__} cannot be sharded: it is not known to update each element by itself, and shards "
        f"cut matrices anywhere. Use one of {known}; if your optimizer is element-wise, pass "
        "EngineOptions(allow_any_optimizer=True)"
    )


@dataclass(slots=True, eq=False)
class OwnedRun:
    """One tensor of the optimizer: a run of this rank's master weights."""

    run: GroupRun
    buffer: ParamBuffer
    param: nn.Parameter  # [stop - start] master dtype, a view of the buffer's master
    shown: Tensor | None = None  # the gradient last put on it, to see a clear
    version: int = 0  # its version then

    @property
    def where(self) -> slice:
        """The run in the shard."""
        return slice(self.run.start, self.run.stop)

    @property
    def params_in_partition(self) -> tuple[str, ...]:
        """Names of the parameters with elements in it, in memory order."""
        return tuple(piece.name for piece in self.run.slices)

    @property
    def params_not_in_partition(self) -> tuple[str, ...]:
        """Names of the other parameters of its group and buffer, in memory order."""
        inside = set(self.params_in_partition)
        params = self.buffer.layout.params
        return tuple(p.name for p in params if p.group == self.run.group and p.name not in inside)

    def __repr__(self) -> str:
        """State in one line, without a collective."""
        run, names = self.run, [name.removeprefix("model.") for name in self.params_in_partition]
        span = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        return (
            f"group {run.group} of {self.buffer.layout.key} · elements {run.start:,} to {run.stop - 1:,} · "
            f"{len(names)} tensor{'s' * (len(names) != 1)}: {span}"
        )


class OptimizerShards:
    """The optimizer's tensors of this rank, their gradients, and the step."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        buffers: Sequence[ParamBuffer],
        comm: Comm,
        options: EngineOptions,
    ) -> None:
        self.optimizer, self._comm, self._options = optimizer, comm, options
        whole = not options.rules.shards_state
        self.runs = [
            OwnedRun(run=run, buffer=buffers[run.buffer], param=_slice_of(buffers[run.buffer], run))
            for run in group_runs(layout, comm.rank, whole=whole)
        ]
        self._mark: GradientElsewhere | None = None
        self._by_buffer: dict[int, list[OwnedRun]] = {}
        for owned in self.runs:
            self._by_buffer.setdefault(owned.run.buffer, []).append(owned)
        self._edit_groups(layout, buffers)
        self.grad_norm: float | None = None
        self.clipped_grad_norm: float | None = None
        self.step_skipped = False
        self.steps_skipped = 0
        self._skipped_in_a_row = 0
        self.last_nonfinite: tuple[str, ...] = ()
        self._norm_is_known = False

    def _edit_groups(self, layout: Layout, buffers: Sequence[ParamBuffer]) -> None:
        """Put the runs in the optimizer's groups, and move its state to them."""
        old = dict(self.optimizer.state)
        self._params_before = [list(group["params"]) for group in self.optimizer.param_groups]
        moved = {owned.param: _move_state(owned, old) for owned in self.runs} if old else {}
        self.optimizer.state.clear()
        for g, group in enumerate(self.optimizer.param_groups):
            group["params"] = [owned.param for owned in self.runs if owned.run.group == g]
        self.optimizer.state.update({p: state for p, state in moved.items() if state})
        if self.runs:
            self._marked = self.runs[0].param
        else:  # an optimizer without a single element here, for ``mark``; it never has a gradient in a step
            self._marked = nn.Parameter(torch.empty(0, device=self._comm.device))
            self.optimizer.param_groups[0]["params"].append(self._marked)
        self._given = [id(p) for group in self.optimizer.param_groups for p in group["params"]]

    def check_groups(self) -> None:
        """See that the optimizer has the tensors that it was given.

        Raises:
            OptimizerError: A param_group was added, removed or changed.
        """
        now = [id(p) for group in self.optimizer.param_groups for p in group["params"]]
        if now != self._given:
            raise OptimizerError(
                "the optimizer's param_groups were changed after shard(): what was added would get no mean over ranks. "
                "Call handle.close(), change the optimizer, and shard() again"
            )

    # ---- gradients on the slices ----

    def show(self, bucket: Bucket) -> None:
        """Put the accumulated mean of a bucket on its slices as ``.grad``, if it counts."""
        if not (bucket.total_full or bucket.has_local):
            return
        if bucket.total is not None and not bucket.total_full:
            bucket.total.zero_()
        for owned in self._by_buffer.get(bucket.buffer.index, ()):
            if bucket.total is None or bucket.total.dtype != owned.param.dtype:
                grad: Tensor = GradientElsewhere.for_param(owned.param)
            else:
                grad = bucket.total[owned.where]
            owned.param.grad = grad
            owned.shown, owned.version = owned.param.grad, grad._version

    def mark(self) -> None:
        """Leave a mark where no gradient is shown on this rank although ranks have some.

        Otherwise a rank that owns nothing of them would not see ``optimizer.zero_grad()``, and keep its own sums.
        """
        if all(owned.shown is None for owned in self.runs):
            self._mark = GradientElsewhere.for_param(self._marked)
            self._marked.grad = self._mark

    def was_cleared(self) -> bool:
        """Whether ``optimizer.zero_grad()`` was called since gradients were shown."""
        if self._mark is not None and (self._marked.grad is not self._mark or self._mark.cleared):
            return True
        return any(_is_cleared(owned) for owned in self.runs if owned.shown is not None)

    def hide(self) -> None:
        """Take every gradient off the slices."""
        self._marked.grad = self._mark = None
        for owned in self.runs:
            owned.param.grad = owned.shown = None

    def forget_norm(self) -> None:
        """New gradients came: the norm is to be computed anew."""
        self._norm_is_known = False

    def norm(self, grads: Gradients) -> float:
        """The global L2 norm of the accumulated mean gradient, in fp64; collective unless it is known already."""
        if not self._norm_is_known:
            parts = [sum_of_squares(b.total) for b in grads.buckets if b.total is not None and b.total_full]
            mine = self._comm.read(torch.stack(parts).sum()) if parts else 0.0
            whole = not self._options.rules.shards_state
            total = mine if whole else self._comm.sum_scalar("the gradient norm", mine)
            self.grad_norm = self.clipped_grad_norm = math.sqrt(total) if total == total else math.nan
            self._norm_is_known = True
        if self.grad_norm is None:
            raise InvariantError("the gradient norm is known but absent")
        return self.grad_norm

    def clip(self, grads: Gradients, max_norm: float) -> float:
        """Scale the accumulated gradients down to ``max_norm``; returns the norm before.

        The factor is that of ``torch.nn.utils.clip_grad_norm_``: min(1, max_norm / (norm + 1e-6)).
        """
        self.norm(grads)
        # Of what is there now: a second call finds the gradients clipped already.
        norm = self.clipped_grad_norm if self.clipped_grad_norm is not None else math.nan
        factor = max_norm / (norm + 1e-6)
        if math.isfinite(norm) and factor < 1.0:
            for bucket in grads.buckets:
                if bucket.total is not None and bucket.total_full:
                    bucket.total.mul_(factor)
            for owned in self.runs:
                if owned.shown is not None:
                    owned.version = owned.shown._version  # our own write is no clear
            self.clipped_grad_norm = norm * factor
        return norm

    # ---- the step ----

    def decide(self, grads: Gradients) -> None:
        """Before the optimizer's step: put final gradients on the slices, or none if the step is to be skipped.

        Raises:
            NonFiniteError: Too many steps in a row were skipped.
        """
        has_any = any(b.total_full for b in grads.buckets)
        self.step_skipped = False
        if not has_any:
            self.hide()
            return
        self._marked.grad = self._mark = None
        norm = self.norm(grads)
        if self._options.skip_nonfinite and not math.isfinite(norm):
            self._skip(grads)
            return
        self._skipped_in_a_row = 0
        for bucket in grads.buckets:
            for owned in self._by_buffer.get(bucket.buffer.index, ()):
                view = bucket.total[owned.where] if bucket.total is not None and bucket.total_full else None
                owned.param.grad = None if view is None else view.to(owned.param.dtype)

    def _skip(self, grads: Gradients) -> None:
        """Leave weights and state untouched in this step, and say which gradients were bad."""
        self.step_skipped = True
        self.steps_skipped += 1
        self._skipped_in_a_row += 1
        for owned in self.runs:
            owned.param.grad = None
        texts = self._comm.exchange("names of bad gradients", grads.bad_gradients(self._comm.rank))
        found = [text for of_rank in texts for text in of_rank]
        if not found:
            found = ["no gradient of a single rank; the sum over ranks or micro-batches overflowed"]
        self.last_nonfinite = tuple(found)
        shown = "; ".join(found[:4]) + (f"; and {len(found) - 4} more" if len(found) > 4 else "")
        message = f"step {grads.step} skipped, its gradient is inf or nan: {shown}"
        if self._skipped_in_a_row >= self._options.max_skipped_steps:
            raise NonFiniteError(
                f"{message}. {self._skipped_in_a_row} steps in a row were skipped: look at the data of that "
                "micro-batch, lower the learning rate, or set skip_nonfinite=False to go on",
                is_shared=True,
            )
        if self._comm.rank == 0:
            log.warning("%s", message)

    @property
    def skipped_counts(self) -> dict[str, int]:
        """Skipped steps, in all and last in a row."""
        return {"skipped": self.steps_skipped, "skipped_in_a_row": self._skipped_in_a_row}

    @skipped_counts.setter
    def skipped_counts(self, values: Mapping[str, int]) -> None:
        self.steps_skipped, self._skipped_in_a_row = values.get("skipped", 0), values.get("skipped_in_a_row", 0)

    def restore_groups(self) -> None:
        """Give the optimizer the model's own parameters back; its sharded state is dropped."""
        self.optimizer.state.clear()
        for group, params in zip(self.optimizer.param_groups, self._params_before, strict=False):
            group["params"] = params


def _slice_of(buffer: ParamBuffer, run: GroupRun) -> nn.Parameter:
    """A view of the master weights as a leaf the optimizer takes."""
    if buffer.master is None:
        raise InvariantError(f"{buffer.layout.key} has an optimizer group but no master weights")
    return nn.Parameter(buffer.master[run.start : run.stop], requires_grad=True)


def _is_cleared(owned: OwnedRun) -> bool:
    """Whether the gradient shown on a slice was taken away or zeroed."""
    grad = owned.param.grad
    if grad is None:
        return True
    if isinstance(grad, GradientElsewhere):
        return grad.cleared
    # Zeroed in place: only a write by somebody else is worth the look.
    return grad._version != owned.version and not bool(grad.any())


SCALAR_STATES = ("step", "mu_product", "eta", "mu")
"""States of torch.optim that are one number for a parameter of any shape, also of none (source: torch 2.13)."""


def _move_state(owned: OwnedRun, old: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """The optimizer's state of whole parameters, cut to one run.

    Raises:
        OptimizerError: Parameters of one group were stepped a different number of times.
    """
    by_name = {s.name: p for s, p in zip(owned.buffer.layout.params, owned.buffer.params, strict=True)}
    state: dict[str, Any] = {}
    for piece in owned.run.slices:
        whole = by_name[piece.name]
        for key, value in old.get(whole, {}).items():
            per_element = key not in SCALAR_STATES and isinstance(value, Tensor) and value.shape == whole.shape
            if per_element:
                if key not in state:
                    state[key] = torch.zeros_like(owned.param.detach())
                at = piece.offset - owned.run.start
                state[key][at : at + piece.length].copy_(value.reshape(-1)[piece.start : piece.start + piece.length])
            elif key in state and not _same(state[key], value):
                raise OptimizerError(
                    f"optimizer state {key!r} of {piece.name} is {value}, of other parameters of its group "
                    f"{state[key]}; shard() keeps an optimizer's state only if all were stepped equally often"
                )
            else:
                state[key] = value.clone() if isinstance(value, Tensor) else value
    return state


def _same(a: Any, b: Any) -> bool:
    """Equality of two scalars of a state."""
    return bool(torch.equal(a, b)) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)

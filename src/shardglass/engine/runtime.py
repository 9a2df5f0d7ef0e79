"""The hooks that drive a sharded model.

Owns every hook on the user's model and optimizer. Leaves what they do to ``gathers``, ``grads`` and ``optim``.

[Note: end of backward] A callback of autograd's engine that is queued from a parameter's hook fires at the end of
the first INNER backward under reentrant checkpointing. So it is queued from a gradient hook on the root module's
outputs, which runs in the outer backward. A loss that does not come from the root's forward has no such hook; its
round is ended by the next thing that needs it: clipping, the step, the next forward.

[Note: compile] Hooks start and await collectives, which no graph can hold, so they are kept out of tracing: a compiled
whole model is cut at each of them. ``compile_units`` compiles the forward of each block instead, with the hooks
outside.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardglass.engine.gathers import reads_in_backward
from shardglass.engine.grads import Bucket
from shardglass.engine.hook import ModuleHook
from shardglass.engine.parts import Parts
from shardglass.engine.placeholder import GradientElsewhere
from shardglass.engine.unchanged import SameParams, first_few
from shardglass.engine.units import Unit
from shardglass.errors import UsageError

AMP_MARK = "_step_supports_amp_scaling"
"""Where a GradScaler finds that an optimizer's step() wants to be called whatever it found (source: torch 2.13)."""


class Runtime:
    """Hooks of one model: parameters are waited for before use, gradients are taken, the step is wrapped."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], parts: Parts) -> None:
        self._model, self._buffers, self._comm = model, parts.buffers, parts.comm
        self._gathers, self._grads, self._shards = parts.gathers, parts.grads, parts.shards
        self._callback_queued = False
        self._took_step = False
        self._weights_age = 0  # steps taken, to see a graph of older weights
        self._placeholders: list[tuple[nn.Parameter, GradientElsewhere]] = []
        self._params = {name: p for unit in units for name, p in unit.params.items()}
        self._trainable = {name: p.requires_grad for name, p in self._params.items()}
        self._same = SameParams(model, self._params)
        self.owner: object = None  # the handle: it lives as long as the hooks, also if the user drops it
        self._hooks: list[Any] = []
        self._blocks = [module for unit in units if unit.is_block for module in unit.modules]
        self._compiled: list[tuple[nn.Module, Any]] = []  # with the forward of its own that a block had, or None
        self._grads.on_total(self._shards.show)
        self._gathers.on_passed(self._grads.launch_passed)
        self._hook_model(units)
        self._hook_gradients()
        self._hooks.append(self._shards.optimizer.register_step_pre_hook(self._before_step))
        self._hooks.append(self._shards.optimizer.register_step_post_hook(self._after_step))
        # A GradScaler then calls step() on every rank, which refuses it; else it would leave the call out on some.
        self._takes_scaler = vars(self._shards.optimizer).get(AMP_MARK)
        setattr(self._shards.optimizer, AMP_MARK, True)

    # ---- installation ----

    def _hook_model(self, units: Sequence[Unit]) -> None:
        """See the root's forward come and go, and have a unit's parameters whole before its modules run."""
        model, add = self._model, self._hooks.append
        add(model.register_forward_pre_hook(ModuleHook(lambda module, args: self._before_forward())))
        owners = {id(module) for unit in units for module in unit.modules}
        for k, unit in enumerate(units):
            for module in unit.modules:
                # Where modules of units lie inside, their forward runs in its own: it cannot hold a unit all along.
                is_leaf = not any(id(child) in owners for child in module.modules() if child is not module)
                add(module.register_forward_pre_hook(self._opener(unit.name, module, is_leaf=is_leaf)))
                if is_leaf:
                    add(module.register_forward_hook(self._closer(unit.name), always_call=True))
            if not unit.is_block and k and units[k - 1].is_block:
                # A head read without its forward, as fused losses do, must be there once the blocks are through.
                for module in units[k - 1].modules:
                    add(module.register_forward_hook(self._waiter_after(unit.name)))
        add(model.register_forward_hook(ModuleHook(lambda module, args, output: self._after_forward(output))))
        add(model.register_forward_hook(ModuleHook(lambda *a: self._gathers.leave(None)), always_call=True))
        add(model.register_state_dict_pre_hook(ModuleHook(self._before_state_dict)))
        add(model.register_load_state_dict_pre_hook(ModuleHook(lambda *a, **k: self._before_load())))
        add(model.register_load_state_dict_post_hook(ModuleHook(lambda module, keys: self.params_changed())))

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001
        """With ``keep_vars`` the parameters themselves are listed, which needs no values."""
        if not keep_vars:
            self._gathers.whole_outside("state_dict()")
        self._gathers.settle()

    def _before_load(self) -> None:
        self._gathers.whole_outside("load_state_dict()")

    def _opener(self, unit: str, module: nn.Module, *, is_leaf: bool) -> Callable[..., None]:
        if not is_leaf:  # where parameters are sharded, its own ones are gathered when they are read
            return ModuleHook(lambda module, args: self._gathers.wait_ahead(unit))
        in_backward = reads_in_backward(module)

        def begin(module: nn.Module, args: Any) -> None:
            self._gathers.enter(unit)
            self._gathers.need(unit, in_backward=in_backward)

        return ModuleHook(begin)

    def _closer(self, unit: str) -> Callable[..., None]:
        return ModuleHook(lambda module, args, output: self._gathers.leave(unit))

    def _waiter_after(self, unit: str) -> Callable[..., None]:
        return ModuleHook(lambda module, args, output: self._gathers.wait_ahead(unit))

    def _hook_gradients(self) -> None:
        """Two hooks a trainable parameter: one before a gradient is accumulated, one after."""
        for bucket in self._grads.buckets:
            for k, param in enumerate(bucket.buffer.params):
                self._hooks.append(param.register_hook(lambda grad: self._before_gradient()))
                self._hooks.append(param.register_post_accumulate_grad_hook(self._taker(bucket, k)))

    def _taker(self, bucket: Bucket, k: int) -> Callable[[Tensor], None]:
        return lambda param: self._grads.arrive(bucket, k, param)  # type: ignore[arg-type]

    def compile_units(self, **options: Any) -> int:
        """Compile the forward of every block, see [Note: compile]; returns how many there are."""
        self._restore_forwards()
        for module in self._blocks:
            self._compiled.append((module, vars(module).get("forward")))
            module.forward = torch.compile(module.forward, **options)
        return len(self._compiled)

    def _restore_forwards(self) -> None:
        """Give compiled blocks their own forward back."""
        for module, own in self._compiled:
            del module.forward
            if own is not None:
                module.forward = own
        self._compiled.clear()

    def remove(self) -> None:
        """Take every hook, compiled forward and placeholder off."""
        self._restore_forwards()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._takes_scaler is None:
            vars(self._shards.optimizer).pop(AMP_MARK, None)
        self._remove_placeholders()
        self._shards.hide()

    # ---- forward ----

    def _before_forward(self) -> None:
        """The root's forward begins: an open round ends, and frozen or thawed parameters are an error."""
        self._gathers.wait_ahead("root:0")
        if torch.is_grad_enabled():
            self.end_backward()
            self._check_params()
        self._gathers.begin_forward()
        self._gathers.enter(None)

    def _after_forward(self, output: object) -> None:
        """The root's forward ended well."""
        trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors_in(output))
        self._gathers.end_forward(keeps_last=trains)
        self._watch_outputs(output)

    def _check_params(self) -> None:
        """Refuse a model whose parameters are no longer what was sharded.

        Raises:
            UsageError: A parameter was frozen or thawed, or they are others; names it.
        """
        for name, param in self._params.items():
            if param.requires_grad is not self._trainable[name]:
                was, now = ("trainable", "frozen") if self._trainable[name] else ("frozen", "trainable")
                raise UsageError(
                    f"{name} was {was} when the model was sharded and is {now} now; call handle.close(), make the "
                    "optimizer anew and shard() again"
                )
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Refuse a model that has other parameters than in ``shard``; see ``unchanged``.

        Raises:
            UsageError: Names them.
        """
        self._same.check()

    def _watch_outputs(self, output: object) -> None:
        """Put a gradient hook on every tensor the root returns, see [Note: end of backward]."""
        if torch.is_grad_enabled():
            for tensor in _tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._starter(self._weights_age))

    def _starter(self, age: int) -> Callable[[Tensor], None]:
        return lambda grad: self._backward_began(age)

    def params_changed(self) -> None:
        """Somebody wrote the model's parameters: take the master weights from them."""
        for buffer in self._buffers:
            buffer.refresh_master()

    # ---- backward ----

    def _backward_began(self, age: int) -> None:
        """In the outer backward, before any parameter's gradient.

        Raises:
            UsageError: The weights were stepped since the forward, so the gradient would be of neither.
        """
        if age != self._weights_age:
            raise UsageError(
                "backward() through a forward from before optimizer.step(): the weights it used are gone; call "
                "backward() for every loss before the step, or run the forward again"
            )
        self._before_gradient()
        if not self._callback_queued:
            self._callback_queued = True
            self._gathers.begin_backward()
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self._callback_queued = False
        self.end_backward()

    def _before_gradient(self) -> None:
        """Before the first gradient of a round: see whether the last ones were cleared, and make room."""
        if self._grads.in_round:
            return
        self.take_note_of_clear()
        self._remove_placeholders()
        self._shards.forget_norm()
        self._grads.open_round()

    def end_backward(self) -> None:
        """End the round and leave placeholders in ``param.grad``; collective unless under ``no_sync``."""
        if not self._grads.in_round:
            self._gathers.end_backward()
            return
        self._gathers.end_backward()
        self._grads.note = self._gathers.order_number
        self._grads.finish_round()
        if len(set(self._grads.notes)) == 1:
            self._gathers.adopt_order()
        for bucket in self._grads.buckets:
            for param in bucket.buffer.params:
                placeholder = GradientElsewhere.for_param(param)
                param.grad = placeholder
                self._placeholders.append((param, placeholder))
        if any(bucket.total_full or bucket.has_local for bucket in self._grads.buckets):
            self._shards.mark()

    def break_off(self) -> None:
        """A forward or backward failed on this rank: take part in the gathers that others of the same still need."""
        self._callback_queued = False
        self._gathers.end_pass()

    def _remove_placeholders(self) -> None:
        for param, placeholder in self._placeholders:
            if param.grad is placeholder:
                param.grad = None
        self._placeholders.clear()

    def take_note_of_clear(self) -> None:
        """If either ``zero_grad`` was called since the last backward, what is accumulated does not count.

        Raises:
            UsageError: Some gradients were taken away or set by hand, and not all.
        """
        gone = [param.grad is None or mark.cleared for param, mark in self._placeholders]
        by_hand = [p for p, mark in self._placeholders if p.grad is not None and p.grad is not mark]
        if by_hand or (any(gone) and not all(gone)):
            odd = by_hand or [p for (p, _), is_gone in zip(self._placeholders, gone, strict=True) if is_gone]
            done = "set" if by_hand else "removed"
            raise UsageError(
                f"{self._names_of(odd)}: the gradient was {done} by hand. The gradients of a "
                "sharded model are in its shards, where a group of parameters is updated as one tensor: clear all with "
                "optimizer.zero_grad(), and leave a parameter out of training with requires_grad_(False) before shard()"
            )
        if any(gone) or self._shards.was_cleared():
            self.clear()

    def _names_of(self, params: Sequence[nn.Parameter]) -> str:
        """Names of parameters, the first few."""
        ids = {id(p) for p in params}
        return first_few(name for name, p in self._params.items() if id(p) in ids)

    def clear(self) -> None:
        """Forget every gradient since the last step."""
        self._grads.drop()
        self._grads.observations.clear()
        self._remove_placeholders()
        self._shards.hide()
        self._shards.forget_norm()

    # ---- step ----

    def prepare_step(self) -> None:
        """Bring the accumulated gradients to their final state; collective.

        Raises:
            UsageError: The model has other parameters than it was sharded with.
        """
        self.check_unchanged()
        self.end_backward()
        self.take_note_of_clear()
        self._comm.position = f"step {self._grads.step}"
        self._grads.reduce_local()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Mapping[str, Any]) -> None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            raise UsageError(
                "optimizer.step(closure) is not supported on a sharded model: call the closure yourself, then step()"
            )
        if getattr(optimizer, "found_inf", None) is not None:
            raise UsageError(
                "torch.amp.GradScaler is not supported on a sharded model: it looks for inf on one rank alone. Train "
                "in bfloat16, which needs no scaling: EngineOptions(param_dtype='bfloat16')"
            )
        self._gathers.settle()
        self._shards.check_groups()
        self.prepare_step()
        self._check_no_foreign_gradient()
        self._shards.decide(self._grads)
        self._took_step = not self._shards.step_skipped and any(b.total_full for b in self._grads.buckets)

    def _check_no_foreign_gradient(self) -> None:
        """Refuse gradients that no backward brought here.

        Raises:
            UsageError: Somebody put them in ``param.grad``; names the first.
        """
        marked = {id(p) for p, _ in self._placeholders}
        odd = [p for p in self._params.values() if p.grad is not None and p.requires_grad and id(p) not in marked]
        if odd:
            raise UsageError(
                f"{self._names_of(odd)}: .grad was set by hand and not by backward(); the step of a sharded model uses "
                "the gradients of its shards"
            )

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._remove_placeholders()
        self._shards.hide()
        self._shards.forget_norm()
        if self._took_step:
            self.spread()
        self._grads.next_step()
        self._comm.position = f"step {self._grads.step}, forward"

    def spread(self) -> None:
        """The master weights changed: the model's parameters follow."""
        self._weights_age += 1
        self._gathers.spread()


def _tensors_in(value: object) -> list[Tensor]:
    """Every tensor in the containers a forward returns."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for item in value.values() for t in _tensors_in(item)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors_in(item)]
    if is_dataclass(value):
        return [t for f in fields(value) for t in _tensors_in(getattr(value, f.name))]
    return []

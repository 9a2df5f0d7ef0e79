"""The Trainer integration: a mixin over any ``transformers.Trainer``.

Owns the places where a Trainer meets the engine: what is sharded when, which micro-batches communicate, the norm,
skipped steps. Leaves checkpoints to ``checkpoints``, arguments to ``arguments``, the config's meaning to ``resolve``,
training itself to the Trainer.

[Note: what is overridden] Accelerate must neither wrap the model in DDP nor install autocast: the model is marked
as prepared and the Accelerator is made with mixed_precision "no", since only parameters are cast. Beside that mark the
only thing of ours on a user's object is that of ``generation``, at stage 3. Everything else is a documented Trainer
method.
"""

import itertools
import logging
import math
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from transformers import TrainerCallback

from shardglass.config import DeepSpeedConfig, load_config
from shardglass.engine.handle import Handle
from shardglass.engine.registry import live_handle
from shardglass.engine.shard import shard
from shardglass.engine.sources import is_hollow
from shardglass.errors import ConfigError, UsageError
from shardglass.hf.accelerated import precision_fault
from shardglass.hf.arguments import ZeroTrainingArguments, check_plain_arguments, words_of
from shardglass.hf.checkpoints import CheckpointMixin
from shardglass.hf.flags import optim_fault
from shardglass.hf.generation import keep_ranks_together
from shardglass.hf.losses import NonFiniteLossCallback
from shardglass.hf.resuming import TellEpoch
from shardglass.hf.saving_beside import TellSaved
from shardglass.hf.schedule import ConfigSchedule
from shardglass.options import EngineOptions
from shardglass.resolve import Resolved, RunArguments, resolve

log = logging.getLogger(__name__)

_TIMES_OUT_OF_MEMORY = itertools.count()
"""A process's, not a trainer's: the key in the launcher's store must be new each time."""

ALL_RAN_OUT_S = 60.0
"""How long a rank that ran out of memory waits for the others to run out too."""

ZeroConfig = str | os.PathLike[str] | Mapping[str, Any]


class ZeroMixin(CheckpointMixin):
    """ZeRO over a ``transformers.Trainer`` or a subclass of it: ``class MyTrainer(ZeroMixin, SFTTrainer): ...``.

    Takes the Trainer's own arguments, and ``zero_config=``: a DeepSpeed JSON as path or dict, for argument classes
    that have no field for it. With ZeroTrainingArguments the ``deepspeed`` field does the same.

    Attributes:
        handle: The engine's handle, once training began; None before.
        resolved: Every value of the run, with its origin.
        token_counts: [2] int64, tokens and label tokens this rank trained on so far; padding is not counted.
    """

    handle: Handle | None
    resolved: Resolved
    token_counts: Tensor

    def __init__(self, *args: Any, zero_config: ZeroConfig | None = None, **kwargs: Any) -> None:
        """Resolve config and arguments, then build the Trainer.

        Raises:
            ConfigError: Config and arguments contradict each other, or ask for what is not supported.
        """
        training_args = kwargs.get("args", args[1] if len(args) > 1 else None)
        if training_args is None:
            training_args = kwargs["args"] = ZeroTrainingArguments(output_dir="tmp_trainer")
        self.handle = None
        self._mine = []
        self._zero_config = zero_config_of(training_args, zero_config)
        self._run_arguments = run_arguments(training_args)
        self.resolved = resolve_run(training_args, zero_config)
        apply_resolved(training_args, self.resolved)
        _ensure_process_group(training_args)
        super().__init__(*args, **kwargs)
        self._check_supported()
        self.token_counts = torch.zeros(2, dtype=torch.int64, device=training_args.device)
        self.add_callback(_TellSkipped(self))  # type: ignore[attr-defined]
        self.add_callback(NonFiniteLossCallback(self))  # type: ignore[attr-defined]
        self.add_callback(TellEpoch(self))  # type: ignore[attr-defined]
        self.add_callback(TellSaved(self._saves()))  # type: ignore[attr-defined]

    def _check_supported(self) -> None:
        """Refuse, before any step, what would train something else than was asked for."""
        args: Any = self.args
        faults = []
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:  # type: ignore[attr-defined]
            other = "DeepSpeed" if self.is_deepspeed_enabled else "FSDP"  # type: ignore[attr-defined]
            faults.append(
                f"Accelerate's own {other} plugin is on: turn it off in its config, shardglass does the sharding"
            )
        if args.n_gpu > 1:
            faults.append(f"one process sees {args.n_gpu} GPUs: start with torchrun, one process per GPU")
        if self._zero_config is not None and self.resolved.optimizer and self.optimizer is not None:
            faults.append("an optimizer was passed and the config has an optimizer section: remove one of them")
        makes_one = self.optimizer is None and self.resolved.optimizer is None
        optim = optim_fault(str(getattr(args.optim, "value", args.optim)))
        if optim is not None and makes_one and not getattr(self, "optimizer_cls_and_kwargs", None):
            faults.append(optim)
        if faults:
            raise ConfigError("; ".join(faults))

    # ---- what a Trainer builds ----

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave a model alone whose values come when it is sharded: it was made for its device."""
        if not is_hollow(model):
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """No autocast: the engine casts the parameters, and nothing else is cast."""
        built: dict[str, Any] = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        return {**built, "mixed_precision": "no"}

    accelerator: Any
    _ran_out = False  # whether the last training step ran out of memory
    _sharded_model: nn.Module | None = None
    optimizer: Any
    lr_scheduler: Any

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Make the optimizer as the config or the Trainer means it, then shard it and the model.

        The ``optimizer`` section of a config puts all trainable parameters in one group; without it the Trainer
        makes a group with and one without weight decay.
        """
        wanted: Any = self.model if model is None else model
        if self.handle is not None and self._sharded_model is wanted and not self.handle.closed:
            if self._ran_out:
                self._ran_out = False
                self.handle.abandon_step()
            return self.optimizer
        if self.handle is not None:
            self._end_saves()
            self.handle.close()
            self.optimizer = None
        other = live_handle(wanted)
        if other is not None:  # of a trainer before this one
            other.close()
        spec = self.resolved.optimizer
        if self.optimizer is None and spec is not None:
            trainable = [p for p in wanted.parameters() if p.requires_grad]
            fused = {} if spec.type == "Adagrad" else {"fused": True}
            self.optimizer = getattr(torch.optim, spec.type)(trainable, **spec.arguments(), **fused)
        given = () if model is None else (model,)  # a subclass's own may be written without the argument
        optimizer: Any = super().create_optimizer(*given)  # type: ignore[misc]
        optimizer = getattr(optimizer, "optimizer", optimizer)
        self.handle = shard(wanted, optimizer, options=self.engine_options())
        self._sharded_model = wanted
        wanted._is_accelerate_prepared = True  # see [Note: what is overridden]
        keep_ranks_together(wanted, self.handle)
        self._compile_units()
        return self.optimizer

    def _compile_units(self) -> None:
        """What ``--torch_compile`` asks for; Accelerate does not compile a model that is marked as prepared."""
        plugin = self.accelerator.state.dynamo_plugin
        if str(getattr(plugin.backend, "value", plugin.backend)).lower() == "no":
            return
        options = {key: value for key, value in plugin.to_kwargs().items() if key != "use_regional_compilation"}
        if self._live_handle().compile_units(**options) == 0:
            name = words_of(self.args).named("torch_compile")
            log.warning("%s: the model has no list of blocks, so nothing is compiled", name)

    def engine_options(self) -> EngineOptions:
        """The engine's options of this run."""
        args: Any = self.args
        options = self.resolved.options
        given = {f.name: getattr(args, f.name) for f in fields(EngineOptions) if hasattr(args, f.name)}
        own = {k: v for k, v in given.items() if k in ("max_skipped_steps", "collective_timeout_s") and v is not None}
        if getattr(args, "skip_nonfinite", True) is False:
            own["skip_nonfinite"] = False
        return replace(options, **own)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Make the config's scheduler if it has one, now that the number of steps is known; else the Trainer's."""
        self._run_arguments = replace(
            self._run_arguments, total_steps=num_training_steps, hidden_size=self._hidden_size()
        )
        args: Any = self.args
        self.resolved = resolve(
            self._zero_config,
            self._run_arguments,
            world_size=args.world_size,
            stage=getattr(args, "zero_stage", None),
        )
        if self.resolved.scheduler is not None and self.lr_scheduler is None:
            inner = getattr(self.optimizer, "optimizer", self.optimizer) if optimizer is None else optimizer
            self.lr_scheduler = ConfigSchedule(inner, self.resolved.scheduler)
            self._created_lr_scheduler = True
            return self.lr_scheduler
        return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]

    def _hidden_size(self) -> int:
        """Width of the model: its config's, else the most frequent last dimension of its matrices."""
        model: Any = self.model
        config = getattr(model, "config", None)
        for name in ("hidden_size", "n_embd", "d_model"):
            if isinstance(getattr(config, name, None), int):
                return int(getattr(config, name))
        widths = [p.shape[-1] for p in model.parameters() if p.dim() == 2]
        return max(set(widths), key=widths.count) if widths else 1

    # ---- a step ----

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """One micro-batch; before the accumulation boundary it communicates only if the stage shards gradients."""
        boundary = bool(self.accelerator.sync_gradients)
        handle = self._live_handle()
        self._count_tokens(args[0] if args else kwargs["inputs"])
        local = not boundary and not handle.options.rules.shards_grads
        try:
            with handle.no_sync() if local else nullcontext():
                loss: Tensor = super().training_step(model, *args, **kwargs)  # type: ignore[misc]
        except RuntimeError as error:
            if self.args.auto_find_batch_size and should_reduce_batch_size(error):
                self._ran_out = True
                handle.break_off()
                self._check_all_ran_out(error)
            raise
        return loss

    def _check_all_ran_out(self, error: RuntimeError) -> None:
        """A smaller batch is tried only if every rank ran out of memory: the others would wait for this one for ever.

        Raises:
            UsageError: This rank is alone; ending it ends the others.
        """
        if self.args.world_size == 1:
            return
        key = f"shardglass/out of memory/{next(_TIMES_OUT_OF_MEMORY)}"
        store = dist.distributed_c10d._get_default_store()
        store.add(key, 1)
        deadline = time.monotonic() + ALL_RAN_OUT_S
        while int(store.add(key, 0)) < self.args.world_size:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"rank {self.args.process_index} ran out of memory and other ranks did not ({error}); "
                    "auto_find_batch_size needs all to run out alike: give a smaller "
                    f"{words_of(self.args).named('per_device_train_batch_size')}"
                ) from error
            time.sleep(0.05)

    def _count_tokens(self, inputs: Mapping[str, Tensor]) -> None:
        """Count real tokens and label tokens; nothing waits for the device."""
        ids, mask, labels = (inputs.get(key) for key in ("input_ids", "attention_mask", "labels"))
        if mask is not None:
            self.token_counts[0] += mask.sum().to(self.token_counts.device)
        elif ids is not None:
            self.token_counts[0] += ids.numel()
        if labels is not None:
            self.token_counts[1] += (labels[..., 1:] != -100).sum().to(self.token_counts.device)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """The Trainer's ``grad_norm``: the global norm before clipping."""
        return self._live_handle().clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> float:
        """The norm as a number; without clipping it is computed here."""
        norm = self._live_handle().clip_grad_norm_(math.inf) if grad_norm is None else grad_norm
        return float(norm)

    def _live_handle(self) -> Handle:
        if self.handle is None:
            name = type(self).__name__
            raise UsageError(
                f"the model of this {name} is not sharded: train() has not begun, or {name} has a create_optimizer() "
                "that hides ZeroMixin's; then put ZeroMixin first, as in class Sharded(ZeroMixin, YourTrainer)"
            )
        return self.handle

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the engine's numbers to the Trainer's; its own keys stay as they are."""
        if self.handle is not None and "grad_norm" in logs:
            if self.handle.clipped_grad_norm is not None:
                logs["clipped_grad_norm"] = self.handle.clipped_grad_norm
            if self.handle.steps_skipped:
                logs["steps_skipped"] = self.handle.steps_skipped
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class ZeroTrainer(ZeroMixin, transformers.Trainer):
    """``transformers.Trainer`` with the ZeRO engine; see ZeroMixin."""


class _TellSkipped(TrainerCallback):
    """Tells Accelerate that a step was skipped, so that the Trainer leaves the scheduler where it is."""

    def __init__(self, trainer: ZeroMixin) -> None:
        self._trainer = trainer

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Runs between the optimizer's step and the scheduler's."""
        handle = self._trainer.handle
        if handle is not None:
            # What `accelerator.optimizer_step_was_skipped` reads; Accelerate has no other way in.
            self._trainer.optimizer._is_overflow = handle.step_skipped


def zero_config_of(args: Any, zero_config: ZeroConfig | None = None) -> DeepSpeedConfig | None:
    """The config of the argument class or of ``zero_config=``; None if neither has one.

    Raises:
        ConfigError: Both are given and differ, plain TrainingArguments have ``deepspeed`` set, or the config is wrong.
    """
    own = args.zero_config if isinstance(args, ZeroTrainingArguments) else None
    if not isinstance(args, ZeroTrainingArguments):
        check_plain_arguments(args)
    if own is not None and zero_config is not None and own != zero_config:
        raise ConfigError("the config is given twice, as deepspeed= of the arguments and as zero_config=: give it once")
    source = own if own is not None else zero_config
    if source is None:
        return None
    return load_config(source, allow_unknown=bool(getattr(args, "allow_unknown_config", False)))


def resolve_run(args: Any, zero_config: ZeroConfig | None = None) -> Resolved:
    """Config and arguments together, as far as they can be before the data is known.

    Raises:
        ConfigError: They contradict each other, or ask for what is not supported; all faults at once. Or
            ``accelerate launch`` asks for another precision.
    """
    resolved = resolve(
        zero_config_of(args, zero_config),
        run_arguments(args),
        world_size=max(1, args.world_size),
        stage=getattr(args, "zero_stage", None),
        final=False,
    )
    fault = precision_fault(resolved.param_dtype, words_of(args))
    if fault is not None:
        raise ConfigError(fault)
    return resolved


def run_arguments(args: Any) -> RunArguments:
    """The training arguments that a config can refer to, with the names the user gave.

    Arguments that carry no list of given names (made from Python) count as given where they differ from their default.
    """
    known = {f.name: getattr(args, f.name) for f in fields(RunArguments) if hasattr(args, f.name)}
    known.pop("explicit", None)
    known["bf16"] = bool(args.bf16 or args.bf16_full_eval)
    known["fp16"] = bool(args.fp16 or args.fp16_full_eval)
    known["lr_scheduler_type"] = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    known["warmup_steps"] = known.get("warmup_steps") or 0
    known["warmup_ratio"] = known.get("warmup_ratio") or 0.0
    given = getattr(args, "explicit", None)
    if given is None:
        defaults = RunArguments()
        given = {name for name, value in known.items() if value != getattr(defaults, name)}
        known["from_command"] = False
    return RunArguments(**known, explicit=frozenset(given))


def apply_resolved(args: Any, resolved: Resolved) -> None:
    """Give the Trainer's arguments the values that the config decided."""
    decided = resolved.arguments
    names = (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "max_grad_norm",
        "learning_rate",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "weight_decay",
    )
    for name in names:
        setattr(args, name, getattr(decided, name))
    if decided.bf16:
        args.bf16_full_eval = False  # it would replace the parameters; the engine casts them


def _ensure_process_group(args: Any) -> None:
    """A single process gets a group of its own, so that world size 1 takes the same path as N."""
    if dist.is_initialized() or args.world_size > 1:
        return
    backend = "nccl" if args.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)

"""The values that go into and come out of ``resolve``.

Owns the types and what can be told from one of them alone. Leaves the filling to the neighbouring modules.
"""

import math
from dataclasses import dataclass
from typing import Literal

from shardglass.options import EngineOptions
from shardglass.schedules import Schedule

Source = Literal["json", "flag", "derived", "default"]
"""Where a value came from; "flag" is one that the user gave, "default" a flag's default or DeepSpeed's own."""

Used = Literal["honoured", "no effect"]

_ENGINE = EngineOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArguments:
    """The training arguments that a config or the engine refers to; defaults are those of ZeroTrainingArguments.

    Attributes:
        per_device_train_batch_size: Sequences of a micro-batch on one rank.
        gradient_accumulation_steps: Micro-batches of one optimizer step.
        max_grad_norm: Norm to clip at; 0 means no clipping.
        learning_rate: Peak rate.
        adam_beta1: First decay rate of Adam.
        adam_beta2: Second decay rate of Adam.
        adam_epsilon: Adam's epsilon.
        weight_decay: Decoupled weight decay.
        warmup_steps: Steps of warm-up; below 1 it is a share of all steps, as in newer transformers.
        warmup_ratio: Share of all steps that warm up; counts only while ``warmup_steps`` is 0.
        max_steps: Optimizer steps of the run; -1 or 0 means by epochs.
        total_steps: Optimizer steps of the run once the data is known; None until then.
        bf16: Compute in bfloat16 (``--bf16`` or ``--bf16_full_eval``).
        fp16: Compute in float16 (``--fp16`` or ``--fp16_full_eval``).
        hidden_size: Width of the model once it is known; None until then.
        optim: The Trainer's optimizer, for a run whose config has no ``optimizer`` section.
        optim_args: More of the Trainer's optimizer, as text.
        lr_scheduler_type: The Trainer's scheduler, for a run whose config has no ``scheduler`` section.
        lr_scheduler_kwargs: More of the Trainer's scheduler.
        skip_nonfinite: Skip a step whose gradient is inf or nan on any rank.
        max_skipped_steps: Skipped steps in a row after which the run stops.
        collective_timeout_s: Seconds after which a collective that did not end is an error.
        explicit: Names of the arguments that the user gave, as above; plus "stage".
        from_command: Whether they are flags of a command line; if not, messages speak of arguments.
    """

    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    max_grad_norm: float = 1.0
    learning_rate: float = 5e-5
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: float = 0
    warmup_ratio: float = 0.0
    max_steps: int = -1
    total_steps: int | None = None
    bf16: bool = False
    fp16: bool = False
    hidden_size: int | None = None
    optim: str = "adamw_torch_fused"
    optim_args: str | None = None
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: object = None
    skip_nonfinite: bool = _ENGINE.skip_nonfinite
    max_skipped_steps: int = _ENGINE.max_skipped_steps
    collective_timeout_s: float = _ENGINE.collective_timeout_s
    explicit: frozenset[str] = frozenset()
    from_command: bool = True

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the run: ``max_steps``, else ``total_steps``; None while unknown."""
        return self.max_steps if self.max_steps > 0 else self.total_steps


def warmup_steps_of(args: RunArguments) -> int | None:
    """Return the steps of warm-up: ``warmup_steps``, else ceil(``warmup_ratio`` × steps); None while unknown.

    The product is taken in floating point, as transformers does, so that both count the same steps.
    """
    if args.warmup_steps >= 1:
        return int(args.warmup_steps)
    ratio = args.warmup_steps or args.warmup_ratio
    if ratio <= 0:
        return 0
    return None if args.steps is None else math.ceil(args.steps * ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNumbers:
    """Sequences per optimizer step: ``train = micro × accumulation × world_size``."""

    micro: int
    accumulation: int
    world_size: int
    train: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """The optimizer that the config asks for, as a class of ``torch.optim`` and its values.

    Attributes:
        type: Name of the class in ``torch.optim``: AdamW, Adam, SGD or Adagrad.
        json_type: The type in the config; DeepSpeed's Adam is AdamW unless ``adam_w_mode`` is false.
        lr: Learning rate.
        weight_decay: Weight decay; decoupled for AdamW, added to the gradient for the others.
        betas: Decay rates of Adam and AdamW; None for the others.
        eps: Epsilon of Adam, AdamW and Adagrad; None for SGD.
        amsgrad: Adam and AdamW only.
        momentum: SGD only.
        dampening: SGD only.
        nesterov: SGD only.
        lr_decay: Adagrad only.
        initial_accumulator_value: Adagrad only.
    """

    type: Literal["AdamW", "Adam", "SGD", "Adagrad"]
    json_type: str
    lr: float
    weight_decay: float = 0.0
    betas: tuple[float, float] | None = None
    eps: float | None = None
    amsgrad: bool = False
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0

    def arguments(self) -> dict[str, object]:
        """The keyword arguments of the ``torch.optim`` class."""
        common: dict[str, object] = {"lr": self.lr, "weight_decay": self.weight_decay}
        if self.type == "SGD":
            return common | {"momentum": self.momentum, "dampening": self.dampening, "nesterov": self.nesterov}
        if self.type == "Adagrad":
            start = self.initial_accumulator_value
            return common | {"lr_decay": self.lr_decay, "initial_accumulator_value": start, "eps": self.eps}
        return common | {"betas": self.betas, "eps": self.eps, "amsgrad": self.amsgrad}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedValue:
    """One row of the table that a run shows.

    Attributes:
        key: Dotted path in the config; for what no config can say, the flag.
        value: The value that counts; None while it is not known, and where an ``auto`` stands for nothing.
        source: Where it came from.
        used: Whether it decides anything here.
        flag: The argument that fills ``auto`` and a missing key; None if there is none.
    """

    key: str
    value: object
    source: Source
    used: Used
    flag: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """All that a config and the flags decide.

    Attributes:
        origin: The config's file name; without a config "the command line" or "the training arguments".
        options: Options of the engine.
        param_dtype: torch's name of the dtype the model computes in: "bfloat16" or "float32".
        batch: Batch numbers.
        gradient_clipping: Norm to clip at; 0.0 means no clipping.
        optimizer: The config's optimizer; None leaves it to the Trainer.
        scheduler: The config's scheduler; None leaves it to the Trainer.
        reduce_dtype: dtype gradients travel in; None means the parameter's.
        accum_dtype: dtype gradients are accumulated in.
        arguments: The training arguments with every value that the config decided.
        values: Every value with its origin, for a table.
        notes: Sentences a user should read once.
        pending: Keys whose value waits for the total number of steps or the hidden size; empty unless
            ``resolve`` was called with ``final=False``.
    """

    origin: str
    options: EngineOptions
    param_dtype: str
    batch: BatchNumbers
    gradient_clipping: float
    optimizer: OptimizerSpec | None
    scheduler: Schedule | None
    reduce_dtype: str | None
    accum_dtype: str
    arguments: RunArguments
    values: tuple[ResolvedValue, ...]
    notes: tuple[str, ...]
    pending: tuple[str, ...]

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return self.options.stage

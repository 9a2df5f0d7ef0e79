"""The flags that are ours, as dataclasses, and the ranges of values that make sense.

Owns names, defaults and help texts of everything the training command takes beside transformers' own training
arguments. Loads neither torch nor transformers, so that ``shardglass train --help`` answers at once.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from shardglass.errors import ConfigError, suggestion
from shardglass.options import EngineOptions

_ENGINE = EngineOptions()

DEBUGPY_PORT = 5678
"""Where debugpy's own examples listen."""


def _flag(default: object, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass
class ModelArguments:
    """Which model, and how it is loaded."""

    model_name_or_path: str = _flag("", "Folder with the model, or its name on the hub. Required.")
    cache_dir: str | None = _flag(None, "Folder that keeps what is downloaded.")
    attn_implementation: str | None = _flag(None, "Attention kernel: eager, sdpa, flash_attention_2.")
    dtype: str | None = _flag(None, "dtype to load the weights in: auto, float32, bfloat16, float16.")
    trust_remote_code: bool = _flag(default=False, help_text="Run Python code that comes with the model.")


@dataclass
class DataArguments:
    """Which data, and how conversations become samples."""

    data_path: str = _flag("", 'JSON file with a list of {"id", "conversations": [{"from", "value"}]}. Required.')
    eval_data_path: str | None = _flag(None, "The same, held out for evaluation.")
    label_policy: str = _flag(
        "assistant",
        "What the loss counts: assistant, all, or qwen (the Qwen script's rule). Also --assistant_only_loss.",
    )
    lazy_preprocess: bool = _flag(default=False, help_text="Tokenize a sample when it is drawn, not all beforehand.")
    skip_bad_records: bool = _flag(default=False, help_text="Leave records out that cannot be used, and count them.")


@dataclass
class LoraArguments:
    """LoRA flags of the Qwen script: known by name, not supported yet."""

    use_lora: bool = _flag(default=False, help_text="Train LoRA adapters. Not supported yet.")
    q_lora: bool = _flag(default=False, help_text="LoRA on a base quantized to 4 bits. Not supported yet.")
    lora_r: int = _flag(64, "Rank of the adapters; no effect without --use_lora.")
    lora_alpha: int = _flag(16, "Scale of the adapters; no effect without --use_lora.")
    lora_dropout: float = _flag(0.05, "Dropout before the adapters; no effect without --use_lora.")
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["c_attn", "c_proj", "w1", "w2"],
        metadata={"help": "Modules that get adapters; no effect without --use_lora."},
    )
    lora_weight_path: str = _flag("", "Adapters to start from; no effect without --use_lora.")
    lora_bias: str = _flag("none", "Which biases are trained: none, all, lora_only; no effect without --use_lora.")


@dataclass(repr=False)
class EngineFlags:
    """What ``ZeroTrainingArguments`` adds to transformers' training arguments."""

    zero_stage: int | None = _flag(None, "ZeRO stage: 0, 1, 2 or 3. Default: the config's, or 2 without a config.")
    model_max_length: int = _flag(2048, "Tokens after which a sample is cut.")
    warmup_ratio: float = _flag(0.0, "Share of all steps that warm up, rounded up; --warmup_steps goes first.")
    skip_nonfinite: bool = _flag(_ENGINE.skip_nonfinite, "Skip a step whose gradient is inf or nan on any rank.")
    max_skipped_steps: int = _flag(_ENGINE.max_skipped_steps, "Skipped steps in a row after which the run stops.")
    collective_timeout_s: float = _flag(
        _ENGINE.collective_timeout_s, "Seconds after which a collective that did not end is an error."
    )
    logging_nan_inf_filter: bool = _flag(
        default=False, help_text="Leave losses that are nan or inf out of the log, as transformers does by default."
    )
    overwrite_output_dir: bool = _flag(
        default=False, help_text="Replace a model in --output_dir that no run wrote; see the README."
    )
    async_save: bool = _flag(
        default=False, help_text="Write checkpoints while training goes on; costs a copy of a rank's state on the host."
    )
    on_save_failure: str = _flag("stop", "What a checkpoint that cannot be written does to the run: stop or continue.")
    skip_memory_check: bool = _flag(
        default=False, help_text="Train although the plan says that the memory cannot suffice."
    )
    allow_unknown_config: bool = _flag(
        default=False, help_text="Leave unknown keys of the config out with a note, instead of refusing them."
    )


@dataclass
class LookArguments:
    """How somebody looks into the run while it trains."""

    look: str | None = _flag(
        None, "Steps after which each rank writes a snapshot, such as 1,100; 0 is before the first. `shardglass look`"
    )
    debugpy_rank: int | None = _flag(None, "The rank that waits for a debugger before it does anything else.")
    debugpy_port: int = _flag(DEBUGPY_PORT, "Port on its machine where it waits; no effect without --debugpy_rank.")


@dataclass
class LaunchArguments:
    """How ``shardglass train`` starts its processes; the names are torchrun's."""

    nproc_per_node: str = _flag("1", "Processes on this machine, one per GPU: a number, gpu, cpu or auto.")
    nnodes: str = _flag("1", "Number of machines.")
    node_rank: int = _flag(0, "Which of the machines this is.")
    master_addr: str | None = _flag(None, "Address of machine 0. Default: this machine.")
    master_port: int | None = _flag(None, "Port on machine 0. Default with one machine: a free one.")
    rdzv_backend: str | None = _flag(None, "Rendezvous of torch's launcher, such as c10d.")
    rdzv_endpoint: str | None = _flag(None, "host:port of the rendezvous.")
    rdzv_id: str | None = _flag(None, "Name of the run at the rendezvous.")
    max_restarts: int = _flag(0, "Times a failed group of processes is started again.")
    log_dir: str | None = _flag(None, "Folder for the launcher's logs.")


SHARDABLE_OPTIMS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Values of ``--optim`` whose update of one element reads that element alone, and which keep plain fp32 states."""


def optim_fault(optim: str) -> str | None:
    """Say why an ``--optim`` of transformers cannot be used; None if it can.

    A name that transformers does not know either is left to its own message.
    """
    if optim in SHARDABLE_OPTIMS:
        return None
    return (
        f"optim {optim} cannot be sharded: its update needs whole matrices, or its states are packed in blocks; use "
        f"one of {', '.join(SHARDABLE_OPTIMS)}"
    )


_NO_DDP = "the engine reduces the gradients itself, without DDP"

IDLE_FLAGS = {
    "ddp_broadcast_buffers": _NO_DDP,
    "ddp_bucket_cap_mb": _NO_DDP,
    "ddp_find_unused_parameters": _NO_DDP,
    "ddp_static_graph": _NO_DDP,
    "do_eval": "--eval_strategy decides when the run evaluates",
    "do_predict": "this command trains",
    "do_train": "this command trains",
    "fsdp_config": "the engine shards the model itself, without FSDP",
}
"""Flags of transformers that do nothing in this command, and why."""


LABEL_POLICIES = ("assistant", "all", "qwen")
"""Values of ``--label_policy``; what they mean is told in ``labels``."""


LOAD_DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Values of ``--dtype``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """An interval of allowed numbers, and one more outside of it that has a meaning of its own."""

    low: float
    high: float = math.inf
    other: float | None = None
    low_excluded: bool = False
    high_excluded: bool = False

    def holds(self, value: float) -> bool:
        """Whether ``value`` lies in the interval; nan and infinities never do."""
        if value == self.other:
            return True
        if not math.isfinite(value) or value < self.low or value > self.high:
            return False
        return not (self.low_excluded and value == self.low) and not (self.high_excluded and value == self.high)

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.low_excluded else f"at least {self.low:g}"
        other = "" if self.other is None else f", or {self.other:g}"
        if self.high == math.inf:
            return f"{low}{other}"
        return f"{low} and {'below' if self.high_excluded else 'at most'} {_number(self.high)}{other}"


def _number(value: float) -> str:
    """Whole numbers with all their digits."""
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


RANGES = {
    "per_device_train_batch_size": Range(low=1),
    "per_device_eval_batch_size": Range(low=1),
    "gradient_accumulation_steps": Range(low=1),
    "num_train_epochs": Range(low=0, low_excluded=True),
    "max_steps": Range(low=1, other=-1),
    "learning_rate": Range(low=0),
    "weight_decay": Range(low=0),
    "adam_beta1": Range(low=0, high=1, high_excluded=True),
    "adam_beta2": Range(low=0, high=1, high_excluded=True),
    "adam_epsilon": Range(low=0),
    "max_grad_norm": Range(low=0),
    "warmup_ratio": Range(low=0, high=1),
    "warmup_steps": Range(low=0),
    "logging_steps": Range(low=0),
    "save_steps": Range(low=0),
    "eval_steps": Range(low=0),
    "dataloader_num_workers": Range(low=0),
    "label_smoothing_factor": Range(low=0, high=1),
    "seed": Range(low=0, high=2**32 - 1),
    "debugpy_rank": Range(low=0),
    "debugpy_port": Range(low=1, high=65535),
    "zero_stage": Range(low=0, high=3),
    "model_max_length": Range(low=2),
    "max_skipped_steps": Range(low=1),
    "collective_timeout_s": Range(low=0, low_excluded=True),
}
"""Numbers that transformers would take and that make no run."""


CHOICES: Mapping[str, Sequence[str]] = {"on_save_failure": ("stop", "continue")}
"""Flags that take one of a few words."""


def range_faults(values: Mapping[str, Any]) -> list[str]:
    """Say which of the values lie outside their range, or are none of the choices; None counts as absent."""
    faults = [
        f"{name} is {values[name]}: it must be {allowed}"
        for name, allowed in RANGES.items()
        if isinstance(values.get(name), int | float) and not allowed.holds(values[name])
    ]
    return faults + [
        f"{name} is {values[name]!r}: it must be {' or '.join(choices)}"
        for name, choices in CHOICES.items()
        if values.get(name) is not None and values[name] not in choices
    ]


def faults_error(what: str, faults: Iterable[str], remedy: str = "") -> ConfigError:
    """Put all faults of one input in one error.

    Args:
        what: What was read: "flags", "training arguments".
        faults: One line each.
        remedy: Said once, behind them.
    """
    lines = list(faults)
    if len(lines) == 1:
        return ConfigError(f"{what}: {lines[0]}" + (f"\n  {remedy}" if remedy else ""))
    return ConfigError("\n  ".join([f"{what}: {len(lines)} faults", *lines, *([remedy] if remedy else [])]))


def flags_error(faults: Iterable[str]) -> ConfigError:
    """All faults of a command line as one error."""
    return faults_error("flags", faults, "`shardglass train --help` lists all flags")


def look_steps(text: str | None) -> tuple[int, ...]:
    """The steps of ``--look``.

    Raises:
        ConfigError: They are no numbers.
    """
    words = [] if text is None else [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and word.isascii() for word in words):
        raise ConfigError(f"--look {text}: it must be one step or several, such as 1,100")
    return tuple(sorted({int(word) for word in words}))


def _look_faults(values: Mapping[str, Any]) -> list[str]:
    """Say what is wrong with the flags of ``LookArguments``."""
    faults = []
    try:
        look_steps(values.get("look"))
    except ConfigError as error:
        faults.append(str(error))
    if values.get("debugpy_rank") is not None and find_spec("debugpy") is None:
        faults.append("--debugpy_rank: debugpy is not installed: pip install 'shardglass[debug]'")
    return faults


def early_faults(values: Mapping[str, Any]) -> list[str]:
    """Say what is wrong with the values of a command, as far as it can be told without transformers."""
    faults = [f"--{name} is required" for name in ("model_name_or_path", "data_path") if not values.get(name)]
    faults += [f"--{name}: a value is missing" for name in ("output_dir", "deepspeed") if values.get(name) == ""]
    faults += [f"--{fault}" for fault in range_faults(values)]
    faults += _look_faults(values)
    for name in ("use_lora", "q_lora"):
        if values.get(name):
            faults.append(f"--{name}: not supported yet; leave it out to train all parameters")
    policy = values.get("label_policy", LABEL_POLICIES[0])
    if policy not in LABEL_POLICIES:
        hint = suggestion(policy, LABEL_POLICIES)
        faults.append(f"--label_policy {policy}: it must be one of {', '.join(LABEL_POLICIES)}{hint}")
    dtype = values.get("dtype")
    if dtype is not None and dtype not in LOAD_DTYPES:
        faults.append(f"--dtype {dtype}: it must be one of {', '.join(LOAD_DTYPES)}{suggestion(dtype, LOAD_DTYPES)}")
    return faults

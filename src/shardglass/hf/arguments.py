"""Training arguments that keep the DeepSpeed JSON to themselves, and the training command's flags as one value.

Owns the argument class and the reading of a command. Leaves how flags are written to ``scan``, our own flags to
``flags``, the meaning of the JSON to ``shardglass.config`` and ``shardglass.resolve``.

[Note: DeepSpeed stays out] transformers' TrainingArguments starts the real DeepSpeed wherever it finds
``self.deepspeed`` set while it is made: when it sets up devices and when it builds its plugin.
``ZeroTrainingArguments`` puts the value aside for that time. Afterwards ``deepspeed`` is readable again, for
``to_dict`` and ``dataclasses.replace``; what transformers and Accelerate act on is ``deepspeed_plugin``, which stays
None.
"""

import enum
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, get_args

import torch
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from shardglass.compat.kept import keep
from shardglass.errors import ConfigError, InvariantError, suggestion
from shardglass.hf.accelerated import lonely_note, other_engines
from shardglass.hf.debugging import patience
from shardglass.hf.flags import (
    IDLE_FLAGS,
    DataArguments,
    EngineFlags,
    LaunchArguments,
    LookArguments,
    LoraArguments,
    ModelArguments,
    early_faults,
    faults_error,
    flags_error,
    optim_fault,
    range_faults,
)
from shardglass.hf.help import show_help
from shardglass.hf.mistakes import mistakes_told
from shardglass.hf.rehearsal import training_faults
from shardglass.hf.scan import Scanned, kinds_of, scan
from shardglass.words import IN_PYTHON, ON_A_COMMAND_LINE, Words

__all__ = [
    "Command",
    "DataArguments",
    "LookArguments",
    "LoraArguments",
    "ModelArguments",
    "ZeroTrainingArguments",
    "check_plain_arguments",
    "parse_command",
    "words_of",
]

log = logging.getLogger(__name__)

_NOTHING: Mapping[str, object] = MappingProxyType({})


@dataclass(repr=False)
class ZeroTrainingArguments(EngineFlags, TrainingArguments):
    """transformers' TrainingArguments for shardglass: ``deepspeed=`` is read by us and starts no DeepSpeed.

    Everything else is as in transformers, except that without CUDA ``use_cpu`` is set by itself (so that ``bf16=True``
    works), and that no autocast is asked for: the engine casts the parameters.

    Attributes:
        deepspeed: The DeepSpeed JSON: a path, its text or a mapping. DeepSpeed need not be installed.
        explicit: Names of the arguments that the user gave on a command line; None if made from Python.

    Raises:
        ConfigError: A number makes no run, or FSDP or DeepSpeed are asked for beside us.
        ValueError: transformers refuses a value.
    """

    explicit: frozenset[str] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check what is ours, then let transformers check and prepare what is its own."""
        faults = [*range_faults(vars(self)), *other_engines(self)]
        if faults:
            raise faults_error("training arguments", faults)
        alone = lonely_note()
        if alone is not None:
            log.warning("%s", alone)
        config: Any = self.deepspeed
        if isinstance(config, os.PathLike):
            config = os.fspath(config)  # a path object has no place in JSON
        if not torch.cuda.is_available():
            self.use_cpu = True
        self.deepspeed = None  # [Note: DeepSpeed stays out]
        try:
            super().__post_init__()  # type: ignore[no-untyped-call]
        finally:
            self.deepspeed = config
        # The Trainer hands this to Accelerate, which would install autocast; `bf16` itself keeps the user's value.
        self.mixed_precision = "no"
        keep(self, config, stage=self.zero_stage)

    @property
    def zero_config(self) -> str | dict[str, Any] | None:
        """The DeepSpeed JSON as given: a path, its text or a mapping; None if there is none."""
        return self.deepspeed

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the steps of warm-up: ``warmup_steps``, else ``warmup_ratio`` × steps, rounded up."""
        if self.warmup_steps == 0 and self.warmup_ratio > 0:
            return math.ceil(num_training_steps * self.warmup_ratio)
        return int(super().get_warmup_steps(num_training_steps))

    @property
    def _no_sync_in_gradient_accumulation(self) -> bool:
        """The Trainer's own value would be False while ``deepspeed`` is set; our engine knows ``no_sync``."""
        return True


def words_of(args: Any) -> Words:
    """How messages name training arguments, by where they came from."""
    return IN_PYTHON if getattr(args, "explicit", None) is None else ON_A_COMMAND_LINE


def check_plain_arguments(args: Any) -> None:
    """Check arguments of another class than ours, such as TrainingArguments or SFTConfig.

    Raises:
        ConfigError: They ask for DeepSpeed or FSDP; says how a DeepSpeed JSON is given to us.
    """
    if isinstance(args, ZeroTrainingArguments):
        return
    faults = other_engines(args)
    if getattr(args, "deepspeed", None) or (getattr(args, "deepspeed_plugin", None) is not None and not faults):
        raise ConfigError(
            f"{type(args).__name__}(deepspeed=...) starts the real DeepSpeed, which cannot run beside shardglass. Use "
            "shardglass.ZeroTrainingArguments(deepspeed=...) instead, or leave deepspeed out there and give the "
            "JSON to the trainer: ZeroTrainer(..., zero_config=...)"
        )
    if faults:
        raise faults_error(type(args).__name__, faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One training command, checked.

    Attributes:
        model: Which model.
        data: Which data.
        training: How to train; its ``explicit`` is set.
        look: How somebody looks into the run.
        notes: What became of old flags and of flags without effect.
        given: Names of the fields that the user gave a value, with the values.
    """

    model: ModelArguments
    data: DataArguments
    training: ZeroTrainingArguments
    look: LookArguments
    notes: tuple[str, ...]
    given: Mapping[str, object]


def parse_command(
    argv: Sequence[str],
    *,
    defaults: Mapping[str, object] = _NOTHING,
    rehearse: bool = False,
    is_debugged: bool = False,
) -> Command:
    """Read the flags of a training command.

    Args:
        argv: The flags, without the program's name.
        defaults: Values of fields that the user does not give.
        rehearse: Check only, on a process that will not train: no GPU is touched.
        is_debugged: A debugger may hold a rank at any moment, so the others wait longer; as with ``--debugpy_rank``.

    Raises:
        ConfigError: Names every flag and value that cannot be used.
        SystemExit: Help was asked for and shown.
    """
    parts = (ModelArguments, DataArguments, LoraArguments, LookArguments, ZeroTrainingArguments)
    known = kinds_of(*parts)
    strange = sorted(set(defaults) - set(known))
    if strange:
        raise InvariantError(f"defaults of the training command name no flag: {', '.join(strange)}")
    elsewhere = {f.name: "belongs to the launcher, before the script's name" for f in fields(LaunchArguments)}
    scanned = scan(argv, known, elsewhere=elsewhere)
    if scanned.wants_help:
        show_help()
        raise SystemExit(0)
    faults = [*scanned.faults, *early_faults(scanned.values), *_choice_faults(scanned), *_optim_faults(scanned)]
    if faults:
        raise flags_error(faults)
    notes = [*scanned.notes, *_idle_notes(scanned)]
    values = {**defaults, **scanned.values}
    if is_debugged or values.get("debugpy_rank") is not None:
        values.update(patience(values))
    if rehearse:
        values = {**values, "use_cpu": True, "ddp_backend": None}
    with mistakes_told(scanned.values):  # transformers' own checks: one fault, no list
        training = _made(ZeroTrainingArguments, values)
    training.explicit = frozenset(scanned.values)
    faults = training_faults(training, evaluates=bool(values.get("eval_data_path")))
    if faults:
        raise flags_error(faults)
    return Command(
        model=_made(ModelArguments, values),
        data=_made(DataArguments, values),
        training=training,
        look=_made(LookArguments, values),
        notes=tuple(notes),
        given=scanned.values,
    )


def _choice_faults(scanned: Scanned) -> list[str]:
    """Say which values are not among those that a field of transformers names."""
    faults = []
    for declared in fields(TrainingArguments):
        value = scanned.values.get(declared.name)
        if not isinstance(value, str):
            continue
        enums = [kind for kind in get_args(declared.type) if isinstance(kind, type) and issubclass(kind, enum.Enum)]
        choices = [str(member.value) for kind in enums for member in kind] or declared.metadata.get("choices")
        if choices and value not in choices:
            hint = suggestion(value, choices)
            faults.append(f"--{declared.name} {value}: it must be one of {', '.join(choices)}{hint}")
        if declared.name in TrainingArguments._VALID_DICT_FIELDS and value.startswith("{"):
            try:
                json.loads(value)
            except ValueError as error:
                faults.append(f"--{declared.name}: not JSON: {error}")
    return faults


def _optim_faults(scanned: Scanned) -> list[str]:
    """Refuse an optimizer of transformers that cannot be sharded, by its name."""
    optim = scanned.values.get("optim")
    if not isinstance(optim, str) or optim not in [member.value for member in OptimizerNames]:
        return []  # absent, or told by _choice_faults
    fault = optim_fault(optim)
    return [f"--{fault}"] if fault is not None else []


def _idle_notes(scanned: Scanned) -> list[str]:
    """Say which flags do nothing in this command, or nothing without another one."""
    notes = [f"--{name} has no effect without --use_lora" for name in scanned.values if name.startswith("lora_")]
    notes += [f"--{name} has no effect: {IDLE_FLAGS[name]}" for name in scanned.values if name in IDLE_FLAGS]
    if scanned.values.get("eval_data_path") and str(scanned.values.get("eval_strategy", "no")) == "no":
        notes.append("--eval_data_path has no effect: nothing is evaluated without --eval_strategy steps or epoch")
    if "debugpy_port" in scanned.values and scanned.values.get("debugpy_rank") is None:
        notes.append("--debugpy_port has no effect without --debugpy_rank")
    return notes


def _made(cls: Any, values: Mapping[str, object]) -> Any:
    return cls(**{f.name: values[f.name] for f in fields(cls) if f.init and f.name in values})

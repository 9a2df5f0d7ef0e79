"""The engine's options, filled: stage, precision, dtypes of gradients, skipped steps, what else the engine is told.

Owns these values and their rows in the table. What neither config nor flag gives keeps the engine's own default.
"""

from dataclasses import replace
from typing import Any

from shardglass.config import DeepSpeedConfig
from shardglass.config.precision import Bf16, DataTypes, Fp16
from shardglass.config.zero import MAX_LIVE, PREFETCH, Zero
from shardglass.options import STAGES, EngineOptions
from shardglass.resolve.filler import Filler

_PREFETCH_BUCKET = 50_000_000
"""DeepSpeed's default; here any number above 0 means the same."""


def fill_stage(config: DeepSpeedConfig | None, filler: Filler, stage: int | None) -> int:
    """Decide the stage; a config without one means stage 0, as in DeepSpeed."""
    key = "zero_optimization.stage"
    json_value = config.zero_optimization.stage if config and config.zero_optimization else None
    if json_value is not None and stage is not None and stage != json_value:
        remedy = f'{filler.words.drop}, or take the key out of the JSON (it cannot be "auto")'
        filler.contradict(key, json_value, filler.named("zero_stage"), stage, remedy)
    missing = 0 if config else EngineOptions().stage
    number = next(value for value in (json_value, stage, missing) if value is not None)
    if json_value is not None:
        filler.put(key, number, "json", flag="zero_stage")
    else:
        filler.put(key, number, "default" if stage is None else "flag", flag="zero_stage")
    if number not in STAGES:
        known = ", ".join(str(known) for known in STAGES)
        filler.faults.append(f"{filler.named('zero_stage')} is {number}; it must be one of {known}")
    return number


def fill_precision(config: DeepSpeedConfig, filler: Filler) -> bool:
    """Decide both switches; return whether the model computes in bfloat16."""
    args = filler.args
    if filler.take("fp16.enabled", (config.fp16 or Fp16()).enabled, "fp16", args.fp16):
        fp16, instead = filler.named("fp16"), filler.named("bf16")
        filler.faults.append(f"{fp16}: float16 needs loss scaling, which is not supported yet; use {instead}")
    section = config.precision or Bf16()
    return bool(filler.take(f"{_bf16_name(config)}.enabled", section.enabled, "bf16", args.bf16))


def fill_options(config: DeepSpeedConfig, filler: Filler, *, stage: int, bf16: bool) -> EngineOptions:
    """Decide the engine's options.

    Args:
        config: The config.
        filler: Collects values and contradictions.
        stage: The stage as decided; one that does not exist is a fault already, and leaves the default here.
        bf16: Whether the model computes in bfloat16.
    """
    args, engine = filler.args, EngineOptions()
    param_dtype = "bfloat16" if bf16 else "float32"
    overflow = (config.precision or Bf16()).check_grad_overflow
    check_key = f"{_bf16_name(config)}.check_grad_overflow"
    accum_dtype = (config.data_types or DataTypes()).grad_accum_dtype
    filler.own("communication_data_type", config.communication_data_type, param_dtype)
    filler.put_flag("--max_skipped_steps", args.max_skipped_steps, "max_skipped_steps")
    filler.put_flag("--collective_timeout_s", args.collective_timeout_s, "collective_timeout_s")
    filler.own("gradient_allreduce_op", config.gradient_allreduce_op, "mean")
    stage = stage if stage in STAGES else engine.stage
    zero = config.zero_optimization or Zero()
    ahead = _given(zero, PREFETCH)
    if STAGES[stage].shards_params:
        _put_missing(zero, filler)
    return replace(
        engine,
        stage=stage,
        max_live_numel=_given(zero, MAX_LIVE),
        prefetch_units=0 if ahead == 0 else engine.prefetch_units,
        param_dtype=param_dtype,
        reduce_dtype=config.communication_data_type or engine.reduce_dtype,
        accum_dtype=filler.own("data_types.grad_accum_dtype", accum_dtype, engine.accum_dtype),
        skip_nonfinite=bool(filler.take(check_key, overflow, "skip_nonfinite", args.skip_nonfinite)),
        max_skipped_steps=args.max_skipped_steps,
        collective_timeout_s=args.collective_timeout_s,
        allow_any_optimizer=filler.own(
            "zero_allow_untested_optimizer", config.zero_allow_untested_optimizer, engine.allow_any_optimizer
        ),
    )


def _put_missing(zero: Zero, filler: Filler) -> None:
    """Record what the engine does without the keys on its gathers; those that are given are recorded with the rest."""
    for names, missing in ((MAX_LIVE, "no limit"), (PREFETCH, _PREFETCH_BUCKET)):
        if _given(zero, names) is None:
            filler.put(f"zero_optimization.{names[0]}", missing, "default")


def _given(zero: Zero, names: tuple[str, ...]) -> Any:
    """The value of a key that a file may give under any of its names; None if it gives none."""
    return next((getattr(zero, name) for name in names if getattr(zero, name) is not None), None)


def _bf16_name(config: DeepSpeedConfig) -> str:
    """The name under which the file gives the section."""
    return "bfloat16" if config.bf16 is None and config.bfloat16 is not None else "bf16"

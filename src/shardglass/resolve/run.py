"""Putting a config and the training arguments together.

Owns stage, precision, the keys that depend on the hidden size, and the notes. Leaves batch, optimizer and scheduler to
their modules.
"""

from collections.abc import Callable
from dataclasses import replace

from shardglass.config import AUTO, DeepSpeedConfig, Status, given_keys
from shardglass.config.precision import DataTypes, Fp16
from shardglass.config.sections import Zero
from shardglass.errors import UsageError
from shardglass.options import RUNNABLE_STAGES, EngineOptions
from shardglass.resolve.batch import fill_batch
from shardglass.resolve.filler import Filler
from shardglass.resolve.optimizer import fill_optimizer
from shardglass.resolve.scheduler import fill_scheduler
from shardglass.resolve.values import BatchNumbers, OptimizerSpec, Resolved, RunArguments

_BY_HIDDEN_SIZE: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}
"""What ``auto`` means where it depends on the model; the formulas of the transformers integration."""


def resolve(
    config: DeepSpeedConfig | None,
    args: RunArguments,
    *,
    world_size: int,
    stage: int | None = None,
    final: bool = True,
) -> Resolved:
    """Decide every value of a run.

    A value of the JSON must equal the flag if the user gave it; otherwise the JSON wins and ``Resolved.arguments`` says
    so. ``auto`` and missing keys come from the flags.

    Args:
        config: The config; None takes everything from the flags.
        args: The training arguments.
        world_size: Number of ranks.
        stage: ZeRO stage if the user gave one; without it and without a config, the engine's default.
        final: False leaves what waits for the number of steps or the hidden size open, in ``Resolved.pending``;
            resolve again once they are known.

    Raises:
        ConfigError: A table of all contradictions, and all values that are not supported or cannot be decided.
        UsageError: ``world_size`` is below 1.
    """
    if world_size < 1:
        raise UsageError(f"resolve: world_size is {world_size}; it must be at least 1")
    filler = Filler(args, config.source if config else "the command line")
    stage_number = _stage(config, filler, stage)
    config = config or DeepSpeedConfig()
    bf16 = _precision(config, filler)
    batch = fill_batch(config, filler, world_size)
    clipping = float(filler.take("gradient_clipping", config.gradient_clipping, "max_grad_norm", args.max_grad_norm))
    optimizer = fill_optimizer(config, filler)
    scheduler = fill_scheduler(config, filler, optimizer.lr if optimizer else args.learning_rate)
    _fill_by_hidden_size(config.zero_optimization or Zero(), filler)
    _fill_rest(config, filler)
    filler.finish(final=final)
    options = _options(config, stage_number, bf16=bf16)
    return Resolved(
        options=options,
        param_dtype="bfloat16" if bf16 else "float32",
        batch=batch,
        gradient_clipping=clipping,
        optimizer=optimizer,
        scheduler=scheduler,
        reduce_dtype=options.reduce_dtype,
        accum_dtype=options.accum_dtype,
        arguments=_decided(replace(args, max_grad_norm=clipping, bf16=bf16, fp16=False), batch, optimizer),
        values=tuple(filler.values.values()),
        notes=(*config.notes, *filler.notes),
        pending=tuple(filler.pending),
    )


def _stage(config: DeepSpeedConfig | None, filler: Filler, stage: int | None) -> int:
    """Decide the stage; a config without one means stage 0, as in DeepSpeed."""
    key = "zero_optimization.stage"
    json_value = config.zero_optimization.stage if config and config.zero_optimization else None
    if json_value is not None:
        if stage is not None and stage != json_value:
            filler.contradict(key, json_value, "--stage", stage)
        filler.put(key, json_value, "json")
    elif stage is not None:
        filler.put(key, stage, "flag")
    else:
        filler.put(key, 0 if config else EngineOptions().stage, "default")
    number = next(value for value in (json_value, stage, 0 if config else EngineOptions().stage) if value is not None)
    if number not in RUNNABLE_STAGES:
        stages = ", ".join(str(runnable) for runnable in RUNNABLE_STAGES)
        name = "--stage" if json_value is None else key
        filler.faults.append(f"{name} is {number}: not supported yet; use one of {stages}")
    return number


def _precision(config: DeepSpeedConfig, filler: Filler) -> bool:
    """Decide both switches; return whether the model computes in bfloat16."""
    args = filler.args
    if config.fp16 is not None or args.fp16:
        fp16 = filler.take("fp16.enabled", (config.fp16 or Fp16()).enabled, "fp16", args.fp16)
        if fp16:
            filler.faults.append("--fp16: float16 needs loss scaling, which is not supported yet; use --bf16")
    section = config.precision
    name = "bfloat16" if config.bf16 is None and config.bfloat16 is not None else "bf16"
    return bool(filler.take(f"{name}.enabled", section.enabled if section else None, "bf16", args.bf16))


def _fill_by_hidden_size(section: Zero, filler: Filler) -> None:
    given = {
        "reduce_bucket_size": section.reduce_bucket_size,
        "stage3_prefetch_bucket_size": section.stage3_prefetch_bucket_size,
        "stage3_param_persistence_threshold": section.stage3_param_persistence_threshold,
    }
    hidden = filler.args.hidden_size
    for name, value in given.items():
        if value != AUTO:
            continue
        if hidden is None:
            filler.wait(f"zero_optimization.{name}")
        else:
            filler.put(f"zero_optimization.{name}", _BY_HIDDEN_SIZE[name](hidden), "derived", "no effect")


def _fill_rest(config: DeepSpeedConfig, filler: Filler) -> None:
    """Record every other key that the file gives, and say once which have no effect."""
    without_effect: dict[str, list[str]] = {}
    remarks: list[str] = []
    for given in given_keys(config):
        effect = given.status is Status.HONOURED
        if given.key not in filler.values:
            value = (
                False if given.value == AUTO else given.value
            )  # an auto that is left belongs to a switch that is off
            filler.put(given.key, value, "json", "honoured" if effect else "no effect")
        if given.status is Status.NO_EFFECT:
            section, _, name = given.key.rpartition(".")
            without_effect.setdefault(section, []).append(name)
            if given.say and given.say not in remarks:
                remarks.append(given.say)
    if without_effect:
        parts = [name for name in without_effect.pop("", [])]
        parts += [f"{section} ({', '.join(names)})" for section, names in without_effect.items()]
        filler.notes.append("no effect here: " + ", ".join(parts))
    filler.notes += remarks


def _options(config: DeepSpeedConfig, stage: int, *, bf16: bool) -> EngineOptions:
    """The engine's options; what the config does not give keeps the engine's own default."""
    options = EngineOptions(stage=stage, param_dtype="bfloat16" if bf16 else "float32")
    accum_dtype = (config.data_types or DataTypes()).grad_accum_dtype
    overflow = config.precision.check_grad_overflow if config.precision else None
    any_optimizer = config.zero_allow_untested_optimizer
    return replace(
        options,
        reduce_dtype=config.communication_data_type or options.reduce_dtype,
        accum_dtype=accum_dtype or options.accum_dtype,
        skip_nonfinite=options.skip_nonfinite if overflow is None else overflow,
        allow_any_optimizer=options.allow_any_optimizer if any_optimizer is None else any_optimizer,
    )


def _decided(args: RunArguments, batch: BatchNumbers, optimizer: OptimizerSpec | None) -> RunArguments:
    """The arguments with what the config decided."""
    args = replace(args, per_device_train_batch_size=batch.micro, gradient_accumulation_steps=batch.accumulation)
    if optimizer is None:
        return args
    args = replace(args, learning_rate=optimizer.lr, weight_decay=optimizer.weight_decay)
    if optimizer.betas is not None:
        args = replace(args, adam_beta1=optimizer.betas[0], adam_beta2=optimizer.betas[1])
    return args if optimizer.eps is None else replace(args, adam_epsilon=optimizer.eps)

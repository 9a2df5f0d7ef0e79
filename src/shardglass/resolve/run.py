"""Putting a config and the training arguments together.

Owns the keys that depend on the hidden size, and the notes. Leaves engine, batch, optimizer and scheduler to their
modules.
"""

from collections.abc import Callable
from dataclasses import replace

from shardglass.config import AUTO, DeepSpeedConfig, Status, given_keys
from shardglass.config.zero import OF_STAGE_3, TWINS, Zero
from shardglass.errors import UsageError
from shardglass.options import Stage
from shardglass.resolve.batch import fill_batch
from shardglass.resolve.engine import fill_options, fill_precision, fill_stage
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
    filler = Filler(args, config.source if config else None)
    stage_number = fill_stage(config, filler, stage)
    config = config or DeepSpeedConfig()
    bf16 = fill_precision(config, filler)
    options = fill_options(config, filler, stage=stage_number, bf16=bf16)
    batch = fill_batch(config, filler, world_size)
    clipping = float(filler.take("gradient_clipping", config.gradient_clipping, "max_grad_norm", args.max_grad_norm))
    optimizer = fill_optimizer(config, filler)
    scheduler = fill_scheduler(config, filler, optimizer.lr if optimizer else args.learning_rate)
    _fill_by_hidden_size(config.zero_optimization or Zero(), filler, options.rules)
    _fill_rest(config, filler, options.rules)
    filler.finish(final=final)
    return Resolved(
        origin=filler.source,
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


def _fill_by_hidden_size(section: Zero, filler: Filler, rules: Stage) -> None:
    given = {
        "reduce_bucket_size": section.reduce_bucket_size,
        "stage3_prefetch_bucket_size": section.stage3_prefetch_bucket_size,
        "stage3_param_persistence_threshold": section.stage3_param_persistence_threshold,
        "prefetch_bucket_size": section.prefetch_bucket_size,
        "param_persistence_threshold": section.param_persistence_threshold,
    }
    hidden = filler.args.hidden_size
    for name, value in given.items():
        if value != AUTO:
            continue
        if hidden is None:
            filler.wait(f"zero_optimization.{name}")
        else:
            meant = _BY_HIDDEN_SIZE[TWINS.get(name, name)]
            decides = name in OF_STAGE_3 and rules.shards_params
            filler.put(f"zero_optimization.{name}", meant(hidden), "derived", "honoured" if decides else "no effect")


def _fill_rest(config: DeepSpeedConfig, filler: Filler, rules: Stage) -> None:
    """Record every other key that the file gives, and say once which have no effect."""
    without_effect: dict[str, list[str]] = {}
    remarks: list[str] = []
    for given in given_keys(config):
        section, _, name = given.key.rpartition(".")
        is_idle = section == "zero_optimization" and name in OF_STAGE_3 and not rules.shards_params
        effect = given.status is Status.HONOURED and not is_idle
        if given.key not in filler.values:
            # The sections' readers let an auto through only for apex, which is off then.
            value = None if given.value == AUTO else given.value
            filler.put(given.key, value, "json", "honoured" if effect else "no effect")
        if given.status is Status.NO_EFFECT or is_idle:
            without_effect.setdefault(section, []).append(name)
            remark = filler.words.spoken(given.say)
            if remark and remark not in remarks:
                remarks.append(remark)
    if without_effect:
        parts = [name for name in without_effect.pop("", [])]
        parts += [f"{section} ({', '.join(names)})" for section, names in without_effect.items()]
        filler.notes.append("no effect here: " + ", ".join(parts))
    filler.notes += remarks


def _decided(args: RunArguments, batch: BatchNumbers, optimizer: OptimizerSpec | None) -> RunArguments:
    """The arguments with what the config decided."""
    args = replace(args, per_device_train_batch_size=batch.micro, gradient_accumulation_steps=batch.accumulation)
    if optimizer is None:
        return args
    args = replace(args, learning_rate=optimizer.lr, weight_decay=optimizer.weight_decay)
    if optimizer.betas is not None:
        args = replace(args, adam_beta1=optimizer.betas[0], adam_beta2=optimizer.betas[1])
    return args if optimizer.eps is None else replace(args, adam_epsilon=optimizer.eps)

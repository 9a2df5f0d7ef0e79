"""Plans from what a user gives: flags and a DeepSpeed JSON.

Owns how they become a model's facts and a ``Setup``. Leaves a run that is about to start to ``run_planning``, the model
to ``meta``, the meaning of the JSON to
``config`` and ``resolve``, what is free to ``machine``, and the plan itself to ``plan``.
"""

from dataclasses import dataclass, replace
from typing import Any

from shardglass.config import DeepSpeedConfig, load_config
from shardglass.config.readers import dtype as read_dtype
from shardglass.errors import ConfigError, suggestion
from shardglass.hf.machine import free_host_bytes
from shardglass.hf.model_config import find_config
from shardglass.layout import SchemeOptions, find_scheme
from shardglass.options import STAGES, EngineOptions
from shardglass.plan.activations import Attention
from shardglass.plan.fit import smallest_fit
from shardglass.plan.kinds import STATES, OptimizerKind
from shardglass.plan.model import ModelFacts
from shardglass.plan.plan import Plan, make_plan
from shardglass.plan.setup import Setup, parse_size
from shardglass.resolve import Resolved, RunArguments, resolve

DEFAULT_LENGTH = 2048
"""Tokens of a sequence if none is given: those of ``--model_max_length``, or fewer if the model was made for fewer."""

_FUSED_ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """The flags of ``shardglass plan``; None is a flag that was not given.

    Attributes:
        model: A preset, a folder, a ``config.json`` or a name on the hub.
        world_size: Number of ranks.
        stage: The ZeRO stage.
        scheme: The layout scheme of the partition.
        deepspeed: Path of a DeepSpeed JSON.
        dtype: dtype to compute in.
        micro_batch: Sequences of a micro-batch on one rank.
        accumulation: Micro-batches of a step.
        length: Tokens of a sequence.
        recomputes: Gradient checkpointing.
        attention: The attention kernel, as transformers names it.
        optimizer: Class of the optimizer, or the Trainer's name of it.
        gpu: Memory of a GPU.
        gpus_per_node: GPUs of a machine.
        host_ram: RAM of a machine that is free; None is this machine's.
        reserve: Memory kept for what no formula knows.
        on_cpu: Plan for ranks on this machine's CPU.
        simulates: Also take a step without memory and say what it had.
        cache_dir: Where downloads are kept.
        trust_remote_code: Run code that comes with the model.
    """

    model: str
    world_size: int | None = None
    stage: int | None = None
    scheme: str = "units"
    deepspeed: str | None = None
    dtype: str | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    length: int | None = None
    recomputes: bool = False
    attention: str = "sdpa"
    optimizer: str | None = None
    gpu: str | None = None
    gpus_per_node: int = 8
    host_ram: str | None = None
    reserve: str | None = None
    on_cpu: bool = False
    simulates: bool = False
    cache_dir: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan with what it was made from.

    Attributes:
        plan: The plan.
        facts: The model.
        setup: The run.
        scheme_options: What the layout scheme was told beside.
    """

    plan: Plan
    facts: ModelFacts
    setup: Setup
    scheme_options: SchemeOptions


def plan_from_flags(flags: PlanFlags) -> Plan:
    """The plan of ``planned_from_flags``.

    Raises:
        ShardglassError: The model, a flag or the config cannot be planned; says which and why.
    """
    return planned_from_flags(flags).plan


def planned_from_flags(flags: PlanFlags) -> Planned:
    """The plan that a command line asks for, and its inputs.

    Without a world size, but with a GPU's memory, the smallest number of GPUs that fits is planned.

    Raises:
        ShardglassError: The model, a flag or the config cannot be planned; says which and why.
    """
    config = load_config(flags.deepspeed, planning=True) if flags.deepspeed is not None else None
    setup, notes = setup_of(flags, config)
    found = find_config(flags.model, cache_dir=flags.cache_dir, trust_remote_code=flags.trust_remote_code)
    # torch and transformers take seconds to import: what is wrong with the flags was said before.
    from shardglass.hf.meta import facts_of
    from shardglass.hf.simulation import simulate

    facts = facts_of(found, dtype=setup.dtype, num_groups=setup.num_groups)
    if flags.length is None and facts.max_length is not None:
        setup = replace(setup, length=min(setup.length, facts.max_length))
    if flags.world_size is None and setup.memory is not None:
        given = setup.stage if flags.stage is not None or _stage_in(config) is not None else None
        setup = smallest_fit(facts, setup, setup.memory, stage=given)
    elif flags.world_size is None:
        notes.append("1 rank is planned; --world-size plans for more, --gpu finds out how many are needed")
    options = _scheme_options(setup.scheme, config)
    plan = make_plan(facts, setup, scheme_options=options, notes=tuple(notes))
    if flags.simulates:
        plan = replace(plan, simulation=simulate(found, setup, rank=plan.stage.rank))
    return Planned(plan=plan, facts=facts, setup=setup, scheme_options=options)


def setup_of(flags: PlanFlags, config: DeepSpeedConfig | None) -> tuple[Setup, list[str]]:
    """The planned run, and what is to be said of its inputs.

    Raises:
        ShardglassError: A value cannot be planned, or flags and config contradict each other.
    """
    if flags.world_size is None and config is not None and isinstance(config.train_batch_size, int):
        raise ConfigError(
            f"{config.source}: train_batch_size is {config.train_batch_size}, which the ranks share: give --world-size"
        )
    world_size = 1 if flags.world_size is None else flags.world_size
    stage = _stage(flags, config)
    setup = Setup(  # checks every number before the config is resolved with them
        world_size=world_size,
        stage=stage,
        scheme=find_scheme(flags.scheme).name,
        dtype=_dtype(flags, config),
        micro_batch=1 if flags.micro_batch is None else flags.micro_batch,
        accumulation=1 if flags.accumulation is None else flags.accumulation,
        length=DEFAULT_LENGTH if flags.length is None else flags.length,
        recomputes=flags.recomputes,
        attention=attention_kind(flags.attention),
        device="cpu" if flags.on_cpu else "cuda",
        ranks_per_node=world_size if flags.on_cpu else flags.gpus_per_node,
        memory=None if flags.gpu is None else parse_size(flags.gpu, "--gpu"),
        reserve=None if flags.reserve is None else _reserve(flags.reserve),
        host_free=free_host_bytes() if flags.host_ram is None else parse_size(flags.host_ram, "--host-ram"),
    )
    if config is None:
        return replace(setup, optimizer=optimizer_kind(flags.optimizer, num_groups=setup.num_groups)), []
    resolved = _resolved(flags, config, setup)
    notes = [*(f"{sentence}; planned without it" for sentence in config.left_out.values()), *resolved.notes]
    return _with_config(setup, flags, config, resolved), notes


def _with_config(setup: Setup, flags: PlanFlags, config: DeepSpeedConfig, resolved: Resolved) -> Setup:
    """The setup with what the config decided."""
    num_groups = 1 if config.optimizer is not None else 2
    if resolved.optimizer is not None and flags.optimizer is None:
        optimizer = kind_of(resolved, num_groups)
    elif "optimizer.type" in config.left_out and flags.optimizer is None:
        optimizer = OptimizerKind(name="the config's optimizer")
    else:
        optimizer = optimizer_kind(flags.optimizer, num_groups=num_groups)
    return replace(
        setup,
        dtype=setup.dtype if setup.dtype == "float16" else resolved.param_dtype,
        reduce_dtype=resolved.reduce_dtype,
        accum_dtype=resolved.accum_dtype,
        prefetch_units=resolved.options.prefetch_units,
        max_live_numel=resolved.options.max_live_numel,
        optimizer=optimizer,
        num_groups=num_groups,
        micro_batch=resolved.batch.micro,
        accumulation=resolved.batch.accumulation,
    )


def _resolved(flags: PlanFlags, config: DeepSpeedConfig, setup: Setup) -> Resolved:
    """Config and flags together, as before a run."""
    given = {
        "per_device_train_batch_size": flags.micro_batch,
        "gradient_accumulation_steps": flags.accumulation,
        "bf16": flags.dtype,
    }
    args = RunArguments(
        per_device_train_batch_size=setup.micro_batch,
        gradient_accumulation_steps=setup.accumulation,
        bf16=setup.dtype == "bfloat16",
        explicit=frozenset(name for name, value in given.items() if value is not None),
    )
    return resolve(config, args, world_size=setup.world_size, stage=setup.stage, final=False)


def _stage_in(config: DeepSpeedConfig | None) -> int | None:
    zero = None if config is None else config.zero_optimization
    return None if zero is None else zero.stage


def _stage(flags: PlanFlags, config: DeepSpeedConfig | None) -> int:
    """The flag's stage or the config's; without both the engine's default, or 0 beside a config as in DeepSpeed."""
    in_config = _stage_in(config)
    if config is not None and None not in (flags.stage, in_config) and flags.stage != in_config:
        raise ConfigError(
            f"{config.source}: zero_optimization.stage is {in_config} and --stage is {flags.stage}; drop one of them"
        )
    missing = EngineOptions().stage if config is None else min(STAGES)
    return next(stage for stage in (flags.stage, in_config, missing) if stage is not None)


def _dtype(flags: PlanFlags, config: DeepSpeedConfig | None) -> str:
    """The flag's dtype, or float16 if the config asks for it, which no run can yet; else bfloat16."""
    if flags.dtype is None:
        asks = config is not None and "fp16.enabled" in config.left_out
        return "float16" if asks else "bfloat16"
    try:
        return str(read_dtype(flags.dtype))
    except ValueError as error:
        raise ConfigError(f"--dtype {error}") from None


def _reserve(text: str) -> int:
    """A size that may be 0."""
    return 0 if text.strip() == "0" else parse_size(text, "--reserve")


def attention_kind(name: str) -> Attention:
    """Which of the kernels that forms are known for a kernel of transformers is.

    Raises:
        ConfigError: It is none of them.
    """
    if name == "eager":
        return "eager"
    if name in _FUSED_ATTENTION:
        return "sdpa"
    known = ("eager", *_FUSED_ATTENTION)
    raise ConfigError(f"--attention {name}: it must be one of {', '.join(known)}{suggestion(name, known)}")


_TRAINERS_NAMES = {
    "adamw_torch_fused": ("AdamW", True),
    "adamw_torch": ("AdamW", False),
    "sgd": ("SGD", False),
    "adagrad": ("Adagrad", False),
    "rmsprop": ("RMSprop", False),
}
"""Values of ``--optim`` that can be sharded: the class of torch.optim, and whether its kernel is fused."""


def optimizer_kind(name: str | None, *, num_groups: int) -> OptimizerKind:
    """The optimizer by its class or by the Trainer's name of it; None is the Trainer's default.

    Raises:
        ConfigError: Nobody has such an optimizer.
    """
    wanted = "adamw_torch_fused" if name is None else name
    by_class = {cls.lower(): (cls, cls in ("Adam", "AdamW")) for cls in STATES}
    found = _TRAINERS_NAMES.get(wanted) or by_class.get(wanted.lower())
    if found is None:
        known = (*STATES, *_TRAINERS_NAMES)
        raise ConfigError(f"--optimizer {name}: it must be one of {', '.join(known)}{suggestion(wanted, known)}")
    return OptimizerKind(name=found[0], groups=({"fused": found[1]},) * num_groups)


def kind_of(resolved: Resolved, num_groups: int) -> OptimizerKind:
    """The optimizer of a config's section, or the Trainer's; the run takes a fused kernel where torch has one."""
    spec = resolved.optimizer
    if spec is None:
        return optimizer_kind(None, num_groups=num_groups)
    group = {**spec.arguments(), "fused": spec.type != "Adagrad"}
    return OptimizerKind(name=spec.type, groups=(group,) * num_groups)


def _scheme_options(scheme: str, config: DeepSpeedConfig | None) -> SchemeOptions:
    """What a DeepSpeed JSON says to DeepSpeed's own layouts."""
    zero = None if config is None else config.zero_optimization
    if zero is None:
        return SchemeOptions()
    reads = find_scheme(scheme).reads
    given = {
        "round_robin_gradients": zero.round_robin_gradients,
        "parameter_alignment": zero.parameter_alignment,
        "sub_group_size": zero.sub_group_size,
    }
    values: dict[str, Any] = {key: value for key, value in given.items() if key in reads and value is not None}
    return SchemeOptions(**values)

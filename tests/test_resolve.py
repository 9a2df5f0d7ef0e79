"""Filling a config from the flags: who wins, what is derived, what contradicts."""

from dataclasses import replace
from pathlib import Path

import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, SequentialSampler

from shardglass.config import load_config
from shardglass.errors import ConfigError, UsageError
from shardglass.options import EngineOptions
from shardglass.resolve import (
    BatchNumbers,
    OptimizerSpec,
    RunArguments,
    SchedulerSpec,
    lr_at,
    note_of_short_data,
    resolve,
    warmup_steps_of,
)
from shardglass.schedules import OneCycleSpec, RangeTestSpec

EXAMPLES = Path(__file__).parent.parent / "examples" / "qwen" / "finetune"

QWEN = RunArguments(
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    learning_rate=1e-5,
    weight_decay=0.1,
    adam_beta2=0.95,
    warmup_ratio=0.01,
    bf16=True,
    lr_scheduler_type="cosine",
    explicit=frozenset(
        {
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "learning_rate",
            "weight_decay",
            "adam_beta2",
            "warmup_ratio",
            "bf16",
        }
    ),
)


def given(**flags):
    """Arguments that the user gave on the command line."""
    return RunArguments(**flags, explicit=frozenset(flags))


def run(source, args=RunArguments(), world_size=2, **options):  # noqa: B008 (frozen)
    return resolve(load_config(source), args, world_size=world_size, **options)


def value_of(resolved, key):
    return next((row.value, row.source, row.used) for row in resolved.values if row.key == key)


def fault(source, args=RunArguments(), world_size=2, **options):  # noqa: B008 (frozen)
    with pytest.raises(ConfigError) as caught:
        run(source, args, world_size, **options)
    return str(caught.value)


def test_the_qwen_command_resolves_to_its_known_values():
    resolved = run(EXAMPLES / "ds_config_zero2.json", replace(QWEN, total_steps=1234))
    assert resolved.options == EngineOptions(stage=2, param_dtype="bfloat16")
    assert resolved.stage == 2
    assert (resolved.batch.micro, resolved.batch.accumulation, resolved.batch.train) == (2, 4, 16)
    assert resolved.gradient_clipping == 1.0
    assert resolved.optimizer == OptimizerSpec(
        type="AdamW", json_type="AdamW", lr=1e-5, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8
    )
    # 0.01 × 1234 = 12.34, rounded up
    assert resolved.scheduler == SchedulerSpec(type="WarmupLR", warmup_max_lr=1e-5, warmup_num_steps=13)
    assert lr_at(resolved.scheduler, 0) == 0.0
    assert lr_at(resolved.scheduler, 14) == 1e-5
    assert resolved.pending == ()
    assert value_of(resolved, "train_batch_size") == (16, "derived", "honoured")
    assert value_of(resolved, "optimizer.params.lr") == (1e-5, "flag", "honoured")
    assert value_of(resolved, "optimizer.params.eps") == (1e-8, "default", "honoured")
    assert value_of(resolved, "zero_optimization.overlap_comm") == (True, "json", "no effect")
    assert all(row.value is not None and row.value != "auto" for row in resolved.values)


def test_the_qwen_command_says_what_users_do_not_see():
    notes = run(EXAMPLES / "ds_config_zero2.json", replace(QWEN, total_steps=1234)).notes
    assert "weight decay reaches biases and norms: the optimizer section puts all parameters in one group" in notes
    assert any(
        note.startswith("the scheduler section wins over --lr_scheduler_type cosine: WarmupLR stays constant")
        and note.endswith("the first two steps run at 0")
        for note in notes
    )
    without_effect = [note for note in notes if note.startswith("no effect here: ")]
    assert len(without_effect) == 1
    assert "steps_per_print" in without_effect[0]
    assert "overlap_comm" in without_effect[0]


def test_what_is_not_known_yet_can_be_left_open_and_is_an_error_in_the_end():
    path = EXAMPLES / "ds_config_zero2.json"
    early = run(path, QWEN, final=False)
    assert early.pending == ("scheduler.params.warmup_num_steps",)
    assert early.scheduler.warmup_num_steps is None
    assert early.param_dtype == "bfloat16"
    message = fault(path, QWEN)
    assert "scheduler.params.warmup_num_steps needs the total number of steps, which is not known" in message


def test_the_config_of_stage_3_says_when_a_unit_is_gathered_ahead():
    resolved = run(EXAMPLES / "ds_config_zero3.json", replace(QWEN, total_steps=10, hidden_size=64))
    assert (resolved.stage, resolved.options.prefetch_units, resolved.options.max_live_numel) == (3, 1, 10**9)
    keys = ("max_live_parameters", "prefetch_bucket_size", "param_persistence_threshold")
    assert [value_of(resolved, f"zero_optimization.stage3_{key}") for key in keys] == [
        (10**9, "json", "honoured"),
        (3686, "derived", "honoured"),
        (640, "derived", "no effect"),
    ]
    idle = next(note for note in resolved.notes if note.startswith("no effect here"))
    assert "stage3_max_reuse_distance" in idle
    assert "stage3_max_live_parameters" not in idle
    assert "stage3_prefetch_bucket_size" not in idle


@pytest.mark.parametrize("prefix", ["stage3_", ""])
@pytest.mark.parametrize(("size", "units"), [(0, 0), (0.0, 0), (1, 1), (5e7, 1), ("auto", 1), (None, 1)])
def test_a_prefetch_bucket_of_0_gathers_nothing_ahead_under_either_name(prefix, size, units):
    zero = {"stage": 3, f"{prefix}prefetch_bucket_size": size, f"{prefix}max_live_parameters": 7}
    options = run({"zero_optimization": zero}, RunArguments(hidden_size=1)).options
    assert (options.prefetch_units, options.max_live_numel) == (units, 7)


def test_keys_of_stage_3_have_no_effect_at_another_stage():
    zero = {"stage": 2, "stage3_max_live_parameters": 1e9, "prefetch_bucket_size": 0}
    resolved = run({"zero_optimization": zero})
    assert value_of(resolved, "zero_optimization.stage3_max_live_parameters") == (10**9, "json", "no effect")
    assert value_of(resolved, "zero_optimization.prefetch_bucket_size") == (0, "json", "no effect")
    assert "no effect here: zero_optimization (stage3_max_live_parameters, prefetch_bucket_size)" in resolved.notes


def test_a_stage_that_does_not_exist_is_refused():
    with pytest.raises(
        ConfigError, match="the command line: 1 fault\n  --zero_stage is 4; it must be one of 0, 1, 2, 3"
    ):
        resolve(None, RunArguments(), world_size=1, stage=4)


def test_values_that_depend_on_the_hidden_size():
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    source = {"zero_optimization": {"stage": 2} | dict.fromkeys(keys, "auto")}
    resolved = run(source, RunArguments(hidden_size=4096))
    assert [value_of(resolved, f"zero_optimization.{key}") for key in keys] == [
        (16777216, "derived", "no effect"),
        (15099494, "derived", "no effect"),
        (40960, "derived", "no effect"),
    ]
    assert fault(source).count("needs the hidden size of the model") == 3
    assert len(run(source, final=False).pending) == 3


def test_without_a_config_the_flags_decide():
    resolved = resolve(None, given(bf16=True, max_grad_norm=0.5, per_device_train_batch_size=3), world_size=4)
    assert resolved.options == EngineOptions(param_dtype="bfloat16")
    assert resolved.batch.train == 12
    assert resolved.gradient_clipping == 0.5
    assert resolved.optimizer is None
    assert resolved.scheduler is None
    assert resolve(None, RunArguments(), world_size=1, stage=1).stage == 1


ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}

TABLE = [
    # what, config, arguments, what is read, expected
    ("no zero section is stage 0", {}, RunArguments(), lambda r: r.stage, 0),
    ("JSON bf16 wins over a default", {"bf16": {"enabled": True}}, RunArguments(), lambda r: r.arguments.bf16, True),
    ("a given bf16 fills auto", {"bf16": {"enabled": "auto"}}, given(bf16=True), lambda r: r.param_dtype, "bfloat16"),
    ("a given bf16 fills a missing section", {}, given(bf16=True), lambda r: r.param_dtype, "bfloat16"),
    ("bf16 off is float32", {"bf16": {"enabled": False}}, RunArguments(), lambda r: r.param_dtype, "float32"),
    ("old name bfloat16", {"bfloat16": {"enabled": True}}, RunArguments(), lambda r: r.param_dtype, "bfloat16"),
    ("clipping from the JSON", {"gradient_clipping": 0.3}, RunArguments(), lambda r: r.arguments.max_grad_norm, 0.3),
    ("clipping off", {"gradient_clipping": 0}, RunArguments(), lambda r: r.gradient_clipping, 0.0),
    ("equal after coercion", {"gradient_clipping": "1"}, given(max_grad_norm=1.0), lambda r: r.gradient_clipping, 1.0),
    (
        "micro-batch from the JSON",
        {"train_micro_batch_size_per_gpu": 3},
        RunArguments(),
        lambda r: (r.arguments.per_device_train_batch_size, r.batch.train),
        (3, 6),
    ),
    (
        "accumulation derived",
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4},
        RunArguments(),
        lambda r: (r.batch.accumulation, r.arguments.gradient_accumulation_steps),
        (8, 8),
    ),
    (
        "accumulation derived beside a given micro-batch",
        {"train_batch_size": 64, "gradient_accumulation_steps": "auto"},
        given(per_device_train_batch_size=16),
        lambda r: r.batch.accumulation,
        2,
    ),
    (
        "micro-batch derived",
        {"train_batch_size": 64, "gradient_accumulation_steps": 8},
        RunArguments(),
        lambda r: (r.batch.micro, value_of(r, "train_micro_batch_size_per_gpu")[1]),
        (4, "derived"),
    ),
    ("only the whole batch", {"train_batch_size": 64}, RunArguments(), lambda r: r.batch.micro, 32),
    ("whole batch equals the flags", {"train_batch_size": 16}, RunArguments(), lambda r: r.batch.micro, 8),
    (
        "JSON rate wins over a default",
        {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}},
        RunArguments(),
        lambda r: (r.optimizer.lr, r.arguments.learning_rate),
        (3e-4, 3e-4),
    ),
    (
        "missing params are DeepSpeed's",
        {"optimizer": {"type": "AdamW"}},
        RunArguments(),
        lambda r: (r.optimizer.lr, r.optimizer.weight_decay, r.optimizer.betas, r.optimizer.eps),
        (1e-3, 0.0, (0.9, 0.999), 1e-8),
    ),
    (
        "missing params are the given flags",
        {"optimizer": {"type": "AdamW"}},
        given(learning_rate=2e-5, adam_beta1=0.8),
        lambda r: (r.optimizer.lr, r.optimizer.betas),
        (2e-5, (0.8, 0.999)),
    ),
    (
        "torch's AdamW has its own decay",
        {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}},
        RunArguments(),
        lambda r: (r.optimizer.type, r.optimizer.weight_decay),
        ("AdamW", 0.01),
    ),
    ("Adam is AdamW", {"optimizer": {"type": "Adam"}}, RunArguments(), lambda r: r.optimizer.type, "AdamW"),
    (
        "Adam without adam_w_mode",
        {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
        RunArguments(),
        lambda r: (r.optimizer.type, r.optimizer.json_type),
        ("Adam", "Adam"),
    ),
    (
        "AdamW whatever adam_w_mode says",
        {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}},
        RunArguments(),
        lambda r: r.optimizer.type,
        "AdamW",
    ),
    (
        "SGD",
        {"optimizer": {"type": "sgd", "params": {"lr": "0.1", "momentum": 0.9, "nesterov": True}}},
        RunArguments(),
        lambda r: r.optimizer.arguments(),
        {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9, "dampening": 0.0, "nesterov": True},
    ),
    (
        "Adagrad",
        {"optimizer": {"type": "Adagrad", "params": {"lr": 0.02, "lr_decay": 0.5}}},
        RunArguments(),
        lambda r: r.optimizer.arguments(),
        {"lr": 0.02, "weight_decay": 0.0, "lr_decay": 0.5, "initial_accumulator_value": 0.0, "eps": 1e-10},
    ),
    (
        "the rate of optimizer and scheduler agree",
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
        },
        RunArguments(),
        lambda r: (r.scheduler.warmup_max_lr, r.scheduler.warmup_num_steps),
        (3e-4, 1),
    ),
    (
        "scheduler defaults",
        {"scheduler": {"type": "WarmupLR"}},
        RunArguments(),
        lambda r: r.scheduler,
        SchedulerSpec(type="WarmupLR", warmup_max_lr=5e-5, warmup_num_steps=1000),
    ),
    (
        "decay to the end of the run",
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}},
        given(max_steps=50, warmup_steps=7, learning_rate=1e-4),
        lambda r: r.scheduler,
        SchedulerSpec(type="WarmupDecayLR", warmup_max_lr=1e-4, warmup_num_steps=7, total_num_steps=50),
    ),
    (
        "cosine",
        {
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"total_num_steps": 100, "warmup_num_steps": 10, "warmup_min_ratio": 0.1, "cos_min_ratio": 0},
            }
        },
        RunArguments(learning_rate=2e-4, total_steps=100),
        lambda r: r.scheduler,
        SchedulerSpec(
            type="WarmupCosineLR",
            warmup_max_lr=2e-4,
            warmup_num_steps=10,
            total_num_steps=100,
            warmup_min_ratio=0.1,
            cos_min_ratio=0.0,
        ),
    ),
    (
        "range test defaults",
        {"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_staircase": True}}},
        RunArguments(),
        lambda r: r.scheduler,
        RangeTestSpec(min_lr=1e-3, step_size=2000, step_rate=1.0, is_staircase=True),
    ),
    (
        "one cycle",
        {
            "scheduler": {
                "type": "OneCycle",
                "params": {
                    "cycle_min_lr": 0,
                    "cycle_max_lr": "1e-3",
                    "cycle_first_step_size": 7,
                    "cycle_first_stair_count": 2,
                    "cycle_max_mom": 0.95,
                },
            }
        },
        RunArguments(),
        lambda r: r.scheduler,
        OneCycleSpec(
            min_lr=0.0,
            max_lr=1e-3,
            first_size=7,
            second_size=7,
            first_stairs=2,
            second_stairs=2,
            momentum=(0.8, 0.95),
        ),
    ),
    (
        "one cycle that leaves momentum alone",
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_momentum": False}}},
        RunArguments(),
        lambda r: (r.scheduler.momentum, r.scheduler.size),
        (None, 4000),
    ),
    ("reduce dtype", {"communication_data_type": "fp32"}, RunArguments(), lambda r: r.reduce_dtype, "float32"),
    (
        "accumulation dtype",
        {"data_types": {"grad_accum_dtype": "bf16"}},
        RunArguments(),
        lambda r: (r.accum_dtype, r.options.accum_dtype),
        ("bfloat16", "bfloat16"),
    ),
    (
        "non-finite steps are taken when asked",
        {"bf16": {"enabled": True, "check_grad_overflow": False}},
        RunArguments(),
        lambda r: r.options.skip_nonfinite,
        False,
    ),
    (
        "any optimizer when asked",
        {"zero_allow_untested_optimizer": True},
        RunArguments(),
        lambda r: r.options.allow_any_optimizer,
        True,
    ),
    ("a stage flag fills a missing stage", {"zero_optimization": {}}, RunArguments(), lambda r: r.stage, 0),
]


@pytest.mark.parametrize(("source", "args", "read", "expected"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE])
def test_table_of_configs_and_arguments(source, args, read, expected):
    assert read(run(source, args)) == expected


def test_a_stage_flag_fills_a_missing_stage_and_contradicts_another():
    assert run({"zero_optimization": {}}, stage=1).stage == 1
    lines = fault({"zero_optimization": {"stage": 2}}, stage=1).splitlines()
    assert lines[0].endswith("in 1 value; drop the flag:")
    assert "zero_optimization.stage  2     --zero_stage  1" in lines[2]
    assert lines[3].endswith('drop the flag, or take the key out of the JSON (it cannot be "auto")')


def test_all_contradictions_come_as_one_table():
    source = {
        "train_batch_size": 64,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-5, "warmup_num_steps": 5}},
    }
    args = replace(QWEN, total_steps=1000, explicit=QWEN.explicit | {"max_grad_norm"})
    lines = fault(source, args).splitlines()
    assert lines[0] == (
        'the DeepSpeed config contradicts the command line in 7 values; write "auto" in the JSON, or drop the flag:'
    )
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert rows == {
        "bf16.enabled": ["false", "--bf16", "true"],
        "train_batch_size": [
            *("64", "--per_device_train_batch_size", "×", "--gradient_accumulation_steps", "×", "world", "size"),
            *("2", "×", "4", "×", "2", "=", "16"),
        ],
        "gradient_clipping": ["0.5", "--max_grad_norm", "1.0"],
        "optimizer.params.lr": ["0.001", "--learning_rate", "1e-05"],
        "optimizer.params.betas[1]": ["0.999", "--adam_beta2", "0.95"],
        "scheduler.params.warmup_num_steps": ["5", "--warmup_ratio", "10", "steps"],
        "scheduler.params.warmup_max_lr": ["2e-05", "--learning_rate", "1e-05"],
    }


def test_max_steps_against_the_scheduler():
    source = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_num_steps": 1}}}
    assert "scheduler.params.total_num_steps  100   --max_steps  50" in fault(source, given(max_steps=50))
    notes = run(source, RunArguments(total_steps=70)).notes
    assert "the scheduler ends its decay at step 100, the run has 70 steps" in notes


FAULTS = [
    (
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4},
        RunArguments(),
        "train_batch_size is 64, but micro-batch × accumulation × world size is 4 × 4 × 2 = 32",
    ),
    (
        {"train_batch_size": 65, "train_micro_batch_size_per_gpu": 4},
        RunArguments(),
        "train_batch_size is 65, which micro-batch × world size = 4 × 2 = 8 does not divide; "
        "gradient_accumulation_steps cannot be derived",
    ),
    ({"train_batch_size": 9}, RunArguments(), "train_micro_batch_size_per_gpu cannot be derived"),
    ({"fp16": {"enabled": "auto"}}, given(fp16=True), "--fp16: float16 needs loss scaling, which is not supported"),
    ({}, given(fp16=True), "--fp16: float16 needs loss scaling"),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 1}}},
        RunArguments(),
        'scheduler.params.total_num_steps is missing; WarmupDecayLR needs it: write a number or "auto"',
    ),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
        RunArguments(),
        "scheduler.params.total_num_steps needs the total number of steps, which is not known",
    ),
    (
        {"optimizer": {"type": "SGD", "params": {"nesterov": True}}},
        RunArguments(),
        "optimizer.params.nesterov needs a momentum above 0",
    ),
]


@pytest.mark.parametrize(("source", "args", "message"), FAULTS, ids=[row[2][:40] for row in FAULTS])
def test_what_cannot_be_decided_says_why(source, args, message):
    assert message in fault(source, args)


def test_a_world_size_below_one_is_refused():
    with pytest.raises(UsageError, match="world_size is 0"):
        resolve(None, RunArguments(), world_size=0)


@pytest.mark.parametrize(
    ("args", "steps"),
    [
        (RunArguments(warmup_ratio=0.01, total_steps=100), 1),
        (RunArguments(warmup_ratio=0.01, total_steps=101), 2),
        (RunArguments(warmup_ratio=0.03, max_steps=1000, total_steps=7), 30),
        (RunArguments(warmup_ratio=0.07, total_steps=100), 8),  # 0.07 × 100 = 7.000000000000001, as in transformers
        (RunArguments(warmup_steps=5, warmup_ratio=0.5, total_steps=100), 5),
        (RunArguments(warmup_steps=0.1, total_steps=95), 10),
        (RunArguments(), 0),
        (RunArguments(warmup_ratio=0.1), None),
    ],
)
def test_warmup_steps_round_up_as_transformers_does(args, steps):
    assert warmup_steps_of(args) == steps


def test_sections_with_remarks_are_noted():
    notes = run({"activation_checkpointing": {"profile": False}, "compile": {"backend": "inductor", "disable": False}})
    assert "activation_checkpointing does nothing for Hugging Face models: use --gradient_checkpointing" in notes.notes
    assert "compile: use --torch_compile" in notes.notes


def test_unknown_keys_that_were_allowed_appear_in_the_notes():
    config = load_config({"new_key": 1}, allow_unknown=True)
    assert resolve(config, RunArguments(), world_size=1).notes == ("unknown key left out: new_key",)


# ---- data that does not fill a step ----


def loader_batches(samples, batch, drops_last):
    """What the Trainer's data loader gives each rank, from the classes that it uses."""
    inner = BatchSampler(SequentialSampler(range(samples)), batch.micro, drops_last)
    if batch.world_size == 1:
        return [list(inner)]
    return [list(BatchSamplerShard(inner, batch.world_size, rank)) for rank in range(batch.world_size)]


@pytest.mark.parametrize("drops_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_short_data_is_told_as_the_data_loader_draws_it(drops_last, world_size, micro):
    batch = BatchNumbers(micro=micro, accumulation=2, world_size=world_size, train=2 * micro * world_size)
    for samples in range(1, batch.train):
        ranks = loader_batches(samples, batch, drops_last)
        drawn = [index for rank in ranks for rows in rank for index in rows]
        if not drawn:
            with pytest.raises(ConfigError, match="dataloader_drop_last leaves nothing"):
                note_of_short_data(samples, batch, drops_last=drops_last)
            continue
        note = note_of_short_data(samples, batch, drops_last=drops_last)
        assert f"a step takes {batch.train}: an epoch is one step of {len(drawn)}" in note
        again = len(drawn) - len(set(drawn))
        assert (f"{again} of them drawn again" in note) == (again > 0)
        assert (f"{samples - len(drawn)} are left out" in note) == (len(set(drawn)) < samples)
    assert note_of_short_data(batch.train, batch, drops_last=drops_last) is None


# ---- what a section overrules ----


SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}


@pytest.mark.parametrize(
    ("section", "optim"),
    [
        ({"type": "AdamW"}, "adamw_torch"),
        ({"type": "Adam"}, "adamw_torch_fused"),
        (SGD["optimizer"], "sgd"),
        ({"type": "Adagrad"}, "adagrad"),
    ],
)
def test_an_optim_that_is_the_sections_own_is_no_contradiction(section, optim):
    assert run({"optimizer": section}, given(optim=optim)).optimizer is not None


@pytest.mark.parametrize(
    ("section", "optim"),
    [
        ({"type": "AdamW"}, "sgd"),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, "adamw_torch"),
        (SGD["optimizer"], "rmsprop"),
    ],
)
def test_an_optim_that_the_section_overrules_is_a_contradiction_with_its_own_remedy(section, optim):
    lines = fault({"optimizer": section}, given(optim=optim)).splitlines()
    assert lines[0] == "the DeepSpeed config contradicts the command line in 1 value; drop the flag:"
    assert lines[2].split() == ["optimizer.type", section["type"], "--optim", optim]
    assert lines[3] == "  optimizer.type: drop the flag, or remove the optimizer section"
    assert run({"optimizer": section}, RunArguments(optim=optim)).optimizer is not None  # a default is no wish


def test_the_usual_remedy_is_told_beside_one_of_its_own():
    source = {"gradient_clipping": 0.5, **SGD}
    lines = fault(source, given(optim="adagrad", max_grad_norm=1.0)).splitlines()
    assert lines[0].endswith('in 2 values; write "auto" in the JSON, or drop the flag:')
    assert lines[-1].startswith("  optimizer.type: ")


def test_given_flags_that_do_nothing_are_notes():
    notes = run(SGD, given(adam_beta2=0.95, adam_epsilon=1e-6, optim_args="momentum=0.9")).notes
    assert "--optim_args has no effect: the optimizer section decides" in notes
    assert "--adam_beta2 and --adam_epsilon have no effect: the optimizer section's SGD takes none" in notes
    assert run(SGD, RunArguments(adam_beta2=0.95, optim_args="momentum=0.9")).notes == run(SGD).notes
    notes = resolve(None, given(optim="sgd", adam_beta1=0.8, optim_args="momentum=0.9"), world_size=1).notes
    assert notes == ("--adam_beta1 has no effect: sgd takes none",)
    notes = resolve(None, given(optim="adamw_torch", adam_beta1=0.8, optim_args="momentum=0.9"), world_size=1).notes
    assert notes == ("--optim_args has no effect: adamw_torch takes none",)
    adagrad = {"optimizer": {"type": "Adagrad", "params": {"lr": 1e-3}}}
    assert run(adagrad, given(adam_epsilon=1e-6)).optimizer.eps == 1e-6


def test_a_cycle_needs_its_ends_and_overrules_the_rate():
    source = {"scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": 1e-3}}}
    assert fault(source).splitlines()[1:] == [
        "  scheduler.params.cycle_min_lr is missing; OneCycle needs it: write a number"
    ]
    source["scheduler"]["params"]["cycle_min_lr"] = 1e-5
    notes = run(source, given(learning_rate=3e-4, warmup_ratio=0.1)).notes
    assert any("over the optimizer's rate: OneCycle, the rate goes from 1e-05 to 0.001 and back" in n for n in notes)
    assert any("sets the second to 0.99, as in DeepSpeed" in note for note in notes)
    assert "--learning_rate and --warmup_ratio have no effect: OneCycle decides" in notes


def test_a_scheduler_section_says_what_it_overrules():
    source = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}
    notes = run(source, given(lr_scheduler_type="cosine", lr_scheduler_kwargs={"num_cycles": 2})).notes
    assert any(note.startswith("the scheduler section wins over --lr_scheduler_type cosine") for note in notes)
    assert "--lr_scheduler_kwargs has no effect: the scheduler section decides" in notes


def test_remarks_on_keys_without_effect_name_what_the_user_writes():
    source = {"compile": {"disable": True}, "activation_checkpointing": {"partition_activations": True}}
    for args, dashes in ((given(), "--"), (replace(given(), from_command=False), "")):
        notes = run(source, args).notes
        assert f"compile: use {dashes}torch_compile" in notes
        assert any(note.endswith(f"use {dashes}gradient_checkpointing") for note in notes)


def test_arguments_from_python_are_not_called_flags():
    python = replace(given(learning_rate=1e-5, fp16=True, optim="sgd"), from_command=False)
    source = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "scheduler": {"type": "WarmupLR"}}
    text = fault(source, python)
    assert text.startswith("the DeepSpeed config contradicts the training arguments in 2 values; ")
    assert 'write "auto" in the JSON, or leave the argument out:' in text
    assert "argument's value" in text
    with pytest.raises(ConfigError, match="the training arguments: 2 faults\n  zero_stage is 4") as caught:
        resolve(None, python, world_size=1, stage=4)
    for said in (text, str(caught.value)):
        assert not any(word in said for word in ("--", "flag", "command line"))

"""The table of resolved values: every key that decides something has a row with its value and its origin."""

import re

import pytest

from shardglass.config import Status, known_keys, load_config
from shardglass.config.types import OPTIMIZERS, SCHEDULERS
from shardglass.config.zero import OF_STAGE_3, TWINS
from shardglass.errors import ConfigError
from shardglass.resolve import RunArguments, resolve

KNOWN = RunArguments(total_steps=100, hidden_size=64)


def given(**flags):
    return RunArguments(**flags, explicit=frozenset(flags))


def rows_of(source, args=KNOWN, **options):
    config = None if source is None else load_config(source)
    return {row.key: row for row in resolve(config, args, world_size=2, **options).values}


def honoured_keys(optimizer, scheduler):
    """The keys of the schema that decide something, without params of other types and second names."""
    takes = {"optimizer": OPTIMIZERS[optimizer].params, "scheduler": SCHEDULERS[scheduler].params}
    keys = set()
    for known in known_keys():
        is_param = known.path[1:2] == ("params",)
        fits = not is_param or known.path[-1] in takes[known.path[0]]
        if (
            known.rule.status is Status.HONOURED
            and fits
            and known.path[0] != "bfloat16"
            and known.path[-1] not in TWINS
        ):
            keys.add(known.key)
    return keys


@pytest.mark.parametrize("optimizer", [name for name, row in OPTIMIZERS.items() if row.params])
@pytest.mark.parametrize("scheduler", [name for name, row in SCHEDULERS.items() if row.params])
@pytest.mark.parametrize("stage", [0, 3])
def test_every_key_that_decides_something_has_a_row_with_a_value(optimizer, scheduler, stage):
    params = {name: "auto" if name == "total_num_steps" else 1 for name in SCHEDULERS[scheduler].needs}
    source = {"optimizer": {"type": optimizer}, "scheduler": {"type": scheduler, "params": params}}
    rows = rows_of(source | {"zero_optimization": {"stage": stage}})
    idle = () if stage == 3 else OF_STAGE_3
    assert honoured_keys(optimizer, scheduler) - {f"zero_optimization.{name}" for name in idle} <= set(rows)
    assert [key for key, row in rows.items() if row.value is None] == []
    assert {row.used for row in rows.values()} == {"honoured"}


def test_without_a_config_the_rows_are_those_of_the_flags():
    rows = rows_of(None, given(learning_rate=1e-4, optim="adamw_torch", warmup_steps=3, max_skipped_steps=5), stage=1)
    shown = {key: (row.value, row.source, row.flag) for key, row in rows.items()}
    assert shown == {
        "zero_optimization.stage": (1, "flag", "--zero_stage"),
        "fp16.enabled": (False, "default", "--fp16"),
        "bf16.enabled": (False, "default", "--bf16"),
        "communication_data_type": ("float32", "default", None),
        "gradient_allreduce_op": ("mean", "default", None),
        "data_types.grad_accum_dtype": ("float32", "default", None),
        "bf16.check_grad_overflow": (True, "default", "--skip_nonfinite"),
        "zero_allow_untested_optimizer": (False, "default", None),
        "--max_skipped_steps": (5, "flag", "--max_skipped_steps"),
        "--collective_timeout_s": (1800.0, "default", "--collective_timeout_s"),
        "train_micro_batch_size_per_gpu": (8, "default", "--per_device_train_batch_size"),
        "gradient_accumulation_steps": (1, "default", "--gradient_accumulation_steps"),
        "train_batch_size": (16, "derived", None),
        "gradient_clipping": (1.0, "default", "--max_grad_norm"),
        "optimizer.type": ("adamw_torch", "flag", "--optim"),
        "optimizer.params.lr": (1e-4, "flag", "--learning_rate"),
        "optimizer.params.weight_decay": (0.0, "default", "--weight_decay"),
        "optimizer.params.betas": ((0.9, 0.999), "default", "--adam_beta1, --adam_beta2"),
        "optimizer.params.eps": (1e-8, "default", "--adam_epsilon"),
        "scheduler.type": ("linear", "default", "--lr_scheduler_type"),
        "scheduler.params.warmup_num_steps": (3, "flag", "--warmup_steps, --warmup_ratio"),
    }


def test_the_trainers_own_optimizer_shows_only_what_it_takes_and_a_warmup_that_is_not_known_yet_is_open():
    rows = rows_of({}, given(optim="adafactor", warmup_ratio=0.1))
    assert "optimizer.params.betas" not in rows
    assert rows["optimizer.type"].value == "adafactor"
    assert rows["scheduler.params.warmup_num_steps"].value is None
    assert rows_of({}, RunArguments(warmup_ratio=0.1, total_steps=15))["scheduler.params.warmup_num_steps"].value == 2


def test_a_json_value_keeps_its_origin_and_names_the_flag_that_auto_would_take():
    rows = rows_of({"optimizer": {"type": "Adam", "params": {"lr": 3e-4, "torch_adam": True}}, "steps_per_print": 9})
    assert (rows["optimizer.params.lr"].source, rows["optimizer.params.lr"].flag) == ("json", "--learning_rate")
    assert (rows["optimizer.params.torch_adam"].value, rows["optimizer.params.torch_adam"].source) == (True, "json")
    assert (rows["optimizer.params.adam_w_mode"].value, rows["optimizer.params.adam_w_mode"].source) == (
        True,
        "default",
    )
    assert (rows["steps_per_print"].value, rows["steps_per_print"].used) == (9, "no effect")


def test_adam_w_mode_off_does_nothing_to_adamw_and_the_run_says_so():
    source = {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}}
    run = resolve(load_config(source), KNOWN, world_size=1)
    row = next(row for row in run.values if row.key == "optimizer.params.adam_w_mode")
    assert (row.value, row.source, run.optimizer.type) == (True, "derived", "AdamW")
    assert "adam_w_mode false does nothing to the type AdamW, as in DeepSpeed: write the type Adam" in run.notes


@pytest.mark.parametrize(("in_json", "flag"), [(False, True), (True, False)])
def test_skipping_of_bad_steps_contradicts_as_other_values_do(in_json, flag):
    source = {"bf16": {"enabled": True, "check_grad_overflow": in_json}}
    with pytest.raises(ConfigError) as caught:
        rows_of(source, given(skip_nonfinite=flag))
    row = str(caught.value).splitlines()[2].split()
    assert row == ["bf16.check_grad_overflow", str(in_json).lower(), "--skip_nonfinite", str(flag).lower()]


def test_what_the_flags_tell_the_engine_is_in_its_options():
    args = given(skip_nonfinite=False, max_skipped_steps=3, collective_timeout_s=60.0)
    options = resolve(load_config({"bfloat16": {"enabled": True}}), args, world_size=1).options
    assert (options.skip_nonfinite, options.max_skipped_steps, options.collective_timeout_s) == (False, 3, 60.0)
    rows = rows_of({"bfloat16": {"enabled": True}}, args)
    assert (rows["bfloat16.check_grad_overflow"].value, rows["bfloat16.check_grad_overflow"].source) == (False, "flag")
    assert "bf16.enabled" not in rows


def test_every_kind_of_contradiction_is_a_row_with_both_values_and_the_flag():
    source = {
        "train_micro_batch_size_per_gpu": "4",
        "gradient_accumulation_steps": 2,
        "gradient_clipping": "1e0",
        "bf16": {"enabled": True, "check_grad_overflow": True},
        "fp16": {"enabled": False},
        "optimizer": {"type": "Adam", "params": {"lr": "1e-4", "eps": 1e-8, "weight_decay": 0, "betas": [0.9, 0.99]}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": "100"}},
        "zero_optimization": {"stage": 2},
    }
    args = given(
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        max_grad_norm=0.5,
        bf16=False,
        fp16=True,
        skip_nonfinite=False,
        learning_rate=2e-5,
        adam_epsilon=1e-6,
        weight_decay=0.1,
        adam_beta1=0.8,
        warmup_steps=20,
        max_steps=200,
    )
    with pytest.raises(ConfigError) as caught:
        rows_of(source, args, stage=1)
    head, titles, *lines, remedy = str(caught.value).splitlines()
    assert head.startswith("the DeepSpeed config contradicts the command line in 13 values; ")
    assert remedy.startswith("  zero_optimization.stage: drop the flag, or take the key out")
    assert re.split(r"  +", titles.strip()) == ["key", "JSON", "flag", "flag's value"]
    assert {line.split()[0]: line.split()[1:] for line in lines} == {
        "zero_optimization.stage": ["2", "--zero_stage", "1"],
        "fp16.enabled": ["false", "--fp16", "true"],
        "bf16.enabled": ["true", "--bf16", "false"],
        "bf16.check_grad_overflow": ["true", "--skip_nonfinite", "false"],
        "train_micro_batch_size_per_gpu": ["4", "--per_device_train_batch_size", "8"],
        "gradient_accumulation_steps": ["2", "--gradient_accumulation_steps", "4"],
        "gradient_clipping": ["1.0", "--max_grad_norm", "0.5"],
        "optimizer.params.lr": ["0.0001", "--learning_rate", "2e-05"],
        "optimizer.params.weight_decay": ["0.0", "--weight_decay", "0.1"],
        "optimizer.params.betas[0]": ["0.9", "--adam_beta1", "0.8"],
        "optimizer.params.eps": ["1e-08", "--adam_epsilon", "1e-06"],
        "scheduler.params.warmup_num_steps": ["10", "--warmup_steps", "20", "steps"],
        "scheduler.params.total_num_steps": ["100", "--max_steps", "200"],
    }
    assert remedy.startswith("  zero_optimization.stage: drop the flag, or take the key out of the JSON")


def test_what_is_equal_or_was_not_given_contradicts_nothing():
    source = {"train_batch_size": "32", "gradient_clipping": 0.7, "optimizer": {"type": "AdamW", "params": {"lr": 1}}}
    rows = rows_of(source, given(per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=1.0))
    assert (rows["train_batch_size"].value, rows["gradient_clipping"].value) == (32, 0.7)

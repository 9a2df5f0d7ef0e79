"""The argument class and the reading of a training command."""

import dataclasses
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainingArguments

from shardglass.errors import ConfigError, InvariantError
from shardglass.hf.accelerated import lonely_note
from shardglass.hf.arguments import Command, ZeroTrainingArguments, check_plain_arguments, parse_command
from shardglass.hf.data_options import DataOptions
from shardglass.hf.flags import (
    IDLE_FLAGS,
    LABEL_POLICIES,
    DataArguments,
    EngineFlags,
    LaunchArguments,
    LookArguments,
    LoraArguments,
    ModelArguments,
)
from shardglass.hf.labels import LABEL_POLICIES as KNOWN_POLICIES
from shardglass.hf.renamed import ALIASES, NEW_NAMES, NEW_VALUES, NO_EFFECT
from shardglass.hf.scan import kinds_in_source, kinds_of
from shardglass.hf.trainer import resolve_run

REQUIRED = ["--model_name_or_path", "model", "--data_path", "data.json"]

QWEN = shlex.split("""
--model_name_or_path /models/Qwen1.5-7B --data_path data/dialogues.json --bf16 True
--output_dir output_qwen_full_1gpu_bs1 --num_train_epochs 2 --per_device_train_batch_size 2
--per_device_eval_batch_size 1 --gradient_accumulation_steps 4 --evaluation_strategy no --save_strategy steps
--save_steps 1000 --save_total_limit 10 --learning_rate 1e-5 --weight_decay 0.1 --adam_beta2 0.95 --warmup_ratio 0.01
--lr_scheduler_type cosine --logging_steps 1 --report_to none --model_max_length 2048 --gradient_checkpointing True
--lazy_preprocess True --deepspeed finetune/ds_config_zero2.json
""")


def parse(*flags: str) -> Command:
    return parse_command([*REQUIRED, *flags])


def message_of(*flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*flags)
    return str(caught.value)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# ---- the command ----


def test_qwen_command_has_its_values(no_cuda):
    command = parse_command(QWEN, defaults={"label_policy": "qwen"})
    training = command.training
    wanted = {
        "bf16": True,
        "output_dir": "output_qwen_full_1gpu_bs1",
        "num_train_epochs": 2.0,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "eval_strategy": "no",
        "save_strategy": "steps",
        "save_steps": 1000,
        "save_total_limit": 10,
        "learning_rate": 1e-5,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "warmup_ratio": 0.01,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "report_to": [],
        "model_max_length": 2048,
        "gradient_checkpointing": True,
        "deepspeed": "finetune/ds_config_zero2.json",
        "zero_config": "finetune/ds_config_zero2.json",
        "use_cpu": True,
    }
    assert {name: getattr(training, name) for name in wanted} == wanted
    assert command.model.model_name_or_path == "/models/Qwen1.5-7B"
    assert command.data.data_path == "data/dialogues.json"
    assert command.data.lazy_preprocess is True
    assert command.data.label_policy == "qwen"
    assert command.notes == ("--evaluation_strategy is called --eval_strategy now: taken as that",)
    assert command.given["eval_strategy"] == "no"
    assert "max_grad_norm" not in command.given
    assert "label_policy" not in command.given
    assert training.explicit == frozenset(command.given)


def test_label_policy_is_assistant_unless_the_script_says_otherwise():
    assert parse().data.label_policy == "assistant"
    assert parse_command([*REQUIRED, "--label_policy", "assistant"], defaults={"label_policy": "qwen"}).data == (
        parse().data
    )


def test_flags_are_written_with_dashes_underscores_and_equals_signs():
    flags = ["--learning-rate=3e-4", "--per-device_train-batch-size", "5", "--max_steps", "-1", "--run_name=--x y"]
    training = parse(*flags).training
    assert (training.learning_rate, training.per_device_train_batch_size) == (3e-4, 5)
    assert (training.max_steps, training.run_name) == (-1, "--x y")


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--lazy_preprocess"], True),
        (["--lazy-preprocess", "True"], True),
        (["--lazy_preprocess=yes"], True),
        (["--lazy_preprocess", "False"], False),
        (["--lazy_preprocess", "0"], False),
        (["--no_lazy_preprocess"], False),
    ],
)
def test_a_switch_is_given_bare_or_with_a_value(words, value):
    assert parse(*words, "--seed", "3").data.lazy_preprocess is value


def test_the_last_of_a_repeated_flag_counts_and_that_is_said():
    command = parse("--seed", "1", "--seed", "2", "--max_steps", "3", "--max_steps", "3")
    assert command.training.seed == 2
    assert [note for note in command.notes if "twice" in note] == ["--seed is given twice, 1 and 2: the last counts"]


def test_two_names_of_a_flag_must_agree():
    assert parse("--evaluation_strategy", "no", "--eval_strategy", "no").training.eval_strategy == "no"
    text = message_of("--evaluation_strategy", "no", "--eval_strategy", "steps")
    assert "--evaluation_strategy and --eval_strategy are the same flag with two values" in text


def test_lists_and_json_values(monkeypatch):
    known = ["tensorboard", "wandb"]
    monkeypatch.setattr("shardglass.hf.rehearsal.get_available_reporting_integrations", lambda: known)
    training = parse("--label_names", "a", "b", "--report_to", *known).training
    assert training.label_names == ["a", "b"]
    assert training.report_to == known
    training = parse("--gradient_checkpointing_kwargs", '{"use_reentrant": false}').training
    assert training.gradient_checkpointing_kwargs == {"use_reentrant": False}
    assert "--lr_scheduler_kwargs: not JSON" in message_of("--lr_scheduler_kwargs", "{min_lr: 0}")


# ---- mistakes ----


def test_all_mistakes_are_told_at_once_with_the_nearest_name():
    with pytest.raises(ConfigError) as caught:
        parse_command(
            shlex.split(
                "--lerning_rate 1 --num_train_epochs two --eval_strategy stpes --q_lora --save_steps 1 2 --zzz "
                "--bf16 maybe --seed --adam_beta2 1.5 --label_policy qwn"
            )
        )
    assert str(caught.value).splitlines() == [
        "flags: 12 faults",
        "  --lerning_rate: unknown flag (did you mean --learning_rate?)",
        "  --num_train_epochs two: not a number",
        "  --save_steps 1 2: it takes one value",
        "  --zzz: unknown flag",
        "  --bf16 maybe: it must be True or False",
        "  --seed: a value is missing",
        "  --model_name_or_path is required",
        "  --data_path is required",
        "  --adam_beta2 is 1.5: it must be at least 0 and below 1",
        "  --q_lora: not supported yet; leave it out to train all parameters",
        "  --label_policy qwn: it must be one of assistant, all, qwen (did you mean 'qwen'?)",
        "  --eval_strategy stpes: it must be one of no, steps, epoch (did you mean 'steps'?)",
        "  `shardglass train --help` lists all flags",
    ]


def test_one_mistake_is_one_line_and_the_remedy():
    assert message_of("--max_steps", "1.5").splitlines() == [
        "flags: --max_steps 1.5: not a whole number",
        "  `shardglass train --help` lists all flags",
    ]


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--learning_rate", "nan"], "--learning_rate nan: not a finite number"),
        (["--warmup_ratio", "1.5"], "--warmup_ratio is 1.5: it must be at least 0 and at most 1"),
        (["--per_device_train_batch_size", "0"], "it must be at least 1"),
        (["--num_train_epochs", "0"], "it must be above 0"),
        (["--max_steps", "0"], "--max_steps is 0: it must be at least 1, or -1"),
        (["--max_steps=-2"], "--max_steps is -2: it must be at least 1, or -1"),
        (["--seed=-1"], "--seed is -1: it must be at least 0 and at most 4294967295"),
        (["--deepspeed="], "--deepspeed: a value is missing"),
        (["--output_dir="], "--output_dir: a value is missing"),
        (["--fsdp", "full_shard"], "fsdp is set, but shardglass shards the model itself"),
        (["--parallelism_config", "x"], "it cannot be given on the command line"),
        (["--fp16", "--bf16"], "At most one of fp16 and bf16"),
        (["--nproc_per_node", "2"], "belongs to the launcher"),
        (["--use_lora", "True"], "--use_lora: not supported yet"),
        (["--liger_kernel_config", "{"], "not JSON"),
    ],
)
def test_what_cannot_be_used_is_refused(flags, part):
    assert part in message_of(*flags)


def test_a_value_before_any_flag_is_refused():
    with pytest.raises(ConfigError, match="'data.json' belongs to no flag"):
        parse_command(["data.json", *REQUIRED])


def test_lora_flags_without_lora_are_noted():
    command = parse("--use_lora", "False", "--lora_r", "8", "--lora_target_modules", "c_attn", "w1")
    assert command.notes == (
        "--lora_r has no effect without --use_lora",
        "--lora_target_modules has no effect without --use_lora",
    )


def test_flags_that_do_nothing_here_are_noted():
    command = parse("--ddp_find_unused_parameters", "False", "--do_train", "--eval_data_path", "held_out.json")
    assert command.notes == (
        "--ddp_find_unused_parameters has no effect: the engine reduces the gradients itself, without DDP",
        "--do_train has no effect: this command trains",
        "--eval_data_path has no effect: nothing is evaluated without --eval_strategy steps or epoch",
    )
    assert set(IDLE_FLAGS) <= set(kinds_in_source())
    assert parse("--max_steps", "-1").notes == ()


def test_a_default_of_the_script_must_name_a_flag():
    with pytest.raises(InvariantError, match="label_polcy"):
        parse_command(REQUIRED, defaults={"label_polcy": "qwen"})


def test_help_ends_the_process_without_an_error(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "--label_policy" in out
    assert "--gradient_accumulation_steps" in out


# ---- old names ----

EVALUATION = {"eval_strategy": ("--eval_data_path", "held_out.json")}


@pytest.mark.parametrize(
    ("old", "value", "new", "result"),
    [
        ("evaluation_strategy", "epoch", "eval_strategy", "epoch"),
        ("no_cuda", "True", "use_cpu", True),
        ("per_gpu_train_batch_size", "3", "per_device_train_batch_size", 3),
        ("per_gpu_eval_batch_size", "3", "per_device_eval_batch_size", 3),
        ("push_to_hub_model_id", "me/it", "hub_model_id", "me/it"),
        ("push_to_hub_token", "t", "hub_token", "t"),
        ("torchdynamo", "eager", "torch_compile_backend", "eager"),
        ("group_by_length", "True", "train_sampling_strategy", "group_by_length"),
        ("include_inputs_for_metrics", "True", "include_for_metrics", ["inputs"]),
    ],
)
def test_an_old_name_is_translated_and_said_once(old, value, new, result):
    command = parse(f"--{old}", value, f"--{old}", value, *EVALUATION.get(new, ()))
    assert getattr(command.training, new) == result
    assert len(command.notes) == 1
    assert command.notes[0].startswith(f"--{old} ")
    assert f"--{new}" in command.notes[0]
    assert new in command.given


def test_an_old_switch_is_refused_as_what_it_stands_for():
    with pytest.raises(ConfigError, match="--optim adafactor cannot be sharded"):
        parse("--adafactor", "True")


@pytest.mark.parametrize(("words", "policy"), [(["True"], "assistant"), ([], "assistant"), (["False"], "all")])
def test_assistant_only_loss_is_a_label_policy(words, policy):
    assert parse("--assistant_only_loss", *words).data.label_policy == policy
    with pytest.raises(ConfigError, match="label_policy"):
        parse("--assistant_only_loss", *words, "--label_policy", "qwen")


def test_an_old_switch_that_is_off_stands_for_nothing():
    command = parse("--group_by_length", "False")
    assert command.training.train_sampling_strategy == "random"
    assert command.notes == ("--group_by_length is off and needs no flag any more: left out",)
    assert "train_sampling_strategy" not in command.given


@pytest.mark.parametrize("name", sorted(NO_EFFECT))
def test_an_old_name_without_effect_is_said_once(name):
    command = parse(f"--{name}", "True", f"--{name.replace('_', '-')}")
    assert command.notes == (f"--{name} has no effect: {NO_EFFECT[name]}",)


def test_every_field_that_transformers_dropped_is_covered():
    # Fields of TrainingArguments in 4.28.1, 4.40.2, 4.46.3 and 4.57.1 that 5.24.0 has not.
    dropped = shlex.split("""
        overwrite_output_dir evaluation_strategy per_gpu_train_batch_size per_gpu_eval_batch_size warmup_ratio
        logging_dir save_safetensors no_cuda use_mps_device jit_mode_eval use_ipex fp16_opt_level
        half_precision_backend xpu_backend tpu_num_cores tpu_metrics_debug past_index sharded_ddp
        fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap adafactor group_by_length
        use_legacy_prediction_loop include_inputs_for_metrics fp16_backend push_to_hub_model_id
        push_to_hub_organization push_to_hub_token _n_gpu mp_parameters torchdynamo ray_scope dispatch_batches
        split_batches include_tokens_per_second
    """)
    ours = {f.name for f in dataclasses.fields(EngineFlags)}
    covered = {*NEW_NAMES, *NEW_VALUES, *NO_EFFECT, *ours}
    assert sorted(set(dropped) - covered) == []


def test_rows_of_old_names_lead_to_flags_that_exist():
    known = set(kinds_of(ZeroTrainingArguments))
    assert {*NEW_NAMES.values(), *(flag for flag, _ in NEW_VALUES.values())} <= known
    assert not {*NEW_NAMES, *NEW_VALUES, *NO_EFFECT} & known
    assert not {*ALIASES} & {*NEW_NAMES, *NEW_VALUES, *NO_EFFECT}


def test_second_names_need_no_note(no_cuda):
    command = parse("--stage", "1", "--torch_dtype", "float32", "--hang_timeout", "60", "--zero_config", "x.json")
    assert command.notes == ()
    assert command.training.zero_stage == 1
    assert command.model.dtype == "float32"
    assert command.training.collective_timeout_s == 60.0
    assert command.training.zero_config == "x.json"


def test_fields_read_from_source_are_those_of_the_class():
    assert kinds_in_source() == kinds_of(TrainingArguments)


def test_values_written_twice_agree():
    assert set(LABEL_POLICIES) == set(KNOWN_POLICIES)
    assert EngineFlags().model_max_length == DataOptions().model_max_length
    assert parse().data.label_policy == DataOptions().label_policy


# ---- the argument class ----


def test_bf16_works_without_cuda_and_asks_for_no_autocast(no_cuda, tmp_path):
    args = ZeroTrainingArguments(output_dir=str(tmp_path), bf16=True)
    assert (args.bf16, args.use_cpu, args.mixed_precision, args.device.type) == (True, True, "no", "cpu")


def test_autocast_asked_for_by_the_environment_is_not_used(no_cuda, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert ZeroTrainingArguments().mixed_precision == "no"


def test_deepspeed_value_survives_every_way_of_copying():
    config = {"zero_optimization": {"stage": 2}}
    args = ZeroTrainingArguments(deepspeed=config)
    assert args.deepspeed == args.zero_config == config
    assert args.deepspeed_plugin is None
    assert args.to_dict()["deepspeed"] == config
    assert json.loads(args.to_json_string())["deepspeed"] == config
    assert "deepspeed={'zero_optimization': {'stage': 2}}" in repr(args)
    assert dataclasses.replace(args, seed=7).deepspeed == config
    assert ZeroTrainingArguments(**args.to_dict()).deepspeed == config
    assert args._no_sync_in_gradient_accumulation


def test_deepspeed_takes_a_path_object_and_json_text():
    assert ZeroTrainingArguments(deepspeed=Path("a") / "b.json").zero_config == os.path.join("a", "b.json")
    assert ZeroTrainingArguments(deepspeed='{"zero_optimization": {}}').zero_config == '{"zero_optimization": {}}'


@pytest.mark.parametrize(
    ("ratio", "steps", "total", "warmup"),
    [(0.01, 0, 301, 4), (0.01, 0, 300, 3), (1.0, 0, 7, 7), (0.5, 3, 100, 3), (0.0, 0.1, 95, 10), (0.0, 0, 9, 0)],
)
def test_warmup_ratio_is_a_share_of_all_steps_rounded_up(ratio, steps, total, warmup):
    args = ZeroTrainingArguments(warmup_ratio=ratio, warmup_steps=steps)
    assert args.get_warmup_steps(total) == warmup


def test_values_that_make_no_run_are_refused_from_python_too():
    with pytest.raises(ConfigError, match="training arguments: 2 faults") as caught:
        ZeroTrainingArguments(gradient_accumulation_steps=0, max_skipped_steps=0)
    assert "gradient_accumulation_steps is 0: it must be at least 1" in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "flag"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "--use_deepspeed"),
        ("ACCELERATE_USE_FSDP", "--use_fsdp"),
        ("ACCELERATE_USE_MEGATRON_LM", "--use_megatron_lm"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "--use_parallelism_config"),
    ],
)
def test_an_engine_that_accelerate_would_start_is_refused(monkeypatch, variable, flag):
    monkeypatch.setenv(variable, "true")
    says = rf"is on \({variable} in the environment\).* turn Accelerate's off. Leave {flag} out of `accelerate launch`"
    plain = SimpleNamespace(deepspeed=None, deepspeed_plugin="made by the plain arguments from the environment")
    for use in (ZeroTrainingArguments, lambda: check_plain_arguments(plain)):
        with pytest.raises(ConfigError, match=says) as caught:
            use()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["false", "0", ""])
def test_an_engine_that_is_switched_off_in_the_environment_is_none(monkeypatch, value):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", value)
    check_plain_arguments(SimpleNamespace(deepspeed=None))


def test_engines_in_the_arguments_are_refused_too():
    with pytest.raises(ConfigError, match="fsdp is set, but shardglass shards the model itself: leave it out"):
        ZeroTrainingArguments(fsdp="full_shard")


@pytest.mark.parametrize(
    ("asked", "bf16", "refused"),
    [("no", False, False), ("no", True, False), ("bf16", True, False), ("bf16", False, True), ("fp16", True, True)],
)
def test_a_precision_that_only_accelerate_launch_asks_for_is_refused(monkeypatch, tmp_path, asked, bf16, refused):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", asked)
    args = ZeroTrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=bf16)
    if refused:
        told = f"asks for mixed precision {asked} .*leave it out there, or give bf16=True here"
        with pytest.raises(ConfigError, match=told):
            resolve_run(args)
        args.explicit = frozenset({"output_dir"})  # as a command sets it
        with pytest.raises(ConfigError, match="or give --bf16 True here"):
            resolve_run(args)
    else:
        assert resolve_run(args).param_dtype == ("bfloat16" if bf16 else "float32")


@pytest.mark.parametrize("world_size", [None, "2"])
def test_a_launch_that_started_one_process_instead_of_several_says_so(monkeypatch, tmp_path, caplog, world_size):
    """The environment that ``accelerate launch --cpu --num_processes 2`` makes, and the same from mpirun."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size is not None:
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", world_size)
    note = lonely_note()
    assert (note is None) == (world_size is not None)
    if note is not None:
        ZeroTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
        assert note in caplog.text
        assert "--multi_gpu --num_processes N" in note


def test_plain_arguments_with_deepspeed_are_one_clear_error(no_cuda):
    args = TrainingArguments(use_cpu=True)
    check_plain_arguments(args)
    args.deepspeed = "ds.json"
    with pytest.raises(ConfigError, match=r"ZeroTrainingArguments\(deepspeed=.*zero_config="):
        check_plain_arguments(args)
    check_plain_arguments(ZeroTrainingArguments(deepspeed="ds.json"))


USE_ARGUMENTS = """
import importlib.util, sys
from accelerate import Accelerator
from accelerate.utils import is_deepspeed_available
from shardglass.hf.arguments import parse_command
flags = ["--model_name_or_path", "m", "--data_path", "d", "--bf16", "--use_cpu", "--deepspeed", "ds.json"]
args = parse_command(flags).training
accelerator = Accelerator(mixed_precision=args.mixed_precision, deepspeed_plugin=args.deepspeed_plugin, cpu=True)
print(bool(is_deepspeed_available()), args.deepspeed, accelerator.distributed_type.value, accelerator.native_amp,
      accelerator.state.deepspeed_plugin, "deepspeed" in sys.modules)
"""


@pytest.mark.parametrize("is_installed", [False, True])
def test_deepspeed_is_never_touched_installed_or_not(tmp_path, is_installed):
    folder = tmp_path / "site"
    if is_installed:
        (folder / "deepspeed").mkdir(parents=True)
        (folder / "deepspeed" / "__init__.py").write_text("raise RuntimeError('DeepSpeed was imported')\n")
        (folder / "deepspeed-0.19.8.dist-info").mkdir()
        (folder / "deepspeed-0.19.8.dist-info" / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8\n"
        )
    paths = [str(folder), *(path for path in sys.path if path)]
    done = subprocess.run(
        [sys.executable, "-c", USE_ARGUMENTS],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    is_there = is_installed or _is_installed("deepspeed")
    assert done.stdout.split() == [str(is_there), "ds.json", "NO", "False", "None", "False"]


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


OUR_OPTIONS = """
allow_unknown_config async_save attn_implementation cache_dir collective_timeout_s data_path debugpy_port debugpy_rank
dtype eval_data_path label_policy lazy_preprocess log_dir look lora_alpha lora_bias lora_dropout lora_r
lora_target_modules lora_weight_path master_addr master_port max_restarts max_skipped_steps model_max_length
model_name_or_path nnodes node_rank nproc_per_node on_save_failure overwrite_output_dir q_lora rdzv_backend
rdzv_endpoint rdzv_id skip_bad_records skip_memory_check skip_nonfinite trust_remote_code use_lora warmup_ratio
zero_stage
"""
"""A flag is a promise: one that is added, renamed or dropped is a change of this list, and of the changelog."""


def test_our_own_options_are_these():
    classes = (ModelArguments, DataArguments, LoraArguments, LookArguments, EngineFlags, LaunchArguments)
    declared = {f.name for cls in classes for f in dataclasses.fields(cls)}
    theirs = {f.name for f in dataclasses.fields(TrainingArguments)}
    assert sorted(declared - theirs) == OUR_OPTIONS.split()

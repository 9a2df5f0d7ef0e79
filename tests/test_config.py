"""Loading the DeepSpeed JSON: what is understood, and every fault with its message."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardglass.config import DeepSpeedConfig, Status, given_keys, load_config
from shardglass.errors import ConfigError

EXAMPLES = Path(__file__).parent.parent / "examples" / "qwen" / "finetune"

STOCK = {
    "stage 0 with monitors": {
        "zero_optimization": {"stage": 0, "round_robin_gradients": True},
        "comms_config": {"comms_logger": {"enabled": True, "verbose": False, "prof_all": True}},
        "monitor_config": {"enabled": False, "tensorboard": {"enabled": True, "output_path": "runs"}},
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": True},
    },
    "stage 1 by strings": {
        "train_batch_size": "64",
        "zero_optimization": {"stage": "1", "reduce_bucket_size": "2e8", "overlap_comm": "true"},
        "fp16": {"enabled": "false"},
        "zero_allow_untested_optimizer": True,
    },
    "stage 2 with keys of stage 3": {
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "none", "pin_memory": True},
            "stage3_max_live_parameters": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
            "sub_group_size": 1e9,
        },
        "gradient_clipping": 1.0,
    },
    "stage 3 without quantization": {
        "zero_optimization": {
            "stage": 3,
            "zero_quantized_weights": False,
            "zero_quantized_gradients": False,
            "zero_hpz_partition_size": 1,
            "mics_shard_size": -1,
            "overlap_comm": True,
            "allgather_partitions": True,
            "reduce_bucket_size": 12845056,
            "stage3_prefetch_bucket_size": 11560550,
            "stage3_param_persistence_threshold": 35840,
            "stage3_gather_fp16_weights_on_model_save": True,
        },
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    },
    "compiled by inductor": {
        "compile": {"disable": False, "backend": "inductor"},
        "zero_optimization": {"stage": 1, "overlap_comm": True},
        "bf16": {"enabled": True},
        "amp": {"enabled": "auto", "opt_level": "auto"},
        "checkpoint": {"tag_validation": "Warn", "load_universal": False},
    },
    "everything off": {
        "tensor_parallel": {"autotp_size": 1},
        "pipeline": {},
        "elasticity": {"enabled": False, "max_train_batch_size": 2000},
        "curriculum_learning": {"enabled": False},
        "data_efficiency": {"enabled": False, "seed": 1234},
        "flops_profiler": {"enabled": True, "profile_step": 5, "module_depth": -1, "top_modules": 1},
        "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": True},
        "nebula": {"enabled": False},
        "hybrid_engine": {"enabled": False},
        "torch_autocast": {"enabled": False},
        "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False},
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "sparse_gradients": False,
        "zero_state": None,
        "_comment": "anything",
        "bfloat16": {"enabled": True, "_why": "old name"},
    },
}


def faults_of(source, **options):
    with pytest.raises(ConfigError) as caught:
        load_config(source, **options)
    return str(caught.value)


@pytest.mark.parametrize("name", STOCK)
def test_stock_configs_are_understood_whole(name):
    config = load_config(STOCK[name])
    assert isinstance(config, DeepSpeedConfig)
    assert config.notes == ()


def test_the_example_files_load_and_differ_in_their_stage():
    two, three = (load_config(EXAMPLES / f"ds_config_zero{stage}.json") for stage in (2, 3))
    assert two.zero_optimization.stage == 2
    assert two.zero_optimization.reduce_bucket_size == 200_000_000
    assert three.zero_optimization.stage == 3
    assert three.zero_optimization.reduce_bucket_size == "auto"
    assert three.zero_optimization.sub_group_size == 10**9
    assert two.optimizer.params.lr == three.optimizer.params.lr == "auto"


def test_numbers_and_booleans_may_stand_in_quotes():
    config = load_config(STOCK["stage 1 by strings"])
    assert config.train_batch_size == 64
    assert config.zero_optimization.stage == 1
    assert config.zero_optimization.reduce_bucket_size == 200_000_000
    assert config.zero_optimization.overlap_comm is True
    assert config.fp16.enabled is False
    assert load_config({"optimizer": {"type": "adamw", "params": {"lr": "1e-5"}}}).optimizer.params.lr == 1e-5


def test_json_text_and_paths_give_the_same_config(tmp_path):
    text = json.dumps(STOCK["stage 1 by strings"])
    path = tmp_path / "ds.json"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())  # with a byte order mark, as some editors write
    expected = load_config(json.loads(text)).model_dump()
    assert [load_config(source).model_dump() for source in (text, path, str(path))] == [expected] * 3
    assert load_config(path).source == str(path)
    assert load_config(base64.urlsafe_b64encode(text.encode()).decode()).model_dump() == expected
    assert "there is no such file" in faults_of("abcd")  # valid base64, but of no JSON


BROKEN_JSON = [
    ('{\n  "a": 1,\n}', "line 3, column 1", "trailing comma"),
    ('{"a": [1, 2,], "b": 1}', "line 1, column 13", "trailing comma"),
    ('{\n  "a": 1 // why\n}', "line 2, column 10", "JSON has no comments"),
    ('{\n  # why\n  "a": 1\n}', "line 2, column 3", "JSON has no comments"),
    ('{\n  /* why */ "a": 1\n}', "line 2, column 3", "JSON has no comments"),
    ("{'a': 1}", "line 1, column 2", "single quotes"),
    ("{\"a\": 'x'}", "line 1, column 7", "single quotes"),
    ('{"a": True}', "line 1, column 7", "True is Python; JSON writes true"),
    ('{"a": None}', "line 1, column 7", "JSON writes null"),
    ('{"a": 1 "b": 2}', "line 1, column 9", "a comma is missing"),
    ('{"a": {"b": 1}', "line 1, column 15", "a closing bracket is missing"),
    ('{"a": "x}', "line 1, column 7", "a string is not closed"),
    ('{"a": 1}}', "line 1, column 9", "a bracket too many"),
    ("{a: 1}", "line 1, column 2", "a key in double quotes"),
]


@pytest.mark.parametrize(("text", "place", "cause"), BROKEN_JSON, ids=[row[2] for row in BROKEN_JSON])
def test_broken_json_names_place_and_cause(tmp_path, text, place, cause):
    path = tmp_path / "ds.json"
    path.write_text(text)
    message = faults_of(path)
    assert message.startswith(f"{path}: {place}: ")
    assert cause in message
    assert message.endswith("^")


def test_files_that_cannot_be_read_say_why(tmp_path):
    assert "there is no such file" in faults_of(tmp_path / "missing.json")
    assert "this is a folder" in faults_of(tmp_path)
    (tmp_path / "list.json").write_text("[1]")
    assert "holds no JSON object" in faults_of(tmp_path / "list.json")
    (tmp_path / "empty.json").write_text("")
    assert "the file is empty" in faults_of(tmp_path / "empty.json")
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    assert "not UTF-8 text (byte 7)" in faults_of(tmp_path / "latin.json")
    assert "nested too deeply" in faults_of('{"a":' * 100_000)
    itself = {}
    itself["a"] = itself
    assert "nested too deeply to be a DeepSpeed config, or contains itself" in faults_of(itself)
    assert "a path or a mapping, not int" in faults_of(3)


def test_a_key_given_twice_is_an_error_with_path_and_lines(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{\n"bf16": {\n"enabled": true,\n"enabled": false\n}\n}')
    assert "bf16.enabled: given twice (lines 3 and 4)" in faults_of(path)


def test_nan_and_infinity_are_no_numbers():
    assert "gradient_clipping is NaN; it must be a finite number" in faults_of('{"gradient_clipping": NaN}')
    assert 'gradient_clipping is "inf"; it must be a number >= 0' in faults_of({"gradient_clipping": "inf"})
    assert "gradient_clipping is inf" in faults_of('{"gradient_clipping": 1e999}')


MESSAGES = [
    ({"zero_optimisation": {}}, "zero_optimisation: unknown key (did you mean 'zero_optimization'?)"),
    ({"zero_optimization": {"stgae": 2}}, "zero_optimization.stgae: unknown key (did you mean 'stage'?)"),
    (
        {"zero_optimization": {"offload_optimizer": {"devise": "none"}}},
        "zero_optimization.offload_optimizer.devise: unknown key (did you mean 'device'?)",
    ),
    ({"flops_profiler": {"enable": True}}, "flops_profiler.enable: unknown key (did you mean 'enabled'?)"),
    ({"warmup_max_lr": 1}, "warmup_max_lr: unknown key here (it belongs to scheduler.params.warmup_max_lr)"),
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4; it must be one of 0, 1, 2, 3"),
    (
        {"zero_optimization": {"stage": "auto"}},
        'zero_optimization.stage is "auto"; it must be a whole number >= 0 ("auto" is not allowed here)',
    ),
    ({"zero_optimization": True}, "zero_optimization: must be an object"),
    ({"train_batch_size": 0}, 'train_batch_size is 0; it must be a whole number >= 1 or "auto"'),
    ({"train_batch_size": 1.5}, 'train_batch_size is 1.5; it must be a whole number >= 1 or "auto"'),
    ({"train_batch_size": True}, 'train_batch_size is true; it must be a whole number >= 1 or "auto"'),
    ({"bf16": {"enabled": 1}}, 'bf16.enabled is 1; it must be true or false or "auto"'),
    ({"sparse_gradients": "yes"}, 'sparse_gradients is "yes"; it must be true or false'),
    ({"steps_per_print": "auto"}, 'steps_per_print is "auto", which is not allowed here'),
    ({"zero_optimization": {"allgather_bucket_size": "auto"}}, '("auto" is not allowed here)'),
    ({"optimizer": {"params": {}}}, "optimizer.type: missing; give one of Adam, AdamW"),
    (
        {"optimizer": {"type": "AdaW"}},
        'optimizer.type is "AdaW"; it must be one of Adam, AdamW, SGD, Adagrad, Lamb, OneBitAdam, ZeroOneAdam, '
        "OneBitLamb, Lion, Muon, MuAdam, MuAdamW, MuSGD (did you mean 'AdamW'?)",
    ),
    (
        {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 1000}}},
        'optimizer.type is "OneBitAdam": not supported yet; use Adam, AdamW, SGD, Adagrad',
    ),
    (
        {"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}},
        "optimizer.params.momentum: AdamW takes no such value",
    ),
    ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}, "use gradient_clipping"),
    ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}, "optimizer.params.betas is [0.9]; it must be two"),
    (
        {"scheduler": {"type": "OneCycle", "params": {"decay_mom_rate": 0.1}}},
        "decay_mom_rate is 0.1: not supported yet",
    ),
    ({"scheduler": {"type": "OneCycle", "params": {"cycle_max_mom": 1}}}, "cycle_max_mom is 1; it must be a number in"),
    (
        {"scheduler": {"type": "OneCycle", "params": {"warmup_min_lr": 1}}},
        "warmup_min_lr: OneCycle takes no such value",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 10}}},
        "scheduler.params.total_num_steps: WarmupLR takes no such value",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}},
        'scheduler.params.warmup_type is "cosine"; it must be one of log, linear',
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": [0, 0]}}},
        "one value per parameter group is not supported yet",
    ),
    ({"fp16": {"enabled": True}}, "fp16.enabled is true: not supported yet; use bf16"),
    ({"amp": {"enabled": True}}, "amp.enabled is true: not supported yet; apex is not used here"),
    (
        {"zero_optimization": {"offload_param": {"device": "nvme"}}},
        'zero_optimization.offload_param.device is "nvme": not supported yet; set it to "none" or drop the section',
    ),
    ({"zero_optimization": {"cpu_offload": True}}, "zero_optimization.cpu_offload is true: not supported yet"),
    ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights is true: not supported yet"),
    ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "zero_hpz_partition_size is 8: not supported yet"),
    ({"communication_data_type": "fp16"}, 'communication_data_type is "fp16": not supported yet'),
    ({"communication_data_type": "int8"}, 'communication_data_type is "int8"; it must be one of fp32, bf16, fp16'),
    ({"gradient_allreduce_op": "sum"}, 'gradient_allreduce_op is "sum": not supported yet; gradients are averaged'),
    ({"tensor_parallel": {"autotp_size": 4}}, "tensor_parallel is an object: not supported yet"),
    ({"elasticity": {"enabled": True}}, "elasticity is an object: not supported yet"),
    ({"sequence_parallel_size": 2}, "sequence_parallel_size is 2: not supported yet"),
    ({"compile": {"deepcompile": True}}, "compile.deepcompile is true: not supported yet"),
    ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal is true: not supported yet"),
    ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states is true: not supported yet"),
    ({"data_types": {"grad_accum_dtype": "fp16"}}, 'data_types.grad_accum_dtype is "fp16": not supported yet'),
    ({3: 1}, "3: a key must be a string, not int"),
    ({"bf16": {}, "bfloat16": {}}, "bfloat16: the old name of bf16, which is given too; remove it"),
    (
        {"zero_optimization": {"max_reuse_distance": 1, "stage3_max_reuse_distance": 1}},
        "zero_optimization.max_reuse_distance: a second name of stage3_max_reuse_distance, which is given too",
    ),
    ({"flops_profiler": True}, "flops_profiler is true; it must be an object"),
    ({"tensorboard": {"job_name": "auto"}}, 'tensorboard holds "auto" (job_name), which is not allowed here'),
    ({"autotuning": {"x": [1, "auto"]}}, 'autotuning holds "auto" (x), which is not allowed here'),
    ({"fp8": "auto"}, 'fp8 is "auto", which is not allowed here'),
    ({"train_batch_size": 2**63}, "train_batch_size is 9223372036854775808; it must be a whole number below 2^63"),
    ({"steps_per_print": float("inf")}, "steps_per_print is inf; it must be a finite"),
    ({"steps_per_print": {1, 2}}, "steps_per_print: is a value of type set, which JSON does not have"),
    ({"wandb": {"team": "\ud83d"}}, "wandb.team: holds half of a surrogate pair, which is no text"),
    ({"wan\ud83d": 1}, "wan\\ud83d: this key holds half of a surrogate pair"),
]


@pytest.mark.parametrize(("source", "message"), MESSAGES, ids=[row[1][:50] for row in MESSAGES])
def test_a_fault_names_its_key_and_the_remedy(source, message):
    assert message in faults_of(source)


def test_all_faults_of_a_file_come_in_one_error():
    message = faults_of(
        {
            "zero_optimization": {"stgae": 2, "stage": 9, "offload_optimizer": {"device": "cpu"}},
            "optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.99], "lr": "fast"}},
            "fp16": {"enabled": True},
            "bf16": [],
        }
    )
    assert message.splitlines()[0] == "the DeepSpeed config: 7 faults"
    keys = {line.split()[0].rstrip(":") for line in message.splitlines()[1:]}
    assert keys == {
        "zero_optimization.stgae",
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer.device",
        "optimizer.params.betas",
        "optimizer.params.lr",
        "fp16.enabled",
        "bf16",
    }


def test_stage_3_with_offload_to_nowhere_is_fine_and_to_the_cpu_a_clear_not_yet():
    nowhere = {"stage": 3, "offload_param": {"device": "none"}, "offload_optimizer": {"device": None}}
    assert load_config({"zero_optimization": nowhere}).zero_optimization.stage == 3
    offload = {"stage": 3, "offload_param": {"device": "cpu"}}
    assert faults_of({"zero_optimization": offload}).splitlines()[1:] == [
        '  zero_optimization.offload_param.device is "cpu": not supported yet; set it to "none" or drop the section',
    ]


def test_whole_numbers_too_long_for_python_to_write_are_named():
    assert "train_batch_size is a whole number of more than 60 digits" in faults_of({"train_batch_size": 10**5000})


def test_unknown_keys_become_notes_when_allowed():
    source = {"bf16": {"enabled": True, "enbled": 1}, "flops_profiler": {"x": 1}, "wandb2": {}}
    config = load_config(source, allow_unknown=True)
    assert config.bf16.enabled is True
    assert [note.split(" (")[0] for note in config.notes] == [
        "unknown key left out: bf16.enbled",
        "unknown key left out: flops_profiler.x",
        "unknown key left out: wandb2",
    ]
    assert "1 fault" in faults_of({"bf16": {"enabled": 7, "x": 1}}, allow_unknown=True)
    assert source["flops_profiler"] == {"x": 1}


def test_given_keys_carry_their_status():
    config = load_config({"bf16": {"enabled": True}, "steps_per_print": 10, "prescale_gradients": False})
    assert {row.key: row.status for row in given_keys(config)} == {
        "bf16.enabled": Status.HONOURED,
        "steps_per_print": Status.NO_EFFECT,
        "prescale_gradients": Status.NOT_YET,
    }


def test_keys_of_loss_scaling_may_stand_in_bf16_and_a_computed_bucket_size_need_not_be_whole():
    source = {
        "bf16": {"enabled": True, "auto_cast": False, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
        "zero_optimization": {"stage3_prefetch_bucket_size": 0.9 * 768 * 768},
    }
    config = load_config(source)
    assert config.zero_optimization.stage3_prefetch_bucket_size == 0.9 * 768 * 768
    idle = [row.status for row in given_keys(config) if row.key.startswith("bf16.") and row.key != "bf16.enabled"]
    assert idle == [Status.NO_EFFECT] * 4


def test_null_counts_as_absent():
    assert load_config({"gradient_clipping": None, "optimizer": None, "fp16": {"enabled": None}}) is not None
    assert given_keys(load_config({"gradient_clipping": None, "optimizer": None})) == ()


def test_neither_config_nor_resolve_loads_torch():
    code = "import sys, shardglass.config, shardglass.resolve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "src"}, check=False).returncode == 0


def test_for_a_plan_values_that_cannot_run_yet_are_left_out_and_named():
    tree = {
        "fp16": {"enabled": True},
        "optimizer": {"type": "Lamb", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    }
    config = load_config(tree, planning=True)
    assert config.left_out == {
        "fp16.enabled": "fp16.enabled is true: not supported yet; use bf16, or float32 with both off",
        "optimizer.type": 'optimizer.type is "Lamb": not supported yet; use Adam, AdamW, SGD, Adagrad',
        "zero_optimization.offload_optimizer.device": (
            'zero_optimization.offload_optimizer.device is "cpu": not supported yet; set it to "none" or drop '
            "the section"
        ),
    }
    assert config.zero_optimization.stage == 3
    assert config.zero_optimization.offload_optimizer.pin_memory is True
    with pytest.raises(ConfigError) as caught:
        load_config(tree)
    assert all(sentence in str(caught.value) for sentence in config.left_out.values())


def test_a_plan_refuses_what_is_wrong_as_a_run_does():
    with pytest.raises(ConfigError, match="must be true or false"):
        load_config({"bf16": {"enabled": 3}, "fp16": {"enabled": True}}, planning=True)

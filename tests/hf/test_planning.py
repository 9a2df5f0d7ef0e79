"""From flags and a DeepSpeed JSON to a planned run, what is free on a machine, and the check before a run."""

import json
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from transformers import AutoConfig

from shardglass.config import load_config
from shardglass.errors import ConfigError, UsageError
from shardglass.hf import memory_check
from shardglass.hf.machine import cgroup_free_bytes, free_host_bytes
from shardglass.hf.memory_check import check_memory, free_for_ranks
from shardglass.hf.model_config import FoundConfig
from shardglass.hf.planning import PlanFlags, optimizer_kind, plan_from_flags, setup_of
from shardglass.hf.run_planning import RunToPlan, plans_of_run
from shardglass.plan.setup import GIB
from shardglass.resolve import RunArguments, resolve


def write(folder: Path, tree) -> str:
    path = folder / "ds.json"
    path.write_text(json.dumps(tree))
    return str(path)


def setup(tree=None, **flags):
    config = None if tree is None else load_config(tree, planning=True)
    return setup_of(PlanFlags(model="smollm2-135m", **flags), config)


# ---- flags and config ----


def test_without_flags_the_engines_defaults_are_planned():
    made, notes = setup()
    assert (made.world_size, made.stage, made.dtype, made.num_groups) == (1, 2, "bfloat16", 2)
    assert (made.optimizer.name, made.optimizer.groups[0]["fused"], made.length) == ("AdamW", True, 2048)
    assert (made.device, made.memory, notes) == ("cuda", None, [])


def test_a_config_decides_stage_dtypes_batch_and_optimizer():
    tree = {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": False},
        "communication_data_type": "bf16",
        "data_types": {"grad_accum_dtype": "bf16"},
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    }
    made, _ = setup(tree, world_size=4)
    assert (made.stage, made.dtype, made.reduce_dtype, made.accum_dtype) == (1, "float32", "bfloat16", "bfloat16")
    assert (made.micro_batch, made.accumulation) == (4, 2)
    assert (made.optimizer.name, made.optimizer.states(0), made.num_groups) == ("SGD", ("momentum_buffer",), 1)


def test_a_config_without_optimizer_section_makes_two_groups_and_stage_0():
    made, _ = setup({}, world_size=2)
    assert (made.num_groups, made.stage) == (2, 0)


def test_what_cannot_run_yet_is_planned_or_named():
    tree = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "fp16": {"enabled": True},
        "optimizer": {"type": "Lion", "params": {"lr": 1e-4}},
    }
    made, notes = setup(tree, world_size=2)
    assert (made.stage, made.dtype, made.num_groups) == (3, "float16", 1)
    assert made.optimizer.states(0) == ()
    assert sum("planned without it" in note for note in notes) == 3
    assert any(note.startswith('zero_optimization.offload_optimizer.device is "cpu"') for note in notes)


def test_flags_and_config_contradict_each_other_as_before_a_run(tmp_path):
    with pytest.raises(ConfigError, match="zero_optimization.stage is 2 and --stage is 1"):
        setup({"zero_optimization": {"stage": 2}}, stage=1)
    with pytest.raises(ConfigError, match="contradicts the command line in 2 values"):
        setup({"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}, micro_batch=4, dtype="fp32")
    with pytest.raises(ConfigError, match="train_batch_size is 64, which the ranks share: give --world-size"):
        setup({"train_batch_size": 64})
    with pytest.raises(ConfigError, match="gradient_clipping"):
        plan_from_flags(PlanFlags(model="smollm2-135m", deepspeed=write(tmp_path, {"gradient_clipp1ng": 1.0})))


def test_a_config_says_more_to_deepspeeds_own_layouts(tmp_path):
    path = write(tmp_path, {"zero_optimization": {"stage": 2, "round_robin_gradients": True}})
    flags = PlanFlags(model="qwen1.5-7b", world_size=2, deepspeed=path, scheme="deepspeed-flat", host_ram="1TB")
    first = plan_from_flags(flags).partition.cuts[0]
    assert (first.after, first.index_in_part) == ("model.layers.0.self_attn.q_proj.weight", 113)
    assert plan_from_flags(replace(flags, scheme="units")).partition.scheme == "units"


def test_sequences_are_no_longer_than_the_model_was_made_for_unless_asked(tmp_path):
    tree = {"model_type": "qwen2", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56}
    tree |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tree))
    assert plan_from_flags(PlanFlags(model=str(path))).run.length == 64
    asked = plan_from_flags(PlanFlags(model=str(path), length=128))
    assert asked.run.length == 128
    assert any("more than the 64" in note for note in asked.notes)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"dtype": "bf15"}, "did you mean 'bf16'"),
        ({"attention": "eagre"}, "did you mean 'eager'"),
        ({"optimizer": "adamw_8bit"}, "did you mean 'adamw_torch'"),
        ({"scheme": "deepspeed-flt"}, "did you mean 'deepspeed-flat'"),
        ({"world_size": 0}, "the world size is 0"),
        ({"gpus_per_node": 0}, "the GPUs per node is 0"),
        ({"gpu": "24XB"}, "--gpu 24XB"),
        ({"host_ram": "much"}, "--host-ram much"),
        ({"reserve": "-1GB"}, "--reserve -1GB"),
    ],
)
def test_values_that_cannot_be_planned_name_the_flag_or_the_nearest(flags, message):
    with pytest.raises((ConfigError, UsageError), match=message):
        setup(**flags)


def test_optimizers_have_the_names_of_torch_and_of_the_trainer():
    assert optimizer_kind("adamw_torch", num_groups=2).groups == ({"fused": False},) * 2
    assert optimizer_kind("rmsprop", num_groups=1).states(0) == ("square_avg",)
    assert optimizer_kind("ADAGRAD", num_groups=1).name == "Adagrad"


# ---- what is free ----


def test_a_containers_limit_counts_where_it_is_less_than_the_machine_has(tmp_path):
    for name, text in (
        ("max", f"{8 * GIB}\n"),
        ("current", f"{6 * GIB}\n"),
        ("stat", f"anon 7\ninactive_file {GIB}\n"),
    ):
        (tmp_path / f"memory.{name}").write_text(text)
    assert cgroup_free_bytes(tmp_path) == 3 * GIB
    (tmp_path / "memory.current").write_text(f"{9 * GIB}\n")
    (tmp_path / "memory.max").write_text(f"{8 * GIB + 5}\n")
    assert free_host_bytes(tmp_path) == 5
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_free_bytes(tmp_path) is None
    assert cgroup_free_bytes(tmp_path / "nowhere") is None


def test_the_first_version_of_control_groups_is_read_too(tmp_path):
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    (folder / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {2 * GIB}\n")
    assert cgroup_free_bytes(tmp_path) == 3 * GIB


def test_what_the_ranks_hold_already_counts_as_free():
    mine = psutil.Process().memory_full_info().uss
    assert free_for_ranks() >= free_host_bytes() + mine // 2


# ---- before a run ----


def run(**change):
    config = AutoConfig.for_model(
        "qwen2", vocab_size=97, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4
    )
    args = RunArguments(per_device_train_batch_size=2, bf16=True, explicit=frozenset({"bf16"}))
    values = {
        "config": FoundConfig(name="tiny", source="folder", config=config),
        "resolved": resolve(None, args, world_size=2, final=False),
        "optim": "adamw_torch",
        "dtype_as_loaded": None,
        "attention": None,
        "longest": None,
        "model_max_length": 512,
        "recomputes": False,
        "device": "cpu",
        "ranks_per_node": 2,
    }
    return RunToPlan(**{**values, **change})


def test_a_run_is_planned_with_its_longest_and_its_shortest_sequences():
    longest, shortest = plans_of_run(run())
    assert (longest.run.length, shortest.run.length) == (512, 2)
    assert (longest.run.micro_batch, longest.run.world_size, longest.run.dtype) == (2, 2, "bfloat16")
    assert longest.stage.total > shortest.stage.total
    assert longest.stage.engine == shortest.stage.engine
    known, same = plans_of_run(run(longest=77))
    assert known == same
    assert known.run.length == 77


def test_weights_that_are_loaded_in_another_dtype_are_planned_so():
    wide, _ = plans_of_run(run(dtype_as_loaded="float32", longest=8))
    narrow, _ = plans_of_run(run(dtype_as_loaded="bfloat16", longest=8))
    assert wide.model.stored_bytes == 2 * narrow.model.stored_bytes


def shown(monkeypatch, free, **options):
    monkeypatch.setattr(memory_check, "free_for_ranks", lambda: free)
    console = Console(record=True, width=200)
    values = {"skip": False, "decides": True, **options}
    check = check_memory(run(), console=console, **values)
    return check, console.export_text()


def test_a_run_that_fits_shows_its_plan_in_three_lines(monkeypatch):
    check, text = shown(monkeypatch, 64 * GIB)
    assert check.fits
    lines = text.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("plan: tiny (qwen2): 27 tensors")
    assert lines[1].startswith("plan: stage 2 on 2 ranks: the engine holds")
    assert lines[2].startswith("plan: fits: RAM of this machine for 2 ranks")


def test_a_run_that_may_not_fit_is_told_and_begins(monkeypatch):
    check, text = shown(monkeypatch, GIB)  # less than two processes take, more than their tensors
    assert not check.fits
    assert not check.cannot_fit
    assert "plan: may not fit: RAM of this machine for 2 ranks" in text


def test_a_run_that_cannot_fit_is_refused_unless_told_otherwise(monkeypatch):
    with pytest.raises(ConfigError) as caught:
        shown(monkeypatch, 1 << 20)
    assert "cannot fit: RAM of this machine for 2 ranks" in str(caught.value)
    assert "--skip_memory_check True trains all the same" in str(caught.value)
    assert shown(monkeypatch, 1 << 20, skip=True)[0].cannot_fit
    assert shown(monkeypatch, 1 << 20, decides=False)[0].cannot_fit


def test_a_gpu_is_compared_with_its_own_memory(monkeypatch):
    monkeypatch.setattr(memory_check, "free_device_bytes", lambda: 1 << 10)
    with pytest.raises(ConfigError, match="cannot fit: memory of a GPU"):
        check_memory(run(device="cuda"), skip=False, decides=True, console=None)


def test_a_model_that_cannot_be_planned_stops_nothing(monkeypatch):
    config = AutoConfig.for_model("clip_text_model")
    console = Console(record=True, width=200)
    odd = run(config=FoundConfig(name="odd", source="folder", config=config))
    assert check_memory(odd, skip=False, decides=True, console=console) is None
    assert console.export_text().startswith("plan: none: odd: transformers makes no causal language model of it")

"""Configs of the kinds that training frameworks ship: each is understood whole, and runs or says what is missing."""

import json
from pathlib import Path

import pytest

from shardglass.config import load_config
from shardglass.errors import ConfigError
from shardglass.resolve import RunArguments, resolve

FOLDER = Path(__file__).parents[1] / "stock_configs"
OPTIMIZER, PARAM = (f"zero_optimization.offload_{kind}.device" for kind in ("optimizer", "param"))

REFUSED = {
    "z0_buckets": (),
    "z0_monitors": (),
    "z1_adamw": (),
    "z1_inductor": (),
    "z2_autotp": ("tensor_parallel",),
    "z2_hand_set": (),
    "z2_monitors": (),
    "z2_offload": (OPTIMIZER,),
    "z2_offload_none": (),
    "z2_offload_short": (OPTIMIZER,),
    "z2_warmup_decay": (),
    "z3_auto": (),
    "z3_hand_set_fp8": (OPTIMIZER, "fp8"),
    "z3_offload_all": (OPTIMIZER, PARAM),
    "z3_offload_states": (OPTIMIZER,),
    "z3_quantization_off": (),
    "z3_short_names": (),
    "z3_short_names_offload": (OPTIMIZER, PARAM),
}
"""What is not supported yet in each file."""

GIVEN = RunArguments(
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    learning_rate=2e-5,
    bf16=True,
    total_steps=100,
    hidden_size=64,
    explicit=frozenset({"per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate"}),
)


def stage_of(name):
    return json.loads((FOLDER / f"{name}.json").read_text())["zero_optimization"]["stage"]


def resolved(name):
    return resolve(load_config(FOLDER / f"{name}.json"), GIVEN, world_size=2)


def test_every_file_has_its_row():
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(REFUSED)


@pytest.mark.parametrize("name", [name for name in REFUSED if not REFUSED[name]])
def test_a_file_that_runs_is_understood_whole(name):
    run = resolved(name)
    assert run.stage == stage_of(name)
    assert run.pending == ()
    assert run.batch.train == 16
    assert [row.key for row in run.values if row.value is None or row.value == "auto"] == []
    assert not [note for note in run.notes if "unknown" in note]


@pytest.mark.parametrize("name", [name for name in REFUSED if REFUSED[name]])
def test_what_a_file_needs_and_is_not_there_comes_as_one_error_and_nothing_else_is_complained_about(name):
    keys = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        resolved(name)
    head, *lines = str(caught.value).splitlines()
    assert head == f"{FOLDER / name}.json: {len(keys)} fault{'s' if len(keys) > 1 else ''}"
    assert sorted(line.split()[0] for line in lines) == sorted(keys)
    assert all("not supported yet" in line for line in lines)


def test_hand_set_numbers_reach_the_run():
    run = resolved("z2_hand_set")
    values = {row.key: row.value for row in run.values}
    assert values["zero_optimization.reduce_bucket_size"] == 12845056
    assert values["zero_optimization.allgather_bucket_size"] == 200_000_000
    assert (run.batch.micro, run.batch.accumulation, run.options.reduce_dtype) == (2, 4, "float32")


def test_short_names_mean_the_same_as_those_with_a_prefix():
    with pytest.raises(ConfigError, match="stage3_max_live_parameters, which is given too"):
        load_config({"zero_optimization": {"stage3_max_live_parameters": 1, "max_live_parameters": 2}})
    source = {"zero_optimization": {"stage": 2, "prefetch_bucket_size": "auto", "param_persistence_threshold": "auto"}}
    values = {row.key: row.value for row in resolve(load_config(source), GIVEN, world_size=2).values}
    assert values["zero_optimization.prefetch_bucket_size"] == int(0.9 * 64 * 64)
    assert values["zero_optimization.param_persistence_threshold"] == 640
    assert resolved("z3_short_names").options.max_live_numel == 0

"""Checkpoints that DeepSpeed 0.19.8 wrote, read bit for bit.

``golden/checkpoints`` has one folder a case: what DeepSpeed saved after three AdamW steps at world size 2, the case in
``info.json``, and in ``reference.safetensors`` whole weights and moments by name, gathered from the live engine.
"""

import json
import math
import random
import shutil
from pathlib import Path

import deepspeed_writer
import pytest
import torch
from safetensors.torch import load_file

from shardglass.checkpoint.deepspeed import is_deepspeed_checkpoint, open_deepspeed

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
CASES = sorted(path.name for path in GOLDEN.iterdir())
KINDS = {"fp32": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def opened(case):
    found = open_deepspeed(GOLDEN / case)
    info = json.loads((GOLDEN / case / "info.json").read_text(encoding="utf-8"))
    return found, info, load_file(GOLDEN / case / "reference.safetensors")


def test_the_recordings_are_there():
    assert len(CASES) == 5


@pytest.mark.parametrize("case", CASES)
def test_every_recorded_value_is_read_bit_for_bit(case):
    found, _, reference = opened(case)
    pick = random.Random(0)
    seen = set()
    for key, value in reference.items():
        kind, _, name = key.partition(":")
        kind = KINDS[kind] if name in found.params else "weight"
        flat = value.flatten()
        read = found.run(kind, name, 0, flat.numel())
        assert read.dtype == (torch.float32 if kind != "weight" else found.dtypes[name])
        assert torch.equal(read.float(), flat), key
        for _ in range(5):
            start = pick.randrange(flat.numel())
            length = pick.randrange(flat.numel() - start + 1)
            assert torch.equal(found.run(kind, name, start, length).float(), flat[start : start + length])
        seen.add((kind, name))
    assert {name for kind, name in seen if kind == "master"} == set(found.params)
    assert {name for kind, name in seen if kind == "weight"} == set(found.frozen)
    found.check_bytes()


@pytest.mark.parametrize("case", CASES)
def test_the_weights_of_the_model_are_the_rounded_masters(case):
    found, info, _ = opened(case)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[info["dtype"]]
    assert set(found.dtypes.values()) == {dtype}
    for name, shape in found.params.items():
        assert found.has("weight", name) == (info["stage"] < 3)
        if info["stage"] < 3:
            numel = math.prod(shape)
            assert torch.equal(found.run("weight", name, 0, numel), found.run("master", name, 0, numel).to(dtype))


@pytest.mark.parametrize("case", CASES)
def test_what_a_checkpoint_says_of_the_run(case):
    found, info, _ = opened(case)
    assert (found.stage, found.world_size, found.version) == (info["stage"], info["world_size"], "0.19.8")
    assert (found.global_steps, found.skipped_steps, found.global_samples) == (3, 0, 6)
    assert (found.folder, found.tag) == (GOLDEN / case / "global_step3", "global_step3")
    assert found.config == info["ds_config"]
    assert found.lr_scheduler is None
    assert found.state_keys == ("exp_avg", "exp_avg_sq")
    assert set(found.step_of.values()) == {3.0}
    assert found.warnings == ()
    groups = [[row[0] for row in group if row[3]] for group in info["input_groups"]]
    assert list(found.params) == [name for group in groups for name in group]
    assert found.group_of == {name: number for number, group in enumerate(groups) for name in group}
    shapes = {row[0]: tuple(row[1]) for group in info["input_groups"] for row in group}
    assert found.params == {name: shapes[name] for name in found.params}
    assert [group["weight_decay"] for group in found.groups] == ([0.1, 0.0] if len(groups) == 2 else [0.01])
    assert all("params" not in group and group["betas"] == (0.9, 0.95) for group in found.groups)
    assert found.shared == ({"lm_head.weight": "model.embed_tokens.weight"} if "_tied_" in case else {})
    assert (found.loss_scaler is None) == ("gaccfp32" in case)
    assert repr(found).startswith(f"DeepSpeedCheckpoint(global_step3, stage {info['stage']}, 2 ranks, step 3, ")


def test_a_tied_parameter_is_read_by_its_second_name():
    found, _, reference = opened("z3_bf16_tied_2g_frozen_subgroups")
    value = reference["fp32:model.embed_tokens.weight"].flatten()
    assert torch.equal(found.run("master", "lm_head.weight", 5, 100), value[5:105])


def test_stage_1_has_its_frozen_parameters_in_the_module_alone():
    found, _, reference = opened("z1_bf16_untied_2g_frozen")
    assert set(found.frozen) == {"model.layers.0.input_layernorm.weight", "model.layers.1.mlp.up_proj.weight"}
    for name, shape in found.frozen.items():
        assert torch.equal(found.run("weight", name, 0, math.prod(shape)).float(), reference[f"fp32:{name}"].flatten())


@pytest.mark.parametrize("case", CASES)
def test_a_folder_is_found_by_its_tag_and_in_a_checkpoint_of_the_trainer(tmp_path, case):
    tag = GOLDEN / case / "global_step3"
    assert is_deepspeed_checkpoint(GOLDEN / case)
    assert is_deepspeed_checkpoint(tag)
    assert open_deepspeed(tag).params == open_deepspeed(str(GOLDEN / case)).params
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(GOLDEN / case, folder)
    (folder / "trainer_state.json").write_text("{}")
    (folder / "latest").write_text("global_step3\n")
    assert is_deepspeed_checkpoint(folder)
    assert open_deepspeed(folder).tag == "global_step3"


def test_what_is_read_is_memory_of_its_own_and_no_file_changes():
    found, _, _ = opened("z2_bf16_untied_2g_frozen")
    before = {path: path.read_bytes() for path in found.folder.iterdir()}
    for kind, name in (("master", next(iter(found.params))), ("weight", next(iter(found.frozen)))):
        first = found.run(kind, name, 0, 10)
        first.zero_()
        assert found.run(kind, name, 0, 10).count_nonzero() > 0
    assert {path: path.read_bytes() for path in found.folder.iterdir()} == before


# ---- the writer of other tests writes what DeepSpeed writes ----

WRITERS = {"z1_bf16_untied_2g_frozen_gaccfp32": "bf16", "z3_bf16_tied_2g_frozen_subgroups": "zero3"}


def outline(value, depth=0):
    """Keys, types and sizes of what a file holds; values of options and of the JSON are the case's own."""
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape), str(value.dtype)
    if isinstance(value, dict):
        return {key: outline(item, depth + 1) for key, item in value.items() if key not in OWN}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [outline(item, depth + 1) for item in value]
    return type(value).__name__, value if isinstance(value, (int, str, torch.Size)) else None


OWN = {"note", "ds_config", "param_slice_mappings", "param_groups"}


@pytest.mark.parametrize("case", CASES)
def test_the_writer_of_the_tests_writes_the_same_files(tmp_path, case):
    from shardglass.checkpoint.deepspeed.unpickling import load_file as load

    info = json.loads((GOLDEN / case / "info.json").read_text(encoding="utf-8"))
    groups = [{row[0]: tuple(row[1]) for row in group if row[3]} for group in info["input_groups"]]
    trained = {name for group in groups for name in group}
    model = open_deepspeed(GOLDEN / case)
    written = deepspeed_writer.Case(
        groups=groups,
        frozen=model.frozen,
        shared=model.shared,
        writer=WRITERS.get(case, "zero"),
        stage=info["stage"],
        dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[info["dtype"]],
        sub_group=info["ds_config"]["zero_optimization"].get("sub_group_size", 10**9),
    )
    deepspeed_writer.write(written, 2, tmp_path)
    recorded = sorted((GOLDEN / case / "global_step3").iterdir())
    assert [path.name for path in recorded] == sorted(path.name for path in (tmp_path / "global_step3").iterdir())
    for path in recorded:
        ours, theirs = outline(load(tmp_path / "global_step3" / path.name)), outline(load(path))
        assert ours == theirs, path.name
    assert trained == set(model.params)

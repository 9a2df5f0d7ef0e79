"""Checkpoints that cannot be read: one CheckpointError that says what, which file, and what to do.

And damage of every kind: a file that was changed is refused, or gives what was written.
"""

import random
import shutil
import zipfile
from collections import OrderedDict
from pathlib import Path

import deepspeed_writer
import pytest
import torch
from deepspeed_writer import Case, write

from shardglass import CheckpointError
from shardglass.checkpoint.deepspeed import is_deepspeed_checkpoint, open_deepspeed

GROUPS = [{"a.weight": (5, 3), "b.weight": (7,)}, {"a.bias": (3,)}]
TAG = "global_step3"
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
SHARD = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
MODEL = "mp_rank_00_model_states.pt"


def stage_2(folder, world_size=2, **options):
    return write(Case(groups=GROUPS, frozen={"f": (4,)}, **options), world_size, folder)


def stage_3(folder, world_size=2, **options):
    return stage_2(folder, world_size, stage=3, writer="zero3", **options)


def refused(folder, *texts):
    """The one message, which has all of the texts."""
    with pytest.raises(CheckpointError) as caught:
        open_deepspeed(folder)
    message = str(caught.value)
    for text in texts:
        assert text in message, message
    return message


def rewrite(path, change):
    """Change what a model file holds; those name no class of DeepSpeed's."""
    data = torch.load(path, weights_only=False)
    change(data)
    torch.save(data, path)


# ---- folders ----


def test_folders_that_are_no_checkpoint(tmp_path):
    assert not is_deepspeed_checkpoint(tmp_path)
    assert not is_deepspeed_checkpoint(tmp_path / "absent")
    refused(tmp_path / "absent", "there is no such checkpoint folder")
    refused(tmp_path, "no DeepSpeed checkpoint: it has neither 'latest' nor *_states.pt files")
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "shardglass.json").write_text("{}")
    assert not is_deepspeed_checkpoint(tmp_path / "checkpoint-3")


def test_latest_that_names_no_folder(tmp_path):
    stage_2(tmp_path)
    (tmp_path / "latest").write_text("global_step5")
    assert is_deepspeed_checkpoint(tmp_path)
    refused(tmp_path, "latest names 'global_step5' (did you mean 'global_step3'?), and there is no such folder")
    shutil.rmtree(tmp_path / TAG)
    refused(tmp_path, "latest names 'global_step5', and there is no such folder; use another checkpoint")
    for text in ("", "../other", "/etc", ".."):
        (tmp_path / "latest").write_text(text)
        refused(tmp_path, f"latest: {text!r} is no tag; give the tag's folder instead")
    (tmp_path / "latest").write_bytes(b"\xff\xfe")
    refused(tmp_path, "latest: cannot be read")


def test_several_tags_without_latest(tmp_path):
    stage_2(tmp_path)
    stage_2(tmp_path, steps=6)
    (tmp_path / "latest").unlink()
    assert is_deepspeed_checkpoint(tmp_path)
    refused(tmp_path, "no file 'latest' says which of global_step3, global_step6 is the newest")
    assert open_deepspeed(tmp_path / "global_step6").global_steps == 6


def test_an_empty_tag(tmp_path):
    (tmp_path / TAG).mkdir()
    (tmp_path / "latest").write_text(TAG)
    refused(tmp_path, f"{tmp_path / TAG}: no DeepSpeed checkpoint")


# ---- missing and foreign files ----


@pytest.mark.parametrize(("make", "name"), [(stage_2, OPTIM), (stage_3, OPTIM), (stage_3, SHARD)])
def test_missing_rank_files_are_named(tmp_path, make, name):
    make(tmp_path, 7)
    (tmp_path / TAG / name.format(2)).unlink()
    refused(tmp_path, "incomplete: 7 ranks wrote it and", name.format(2), "is missing")
    for rank in (3, 4, 5):
        (tmp_path / TAG / name.format(rank)).unlink()
    refused(tmp_path, name.format(2), name.format(3), name.format(4), "and 1 more are missing")


@pytest.mark.parametrize(("make", "name"), [(stage_2, MODEL), (stage_3, SHARD.format(0))])
def test_a_missing_model_file_is_named(tmp_path, make, name):
    make(tmp_path)
    (tmp_path / TAG / name).unlink()
    refused(tmp_path, f"{tmp_path / TAG / name}: the file is missing; the checkpoint is incomplete")


@pytest.mark.parametrize("make", [stage_2, stage_3])
def test_no_optimizer_file_at_all(tmp_path, make):
    make(tmp_path)
    for path in (tmp_path / TAG).glob("*optim*"):
        path.unlink()
    refused(tmp_path, "incomplete: 2 ranks wrote it", "zero_pp_rank_0_mp_rank_00_optim_states.pt")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("layer_3_expert_1_mp_rank_00_model_states.pt", "a file of experts (MoE)"),
        ("expert_1_mp_rank_00_model_states.pt", "a file of experts (MoE)"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "a file of experts (MoE)"),
        ("layer_03-model_00-model_states.pt", "a file of pipeline parallelism"),
        ("mp_rank_01_model_states.pt", "a file of tensor parallelism (mp_rank 1)"),
        ("bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", "a file of tensor parallelism (mp_rank 1)"),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", "two checkpoints are mixed in one folder"),
        ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "are both of rank 1: two checkpoints are mixed"),
        (OPTIM.format(2), "2 ranks wrote it, and bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt is of a rank beyond"),
    ],
)
def test_files_of_other_kinds_of_parallelism_and_of_other_runs_are_named(tmp_path, name, text):
    stage_2(tmp_path)
    shutil.copy(tmp_path / TAG / OPTIM.format(0), tmp_path / TAG / name)
    refused(tmp_path, name, text)


def test_a_universal_checkpoint_is_named(tmp_path):
    stage_2(tmp_path)
    for path in (tmp_path / TAG).glob("*optim*"):
        path.unlink()
    (tmp_path / TAG / "zero" / "a.weight").mkdir(parents=True)
    assert is_deepspeed_checkpoint(tmp_path)
    refused(tmp_path, "a universal checkpoint, which cannot be read; give the one it was made of")


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("mp_world_size", 2, "written with tensor parallelism"),
        ("checkpoint_parallel_dimensions", {"pp_degree": 1, "tp_degree": 2}, "written with tensor parallelism"),
        ("checkpoint_parallel_dimensions", {"pp_degree": 2, "tp_degree": 1}, "written with pipeline parallelism"),
        ("module", None, "written with pipeline parallelism"),
        ("num_experts", [4], "written with experts (MoE)"),
        ("ds_autoep_layers", [{"ep_size": 2}], "written with experts (MoE)"),
        ("param_shapes", None, "written without ZeRO"),
        ("param_shapes", {}, "['param_shapes'] is a dict and not a list"),
        ("param_shapes", [OrderedDict(a=(2, -1))], "['param_shapes'][0]['a'] is no shape"),
        ("param_shapes", [OrderedDict(a=torch.Size([15])), OrderedDict(a=torch.Size([3]))], "names a parameter twice"),
        ("dp_world_size", 3, "incomplete: 3 ranks wrote it"),
        ("dp_world_size", "2", "['dp_world_size'] is a str and not a int"),
        ("buffer_names", ["lost"], "has lost, which is not in ['module']"),
        ("frozen_param_fragments", {}, "and ['frozen_param_shapes'] have other names"),
        ("frozen_param_shapes", OrderedDict(f=torch.Size([5])), "frozen f has shape (4,) and needs (5,)"),
        ("ds_version", "0.18.0", "DeepSpeed 0.19.8, and 0.18.0 in mp_rank_00_model_states.pt"),
    ],
)
def test_a_model_file_that_says_something_else(tmp_path, key, value, text):
    stage_2(tmp_path)
    rewrite(tmp_path / TAG / MODEL, lambda data: data.update({key: value}))
    refused(tmp_path, text)


@pytest.mark.parametrize("key", ["module", "param_shapes", "buffer_names", "global_steps", "dp_world_size"])
def test_a_missing_key_is_named(tmp_path, key):
    stage_2(tmp_path)
    rewrite(tmp_path / TAG / MODEL, lambda data: data.pop(key))
    refused(tmp_path, MODEL, f"[{key!r}] is missing: the file is no ZeRO checkpoint")


def test_a_plain_state_dict_is_not_taken_for_one(tmp_path):
    stage_2(tmp_path)
    torch.save([torch.ones(2)], tmp_path / TAG / MODEL)
    refused(tmp_path, "it holds a list and not what DeepSpeed saves")
    torch.save({"a": torch.ones(2)}, tmp_path / TAG / MODEL)
    refused(tmp_path, "is missing: the file is no ZeRO checkpoint")


# ---- files of two saves in one folder ----


def test_a_file_of_another_step_is_named(tmp_path):
    for make in (stage_2, stage_3):
        shutil.rmtree(tmp_path, ignore_errors=True)
        make(tmp_path)
        make(tmp_path, steps=6)
        shutil.copy(tmp_path / "global_step6" / OPTIM.format(1), tmp_path / TAG)
        message = refused(tmp_path / TAG, OPTIM.format(1), "step of the optimizer [6.0, 6.0], and [3.0, 3.0]")
        assert "files of two saves are mixed in one folder; use another checkpoint" in message


def test_a_stage_3_model_file_of_another_step_is_named(tmp_path):
    stage_3(tmp_path)
    stage_3(tmp_path, steps=6)
    shutil.copy(tmp_path / "global_step6" / SHARD.format(1), tmp_path / TAG)
    refused(tmp_path / TAG, SHARD.format(1), "global step 6, and 3 in " + SHARD.format(0))


def test_the_model_file_of_another_step_is_told_by_its_weights(tmp_path):
    stage_2(tmp_path)
    stage_2(tmp_path, steps=6, seed=1)
    shutil.copy(tmp_path / "global_step6" / MODEL, tmp_path / TAG)
    refused(tmp_path / TAG, MODEL, "a.weight is not the rounded master weight of " + OPTIM.format(0))


def test_an_optimizer_that_began_anew_is_read_with_a_warning(tmp_path):
    """As after a start from a checkpoint without the optimizer's state: the steps differ, the weights do not."""
    stage_2(tmp_path)
    rewrite(tmp_path / TAG / MODEL, lambda data: data.update(global_steps=10))
    found = open_deepspeed(tmp_path)
    assert found.global_steps == 10
    assert set(found.step_of.values()) == {3.0}
    assert "the optimizer made 3 steps and the engine 10 with 0 skipped" in found.warnings[0]
    rewrite(tmp_path / TAG / MODEL, lambda data: data.update(skipped_steps=7))
    assert open_deepspeed(tmp_path).warnings == ()


@pytest.mark.parametrize("make", [stage_2, stage_3])
def test_a_file_of_another_world_size_is_named(tmp_path, make):
    make(tmp_path)
    make(tmp_path / "four", 4)
    shutil.copy(tmp_path / "four" / TAG / OPTIM.format(1), tmp_path / TAG)
    refused(tmp_path, OPTIM.format(1), "4 ranks share its buffers", "and the checkpoint has 2 ranks")


def test_a_file_of_another_model_is_named(tmp_path):
    stage_2(tmp_path)
    write(Case(groups=[{"a.weight": (500,), "b.weight": (7,)}, {"a.bias": (3,)}]), 2, tmp_path / "other")
    for rank in (0, 1):
        shutil.copy(tmp_path / "other" / TAG / OPTIM.format(rank), tmp_path / TAG)
    refused(tmp_path, OPTIM.format(0), "the master weights of buffer 0: 254 elements, and the parameters", "need 12")
    write(Case(groups=GROUPS[:1]), 2, tmp_path / "fewer")
    shutil.copy(tmp_path / "fewer" / TAG / OPTIM.format(1), tmp_path / TAG)
    refused(tmp_path, OPTIM.format(1), "number of buffers 1, and 2")


def test_stages_are_not_mixed(tmp_path):
    stage_2(tmp_path)
    stage_3(tmp_path / "other")
    for rank in (0, 1):
        shutil.copy(tmp_path / "other" / TAG / OPTIM.format(rank), tmp_path / TAG)
    refused(tmp_path, OPTIM.format(0), "not of the stage that mp_rank_00_model_states.pt is of")


def test_an_optimizer_on_nvme_is_named(tmp_path, monkeypatch):
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
    monkeypatch.setattr(deepspeed_writer.Writer, "config", lambda self: config)
    monkeypatch.setattr(deepspeed_writer.Writer, "piece", lambda self, value, rank, *, garbage: torch.empty(0))
    write(Case(groups=GROUPS, stage=3, writer="zero3"), 2, tmp_path)
    refused(tmp_path, "the run kept its optimizer on NVMe")


def test_groups_of_experts_are_named(tmp_path, monkeypatch):
    plain = deepspeed_writer.Writer.torch_state

    def with_experts(self, states, indices):
        found = plain(self, states, indices)
        found["param_groups"][1] |= {"moe": True, "name": "ep_size_2"}
        return found

    monkeypatch.setattr(deepspeed_writer.Writer, "torch_state", with_experts)
    stage_2(tmp_path)
    refused(tmp_path, "param_group 1 is one of experts (MoE)")


# ---- pickles ----


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("touched-by-a-pickle"),))


@pytest.mark.parametrize("name", [MODEL, OPTIM.format(1)])
def test_a_pickle_that_needs_another_class_is_refused_and_not_run(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    stage_2(tmp_path)
    torch.save({"client": Evil()}, tmp_path / TAG / name)
    refused(tmp_path, name, "it needs pathlib.", "which no ZeRO checkpoint needs, and nothing of it was run")
    assert not (tmp_path / "touched-by-a-pickle").exists()


@pytest.mark.parametrize("harmful", ["os.system", "builtins.eval", "builtins.getattr"])
def test_functions_that_run_things_are_refused(tmp_path, harmful):
    import builtins
    import os

    function = {"os.system": os.system, "builtins.eval": builtins.eval, "builtins.getattr": getattr}[harmful]
    arguments = (os, "system") if harmful == "builtins.getattr" else ("true",)
    kind = type("Harm", (), {"__reduce__": lambda self: (function, arguments)})
    stage_2(tmp_path)
    if harmful == "builtins.getattr":
        arguments = (deepspeed_writer.ZeroStageEnum, "__class__")
        path = tmp_path / TAG / OPTIM.format(0)
        deepspeed_writer.save({"optimizer_state_dict": kind()}, path)
        refused(tmp_path, OPTIM.format(0), "cannot be read (KeyError: '__class__')")
        arguments = ("text", "upper")
        deepspeed_writer.save({"optimizer_state_dict": kind()}, path)
        refused(tmp_path, OPTIM.format(0), "an attribute of something other than ZeroStageEnum")
    else:
        torch.save({"client": kind()}, tmp_path / TAG / MODEL)
        refused(tmp_path, MODEL, harmful.replace("os", "posix"))


# ---- damage ----


def opened(folder):
    """The checkpoint with all its bytes checked, or the reason why not."""
    try:
        found = open_deepspeed(folder)
        found.check_bytes()
    except CheckpointError as error:
        return None, str(error)
    return found, None


def files_of(folder):
    return sorted((folder / TAG).iterdir())


@pytest.mark.parametrize("make", [stage_2, stage_3])
def test_a_truncated_file_is_named_wherever_it_ends(tmp_path, make):
    make(tmp_path)
    for path in files_of(tmp_path):
        whole = path.read_bytes()
        for length in (0, 1, 3, 22, 100, len(whole) // 2, len(whole) - 100, len(whole) - 1):
            path.write_bytes(whole[:length])
            refused(tmp_path, str(path), "cut off or damaged")
        path.write_bytes(whole)
    open_deepspeed(tmp_path)


def test_a_file_that_is_no_archive_is_named(tmp_path):
    stage_2(tmp_path)
    path = tmp_path / TAG / MODEL
    torch.save({"module": {}}, path, _use_new_zipfile_serialization=False)
    refused(tmp_path, MODEL, "in PyTorch's format of before 1.6; write it again with torch.save")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", "nothing")
    refused(tmp_path, MODEL, "cannot be read")


@pytest.mark.parametrize("make", [stage_2, stage_3])
def test_a_flipped_byte_is_refused_or_changes_nothing(tmp_path, make):
    """Anywhere: opening or ``check_bytes`` refuses the file by name, or every value is what was written."""
    written = make(tmp_path)
    pick = random.Random(0)
    refusals = 0
    for path in files_of(tmp_path):
        whole = path.read_bytes()
        for at in sorted(pick.sample(range(len(whole)), 40)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ pick.randrange(1, 256)]) + whole[at + 1 :])
            found, fault = opened(tmp_path)
            assert fault is None or str(path) in fault
            refusals += fault is not None
            for (kind, name), value in written.values.items() if fault is None else ():
                assert torch.equal(found.run(kind, name, 0, value.numel()), value.flatten()), (path.name, at)
        path.write_bytes(whole)
    assert refusals > 20


def test_a_flipped_byte_of_the_structure_is_refused_at_once(tmp_path):
    stage_2(tmp_path)
    path = tmp_path / TAG / OPTIM.format(1)
    whole = path.read_bytes()
    at = whole.index(b"exp_avg_sq")
    path.write_bytes(whole[:at] + b"E" + whole[at + 1 :])
    refused(tmp_path, str(path), "Bad CRC-32")


def test_a_flipped_byte_of_a_tensor_is_found_by_check_bytes(tmp_path):
    written = stage_2(tmp_path, dtype=torch.float32)
    path = tmp_path / TAG / MODEL
    whole = path.read_bytes()
    at = whole.index(written.values["weight", "b.weight"].numpy().tobytes())
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    found = open_deepspeed(tmp_path)
    with pytest.raises(CheckpointError, match=f"{MODEL}: the bytes of .*/data/.* are not those that were written"):
        found.check_bytes()


def test_a_damaged_archive_directory_is_refused(tmp_path):
    stage_2(tmp_path)
    path = tmp_path / TAG / MODEL
    whole = path.read_bytes()
    for at in range(whole.rindex(b"PK\x01\x02"), len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        _, fault = opened(tmp_path)
        assert fault is None or str(path) in fault

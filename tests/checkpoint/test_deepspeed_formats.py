"""Every form in which DeepSpeed lays out a checkpoint, at any world size, from folders that the tests write.

``deepspeed_writer`` is held against recorded folders in ``test_deepspeed_recorded``.
"""

import logging
import pickle
import shutil
import tempfile

import deepspeed_writer
import pytest
import torch
from deepspeed_writer import Case, DynamicLossScaler, write
from hypothesis import given, settings
from hypothesis import strategies as st

from shardglass import CheckpointError, UsageError
from shardglass.checkpoint.deepspeed import open_deepspeed
from shardglass.checkpoint.deepspeed.places import Place, flat_places, partitioned_places

GROUPS = [{"a.weight": (5, 3), "b.weight": (7,), "c.weight": (4, 4), "d.weight": (2, 3)}, {"a.bias": (1,)}]
FROZEN = {"f.weight": (3, 3), "f.bias": (1,), "f.none": (0, 4)}

FORMS = {
    "zero-1": {"stage": 1},
    "zero-2": {"stage": 2},
    "zero-2 fp32": {"stage": 2, "dtype": torch.float32},
    "zero-1 fp16": {"stage": 1, "dtype": torch.float16, "scaler": DynamicLossScaler},
    "bf16": {"stage": 1, "writer": "bf16"},
    "round robin": {"stage": 2, "round_robin": True},
    "aligned": {"stage": 2, "aligned": True},
    "aligned round robin": {"stage": 1, "aligned": True, "round_robin": True, "dtype": torch.float32},
    "elastic": {"stage": 2, "writer": "elastic"},
    "zero-3": {"stage": 3, "writer": "zero3"},
    "zero-3 sub-groups": {"stage": 3, "writer": "zero3", "sub_group": 6},
    "zero-3 fp32": {"stage": 3, "writer": "zero3", "dtype": torch.float32, "sub_group": 1},
}


def assert_reads(found, written, runs):
    """Hold what is read against what was written, whole and in the given runs.

    Args:
        found: The checkpoint.
        written: What lies there.
        runs: (start, length) in parts of the whole, from 0 to 1.
    """
    assert list(found.params) == written.order
    for (kind, name), value in written.values.items():
        flat = value.flatten()
        assert torch.equal(found.run(kind, name, 0, flat.numel()), flat), (kind, name)
        for first, share in runs:
            start = int(first * flat.numel())
            length = int(share * (flat.numel() - start))
            assert torch.equal(found.run(kind, name, start, length), flat[start : start + length]), (kind, name)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 12])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_is_read_bit_for_bit(tmp_path, form, world_size):
    case = Case(groups=GROUPS, frozen=FROZEN, buffers={"f.table": (2, 2)}, shared={"z": "a.weight"}, **FORMS[form])
    written = write(case, world_size, tmp_path)
    found = open_deepspeed(tmp_path)
    assert_reads(found, written, [(0.1, 0.7), (0.5, 0.5), (0.9, 1.0), (1.0, 1.0)])
    assert (found.stage, found.world_size, found.warnings) == (case.stage, world_size, ())
    assert found.frozen == FROZEN
    assert found.shared == {"z": "a.weight"}
    assert found.buffers["f.table"].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert found.group_of == {name: number for number, group in enumerate(GROUPS) for name in group}
    assert [group.get("lr") for group in found.groups] == ([None, None] if form == "elastic" else [0.01, 0.02])
    assert set(found.step_of.values()) == {3.0}
    assert set(found.dtypes.values()) == {case.dtype}
    found.check_bytes()


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(sorted(FORMS)),
    world_size=st.integers(1, 7),
    shapes=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=9),
    cut=st.integers(1, 9),
    frozen=st.lists(st.integers(0, 9), max_size=2),
    runs=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=4),
)
def test_any_model_is_read_bit_for_bit(form, world_size, shapes, cut, frozen, runs):
    named = {f"p{number}": tuple(shape) for number, shape in enumerate(shapes)}
    names = list(named)
    groups = [{name: named[name] for name in part} for part in (names[:cut], names[cut:]) if part]
    case = Case(groups=groups, frozen={f"f{n}": (size,) for n, size in enumerate(frozen)}, **FORMS[form])
    with tempfile.TemporaryDirectory() as folder:
        written = write(case, world_size, folder)
        assert_reads(open_deepspeed(folder), written, runs)


def test_ranks_are_sorted_as_numbers(tmp_path):
    case = Case(groups=[{"a": (1000,)}])
    written = write(case, 11, tmp_path)
    assert_reads(open_deepspeed(tmp_path), written, [])


def test_a_slice_reads_only_the_files_it_touches(tmp_path):
    """Bytes of the others are spoiled after opening, in their tensors alone, and what is read does not change."""
    case = Case(groups=[{"a": (4000,)}], dtype=torch.float32)
    written = write(case, 4, tmp_path)
    found = open_deepspeed(tmp_path)
    for rank in (0, 2, 3):
        path = tmp_path / "global_step3" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        path.write_bytes(b"\xff" * path.stat().st_size)
    assert torch.equal(found.run("exp_avg", "a", 1100, 800), written.values["exp_avg", "a"][1100:1900])
    with pytest.raises(CheckpointError, match="rank_0_mp_rank_00_optim_states.pt: cannot be read"):
        found.check_bytes(range(1))
    found.check_bytes(range(1, 2))


def test_places_of_one_parameter_cover_it_once_and_in_order():
    for places in (
        flat_places([{"a": (7,), "b": (30,)}], [(1, 0)], 4),
        partitioned_places([{"a": (7,), "b": (30,)}], 4),
    ):
        assert sum(count for _, _, count in places.of["b"].pieces(0, 30)) == 30
        assert list(places.of["b"].pieces(3, 0)) == []
    assert list(Place(buffer=0, base=3, size=4, first=10).pieces(0, 6)) == [(0, 13, 1), (1, 10, 4), (2, 10, 1)]


@pytest.mark.parametrize("form", ["zero-1", "zero-2", "zero-3"])
def test_a_save_without_frozen_parameters_has_none(tmp_path, form):
    write(Case(groups=GROUPS, frozen=FROZEN, excludes_frozen=True, **FORMS[form]), 2, tmp_path)
    assert open_deepspeed(tmp_path).frozen == {}


def test_a_save_before_the_first_step_has_no_states(tmp_path):
    write(Case(groups=GROUPS, states=(), steps=0), 2, tmp_path)
    found = open_deepspeed(tmp_path)
    assert found.state_keys == ()
    assert set(found.step_of.values()) == {None}
    assert found.has("master", "a.weight")
    assert not found.has("exp_avg", "a.weight")


def test_second_names_that_are_none_are_dropped(tmp_path):
    """DeepSpeed takes all tensors at address 0 for one, and lists second names of what it left out."""
    case = Case(groups=GROUPS, frozen={"empty": (0, 4), "hollow": (3, 0)}, shared={"tied": "a.weight"})
    write(case, 2, tmp_path)
    changed(tmp_path, lambda data: data["shared_params"].update(hollow="empty", gone="left.out"), "mp_*")
    found = open_deepspeed(tmp_path)
    assert found.shared == {"tied": "a.weight"}
    assert found.frozen == {"empty": (0, 4), "hollow": (3, 0)}
    assert found.run("weight", "hollow", 0, 0).shape == (0,)


def changed(folder, change, pattern="*"):
    """Rewrite the files of a folder that match, each after a change of what it holds."""
    for path in sorted((folder / "global_step3").glob(pattern)):
        data = torch.load(path, weights_only=False) if pattern == "mp_*" else load_written(path)
        change(data)
        deepspeed_writer.save(data, path)


def load_written(path):
    from unittest import mock

    kinds = {kind.__name__: kind for kind in (*deepspeed_writer.HOMES.values(), DynamicLossScaler)}

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            return kinds[name] if module.startswith("deepspeed") else super().find_class(module, name)

    with mock.patch.object(pickle, "Unpickler", Unpickler):
        return torch.load(path, weights_only=False, pickle_module=pickle)


@pytest.mark.parametrize("where", ["state as int", "group", "scheduler", "tensor options", "nothing"])
def test_steps_and_options_are_found_where_optimizers_keep_them(tmp_path, where):
    write(Case(groups=GROUPS), 2, tmp_path)

    def change(data):
        base = data["optimizer_state_dict"]["base_optimizer_state"]
        for state in base["state"].values():
            if where == "state as int":
                state["step"] = 3
            elif where in ("group", "nothing"):
                del state["step"]
        for group in base["param_groups"]:
            if where == "group":
                group["step"] = 3
            if where == "tensor options":
                group["lr"] = torch.tensor(0.5, dtype=torch.float64)

    changed(tmp_path, change, "*optim*")
    found = open_deepspeed(tmp_path)
    assert set(found.step_of.values()) == ({None} if where == "nothing" else {3})
    assert found.groups[0]["lr"] == (0.5 if where == "tensor options" else 0.01)
    assert found.state_keys == ("exp_avg", "exp_avg_sq")


def test_states_that_are_not_element_by_element_are_warned_of_and_the_rest_is_read(tmp_path, caplog):
    write(Case(groups=GROUPS), 2, tmp_path)

    def change(data):
        state = data["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        state["absmax1"] = torch.ones(3)
        state["mu_product"] = torch.tensor(0.5)
        state["matrix"] = torch.ones(2, 2)

    changed(tmp_path, change, "*optim*")
    with caplog.at_level(logging.WARNING):
        found = open_deepspeed(tmp_path)
    assert found.state_keys == ("exp_avg", "exp_avg_sq")
    assert len(found.warnings) == 1
    assert "of buffer 0 absmax1, matrix, mu_product cannot be read" in found.warnings[0]
    assert [record.getMessage() for record in caplog.records] == list(found.warnings)


def test_a_state_that_one_group_lacks_is_named(tmp_path):
    write(Case(groups=GROUPS), 2, tmp_path)
    changed(
        tmp_path,
        lambda data: data["optimizer_state_dict"]["base_optimizer_state"]["state"][1].pop("exp_avg_sq"),
        "*optim*",
    )
    found = open_deepspeed(tmp_path)
    assert found.has("exp_avg_sq", "a.weight")
    with pytest.raises(CheckpointError, match="no 'exp_avg_sq' of a.bias: the optimizer kept none in its param_group"):
        found.run("exp_avg_sq", "a.bias", 0, 1)


def test_files_without_the_newer_keys_are_read(tmp_path):
    written = write(Case(groups=GROUPS, frozen=FROZEN), 3, tmp_path)
    changed(tmp_path, lambda data: data["optimizer_state_dict"].pop("param_alignment_paddings"), "*optim*")
    assert_reads(open_deepspeed(tmp_path), written, [])


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("0.16.4", None),
        ("0.18.2+cu128", None),
        ("0.16.3", "releases before 0.16.4 record padding otherwise"),
        ("0.20.0", "0.19.8 is the newest release"),
        ("from git", "no version of DeepSpeed"),
        (None, "no ds_version"),
    ],
)
def test_other_releases_are_warned_of_by_name(tmp_path, version, text):
    written = write(Case(groups=GROUPS), 2, tmp_path)

    def change(data):
        data["ds_version"] = version

    changed(tmp_path, change)
    found = open_deepspeed(tmp_path)
    assert_reads(found, written, [])
    assert len(found.warnings) == (text is not None)
    assert text is None or text in found.warnings[0]


def test_an_older_release_that_cut_too_much_padding_off_is_read(tmp_path):
    """Before 0.16.4 the last rank records all padding, and what it keeps is cut at a negative length."""
    written = write(Case(groups=[{"a": (1,)}]), 4, tmp_path)
    for rank, kept in enumerate((2, 2, 2, 0)):

        def change(data, kept=kept):
            held = data["optimizer_state_dict"]
            held["single_partition_of_fp32_groups"] = [
                torch.cat([part, torch.zeros(2)])[:kept] for part in held["single_partition_of_fp32_groups"]
            ]

        changed(tmp_path, change, f"*rank_{rank}_mp*optim*")
    assert_reads(open_deepspeed(tmp_path), written, [])


def test_an_enum_that_was_pickled_by_name_is_read(tmp_path):
    """As Python 3.11.0 to 3.11.3 pickle it: getattr(ZeroStageEnum, "gradients")."""
    written = write(Case(groups=GROUPS), 2, tmp_path)
    by_name = type("ByName", (), {"__reduce__": lambda self: (getattr, (deepspeed_writer.ZeroStageEnum, "gradients"))})

    def change(data):
        data["optimizer_state_dict"]["zero_stage"] = by_name()

    changed(tmp_path, change, "*optim*")
    found = open_deepspeed(tmp_path)
    assert found.stage == 2
    assert_reads(found, written, [])


def test_a_scheduler_with_numpy_numbers_is_read(tmp_path):
    import numpy as np

    write(Case(groups=GROUPS), 2, tmp_path)

    def change(data):
        data["lr_scheduler"] = {"rates": [np.float64(0.1), np.float32(0.5), np.int64(3)], "last_epoch": 3}

    changed(tmp_path, change, "mp_*")
    assert open_deepspeed(tmp_path).lr_scheduler == {"rates": [0.1, 0.5, 3.0], "last_epoch": 3}


def test_a_dynamic_loss_scale_is_read(tmp_path):
    write(Case(groups=GROUPS, scaler=DynamicLossScaler, dtype=torch.float16), 2, tmp_path)
    assert open_deepspeed(tmp_path).loss_scaler == vars(DynamicLossScaler())


def test_a_rank_of_every_layout_that_has_only_padding_is_read(tmp_path):
    for form, options in FORMS.items():
        folder = tmp_path / form
        written = write(Case(groups=[{"a": (1,)}, {"b": (3,)}], **options), 9, folder)
        assert_reads(open_deepspeed(folder), written, [])
        shutil.rmtree(folder)


def test_calls_that_ask_for_what_is_not_there_are_told_what_is(tmp_path):
    write(Case(groups=GROUPS, frozen=FROZEN, stage=3, writer="zero3"), 2, tmp_path)
    found = open_deepspeed(tmp_path)
    for kind, name, text in [
        ("master", "a.weigth", r"no parameter 'a.weigth' in it \(did you mean 'a.weight'\?\)"),
        ("moment", "a.weight", "no 'moment' in it; there are 'master', 'weight', 'exp_avg', 'exp_avg_sq'"),
        ("weight", "a.weight", "no 'weight' of a.weight, which was trained; read 'master' of it"),
        ("exp_avg", "f.weight", "no 'exp_avg' of f.weight, which was frozen; read 'weight' of it"),
    ]:
        assert not found.has(kind, name)
        with pytest.raises(CheckpointError, match=text):
            found.run(kind, name, 0, 1)
    for start, length in [(-1, 2), (0, 16), (15, 1), (3, -1)]:
        with pytest.raises(UsageError, match="a.weight has 15 elements"):
            found.run("master", "a.weight", start, length)
    assert found.run("master", "a.weight", 15, 0).shape == (0,)

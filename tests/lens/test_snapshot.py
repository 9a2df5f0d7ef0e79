"""Snapshots as values: JSON both ways, differences, and faults named, from snapshots made by hand."""

import json
from dataclasses import replace

import pytest

from shardglass import Snapshot, UsageError
from shardglass.layout import ParamSpec, SchemeOptions, make_layout
from shardglass.lens.rows import AttributeRow, Held, MemoryRow, ParamRow, Storage, View, Wrapper

NAMES = {"model.embed.weight": (5, 3), "model.up.weight": (4, 4), "model.up.bias": (4,)}


def params(dtype="float32"):
    return [
        ParamSpec(name=name, shape=shape, dtype=dtype, trainable=True, group=0, unit="group 0")
        for name, shape in NAMES.items()
    ]


def flat_snapshot(rank=0, **changes):
    """A ZeRO-2 rank of two: 35 elements, padded to 36, cut after element 18, which is in the second tensor."""
    layout = make_layout("deepspeed-flat", params(), 2)
    flat = "optimizer.bit16_groups_flat[0]"
    rows, start = [], 0
    for p in layout.buffers[0].params:
        rows.append(
            ParamRow(
                name=p.name,
                aliases=("head.weight",) if p.name == "model.embed.weight" else (),
                shape=p.shape,
                seen=p.shape,
                dtype="float32",
                device="cpu",
                trainable=True,
                status="whole",
                data=View(of=flat, start=start, stop=start + p.numel),
                shard=None,
                grad=None,
                grad_dtype=None,
            )
        )
        start += p.numel
    master = "optimizer.single_partition_of_fp32_groups[0]"
    made = Snapshot(
        source="live",
        engine="deepspeed",
        stage=2,
        rank=rank,
        world_size=2,
        step=3,
        layout=layout,
        model_chain=(
            Wrapper(where="m", also=None, kind="DDP", type="t.DDP", in_place=False, does="d", when="w"),
            Wrapper(where="m.module", also="model", kind="Net", type="n.Net", in_place=False, does="d", when="w"),
        ),
        params=tuple(rows),
        held=(
            held("param", 36, flat, cut=False),
            held("master", 18, master),
        ),
        attributes=(
            AttributeRow(
                attribute="optimizer.params_in_partition[0]",
                meaning="those with elements here",
                form="list of 2 parameters",
                names=(("model.embed.weight", "model.up.weight"), ("model.up.weight", "model.up.bias"))[rank],
                fact="params_in_partition",
                group=0,
            ),
            AttributeRow(
                attribute="optimizer.first_offset[0]",
                meaning="of the first",
                form="number",
                number=(0, 3)[rank],
                fact="first_offset",
                group=0,
            ),
        ),
        memory=(MemoryRow(category="parameters", nbytes=144),),
        storages=(Storage(label=flat, device="cpu", nbytes=144), Storage(label=master, device="cpu", nbytes=72)),
    )
    return replace(made, **changes)


def held(kind, numel, label, *, cut=True, first=0, dtype="float32"):
    view = View(of=label, start=0, stop=numel)
    return Held(buffer=0, kind=kind, dtype=dtype, cut=cut, first=first, numel=numel, attribute=label, view=view)


def test_json_gives_back_an_equal_snapshot():
    snapshot = flat_snapshot()
    assert Snapshot.from_json(snapshot.to_json()) == snapshot
    assert snapshot.to_json() == Snapshot.from_json(snapshot.to_json()).to_json()


def test_a_snapshot_shows_itself_in_one_line_and_in_the_words_of_deepspeed():
    left, right = flat_snapshot(), flat_snapshot(1)
    assert repr(left) == "rank 0 of 2 · 72 of 140 bytes fp32 · 2 of 3 tensors, last cut: up.weight (3 of 16 here)"
    assert left.params_in_partition == {0: ("model.embed.weight", "model.up.weight")}
    assert left.params_not_in_partition == {0: ("model.up.bias",)}
    assert right.params_in_partition == {0: ("model.up.weight", "model.up.bias")}
    assert right.params_not_in_partition == {0: ("model.embed.weight",)}


def damaged(change):
    tree = json.loads(flat_snapshot().to_json())
    change(tree)
    return json.dumps(tree)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"run/7\.json is no JSON \(line 1, column 2\)"),
        ("[]", r"run/7\.json is no snapshot: it has no version"),
        (damaged(lambda t: t.update(version=9)), "snapshot of version 9, and version 1 is understood"),
        (damaged(lambda t: t.pop("rank")), r"run/7\.json\.rank is missing"),
        (damaged(lambda t: t.update(ranks=1)), r"run/7\.json\.ranks is unknown"),
        (damaged(lambda t: t.update(rank="0")), r"run/7\.json\.rank is '0'; it must be of type int"),
        (damaged(lambda t: t.update(rank=True)), r"run/7\.json\.rank is True; it must be of type int"),
        (damaged(lambda t: t.update(held={})), r"run/7\.json\.held must be an array, not dict"),
        (damaged(lambda t: t["held"][1].pop("kind")), r"run/7\.json\.held\[1\]\.kind is missing"),
        (damaged(lambda t: t["held"].append(3)), r"run/7\.json\.held\[2\] must be an object, not int"),
        (damaged(lambda t: t.pop("layout")), r"run/7\.json\.layout is missing or damaged"),
        (damaged(lambda t: t["layout"].update(version=77)), "this layout is of version 77"),
        (damaged(lambda t: t["layout"].pop("buffers")), r"run/7\.json\.layout is missing or damaged"),
    ],
)
def test_a_text_that_is_no_snapshot_is_told_in_one_line(text, message):
    with pytest.raises(UsageError, match=message) as error:
        Snapshot.from_json(text, where="run/7.json")
    assert "\n" not in str(error.value)


# ---- where ----


def test_where_tells_rank_by_rank_what_is_held():
    found = flat_snapshot().where("model.up.weight")
    rows = [(h.kind, h.ranks_text, h.start, h.stop, h.offset, h.dtype, h.nbytes, h.attribute) for h in found.holdings]
    flat, master = "optimizer.bit16_groups_flat[0]", "optimizer.single_partition_of_fp32_groups[0]"
    assert rows == [
        ("param", "ranks 0 to 1", 0, 16, 15, "float32", 64, f"{flat}[15:31]"),
        ("master", "rank 0", 0, 3, 15, "float32", 12, f"{master}[15:18]"),
        ("master", "rank 1", 3, 16, 0, "float32", 52, None),
    ]
    assert found.ranks == (0, 1)
    assert "model.up.weight  (4, 4) = 16 elements, float32, group 0, deepspeed-flat" in repr(found)
    assert "master     rank 0: elements 0 to 2 at 15 of the shard group 0/float32/trainable" in repr(found)


@pytest.mark.parametrize(
    "name", ["model.embed.weight", "module.model.embed.weight", "_orig_mod.model.embed.weight", "head.weight"]
)
def test_where_knows_a_parameter_by_the_names_of_wrappers_and_ties(name):
    assert flat_snapshot().where(name).name == "model.embed.weight"


def test_a_wrong_name_is_answered_with_the_nearest():
    with pytest.raises(
        UsageError, match=r"no parameter is named 'model.up.wieght' \(did you mean 'model.up.weight'\?\)"
    ):
        flat_snapshot().where("model.up.wieght")


def test_where_in_a_plan_needs_nothing_that_is_live():
    layout = make_layout("deepspeed-param", params(), 4, SchemeOptions())
    plan = Snapshot(source="plan", engine="deepspeed", stage=3, rank=0, world_size=4, step=None, layout=layout)
    runs = [(h.ranks_text, h.start, h.stop) for h in plan.where("model.embed.weight").holdings]
    assert runs == [("rank 0", 0, 4), ("rank 1", 4, 8), ("rank 2", 8, 12), ("rank 3", 12, 15)]


def test_a_rank_without_elements_of_a_buffer_still_tells_what_others_keep_of_it():
    layout = make_layout("dim0", [params()[2], params()[1]], 3)
    one = Held(buffer=1, kind="exp_avg", dtype="float32", cut=True, first=0, numel=0, attribute="", view=None)
    last = Snapshot(source="live", engine="fsdp2", stage=None, rank=2, world_size=3, step=1, layout=layout, held=(one,))
    assert [(h.kind, h.ranks_text) for h in last.where("model.up.bias").holdings] == [
        ("exp_avg", "rank 0"),
        ("exp_avg", "rank 1"),
    ]


# ---- check ----


def test_memory_as_the_layout_says_has_no_faults():
    assert flat_snapshot().check() == ()
    assert flat_snapshot(1).check() == ()


def broken_param(**changes):
    snapshot = flat_snapshot()
    rows = [replace(row, **changes) if row.name == "model.up.weight" else row for row in snapshot.params]
    return replace(snapshot, params=tuple(rows))


FLAT = "optimizer.bit16_groups_flat[0]"
MASTER = "optimizer.single_partition_of_fp32_groups[0]"


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        (
            broken_param(data=View(of=FLAT, start=16, stop=32)),
            f"params.model.up.weight.data: begins at {FLAT}[15] → {FLAT}[16:32]",
        ),
        (
            broken_param(data=View(of="elsewhere", start=15, stop=31)),
            f"params.model.up.weight.data: begins at {FLAT}[15] → elsewhere[15:31]",
        ),
        (broken_param(data=None), f"params.model.up.weight.data: begins at {FLAT}[15] → absent"),
        (
            flat_snapshot(held=(held("param", 36, FLAT, cut=False), held("master", 20, MASTER))),
            f"{MASTER}: 18 elements → 20 elements",
        ),
        (
            flat_snapshot(held=(held("param", 36, FLAT, cut=False), held("master", 16, MASTER))),
            f"{MASTER}: master of model.up.weight: elements 15 to 17 of group 0/float32/trainable → absent",
        ),
        (
            flat_snapshot(params=flat_snapshot().params[:-1]),
            "params.model.up.bias: in the layout → absent",
        ),
        (
            flat_snapshot(1, attributes=flat_snapshot(0).attributes),
            "optimizer.first_offset[0]: 3 → 0",
        ),
        (
            flat_snapshot(1, attributes=flat_snapshot(0).attributes),
            "optimizer.params_in_partition[0]: 2 names, with model.up.weight at the first difference → 2 names: "
            "model.embed.weight, model.up.weight",
        ),
    ],
)
def test_every_difference_from_the_layout_is_named(snapshot, expected):
    assert expected in [str(fault) for fault in snapshot.check()]


# ---- diff ----


def lines(left, right):
    return [str(change) for change in left.diff(right)]


def test_a_snapshot_does_not_differ_from_itself():
    assert lines(flat_snapshot(), flat_snapshot()) == []


def test_two_moments_differ_in_steps_states_memory_and_wrappers():
    before = flat_snapshot()
    grown = (*before.held, held("exp_avg", 18, "state"))
    later = flat_snapshot(
        step=4,
        held=grown,
        model_chain=before.model_chain[1:],
        memory=(*before.memory, MemoryRow(category="optimizer exp_avg", nbytes=72)),
        params=broken_param(status="NOT_AVAILABLE", seen=(0,)).params,
    )
    assert lines(before, later) == [
        "step: 3 → 4",
        "model_chain: DDP(Net) → Net",
        "params.model.up.weight.seen: (4, 4) → (0,)",
        "params.model.up.weight.status: whole → NOT_AVAILABLE",
        "held.group 0/float32/trainable.exp_avg: absent → present",
        "memory.optimizer exp_avg: absent → present",
    ]


def test_two_ranks_differ_in_rank_and_lists_and_not_in_layout():
    assert lines(flat_snapshot(0), flat_snapshot(1)) == [
        "rank: 0 → 1",
        "attributes.optimizer.params_in_partition[0].names: ('model.embed.weight', 'model.up.weight') → "
        "('model.up.weight', 'model.up.bias')",
        "attributes.optimizer.first_offset[0].number: 0 → 3",
    ]


def test_a_run_is_held_against_a_plan_by_layout_tensors_and_memory_alone():
    run = flat_snapshot()
    planned = tuple(replace(h, attribute="", view=None) for h in run.held)
    plan = replace(run, source="plan", step=None, model_chain=(), params=(), attributes=(), storages=(), held=planned)
    assert lines(plan, run) == []
    other = make_layout("deepspeed-flat", [params()[1], params()[0], params()[2]], 2)
    assert lines(replace(plan, layout=other), run) == [
        "layout.model.up.weight.place: as laid out → 13 of 16 elements on other ranks, 3 at other offsets",
        "layout.model.embed.weight.place: as laid out → 13 of 15 elements on other ranks, 2 at other offsets",
    ]
    assert lines(replace(plan, memory=(MemoryRow(category="parameters", nbytes=100),)), run) == [
        "memory.parameters.nbytes: 100 → 144"
    ]
    assert lines(replace(plan, held=(replace(planned[0], dtype="bfloat16"), planned[1])), run) == [
        "held.group 0/float32/trainable.param.dtype: bfloat16 → float32"
    ]


def test_layouts_of_other_models_differ_by_name_shape_and_dtype():
    run = flat_snapshot()
    changed = [replace(params()[0], shape=(6, 3)), replace(params()[1], name="model.down.weight"), params()[2]]
    found = lines(replace(run, layout=make_layout("deepspeed-flat", changed, 2)), run)
    assert "layout.model.down.weight: (4, 4) → absent" in found
    assert "layout.model.up.weight: absent → (4, 4)" in found
    assert "layout.model.embed.weight.shape: (6, 3) → (5, 3)" in found

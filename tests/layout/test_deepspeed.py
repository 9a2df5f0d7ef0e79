"""DeepSpeed's layouts against recordings of DeepSpeed 0.19.8: every number of every file, by arithmetic alone.

``golden/deepspeed`` has one file a run, named stage, dtype, tied or not, optimizer groups, variant, world size:
``input_groups`` is what the optimizer was given, ``ranks`` what each rank then held.
"""

import json
import re
from pathlib import Path

import pytest

from shardglass.errors import UsageError
from shardglass.layout import (
    ParamSpec,
    SchemeOptions,
    deepspeed_flat_layout,
    deepspeed_param_layout,
    first_offset,
    groups_padding,
    has_bf16_optimizer,
    locate,
    make_layout,
    param_alignment_paddings,
    params_in_partition,
    params_not_in_partition,
    persistent_parameters,
    round_robin_indices,
    secondary_layout,
    slices_in,
    slices_of,
    sub_group_paddings,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "deepspeed"
FLAT = sorted(path.name for path in GOLDEN.glob("z[12]_*.json"))
PARAM = sorted(path.name for path in GOLDEN.glob("z3_*.json"))
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

NOT_LAYOUT = {"content_verified", "hp_mapping_matches_memory", "hp_mapping", "hp_dtype", "nccl_start_alignment_factor"}
"""Fields that say how a recording was checked, or that have a test of their own."""


def load(name):
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def specs(case):
    """The parameters of a recording: each group's in its order, then those the optimizer was not given."""
    found = []
    for group, rows in enumerate(case["input_groups"]):
        found += [parameter(*row, group) for row in rows]
    given = {p.name for p in found}
    rest = [(n, shape) for n, shape, _ in case["named_parameters"] if n not in given]
    return found + [parameter(name, shape, case["dtype"], False, None) for name, shape in rest]


def parameter(name, shape, dtype, trainable, group):
    group = group if trainable else None
    return ParamSpec(name=name, shape=tuple(shape), dtype=DTYPES[dtype], trainable=trainable, group=group, unit="model")


def zero(case):
    return case["ds_config"]["zero_optimization"]


def flat_layout(case):
    has_bf16 = has_bf16_optimizer(
        stage=case["stage"],
        dtype=DTYPES[case["dtype"]],
        grad_accum_dtype=DTYPES.get(case["ds_config"].get("data_types", {}).get("grad_accum_dtype")),
        offloads_optimizer="offload_optimizer" in zero(case),
    )
    keys = ("round_robin_gradients", "parameter_alignment")
    options = {} if has_bf16 else {key: zero(case)[key] for key in keys if key in zero(case)}
    return make_layout("deepspeed-flat", specs(case), case["world_size"], SchemeOptions(**options)), has_bf16


def test_recordings_of_every_kind_are_there():
    assert len(FLAT) == 21
    assert len(PARAM) == 9


@pytest.mark.parametrize("name", FLAT)
def test_stages_1_and_2_hold_what_deepspeed_held(name):
    case = load(name)
    layout, has_bf16 = flat_layout(case)
    given = [[row[0] for row in rows if row[3] and 0 not in row[1]] for rows in case["input_groups"]]
    assert len(case["ranks"]) == layout.world_size
    for rank, recorded in enumerate(case["ranks"]):
        assert recorded["rank"] == rank
        assert (recorded["optimizer_class"] == "BF16_Optimizer") == has_bf16
        assert len(recorded["groups"]) == sum(b.unit.startswith("group") for b in layout.buffers)
        for group, row in enumerate(recorded["groups"]):
            found = flat_row(layout, rank, group, given[group], has_bf16=has_bf16)
            assert {key: found[key] for key in row if key not in NOT_LAYOUT} == without(row, NOT_LAYOUT)


def without(row, keys):
    return {key: value for key, value in row.items() if key not in keys}


def flat_row(layout, rank, b, given, *, has_bf16=False):
    """What the layout says of one optimizer group on one rank, under the names of the recordings."""
    buffer = layout.buffers[b]
    group, shard, numel = buffer.params[0].group, buffer.holders.shard_of(rank), buffer.shard_numel
    slices = slices_in(layout, b, rank)
    names = [p.name for p in buffer.params]
    assert all(slices_of(layout, s.name, rank) == (s,) for s in slices)
    return {
        "partition_id": shard,
        "partition_count": buffer.holders.num_shards,
        "group_ranks": [r for r in range(layout.world_size) if buffer.holders.shard_of(r) is not None],
        "flat_numel": buffer.numel,
        "partition_numel": numel,
        "partition_size_attr": numel,
        "hp_numel": numel,
        "partition_start": shard * numel,
        "padding": groups_padding(layout, rank, on_last_rank=has_bf16)[group],
        "total_padding_in_partition": numel - sum(s.length for s in slices),
        "held": [[s.name, s.start, s.length, s.offset] for s in slices],
        "flat_order_and_offset": [list(pair) for pair in zip(names, buffer.offsets, strict=True)],
        "bit16_group_order": given,
        "round_robin_order": names,
        "round_robin_indices": [names.index(name) for name in given],
        "param_alignment_paddings": list(param_alignment_paddings(layout, rank)[group]),
        "params_in_partition": list(params_in_partition(layout, rank)[group]),
        "params_not_in_partition": list(params_not_in_partition(layout, rank)[group]),
        "first_offset": first_offset(layout, rank)[group],
    }


@pytest.mark.parametrize("name", FLAT)
def test_what_deepspeed_believes_under_round_robin_is_the_layout_without_it(name):
    # Its own mapping from parameters to memory walks the original order; the recordings keep it where it is wrong.
    case = load(name)
    believed, _ = flat_layout({**case, "ds_config": {"zero_optimization": {}}})
    is_wrong = zero(case).get("round_robin_gradients", False) and not zero(case).get("parameter_alignment", False)
    for rank, recorded in enumerate(case["ranks"]):
        for group, row in enumerate(recorded["groups"]):
            assert row["hp_mapping_matches_memory"] != is_wrong
            assert ("hp_mapping" in row) == is_wrong
            slices = [[s.name, s.start, s.length, s.offset] for s in slices_in(believed, group, rank)]
            assert row.get("hp_mapping", slices) == slices


@pytest.mark.parametrize("name", [n for n in FLAT if "roundrobin" in n])
def test_round_robin_indices_are_deepspeed_s(name):
    case = load(name)
    (group,) = case["ranks"][0]["groups"]
    assert round_robin_indices(len(group["round_robin_order"]), case["world_size"]) == group["round_robin_indices"]


@pytest.mark.parametrize("name", PARAM)
def test_stage_3_holds_what_deepspeed_held(name):
    case = load(name)
    params = specs(case)
    options = {"sub_group_size": zero(case)["sub_group_size"]} if "sub_group_size" in zero(case) else {}
    layout = make_layout("deepspeed-param", params, case["world_size"], SchemeOptions(**options))
    by_name = {p.name: p for p in params}
    in_model_order = [by_name[name] for name, _, _ in case["named_parameters"]]
    thresholds = {
        "param_threshold": zero(case).get("stage3_param_persistence_threshold"),
        "model_threshold": zero(case).get("stage3_model_persistence_threshold"),
    }
    given = {key: value for key, value in thresholds.items() if value is not None}
    persistent = persistent_parameters(in_model_order, **given)
    for rank, recorded in enumerate(case["ranks"]):
        assert recorded["rank"] == rank
        assert recorded["partition_count"] == layout.world_size
        assert recorded["persistent_parameters"] == list(persistent)
        assert [without(row, NOT_LAYOUT) for row in recorded["params"]] == [
            param_row(layout, rank, p, ds_id, p.name in persistent) for ds_id, p in enumerate(in_model_order)
        ]
        assert [without(row, {*NOT_LAYOUT, "fp32_dtype"}) for row in recorded["sub_groups"]] == sub_group_rows(
            layout, rank
        )


def param_row(layout, rank, param, ds_id, is_persistent):
    """What the layout says of one parameter on one rank, under the names of the recordings."""
    buffer, k = layout.find(param.name)
    chunk, holders = layout.buffers[buffer].chunks[k], layout.buffers[buffer].holders
    (held,) = slices_of(layout, param.name, rank) or (None,)
    return {
        "name": param.name,
        "ds_id": ds_id,
        "ds_numel": param.numel,
        "ds_shape": list(param.shape),
        "partition_numel": chunk,
        "aligned_numel": chunk * holders.num_shards,
        "padding_size": chunk * holders.num_shards - param.numel,
        "persist": is_persistent,
        "requires_grad": param.trainable,
        "start": holders.shard_of(rank) * chunk if held is None else held.start,
        "held_numel": 0 if held is None else held.length,
    }


def sub_group_rows(layout, rank):
    """What the layout says of the flat sub-groups of one rank."""
    paddings = sub_group_paddings(layout, rank)
    rows = []
    for b, buffer in enumerate(layout.buffers):
        if not buffer.unit.startswith("group"):
            continue
        held = {s.name: s.length for s in slices_in(layout, b, rank)}
        members = zip(buffer.params, buffer.offsets, buffer.chunks, strict=True)
        rows.append(
            {
                "group_id": buffer.params[0].group,
                "numel": buffer.shard_numel,
                "fp32_numel": buffer.shard_numel,
                "params": [[p.name, offset, chunk, held.get(p.name, 0)] for p, offset, chunk in members],
                "groups_padding": list(paddings[len(rows)]),
            }
        )
    return rows


def test_the_second_copy_of_zero_plus_plus_is_as_long_as_deepspeed_s():
    case = load("z3_bf16_untied_1g_hpz2_ws4.json")
    layout = secondary_layout(specs(case), case["world_size"], zero(case)["zero_hpz_partition_size"])
    for rank, recorded in enumerate(case["ranks"]):
        assert recorded["num_ranks_in_param_group"] == layout.buffers[0].holders.num_shards == 2
        assert recorded["secondary"] == [[b.params[0].name, b.shard_numel, b.chunks[0]] for b in layout.buffers]
        starts = [s.start for b in range(len(layout.buffers)) for s in slices_in(layout, b, rank)]
        assert starts == [rank % 2 * b.shard_numel for b in layout.buffers]


def test_experts_are_cut_over_the_ranks_that_share_them():
    case = load("moe_z2_bf16_ws4.json")
    params = [parameter(*row, group) for group, rows in enumerate(case["input_groups"]) for row in rows["params"]]
    options = SchemeOptions(expert_parallel={1: case["ep_size"]})
    layout = deepspeed_flat_layout(params, case["world_size"], options)
    for rank, recorded in enumerate(case["ranks"]):
        expert_rank = rank % case["ep_size"]
        buffers = [b for b, buffer in enumerate(layout.buffers) if buffer.holders.shard_of(rank) is not None]
        assert buffers == [0, 1 + expert_rank]
        for b, row in zip(buffers, recorded["groups"], strict=True):
            assert {key: found for key, found in flat_row(layout, rank, b, []).items() if key in row} == (
                with_global_names(row, expert_rank)
            )


def with_global_names(row, expert_rank):
    """A recording has each rank's own expert names; there are two a rank."""

    def renamed(match):
        return f"deepspeed_experts.{int(match.group(1)) + 2 * expert_rank}."

    return json.loads(re.sub(r"deepspeed_experts\.(\d+)\.", renamed, json.dumps(row)))


def test_an_expert_of_every_rank_has_one_name_in_the_layout():
    rows = [(f"moe.deepspeed_experts.{j}.w", (3,)) for j in range(2)]
    params = [ParamSpec(name=n, shape=s, dtype="float32", trainable=True, group=0, unit="u") for n, s in rows]
    layout = deepspeed_flat_layout(params, 6, SchemeOptions(expert_parallel={0: 3}))
    assert layout.names == tuple(f"moe.deepspeed_experts.{j}.w" for j in range(6))
    assert [locate(layout, name, 0).ranks for name in layout.names] == [
        range(1), range(1), range(1, 2), range(1, 2), range(2, 3), range(2, 3)
    ]  # fmt: skip
    assert [locate(layout, f"moe.deepspeed_experts.{j}.w", 2).rank for j in (1, 3, 5)] == [3, 4, 5]


# ---- rules that no recording shows ----


def spec(name, shape, group=0, dtype="float32"):
    return ParamSpec(name=name, shape=shape, dtype=dtype, trainable=group is not None, group=group, unit="u")


def test_what_is_frozen_or_empty_is_whole_on_every_rank_at_stages_1_and_2():
    layout = deepspeed_flat_layout([spec("w", (5,)), spec("empty", (0, 3)), spec("frozen", (2,), None)], 3)
    assert layout.names == ("w", "empty", "frozen")
    assert locate(layout, "frozen", 1).ranks == range(3)
    assert [params_in_partition(layout, rank) for rank in range(3)] == [{0: ("w",)}, {0: ("w",)}, {0: ("w",)}]
    assert params_not_in_partition(layout, 0) == {0: ()}


def test_what_is_frozen_is_cut_but_in_no_sub_group_at_stage_3():
    layout = deepspeed_param_layout([spec("w", (5,)), spec("frozen", (4,), None), spec("empty", (0,))], 3)
    assert [b.unit for b in layout.buffers] == ["group 0, sub-group 0", "u", "u"]
    assert [(s.start, s.length) for r in range(3) for s in slices_of(layout, "frozen", r)] == [(0, 2), (2, 2)]
    assert slices_of(layout, "empty", 0) == ()


@pytest.mark.parametrize(("limit", "sizes"), [(0, [1, 1, 1]), (3, [1, 2]), (4, [2, 1]), (6, [3]), (7, [3])])
def test_a_sub_group_is_closed_once_it_reached_its_size(limit, sizes):
    params = [spec("a", (6,)), spec("b", (4,)), spec("c", (2,))]
    layout = deepspeed_param_layout(params, 2, SchemeOptions(sub_group_size=limit))
    assert [len(b.params) for b in layout.buffers] == sizes


def test_what_deepspeed_fails_on_is_refused():
    with pytest.raises(UsageError, match=r"no parameter of optimizer group 1 has elements \(empty has shape \(0, 2\)"):
        deepspeed_flat_layout([spec("w", (1,)), spec("empty", (0, 2), 1)], 2)
    with pytest.raises(UsageError, match="w is float32 and v is bfloat16; DeepSpeed keeps one optimizer group in one"):
        deepspeed_flat_layout([spec("w", (1,)), spec("v", (1,), dtype="bfloat16")], 2)
    with pytest.raises(UsageError, match="size 3 of group 0 does not divide 4 ranks"):
        deepspeed_flat_layout([spec("w", (1,))], 4, SchemeOptions(expert_parallel={0: 3}))
    with pytest.raises(UsageError, match="w of group 0 is no expert"):
        deepspeed_flat_layout([spec("w", (1,))], 4, SchemeOptions(expert_parallel={0: 2}))
    with pytest.raises(UsageError, match=r"no optimizer group 7; groups are \[0\]"):
        deepspeed_flat_layout([spec("w", (1,))], 4, SchemeOptions(expert_parallel={7: 2}))
    with pytest.raises(UsageError, match="zero_hpz_partition_size 3 does not divide 4 ranks"):
        secondary_layout([spec("w", (1,))], 4, 3)
    with pytest.raises(UsageError, match="those of scheme deepspeed-flat; this layout is of scheme deepspeed-param"):
        groups_padding(deepspeed_param_layout([spec("w", (1,))], 1), 0)

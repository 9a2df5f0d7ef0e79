"""Qwen1.5-7B, its 387 tensors in one and two optimizer groups, cut where DeepSpeed cuts it."""

import json
from pathlib import Path

import pytest

from shardglass.layout import (
    ParamSpec,
    SchemeOptions,
    boundary_cuts,
    first_offset,
    groups_padding,
    make_layout,
    params_in_partition,
    params_not_in_partition,
    rank_bytes,
    slices_in,
)

QWEN = json.loads((Path(__file__).parents[1] / "golden" / "deepspeed" / "qwen15_7b.json").read_text(encoding="utf-8"))


def qwen15_7b():
    """(name, shape) of Qwen1.5-7B's parameters from its public configuration: untied, biases on q, k and v."""
    hidden, intermediate, vocabulary, blocks = 4096, 11008, 151936, 32
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for block in range(blocks):
        prefix = f"model.layers.{block}."
        for part in "qkv":
            yield f"{prefix}self_attn.{part}_proj.weight", (hidden, hidden)
            yield f"{prefix}self_attn.{part}_proj.bias", (hidden,)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, hidden)
        yield f"{prefix}mlp.gate_proj.weight", (intermediate, hidden)
        yield f"{prefix}mlp.up_proj.weight", (intermediate, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, intermediate)
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


GROUPS = {
    "one_group": lambda name: 0,
    "hf_two_groups": lambda name: int("bias" in name or "norm" in name),
    "old_hf_two_groups_bias_only": lambda name: int("bias" in name),
}


def test_the_parameters_of_qwen_are_those_of_the_recording():
    rows = [[name, list(shape), shape[0] * (shape[1] if len(shape) == 2 else 1)] for name, shape in qwen15_7b()]
    assert rows == QWEN["named_parameters"]
    assert len(rows) == QWEN["n_params"] == 387
    assert sum(numel for *_, numel in rows) == QWEN["total_numel"]


@pytest.mark.parametrize("key", QWEN["layouts"])
def test_qwen_is_cut_where_deepspeed_cuts_it(key):
    expected = QWEN["layouts"][key]
    groups, world, order = key.split("/")
    options = SchemeOptions(round_robin_gradients=order == "round_robin_gradients")
    params = [
        ParamSpec(name=name, shape=shape, dtype="bfloat16", trainable=True, group=GROUPS[groups](name), unit="model")
        for name, shape in qwen15_7b()
    ]
    layout = make_layout("deepspeed-flat", params, expected["world_size"], options)
    assert world == f"world{layout.world_size}"
    assert len(layout.buffers) == len(expected["groups"])
    for b, row in enumerate(expected["groups"]):
        assert {**group_row(layout, b, params), "ranks": qwen_ranks(layout, b)} == row
    adam = {"master weights": 4, "optimizer exp_avg": 4, "optimizer exp_avg_sq": 4}
    for rank in range(layout.world_size):
        account = rank_bytes(layout, rank, state=adam)
        assert sum(account[kind] for kind in adam) == expected["fp32_plus_adam_bytes_per_rank"]
        assert account["trainable parameters"] + account["padding"] == account["master weights"] // 2


def group_row(layout, b, params):
    """What the layout says of a group, under the names of the recording."""
    buffer = layout.buffers[b]
    in_model = [p.name for p in params]
    in_group = [p.name for p in params if p.group == b]
    cuts = [c for c in boundary_cuts(layout, order=in_model) if c.buffer == b]
    return {
        "group": b,
        "n_params": len(buffer.params),
        "numel": buffer.real_numel,
        "alignment": 2 * layout.world_size,
        "flat_numel": buffer.numel,
        "tail_padding": groups_padding(layout, layout.world_size - 1)[b],
        "partition_numel": buffer.shard_numel,
        "cuts": [cut_row(layout, cut, in_group) for cut in cuts],
    }


def cut_row(layout, cut, in_group):
    row = {
        "boundary": cut.right_rank * layout.buffers[cut.buffer].shard_numel,
        "between_ranks": [cut.left_rank, cut.right_rank],
        "param": cut.name,
        "index_in_flat_order": cut.position,
    }
    if cut.name is None:
        return row | {"first_on_right": cut.after, "note": "falls exactly between two parameters"}
    return row | {
        "index_in_group": in_group.index(cut.name),
        "index_in_model": cut.index,
        "numel": cut.left + cut.right,
        "on_left": cut.left,
        "on_right": cut.right,
    }


def qwen_ranks(layout, b):
    rows = []
    for rank in range(layout.world_size):
        inside = params_in_partition(layout, rank)[b]
        rows.append(
            {
                "rank": rank,
                "n_in_partition": len(inside),
                "n_not_in_partition": len(params_not_in_partition(layout, rank)[b]),
                "first_param": inside[0],
                "last_param": inside[-1],
                "first_offset": first_offset(layout, rank)[b],
                "padding": groups_padding(layout, rank)[b],
                "held_numel": sum(s.length for s in slices_in(layout, b, rank)),
            }
        )
    return rows

"""What a rank holds in one line, at the size of a real model and at the edges."""

import pytest

from shardglass import UsageError
from shardglass.layout import ParamSpec, make_layout
from shardglass.layout.line import rank_line


def qwen15_7b():
    """Qwen1.5-7B's parameters from its public configuration, as one optimizer group."""
    hidden, intermediate, vocabulary, blocks = 4096, 11008, 151936, 32
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for block in range(blocks):
        prefix = f"model.layers.{block}."
        for part in "qkv":
            shapes[f"{prefix}self_attn.{part}_proj.weight"] = (hidden, hidden)
            shapes[f"{prefix}self_attn.{part}_proj.bias"] = (hidden,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (intermediate, hidden)
        shapes[f"{prefix}mlp.up_proj.weight"] = (intermediate, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, intermediate)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    return [param(name, shape, unit=name.split(".mlp")[0]) for name, shape in shapes.items()]


def param(name, shape, *, dtype="bfloat16", unit="u"):
    return ParamSpec(name=name, shape=shape, dtype=dtype, trainable=True, group=0, unit=unit)


def test_qwen_under_deepspeed_at_two_ranks():
    layout = make_layout("deepspeed-flat", qwen15_7b(), 2)
    cut = "last cut: layers.16.self_attn.q_proj.weight"
    assert rank_line(layout, 0) == (
        f"rank 0 of 2 · 7.7 of 15.4 GB bf16 · 194 of 387 tensors, {cut} (2,048 of 16,777,216 here)"
    )
    assert rank_line(layout, 1) == (
        f"rank 1 of 2 · 7.7 of 15.4 GB bf16 · 194 of 387 tensors, {cut} (16,775,168 of 16,777,216 here)"
    )


def test_qwen_where_every_rank_has_all():
    line = "rank 1 of 2 · 15.4 of 15.4 GB bf16 · 387 of 387 tensors, none cut"
    assert rank_line(make_layout("replicated", qwen15_7b(), 2), 1) == line
    assert rank_line(make_layout("deepspeed-flat", qwen15_7b(), 2), 1, whole=True) == line


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("deepspeed-flat", "rank 1 of 2 · 18 of 34 bytes fp32+bf16 · 2 of 3 tensors, last cut: b (3 of 7 here)"),
        ("dim0", "rank 1 of 2 · 18 of 42 bytes fp32+bf16 · 3 of 3 tensors, last cut: d (2 of 4 here)"),
    ],
)
def test_small_layouts_count_bytes_and_several_dtypes(scheme, expected):
    params = [
        param("model.a", (0, 3), dtype="float32"),
        param("model.b", (7,), dtype="float32"),
        ParamSpec(name="c", shape=(3,), dtype="bfloat16", trainable=False, group=None, unit="u"),
    ]
    if scheme == "dim0":
        params = [*params[1:], param("d", (4,), dtype="bfloat16")]
    layout = make_layout(scheme, params, 2)
    assert rank_line(layout, 1) == expected


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match="the layout has ranks 0 to 1"):
        rank_line(make_layout("dim0", [param("a", (4,))], 2), 2)

"""A plan in a terminal: what it says and in which form."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from shardglass.layout import ParamSpec
from shardglass.plan.check import check_fits
from shardglass.plan.model import Geometry, ModelFacts
from shardglass.plan.plan import make_plan
from shardglass.plan.setup import GIB, Setup
from shardglass.report.plan_tables import MOST_CUT_ROWS
from shardglass.report.plan_terminal import render_check, render_plan

HIDDEN, INNER, VOCABULARY, LAYERS = 4096, 11008, 151936, 32


def qwen(**change):
    """Qwen1.5-7B by shapes, matrices in group 0, biases and norms in group 1."""
    rows = [("model.embed_tokens.weight", (VOCABULARY, HIDDEN), "root:0")]
    for k in range(LAYERS):
        unit = f"model.layers.{k}"
        for part in "qkv":
            rows.append((f"{unit}.self_attn.{part}_proj.weight", (HIDDEN, HIDDEN), unit))
            rows.append((f"{unit}.self_attn.{part}_proj.bias", (HIDDEN,), unit))
        rows.append((f"{unit}.self_attn.o_proj.weight", (HIDDEN, HIDDEN), unit))
        rows.append((f"{unit}.mlp.gate_proj.weight", (INNER, HIDDEN), unit))
        rows.append((f"{unit}.mlp.up_proj.weight", (INNER, HIDDEN), unit))
        rows.append((f"{unit}.mlp.down_proj.weight", (HIDDEN, INNER), unit))
        rows.append((f"{unit}.input_layernorm.weight", (HIDDEN,), unit))
        rows.append((f"{unit}.post_attention_layernorm.weight", (HIDDEN,), unit))
    rows += [("model.norm.weight", (HIDDEN,), "root:1"), ("lm_head.weight", (VOCABULARY, HIDDEN), "root:1")]
    values = {
        "name": "qwen1.5-7b",
        "model_type": "qwen2",
        "source": "preset",
        "params": tuple(
            ParamSpec(name=name, shape=shape, dtype="bfloat16", trainable=True, group=2 - len(shape), unit=unit)
            for name, shape, unit in rows
        ),
        "tied": (),
        "stored_dtype": "bfloat16",
        "buffer_bytes": 512,
        "max_length": 32768,
        "geometry": Geometry(
            num_layers=LAYERS,
            hidden=HIDDEN,
            num_heads=32,
            num_kv_heads=32,
            head_dim=128,
            intermediate=INNER,
            vocabulary=VOCABULARY,
        ),
    }
    return ModelFacts(**{**values, **change})


def text_of(setup, *, facts=None, width=120, colour=False):
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=colour, color_system="standard" if colour else None)
    render_plan(make_plan(facts or qwen(), setup), console)
    return stream.getvalue()


def cells(text, start):
    """The words of the first line that starts so."""
    line = next(line for line in text.splitlines() if line.strip().startswith(start))
    return line.split()


def test_the_first_line_is_the_verdict():
    assert text_of(Setup(world_size=8, memory=80 * GIB)).startswith("fits: stage 2 on 8 GPUs of 80.00 GiB")
    assert text_of(Setup(world_size=2, memory=24 * GIB)).startswith("does not fit: stage 2 on 2 GPUs of 24.00 GiB")
    assert text_of(Setup()).startswith("no verdict: the memory of a GPU was not given")


def test_what_would_fit_is_told_beside_a_refusal():
    assert "smallest 2 GPUs at stage 3" in text_of(Setup(world_size=2, memory=80 * GIB))
    text = text_of(Setup(world_size=2, memory=40 * GIB))
    assert "smallest 6 GPUs at stage 3" in text
    assert "4 GPUs at stage 3 with --gradient-checkpointing" in text
    assert "no number of GPUs helps" in text_of(Setup(world_size=2, memory=GIB // 2))


def test_the_partition_and_its_cuts():
    text = text_of(Setup(world_size=4, scheme="deepspeed-flat"))
    assert "Partition: scheme deepspeed-flat, as used by DeepSpeed ZeRO-1 and ZeRO-2" in text
    assert cells(text, "group 0     0  1") == ["group", "0", "0", "1,930,166,272", "0", "48", "178"]
    assert "an index counts from 0, in model order" in text
    row = ["group", "0", "0", "|", "1", "80", "26,476,544", "18,612,224", "58.721", "6,464", "0"]
    assert cells(text, "group 0  0 | 1") == [*row, "model.layers.6.mlp.gate_proj.weight"]
    between = ["-", "|", "model.layers.16.self_attn.q_proj.weight"]
    assert cells(text, "group 0  1 | 2")[-3:] == between
    assert "| the boundary falls between two tensors" in text


def test_cuts_that_are_alike_in_every_block_are_one_row():
    text = text_of(Setup(world_size=2))
    row = next(line for line in text.splitlines() if line.startswith("model.layers.{0..31}"))
    assert "8, … 380" in row  # the gate of block 0, and of block 31
    assert row.rstrip().endswith("….mlp.gate_proj.weight")


def test_long_tables_are_cut_and_say_so():
    lines = text_of(Setup(world_size=64)).splitlines()
    assert "and 48 rows more, in the JSON" in lines
    assert sum(" | " in line for line in lines) == MOST_CUT_ROWS  # ranks
    assert any(line.startswith("and ") and line.endswith(" cuts more, in the JSON") for line in lines)
    many = text_of(Setup(world_size=1000)).splitlines()
    assert "and 936 ranks between the last two rows of a part" in many


def test_one_rank_has_no_cuts():
    assert "No boundary between ranks: nothing is cut" in text_of(Setup())


def test_memory_marks_the_highest_moment_and_the_largest_term_of_every_stage():
    setup = Setup(world_size=2, memory=80 * GIB)
    text, plan = text_of(setup), make_plan(qwen(), setup)
    for start, value in (("weights", "14.38"), ("master weights", "28.76"), ("gathered units", "-")):
        assert value in cells(text, start)
    assert text.count("◄") == len(plan.stages) + 1  # and the legend
    moments = [line for line in text.splitlines() if line.startswith("  sum ")]
    assert len(moments) == 4
    assert sum(line.count("*") for line in moments) == len(plan.stages)
    needed = [f"{stage.total / GIB:,.2f}" for stage in plan.stages]
    assert cells(text, "needed") == ["needed", *needed]
    free = [f"{80 - stage.total / GIB:,.2f}" for stage in plan.stages]
    assert cells(text, "free of 80.00 GiB") == ["free", "of", "80.00", "GiB", *free]


def test_every_number_of_the_memory_table_is_in_the_json():
    setup = Setup(world_size=2, memory=80 * GIB)
    plan = make_plan(qwen(), setup)
    text = text_of(setup)
    for stage in plan.stages:
        for term in stage.terms:
            if term.bytes >= GIB // 100:
                assert f"{term.bytes / GIB:,.2f}" in text


def test_missing_activations_are_said_under_the_table():
    text = text_of(Setup(world_size=2), facts=qwen(geometry=None))
    assert "activations and logits are NOT in these sums" in text
    assert "activations of qwen2 models have no closed form here" in text


def test_more_ram_than_is_free_is_warned_of_before_the_system_kills():
    text = text_of(Setup(world_size=8, host_free=16 * GIB))
    assert "8 ranks on one: RAM 121.06 GiB while loading" in text
    assert "exit code -9" in text
    assert "exit code -9" not in text_of(Setup(world_size=8, host_free=512 * GIB))


def test_disk_and_assumptions_stand_at_the_end():
    text = text_of(Setup(world_size=2))
    assert "100.67 GiB a checkpoint: 14.38 GiB weights, 28.76 GiB master weights, 57.53 GiB optimizer states" in text
    assert "assumed, not measured on a GPU" in " ".join(text.split())


@pytest.mark.parametrize("width", [20, 100, 500])
def test_lines_are_never_wider_than_the_page(width):
    lines = text_of(Setup(world_size=4, memory=24 * GIB, host_free=GIB), width=width).splitlines()
    assert max(map(len, lines)) <= min(132, max(100, width))
    assert all(line == line.rstrip() for line in lines)


def test_the_verdict_has_its_colour():
    assert "\x1b[1;32mfits" in text_of(Setup(world_size=8, memory=80 * GIB), colour=True)
    assert "\x1b[1;31mdoes not fit" in text_of(Setup(world_size=2, memory=24 * GIB), colour=True)


def test_a_check_is_three_lines_with_the_last_in_colour_if_it_may_not_fit():
    plan = make_plan(qwen(), Setup(world_size=8))
    for free, word in ((80 * GIB, "fits"), (50 * GIB, "may not fit"), (20 * GIB, "cannot fit")):
        stream = io.StringIO()
        console = Console(file=stream, width=200, force_terminal=True, color_system="standard")
        check = check_fits(plan, free=free)
        render_check(plan, check, console)
        lines = stream.getvalue().splitlines()
        assert len(lines) == 3
        assert f"plan: {word}: memory of a GPU: {plan.stage.total / GIB:.2f} GiB needed" in lines[2]
        assert ("\x1b[33m" in lines[2]) == (word != "fits")
    assert "the largest part is weights, 14.38 GiB" in check.sentence


def test_the_least_need_is_that_of_the_shortest_sequences_without_a_reserve():
    setup = Setup(world_size=8)
    plan, shortest = make_plan(qwen(), setup), make_plan(qwen(), replace(setup, length=2))
    check = check_fits(plan, free=40 * GIB, shortest=shortest)
    assert check.least == shortest.stage.total - shortest.stage.reserve
    assert (check.fits, check.cannot_fit) == (False, False)

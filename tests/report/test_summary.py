"""The run summary of a realistic model: its values, its JSON, and its form in a terminal."""

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import shardglass.report
from shardglass.layout import ParamSpec, units_layout
from shardglass.options import EngineOptions
from shardglass.plan import OptimizerKind, StepShape, planned_bytes
from shardglass.report import (
    Batch,
    CutRow,
    DecayGroup,
    Environment,
    Progress,
    RatePoint,
    RunSummary,
    cut_rows,
    dtype_rows,
    memory_account,
    render_summary,
)

HIDDEN, INNER, KV, VOCABULARY, LAYERS = 576, 1536, 192, 49152, 30  # SmolLM2-135M, embedding and head tied
MIB = 1 << 20


def smollm(world_size=2, *, dtype="bfloat16", frozen=()):
    """SmolLM2-135M by shapes: matrices in group 0, norms in group 1."""
    rows = [("model.embed_tokens.weight", (VOCABULARY, HIDDEN), "root:0")]
    for k in range(LAYERS):
        unit = f"model.layers.{k}"
        rows += [
            (f"{unit}.self_attn.q_proj.weight", (HIDDEN, HIDDEN), unit),
            (f"{unit}.self_attn.k_proj.weight", (KV, HIDDEN), unit),
            (f"{unit}.self_attn.v_proj.weight", (KV, HIDDEN), unit),
            (f"{unit}.self_attn.o_proj.weight", (HIDDEN, HIDDEN), unit),
            (f"{unit}.mlp.gate_proj.weight", (INNER, HIDDEN), unit),
            (f"{unit}.mlp.up_proj.weight", (INNER, HIDDEN), unit),
            (f"{unit}.mlp.down_proj.weight", (HIDDEN, INNER), unit),
            (f"{unit}.input_layernorm.weight", (HIDDEN,), unit),
            (f"{unit}.post_attention_layernorm.weight", (HIDDEN,), unit),
        ]
    rows.append(("model.norm.weight", (HIDDEN,), "root:1"))
    specs = []
    for name, shape, unit in rows:
        trainable = unit not in frozen
        group = (0 if len(shape) == 2 else 1) if trainable else None
        specs.append(ParamSpec(name=name, shape=shape, dtype=dtype, trainable=trainable, group=group, unit=unit))
    return units_layout(specs, world_size)


def summary(*, world_size=2, stage=2, largest=1, off=0, **changes):
    """What a demo run would say; ``off`` bytes more gradients than planned on this rank."""
    layout, options = smollm(world_size), EngineOptions(stage=stage, param_dtype="bfloat16")
    shape = StepShape(micro_batches=(4,), accumulates_locally=stage < 2)
    kind = OptimizerKind(name="AdamW")
    accounts = []
    for rank in (0, largest):
        plan = planned_bytes(layout, options, rank, optimizer=kind, shape=shape)
        measured = plan | {"gradients": plan["gradients"] + (off if rank == 0 else 0)}
        accounts.append(
            memory_account(rank, planned=plan, measured=measured, process=2377 * MIB + rank * 8 * MIB, peak=2489 * MIB)
        )
    values = {
        "model": "SmolLM2-135M-Instruct",
        "stage": stage,
        "memory": accounts[0],
        "largest": accounts[1],
        "batch": Batch(
            ranks=world_size,
            micro=2,
            accumulation=4,
            steps_per_epoch=1043,
            tokens_per_step=1843.4,
            label_share=0.612,
            cut_share=0.031,
            max_length=512,
        ),
        "progress": Progress(
            steps=50, skipped=0, first_loss=2.81234, last_loss=1.93211, tokens_per_s=312.4, held_out=(2.7904, 2.1133)
        ),
        "rates": (
            RatePoint(what="start", step=0, rates=(0.0, 0.0)),
            RatePoint(what="end of warmup", step=3, rates=(2e-5, 2e-5)),
            RatePoint(what="end", step=50, rates=(4.13e-7, 4.13e-7)),
        ),
        "groups": (
            DecayGroup(index=0, weight_decay=0.1, tensors=211, elements=134_479_872),
            DecayGroup(index=1, weight_decay=0.0, tensors=61, elements=35_136),
        ),
        "dtypes": dtype_rows(layout, options, saved="bfloat16", buffers=("float32",)),
        "cuts": cut_rows(layout, options),
        "environment": Environment(
            attention="sdpa",
            backend="gloo",
            device="cpu",
            versions=(("python", "3.11.9"), ("torch", "2.13.0"), ("transformers", "5.24.0"), ("shardglass", "0.1.0")),
        ),
    }
    return RunSummary(**(values | changes))


def printed(run, width=100):
    stream = io.StringIO()
    render_summary(run, Console(file=stream, width=width))
    return stream.getvalue().splitlines()


def section(lines, first):
    """Cells, two blanks apart, of the line that starts with ``first``."""
    line = next(line for line in lines if line.startswith(first))
    return re.split(r"  +", line)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_a_realistic_summary_fits_in_40_lines_and_cuts_no_number(width):
    for run in (summary(), summary(stage=1, off=-7), summary(world_size=1, largest=0)):
        lines = printed(run, width)
        assert 24 <= len(lines) <= 40
        assert max(map(len, lines)) <= 120
        assert "…" not in "\n".join(lines)


def test_planned_and_measured_bytes_stand_side_by_side_with_the_exact_number():
    lines = printed(summary())
    assert section(lines, "parameters ") == [
        *("parameters", "256.57", "256.57", "= 269,030,016", "256.57", "= 269,030,016"),
    ]
    # Flats in bf16 (two of a block, one of each root unit) and a fp32 mean of each shard.
    block = 2 * 3_540_096
    flats = 2 * block + 2 * (VOCABULARY * HIDDEN + HIDDEN)
    assert section(lines, "gradients ")[3] == f"= {flats + 4 * 134_515_008 // 2:,}"
    assert section(lines, "optimizer step")[3:] == ["= 128", "0.00", "= 248"]  # rank 1 has the norms: more tensors
    assert section(lines, "engine in all")[1] == "1,382.72"
    assert section(lines, "rest of process (RSS)")[1] == f"{2377 - 1382.72:,.2f}"
    assert section(lines, "peak of process (RSS)")[1] == "2,489.00"
    assert "max: rank 1" in next(line for line in lines if line.startswith("MiB on rank 0"))


def test_the_largest_ranks_columns_go_if_it_is_this_rank():
    lines = printed(summary(largest=0))
    assert any(line.startswith("MiB on rank 0 (largest)") for line in lines)
    assert section(lines, "parameters ") == ["parameters", "256.57", "256.57", "= 269,030,016"]


def test_bytes_off_the_plan_show_the_difference_and_are_a_deviation_at_the_top():
    lines = printed(summary(off=1024))
    assert lines[1] == "! rank 0 holds other bytes than planned: gradients +1,024"
    assert section(lines, "gradients ")[3] == "+1,024 !"
    assert section(lines, "engine in all")[3] == "+1,024 !"


def test_deviations_come_first_then_notes_then_the_rest():
    lines = printed(summary(deviations=("the scheduler is another",), notes=("no effect here: wall_clock",)))
    assert lines[0] == "Run summary: SmolLM2-135M-Instruct, ZeRO stage 2, 2 ranks"
    assert lines[1:3] == ["! the scheduler is another", "- no effect here: wall_clock"]
    assert printed(summary())[1].startswith("= no deviations")


def test_what_the_numbers_of_a_training_show_is_a_deviation():
    worse = Progress(steps=9, skipped=2, first_loss=2.0, last_loss=2.5, tokens_per_s=1.0, held_out=(2.0, float("nan")))
    found = summary(progress=worse).all_deviations
    assert found == (
        "2 of 9 steps were skipped: their gradient was inf or nan",
        "the training loss rose from 2.0000 to 2.5000",
        "the held-out loss went from 2.0000 to nan",
    )
    assert summary(progress=replace(worse, last_loss=float("inf"))).all_deviations[1] == "the last training loss is inf"


def test_a_run_whose_rate_never_left_0_is_a_deviation():
    still = (RatePoint(what="start", step=0, rates=(0.0, 0.0)), RatePoint(what="end", step=1, rates=(0.0, 0.0)))
    told = "every step ran at learning rate 0, so nothing was learned"
    assert any(told in line for line in summary(rates=still).all_deviations)
    moved = (*still, RatePoint(what="end", step=2, rates=(0.0, 1e-5)))
    assert not any(told in line for each in (moved, ()) for line in summary(rates=each).all_deviations)


def test_batch_data_loss_and_rate_are_told_in_a_line_each():
    lines = printed(summary())
    told = {line.split()[0]: line[8:] for line in lines if line.startswith(("batch", "data", "loss", "rate"))}
    assert told == {
        "batch": "2 ranks × 2 micro × 4 accumulation = 16 sequences a step; 1,043 steps an epoch",
        "data": "1,843 tokens a step, 61.2% of them labels; 3.1% of the samples cut at 512 tokens",
        "loss": "2.8123 → 1.9321 in 50 steps; held-out 2.7904 → 2.1133; 312 tokens/s",
        "rate": "0 at step 0 (start); 2e-05 at step 3 (end of warmup); 4.13e-07 at step 50 (end)",
    }


def test_rates_that_differ_between_groups_are_all_told():
    lines = printed(summary(rates=(RatePoint(what="end", step=7, rates=(1e-5, 2e-5, 0.0, 1.0, 2.0)),)))
    assert "rate    1e-05, 2e-05, 0, 2 more at step 7 (end)" in lines


def test_decay_groups_have_their_element_counts():
    lines = printed(summary())
    assert "groups  0: weight decay 0.1, 134,479,872 elements in 211 tensors" in lines
    assert "        1: weight decay 0, 35,136 elements in 61 tensors" in lines


def test_the_dtype_of_every_kind_of_tensor_on_its_way():
    lines = printed(summary())
    bf16, fp32 = "bfloat16", "float32"
    assert section(lines, "dtype of") == [
        *("dtype of", "stored", "computed", "reduced", "accumulated", "updated", "saved"),
    ]
    assert section(lines[18:], "parameters") == ["parameters", bf16, bf16, "-", "-", fp32, bf16]
    assert section(lines[18:], "gradients") == ["gradients", fp32, bf16, bf16, fp32, "-", "-"]
    assert section(lines[18:], "master weights") == ["master weights", fp32, "-", "-", "-", fp32, "-"]
    assert section(lines, "optimizer state") == ["optimizer state", fp32, "-", "-", "-", fp32, "-"]
    assert section(lines, "buffers") == ["buffers", fp32, fp32, "-", "-", "-", "-"]


def test_kinds_of_tensor_that_a_run_has_not_got_have_no_row():
    fp32 = dtype_rows(smollm(dtype="float32"), EngineOptions(reduce_dtype="bfloat16"), saved=None)
    assert [row.kind for row in fp32] == ["parameters", "gradients", "optimizer state"]
    assert (fp32[0].updated, fp32[0].saved, fp32[1].reduced) == ("float32", "float32", "bfloat16")
    frozen = dtype_rows(smollm(frozen=("model.layers.3",)), EngineOptions(), saved="bfloat16")
    assert frozen[1].kind == "frozen parameters"
    assert (frozen[1].stored, frozen[1].updated, frozen[1].saved) == ("bfloat16", None, "bfloat16")


def test_sharded_parameters_lie_in_their_master_weights_between_steps():
    rows = dtype_rows(smollm(dtype="float32", frozen=("model.layers.3",)), EngineOptions(stage=3), saved=None)
    stored = {row.kind: row.stored for row in rows}
    assert (stored["parameters"], stored["frozen parameters"], stored["master weights"]) == (None, "float32", "float32")
    assert rows[0].computed == rows[0].saved == "float32"


def test_equal_cuts_of_different_blocks_are_one_row_with_elements_on_each_side():
    # A block lies as 4 attention matrices, gate, up, down, norms: 3,540,096 elements; its half is 576 into up_proj.
    rows = cut_rows(smollm(), EngineOptions(stage=2))
    assert [(r.pattern, r.left, r.right, r.count) for r in rows] == [
        ("model.embed_tokens.weight", 14_155_776, 14_155_776, 1),
        ("model.layers.{0..29}.mlp.up_proj.weight", 576, 884_160, 30),
        ("model.norm.weight", 288, 288, 1),
    ]
    lines = printed(summary())
    assert "        rank 0 | 1:        576 |    884,160  of model.layers.{0..29}.mlp.up_proj.weight" in lines


def test_blocks_that_differ_are_listed_apart_and_frozen_ones_are_not_cut():
    frozen = tuple(f"model.layers.{k}" for k in (1, 2, 7))
    rows = cut_rows(smollm(frozen=frozen), EngineOptions(stage=1))
    assert rows[1].pattern == "model.layers.{0,3..6,8..29}.mlp.up_proj.weight"
    assert rows[1].count == 27


def test_a_boundary_between_tensors_names_the_unit():
    specs = [
        ParamSpec(name=f"h.{k}.{w}", shape=(8,), dtype="float32", trainable=True, group=0, unit=f"h.{k}")
        for k in (0, 1)
        for w in "ab"
    ]
    (row,) = cut_rows(units_layout(specs, 2), EngineOptions())
    assert row == CutRow(left_rank=0, pattern="h.{0..1}", is_tensor=False, left=0, right=0, count=2)
    assert "cuts    rank 0 | 1: no tensor of h.{0..1}" in printed(summary(cuts=(row,)))


def test_a_stage_that_cuts_nothing_has_no_cuts():
    assert cut_rows(smollm(), EngineOptions(stage=0)) == ()
    assert not [line for line in printed(summary(stage=0)) if line.startswith("cuts")]


def test_lists_that_are_too_long_say_how_many_are_left_out():
    cuts = cut_rows(smollm(64), EngineOptions())
    groups = tuple(DecayGroup(index=k, weight_decay=0.0, tensors=1, elements=k) for k in range(9))
    lines = printed(summary(cuts=cuts, groups=groups))
    assert len(lines) <= 40
    assert "        2: weight decay 0, 2 elements in 1 tensors; and 6 more" in lines
    last = next(line for line in lines if "; and" in line and "rank 3 | 4" in line)
    assert last.endswith(f"; and {len(cuts) - 4} more")


@pytest.mark.parametrize("count", [1, 4, 12, 200])
def test_many_and_long_deviations_take_the_room_of_the_lists_but_not_more(count):
    long = "a sentence that says what was asked for, what was done, and what to do about it, at length " * 2
    run = summary(deviations=tuple(f"{k}: {long}" for k in range(count)), notes=("a note",))
    lines = printed(run)
    assert len(lines) <= 40
    assert lines[1].startswith("! 0: a sentence")
    assert any(line.startswith("MiB on rank 0") for line in lines)
    assert any(line.startswith("cuts") for line in lines)
    if count > 4:
        shown = sum(line.startswith("!") for line in lines)
        assert f"  and {count + 1 - shown} more, in the summary's JSON" in lines


def test_one_endless_deviation_keeps_its_beginning():
    lines = printed(summary(deviations=("word " * 2000,)))
    assert len(lines) <= 40
    assert lines[1].startswith("! word word")


def test_sizes_of_the_largest_models_fit():
    run = summary()
    huge = tuple(replace(row, planned=row.planned * 400, measured=row.measured * 400) for row in run.memory.rows)
    account = replace(run.memory, rows=huge, process=10**12, peak=10**12)
    lines = printed(replace(run, memory=account, largest=replace(account, rank=1023)))
    assert section(lines, "parameters ")[1:4] == ["102,626.81", "102,626.81", "= 107,612,006,400"]
    assert len(lines) <= 40


def test_an_optimizer_without_a_plan_is_shown_as_unknown_and_told():
    measured = {"parameters": 8, "optimizer exp_avg": 16, "communication": 4}
    account = memory_account(0, planned={"parameters": 8, "communication": 4}, measured=measured, process=99, peak=99)
    assert [(row.category, row.planned) for row in account.rows] == [
        ("parameters", 8),
        ("optimizer exp_avg", None),
        ("communication", 4),
    ]
    assert (account.measured, account.remainder) == (28, 71)
    run = replace(summary(), memory=account, largest=account)
    assert run.all_deviations == ("rank 0 holds other bytes than planned: optimizer exp_avg not planned",)
    assert section(printed(run), "optimizer exp_avg")[1:] == ["unknown", "0.00", "16"]


def test_a_category_of_one_side_alone_is_a_difference():
    account = memory_account(0, planned={"a": 5}, measured={"b": 3}, process=9, peak=9)
    assert [(row.category, row.difference) for row in account.rows] == [("a", -5), ("b", 3)]


def test_the_json_has_every_value_and_is_strict():
    run = summary(progress=replace(summary().progress, last_loss=float("nan")), notes=("a note",))
    data = json.loads(run.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert data["version"] == 1
    assert data["memory"]["rows"][0] == {"category": "parameters", "planned": 269_030_016, "measured": 269_030_016}
    assert data["progress"]["last_loss"] == "nan"
    assert data["all_deviations"] == ["the last training loss is nan"]
    assert data["cuts"][1]["pattern"] == "model.layers.{0..29}.mlp.up_proj.weight"
    assert data["environment"]["versions"][0] == ["python", "3.11.9"]


def test_the_report_loads_neither_torch_nor_numpy():
    source = Path(shardglass.report.__file__).parents[2]
    code = f"import sys; sys.path.insert(0, {str(source)!r}); import shardglass.report; "
    code += "sys.exit(3 if {'torch', 'numpy'} & set(sys.modules) else 0)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

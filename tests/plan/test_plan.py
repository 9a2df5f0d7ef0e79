"""The plan as a value: DeepSpeed's recorded partition of Qwen1.5-7B, a real run's bytes, JSON, fit and host."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models import tokens
from ranks import run_ranks
from transformers import AutoConfig, AutoModelForCausalLM

from shardglass.engine.shard import shard
from shardglass.errors import UsageError
from shardglass.hf.meta import facts_of, group_parameters
from shardglass.hf.model_config import FoundConfig, find_config
from shardglass.hf.planning import PlanFlags, plan_from_flags
from shardglass.layout import units_layout
from shardglass.options import EngineOptions
from shardglass.plan.host import FILE_BYTES
from shardglass.plan.kinds import OptimizerKind
from shardglass.plan.plan import Plan, make_plan
from shardglass.plan.setup import GIB, Setup, parse_size
from shardglass.plan.stages import BACKWARD, LOADING, LOSS, MOMENTS, PROCESS_BYTES, STEP

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "deepspeed" / "qwen15_7b.json").read_text())


@pytest.fixture(scope="module")
def qwen():
    return facts_of(find_config("qwen1.5-7b"), dtype="bfloat16")


@pytest.fixture(scope="module")
def smollm():
    return facts_of(find_config("smollm2-135m"), dtype="bfloat16")


# ---- the partition ----


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("num_groups", "recorded"), [(1, "one_group"), (2, "hf_two_groups")])
def test_the_partition_of_qwen_7b_is_the_one_deepspeed_made(world_size, num_groups, recorded):
    facts = facts_of(find_config("qwen1.5-7b"), dtype="bfloat16", num_groups=num_groups)
    plan = make_plan(facts, Setup(world_size=world_size, scheme="deepspeed-flat", num_groups=num_groups))
    assert (plan.model.num_tensors, plan.model.numel) == (GOLDEN["n_params"], GOLDEN["total_numel"])
    groups = GOLDEN["layouts"][f"{recorded}/world{world_size}/default"]["groups"]
    expected_parts, expected_cuts = [], []
    for group in groups:
        part = f"group {group['group']}"
        for rank in group["ranks"]:
            numbers = (rank["held_numel"], rank["padding"], rank["n_in_partition"], rank["n_not_in_partition"])
            expected_parts.append((part, rank["rank"], *numbers))
        for cut in group["cuts"]:
            index = cut.get("index_in_model")
            behind = cut.get("first_on_right", cut["param"])
            sides = cut.get("on_left", 0), cut.get("on_right", 0)
            ranks = tuple(cut["between_ranks"])
            expected_cuts.append((part, ranks, cut["param"], index, cut["index_in_flat_order"], *sides, behind))
    rows = [(p.part, p.rank, p.numel, p.padding, p.num_in, p.num_not_in) for p in plan.partition.parts]
    assert rows == expected_parts
    cuts = [
        (c.part, (c.left_rank, c.right_rank), c.tensor, c.index, c.index_in_part, c.left, c.right, c.after)
        for c in plan.partition.cuts
    ]
    assert cuts == expected_cuts


def test_the_cut_of_one_group_on_two_ranks_has_its_row_and_column():
    facts = facts_of(find_config("qwen1.5-7b"), dtype="bfloat16", num_groups=1)
    (cut,) = make_plan(facts, Setup(world_size=2, scheme="deepspeed-flat", num_groups=1)).partition.cuts
    assert (cut.tensor, cut.index) == ("model.layers.16.self_attn.q_proj.weight", 193)
    assert (cut.row, cut.column) == (0, 2048)  # 2,048 elements of a matrix of 4,096 columns lie before it
    assert cut.left_percent == pytest.approx(100 * 2048 / 16777216)


def test_every_scheme_holds_every_element_once_or_on_every_rank(smollm):
    for scheme in ("units", "deepspeed-flat", "deepspeed-param", "dim0"):
        partition = make_plan(smollm, Setup(world_size=3, scheme=scheme)).partition
        assert sum(row.numel for row in partition.parts) == smollm.numel
    copies = make_plan(smollm, Setup(world_size=3, scheme="ddp")).partition
    assert [row.numel for row in copies.parts] == [smollm.numel] * 3
    assert copies.cuts == ()


def test_of_many_ranks_the_first_and_the_last_have_rows(smollm):
    partition = make_plan(smollm, Setup(world_size=1000)).partition
    assert [row.rank for row in partition.parts] == [*range(63), 999]
    assert partition.num_ranks_left_out == 936
    assert len(partition.cuts) + partition.num_cuts_left_out == 63 * 32  # 32 units, each cut behind 63 ranks


# ---- a real run ----


CONFIG = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}


def found(kind, *, tied):
    config = AutoConfig.for_model(kind, **CONFIG, tie_word_embeddings=tied)
    return FoundConfig(name=kind, source="file", config=config)


def differences(rank, world_size):
    """(case, planned, measured) wherever a plan is not what its run holds, and the number of runs."""
    wrong, count = [], 0
    for kind, tied, dtype, accumulation in (
        ("qwen2", False, "bfloat16", 1),
        ("llama", True, "bfloat16", 3),
        ("qwen2", True, "float32", 2),
    ):
        facts = facts_of(found(kind, tied=tied), dtype=dtype)
        for stage in (0, 2, 3):
            setup = Setup(
                world_size=world_size, stage=stage, dtype=dtype, accumulation=accumulation, device="cpu", length=6
            )
            plan = make_plan(facts, setup)
            handle = run_of(found(kind, tied=tied).config, setup, rank)
            count += 1
            case = f"{kind}, stage {stage}, {dtype}, accumulation {accumulation}"
            if handle.layout != units_layout(facts.params, world_size):
                wrong.append((case, "another layout", None))
            planned = {category.name: category.bytes for category in plan.stage.engine}
            if rank == plan.stage.rank and planned != handle.memory():
                wrong.append((case, planned, handle.memory()))
            handle.close()
    return wrong, count


def run_of(config, setup, rank):
    """Two steps of the planned run, as a Trainer would take them; returns the handle."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    groups = group_parameters(model, setup.num_groups).param_groups
    optimizer = torch.optim.AdamW([{"params": group["params"]} for group in groups], lr=1e-3, fused=True)
    handle = shard(model, optimizer, options=EngineOptions(stage=setup.stage, param_dtype=setup.dtype))
    for step in range(2):
        for micro in range(setup.accumulation):
            local = not handle.options.rules.shards_grads and micro < setup.accumulation - 1
            with handle.no_sync() if local else nullcontext():
                ids = tokens(step, micro, rank)
                model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return handle


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_plan_from_a_config_is_what_the_run_of_it_holds_to_the_byte(world_size):
    for rank, (wrong, count) in enumerate(run_ranks(world_size, differences, timeout_s=240.0)):
        assert wrong == [], f"rank {rank}"
        assert count == 9


# ---- JSON ----


def test_a_plan_comes_back_from_its_json_equal(smollm):
    for setup in (Setup(), Setup(world_size=4, memory=24 * GIB, scheme="deepspeed-flat", host_free=GIB)):
        plan = make_plan(smollm, setup, notes=("said once",))
        assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "version 1, and version 2 is understood"),
        ({"verdict": None}, "plan.verdict is None"),
        ({"stages": 3}, "plan.stages must be an array"),
        ({"more": 1}, "plan.more is unknown"),
    ],
)
def test_a_file_that_is_no_plan_of_this_version_is_told_in_a_line(smollm, change, message):
    tree = json.loads(make_plan(smollm, Setup()).to_json())
    with pytest.raises(UsageError, match=message):
        Plan.from_json(json.dumps(tree | change))
    with pytest.raises(UsageError, match="not JSON"):
        Plan.from_json("{")


# ---- memory ----


def test_moments_add_up_what_is_alive_at_them(qwen):
    setup = Setup(world_size=2, micro_batch=2, length=512)
    stage = make_plan(qwen, setup).stage
    by_name = {term.name: term for term in stage.terms}
    state = stage.engine_bytes + qwen.buffer_bytes
    assert stage.at(STEP) == state  # a fused kernel needs nothing more
    kept = by_name["activations of blocks"].bytes
    assert stage.at(LOSS) == state + kept + by_name["activations of the head"].bytes + by_name["logits and loss"].bytes
    in_flight = by_name["a tensor's gradient"].bytes
    assert in_flight == 151936 * 4096 * 2
    assert stage.at(BACKWARD) == state + kept + by_name["gradients of activations"].bytes + in_flight
    assert stage.highest == max(MOMENTS, key=stage.at)
    assert stage.total == stage.at(stage.highest) + stage.reserve
    assert stage.binding.bytes == max(t.bytes for t in stage.terms if stage.highest in t.moments)


def test_loading_an_fp32_checkpoint_for_bf16_starts_with_all_of_it(qwen):
    fp32 = replace(qwen, stored_dtype="float32")
    stage = make_plan(fp32, Setup(world_size=8)).stage
    largest_unit = 151936 * 4096 + 4096  # the head and the norm before it
    assert stage.at(LOADING) - qwen.buffer_bytes == 4 * qwen.numel + largest_unit * (4 + 2)
    assert make_plan(qwen, Setup(world_size=8)).stage.at(LOADING) < stage.at(LOADING)


def test_a_tied_weight_has_two_gradients_at_the_end_of_backward(smollm):
    tied = {t.name: t.bytes for t in make_plan(smollm, Setup()).stage.terms}
    loose = {t.name: t.bytes for t in make_plan(replace(smollm, tied=()), Setup()).stage.terms}
    assert tied["a tensor's gradient"] == 2 * loose["a tensor's gradient"] == 2 * 49152 * 576 * 2


def test_stages_cut_what_their_rows_say(qwen):
    stages = {plan.stage: plan for plan in make_plan(qwen, Setup(world_size=8)).stages}
    sizes = {number: {c.name: c.bytes for c in plan.engine} for number, plan in stages.items()}
    assert sizes[0]["master weights"] == 8 * sizes[1]["master weights"]
    assert sizes[3]["parameters"] == 0  # between uses there are the master shards alone
    assert sizes[3]["master weights"] == sizes[2]["master weights"]
    gathered = next(term.bytes for term in stages[3].terms if term.name == "gathered units")
    block = (4 * 4096 * 4096 + 3 * 4096 * 11008 + 3 * 4096 + 2 * 4096) * 2
    assert gathered == pytest.approx(151936 * 4096 * 2 + block, rel=1e-4)  # the embedding and the first block


def test_the_step_without_a_fused_kernel_makes_temporaries(smollm):
    loose = OptimizerKind(name="AdamW", groups=({"fused": False},) * 2)
    for device, expected in (("cuda", smollm.numel * 4), ("cpu", 2 * 49152 * 576 * 4)):
        stage = make_plan(smollm, Setup(stage=0, optimizer=loose, device=device)).stage
        made = next(term.bytes for term in stage.terms if term.name == "step temporaries")
        assert made == pytest.approx(expected, rel=1e-4)


def test_gradients_kept_in_bf16_are_cast_for_the_step(smollm):
    stage = make_plan(smollm, Setup(world_size=2, accum_dtype="bfloat16")).stage
    made = next(term.bytes for term in stage.terms if term.name == "step temporaries")
    assert made == pytest.approx(smollm.numel / 2 * 4, rel=1e-3)


def test_a_model_of_another_form_says_that_activations_are_missing(smollm):
    plan = make_plan(replace(smollm, geometry=None), Setup())
    assert not plan.stage.activations_known
    assert "no closed form" in plan.notes[0]
    assert not [t for t in plan.stage.terms if "activations" in t.name or "logits" in t.name]


def test_the_reserve_is_an_assumption_unless_it_is_given(smollm):
    plan = make_plan(smollm, Setup(reserve=0))
    assert plan.stage.reserve == 0
    assert not any("reserve" in text for text in plan.assumptions)
    assert any("assumed, not measured on a GPU" in text for text in make_plan(smollm, Setup()).assumptions)


# ---- machine and disk ----


def test_ram_of_a_machine_while_loading_and_saving(qwen):
    host = make_plan(qwen, Setup(world_size=16, ranks_per_node=8)).host
    assert host.ranks == 8
    assert host.loading == 8 * (PROCESS_BYTES + qwen.numel * 2)
    at_stage_3 = make_plan(qwen, Setup(world_size=16, ranks_per_node=8, stage=3)).host
    assert at_stage_3.loading == 8 * PROCESS_BYTES + qwen.numel * 2  # one process at most reads all of it
    assert host.training == host.processes == 8 * PROCESS_BYTES
    assert host.saving == host.processes + qwen.numel * 2 + 8 * FILE_BYTES * 2
    assert host.fits is None
    assert make_plan(qwen, Setup(world_size=16, host_free=100 * GIB)).host.fits is False


def test_on_the_cpu_the_machine_holds_every_rank(smollm):
    plan = make_plan(smollm, Setup(world_size=2, device="cpu", ranks_per_node=2, host_free=64 * GIB))
    assert plan.host.training == 2 * plan.stage.total
    assert plan.verdict.startswith("fits: stage 2 with 2 ranks on one machine")
    small = make_plan(smollm, Setup(world_size=2, device="cpu", ranks_per_node=2, host_free=GIB))
    assert small.verdict.startswith("does not fit")


def test_bytes_of_a_checkpoint(qwen):
    disk = make_plan(qwen, Setup()).checkpoint
    assert (disk.weights, disk.master) == (qwen.numel * 2, qwen.numel * 4)
    assert disk.states == 2 * qwen.numel * 4 + 387 * 4
    assert make_plan(qwen, Setup(optimizer=OptimizerKind(name="SGD"))).checkpoint.states == 0


# ---- what fits ----


def needed(facts, setup):
    return make_plan(facts, replace(setup, memory=None)).stage.total


def test_what_is_said_to_fit_fits_and_one_more_does_not(smollm):
    setup = Setup(memory=6 * GIB, length=1024)
    fit = make_plan(smollm, setup).fit
    tried = 0
    for row in fit.rows:
        for largest in row.largest:
            at = replace(setup, world_size=row.world_size, stage=largest.stage)
            if largest.micro_batch:
                assert needed(smollm, replace(at, micro_batch=largest.micro_batch)) <= fit.memory
            assert needed(smollm, replace(at, micro_batch=largest.micro_batch + 1)) > fit.memory
            tried += 1
    assert tried >= 16


def test_the_smallest_run_is_found_without_a_world_size():
    plan = plan_from_flags(PlanFlags(model="qwen1.5-7b", gpu="80GB", host_ram="2TB"))
    assert plan.verdict.startswith("fits: stage 3 on 2 GPUs of 80.00 GiB, micro-batch 1")
    facts = facts_of(find_config("qwen1.5-7b"), dtype="bfloat16")
    assert needed(facts, Setup(world_size=2, stage=3)) <= 80 * GIB
    for stage in (0, 1, 2):
        assert needed(facts, Setup(world_size=2, stage=stage)) > 80 * GIB
    assert needed(facts, Setup(world_size=1, stage=3)) > 80 * GIB


def test_options_name_gradient_checkpointing_if_it_needs_fewer_gpus(qwen):
    fit = make_plan(qwen, Setup(world_size=2, memory=24 * GIB)).fit
    assert not fit.fits
    for option in fit.options:
        setup = Setup(world_size=option.world_size, stage=option.stage, recomputes=option.recomputes)
        assert needed(qwen, setup) <= 24 * GIB
    assert [option.recomputes for option in fit.options] == [False, True]
    assert fit.options[1].world_size < fit.options[0].world_size


def test_nothing_fits_in_a_memory_below_the_reserve(smollm):
    plan = make_plan(smollm, Setup(world_size=4, memory=GIB // 2))
    assert plan.verdict.startswith("does not fit: stage 2 on 4 GPUs of 0.50 GiB")
    assert plan.fit.options == ()


# ---- values ----


def test_sizes_are_read_as_gpu_makers_write_them():
    assert parse_size("24GB", "--gpu") == parse_size("24 GiB", "--gpu") == parse_size("24g", "--gpu") == 24 * GIB
    assert parse_size("81559MiB", "--gpu") == 81559 << 20
    with pytest.raises(UsageError, match=r"--gpu 24: that is 24 bytes; say the unit, as in 24GB"):
        parse_size("24", "--gpu")
    assert parse_size("1.5TB", "--gpu") == 1536 * GIB
    for text in ("24XB", "", "-3GB", "0GB", "GB", "1e3GB"):
        with pytest.raises(UsageError, match="must be a size above 0"):
            parse_size(text, "--gpu")


def test_a_setup_names_all_its_faults_at_once():
    with pytest.raises(UsageError) as caught:
        Setup(world_size=0, stage=4, dtype="int8", micro_batch=0, attention="flex")
    text = str(caught.value)
    for part in ("world size is 0", "stage is 4", "dtype is int8", "micro-batch is 0", "attention is flex"):
        assert part in text

"""Looking at live DeepSpeed engines, ZeRO 1, 2 and 3, on two processes over gloo.

Values are held against plain PyTorch on one process, attributes against DeepSpeed's own tensors.
"""

import importlib.util
import logging
import os
import warnings

import pytest
import torch
from looking import (
    assert_trained_as,
    assert_where_agrees,
    gradients_of,
    kinds,
    states_of,
    steady_adamw,
    steady_look,
    two_groups,
)
from models import tiny_causal_lm, tokens
from oracle import Oracle, one_group
from ranks import run_ranks
from sharded import assert_equal
from tolerances import ADAM_FP32, ORDER_FP32, TRAJECTORY_BF16

from shardglass import UsageError, look, where

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed; `pip install 'shardglass[deepspeed]'`, with g++ and ninja, runs these tests",
)

EMBED, UP, NORM = "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"


def engine_of(model, groups, config):
    """A DeepSpeedEngine over plain AdamW; the warnings of DeepSpeed's own calls are not ours."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.simplefilter("ignore")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo")
    base = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
    optimizer = steady_adamw(trained(groups)(list(model.named_parameters())))
    return deepspeed.initialize(model=model, optimizer=optimizer, config={**base, **config})[0]


def loss_of(*key):
    return lambda model: model(input_ids=tokens(*key), labels=tokens(*key)).loss


def model_of(*, tied=False, frozen=()):
    model = tiny_causal_lm(tied=tied)
    for name, param in model.named_parameters():
        if name in frozen:
            param.requires_grad_(False)
    return model


def trained(groups):
    """The groups of what is trained."""
    return lambda named: groups([(name, p) for name, p in named if p.requires_grad])


def zero(stage, **options):
    return {"zero_optimization": {"stage": stage, **options}}


FP32 = {
    "zero-1": (zero(1), one_group, {}),
    "zero-1 accumulating": ({**zero(1), "gradient_accumulation_steps": 2}, two_groups, {"tied": True}),
    "zero-2": (zero(2), two_groups, {"tied": True, "frozen": (NORM,)}),
    "zero-2 accumulating": ({**zero(2), "gradient_accumulation_steps": 2}, one_group, {}),
    "zero-2 round robin": (zero(2, round_robin_gradients=True), two_groups, {}),
    "zero-2 aligned": (zero(2, parameter_alignment=True), two_groups, {"frozen": (UP,)}),
    "zero-3": (zero(3), two_groups, {"tied": True, "frozen": (NORM,)}),
    "zero-3 sub-groups": (zero(3, sub_group_size=4000, stage3_param_persistence_threshold=0), two_groups, {}),
}


def trained_in_fp32(rank, world_size, case):
    config, groups, kind = FP32[case]
    rounds = config.get("gradient_accumulation_steps", 1)
    oracle = Oracle(model_of(**kind), world_size, optimizers=steady_adamw, groups=trained(groups))
    engine = engine_of(model_of(**kind), groups, config)
    snapshot = steady_look(engine)
    assert (snapshot.engine, snapshot.stage) == ("deepspeed", config["zero_optimization"]["stage"])
    assert (snapshot.rank, snapshot.world_size, snapshot.step) == (rank, world_size, 0)
    assert_where_agrees(engine, None, snapshot, [EMBED, UP, NORM])
    for step in range(2):
        for micro in range(rounds):
            losses = [loss_of(step, micro, r) for r in range(world_size)]
            oracle.backward(lambda model, loss=loss: loss(model) / rounds for loss in losses)
            engine.backward(losses[rank](engine))
            steady_look(engine)
            if micro == rounds - 1 and step == 0:
                assert_equal(gradients_of(engine, None, oracle), oracle.gradients, ORDER_FP32)
            engine.step()
            steady_look(engine)
        oracle.step()
    assert steady_look(engine, engine.optimizer).step == 2
    assert_trained_as(engine, None, oracle, master="master", tolerance=ADAM_FP32)
    assert_trained_as(engine.module, engine.optimizer, oracle, master="master", tolerance=ADAM_FP32)
    whole = {name: value for name, value in states_of(engine, None, oracle, master="param").items() if "master" in name}
    assert_equal(whole, {key: value for key, value in oracle.states().items() if key in whole}, ADAM_FP32)


@pytest.mark.parametrize("case", FP32)
def test_masters_states_and_gradients_are_those_of_plain_pytorch(case):
    run_ranks(2, trained_in_fp32, case, timeout_s=180)


BF16 = {
    "zero-1, gradients summed in fp32": {**zero(1), "data_types": {"grad_accum_dtype": "fp32"}},
    "zero-2": zero(2),
    "zero-3": zero(3, stage3_param_persistence_threshold=100),
}


def trained_in_bf16(rank, world_size, case):
    def rounded():
        model = model_of()
        for p in model.parameters():
            p.data = p.data.bfloat16().float()
        return model

    oracle = Oracle(rounded(), world_size, optimizers=steady_adamw, groups=two_groups, param_dtype=torch.bfloat16)
    engine = engine_of(rounded(), two_groups, {**BF16[case], "bf16": {"enabled": True}})
    losses = [loss_of(0, r) for r in range(world_size)]
    oracle.backward(losses)
    engine.backward(losses[rank](engine))
    snapshot = steady_look(engine)
    assert {h.dtype for h in snapshot.held if h.kind == "param"} == {"bfloat16"}
    assert {h.dtype for h in snapshot.held if h.kind == "master"} == {"float32"}
    assert_equal(gradients_of(engine, None, oracle), oracle.gradients, TRAJECTORY_BF16)
    engine.step()
    oracle.step()
    steady_look(engine)
    assert_trained_as(engine, None, oracle, master="master", tolerance=TRAJECTORY_BF16)


@pytest.mark.parametrize("case", BF16)
def test_bf16_engines_keep_fp32_masters_and_are_read_alike(case):
    run_ranks(2, trained_in_bf16, case, timeout_s=180)


# ---- what a person sees in the debugger ----


def stage_2_table(rank, world_size):
    engine = engine_of(model_of(), two_groups, {**zero(2), "bf16": {"enabled": True}})
    optimizer = engine.optimizer
    engine.backward(loss_of(rank)(engine))
    snapshot = look(engine, optimizer)
    rows = {row.attribute: row for row in snapshot.attributes}
    for g in range(2):
        group_is_explained(snapshot, rows, optimizer, g)
    assert rows["optimizer.bit16_groups"].form == "list of 2 lists"
    assert rows["optimizer.bit16_groups[0]"].form == "list of 16 parameters"
    assert "not groups" in rows["optimizer.parallel_partitioned_bit16_groups[0]"].meaning
    assert all(row.meaning for row in rows.values())
    assert kinds(snapshot.model_chain) == ["DeepSpeedEngine", "Qwen2ForCausalLM"]
    assert kinds(snapshot.optimizer_chain) == ["DeepSpeed ZeRO-1/2", "AdamW"]
    assert [link.where for link in look(engine).optimizer_chain] == ["model.optimizer", "model.optimizer.optimizer"]
    assert [(g.weight_decay, g.num_params) for g in snapshot.groups] == [(0.1, 16), (0.0, 11)]
    param = where(engine, UP).holdings[0]
    assert param.attribute == f"model.optimizer.bit16_groups_flat[0][{param.offset}:{param.offset + 56 * 32}]"
    return repr(snapshot)


def group_is_explained(snapshot, rows, optimizer, g):
    """Every row about one group against DeepSpeed's own tensors and lists."""
    flat = optimizer.bit16_groups_flat[g]
    label, size = f"optimizer.bit16_groups_flat[{g}]", flat.numel() // snapshot.world_size
    row = rows[label]
    assert (row.view, row.nbytes, row.shape) == (f"{label}[0:{flat.numel()}]", flat.numel() * 2, tuple(flat.shape))
    for r, part in enumerate(optimizer.parallel_partitioned_bit16_groups[g]):
        row = rows[f"optimizer.parallel_partitioned_bit16_groups[{g}][{r}]"]
        assert row.view == f"{label}[{r * size}:{(r + 1) * size}]"
        assert part.data_ptr() == flat.data_ptr() + r * size * 2
        assert ("this rank" in row.meaning) == (r == snapshot.rank)
    master = f"optimizer.single_partition_of_fp32_groups[{g}]"
    row = rows[master]
    assert (row.view, row.dtype, row.nbytes) == (f"{master}[0:{size}]", "float32", 4 * size)
    assert rows[f"optimizer.optimizer.param_groups[{g}]['params']"].view == master
    assert optimizer.optimizer.param_groups[g]["params"][0] is optimizer.single_partition_of_fp32_groups[g]
    for word in ("params_in_partition", "params_not_in_partition"):
        names = tuple(optimizer.param_names[p] for p in getattr(optimizer, word)[g])
        assert rows[f"optimizer.{word}[{g}]"].names == names == getattr(snapshot, word)[g]
    assert rows[f"optimizer.first_offset[{g}]"].number == optimizer.first_offset[g]
    assert rows[f"optimizer.partition_size[{g}]"].number == optimizer.partition_size[g] == size
    assert rows[f"optimizer.averaged_gradients[{g}]"].nbytes == 2 * size
    params = {row.name: row for row in snapshot.params}
    for p in optimizer.bit16_groups[g]:
        row, start = params[optimizer.param_names[p]], (p.data_ptr() - flat.data_ptr()) // 2
        assert str(row.data) == f"{label}[{start}:{start + p.numel()}]"
        assert row.grad is None


def test_every_attribute_of_a_zero_2_optimizer_is_explained_and_traced_to_its_memory():
    first, _ = run_ranks(2, stage_2_table, timeout_s=120)
    cut = "last cut: layers.1.self_attn.q_proj.bias (16 of 32 here)"
    assert first == f"rank 0 of 2 · 23.4 of 46.8 kB bf16 · 14 of 27 tensors, {cut}"


def stage_3_table(rank, world_size):
    config = zero(3, stage3_param_persistence_threshold=0, sub_group_size=4000)
    engine = engine_of(model_of(frozen=(NORM,)), two_groups, {**config, "bf16": {"enabled": True}})
    optimizer = engine.optimizer
    snapshot = look(engine, optimizer)
    rows = {row.attribute: row for row in snapshot.attributes}
    params = {row.name: row for row in snapshot.params}
    assert len(optimizer.fp16_groups) > 2
    for p, name in optimizer.param_names.items():
        row = params[name]
        assert (p.numel(), row.seen, row.status) == (0, (0,), "NOT_AVAILABLE")
        assert row.shape == tuple(p.ds_shape)
        assert row.data is None
        assert row.shard.stop - row.shard.start == p.ds_tensor.numel()
    assert params[NORM].shard.of == f"{NORM}.ds_tensor"  # frozen: outside the sub-groups
    assert params[EMBED].shard.of == "optimizer.lp_param_buffer"
    buffer = optimizer.lp_param_buffer
    for s, flat in enumerate(optimizer.fp16_partitioned_groups_flat):
        start = (flat.data_ptr() - buffer.data_ptr()) // 2
        row = rows[f"optimizer.fp16_partitioned_groups_flat[{s}]"]
        assert row.view == f"optimizer.lp_param_buffer[{start}:{start + flat.numel()}]"
        own = rows[f"optimizer.fp32_partitioned_groups_flat[{s}]"]
        assert own.view == f"optimizer.fp32_partitioned_groups_flat[{s}][0:{flat.numel()}]"
        names = tuple(optimizer.param_names[p] for p in optimizer.fp16_groups[s])
        assert rows[f"optimizer.fp16_groups[{s}]"].names == names
        assert rows[f"optimizer.sub_group_to_group_id[{s}]"].number == optimizer.sub_group_to_group_id[s]
    assert rows[f"{EMBED}.ds_numel"].number == 97 * 32
    assert rows[f"{EMBED}.data"].nbytes == 0
    assert "numel() is 0" in rows[f"{EMBED}.data"].meaning
    assert rows[f"{EMBED}.ds_status"].form == "NOT_AVAILABLE"
    assert rows[f"{EMBED}.ds_tensor"].shape == (97 * 32 // 2,)
    found = where(engine, EMBED)
    assert [(h.kind, h.ranks_text, h.start, h.stop) for h in found.holdings[:2]] == [
        ("param", "rank 0", 0, 1552),
        ("param", "rank 1", 1552, 3104),
    ]
    assert "param.shape is (0,) here: NOT_AVAILABLE" in repr(found)
    engine.backward(loss_of(rank)(engine))
    during = look(engine, optimizer)
    change = [str(c) for c in snapshot.diff(during) if "grad" in c.where]
    assert any(line.startswith("held.group 0, sub-group 0/bfloat16/trainable.grad: absent") for line in change)


def test_zero_3_shows_why_numel_is_0_and_where_the_total_comes_from():
    run_ranks(2, stage_3_table, timeout_s=120)


def tampered(rank, world_size):
    engine = engine_of(model_of(), two_groups, zero(2))
    optimizer = engine.optimizer
    weight = engine.module.get_parameter(UP)
    kept, weight.data = weight.data, weight.data.clone()
    moved = [str(fault) for fault in look(engine, optimizer).check()]
    weight.data = kept
    removed = optimizer.params_in_partition[0].pop()
    optimizer.first_offset[0] += 1
    lists = [str(fault) for fault in look(engine, optimizer).check()]
    optimizer.params_in_partition[0].append(removed)
    optimizer.first_offset[0] -= 1
    kept = optimizer.single_partition_of_fp32_groups[0]
    optimizer.single_partition_of_fp32_groups[0] = kept.detach()[:-2]
    short = [str(fault) for fault in look(engine, optimizer).check()]
    optimizer.single_partition_of_fp32_groups[0] = kept
    assert look(engine, optimizer).check() == ()
    with pytest.raises(UsageError, match=f"did you mean '{UP}'"):
        where(engine, UP[:-1])
    return moved, lists, short


def test_a_deepspeed_run_that_is_not_laid_out_as_shown_is_named():
    moved, lists, short = run_ranks(2, tampered, timeout_s=120)[0]
    assert [line.partition(" →")[0] for line in moved] == [
        f"params.{UP}.data: begins at optimizer.bit16_groups_flat[0][7968]"
    ]
    assert sorted(line.partition(":")[0] for line in lists) == [
        "optimizer.first_offset[0]",
        "optimizer.params_in_partition[0]",
    ]
    assert [line.partition(" of model")[0] for line in short] == [
        "optimizer.single_partition_of_fp32_groups[0]: master"
    ]

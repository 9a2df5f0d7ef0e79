"""Looking at the native engine: it is found from model or optimizer alone, and shows what the handle knows."""

import pytest
import torch
from looking import assert_where_agrees, kinds, steady_look, two_groups
from models import Perceptron, tiny_causal_lm, tokens
from ranks import run_alone, run_ranks
from sharded import make, squared
from torch import nn

from shardglass import UsageError, look, shard, state_of, where
from shardglass.engine.units import build_units

UP = "model.layers.0.mlp.up_proj.weight"


def through_a_step(rank, world_size, stage, dtype):
    model = tiny_causal_lm(tied=True)
    model.model.embed_tokens.weight.requires_grad_(False)
    handle, optimizer = make(model, stage=stage, groups=two_groups, param_dtype=dtype)
    before = steady_look(model, optimizer)
    with handle.no_sync():
        model(input_ids=tokens(0, rank), labels=tokens(0, rank)).loss.backward()
    steady_look(model, optimizer)
    model(input_ids=tokens(rank), labels=tokens(rank)).loss.backward()
    during = steady_look(model, optimizer)
    optimizer.step()
    after = steady_look(model, optimizer)
    steady_look(model)
    assert (after.engine, after.stage, after.rank, after.world_size) == ("shardglass", stage, rank, world_size)
    assert [before.step, during.step, after.step] == [0, 0, 1]
    assert {row.category: row.nbytes for row in after.memory} == handle.memory()
    assert after.layout == handle.layout
    assert after.params_in_partition == handle.params_in_partition
    assert after.params_not_in_partition == handle.params_not_in_partition
    assert_where_agrees(model, optimizer, after, [UP, "model.norm.weight", "model.embed_tokens.weight"])
    tied = next(row for row in after.params if row.name == "model.embed_tokens.weight")
    assert tied.aliases == ("lm_head.weight",)
    assert not tied.trainable
    gone = {h.kind for h in during.held} - {h.kind for h in after.held}
    new = {h.kind for h in after.held} - {h.kind for h in before.held}
    assert (gone, new) == ({"grad"}, {"exp_avg", "exp_avg_sq"})
    for name in (UP, "lm_head.weight"):
        whole, expected = state_of(model, name), handle.state_of(after.where(name).name)
        assert whole.keys() == expected.keys()
        assert all(torch.equal(whole[kind], expected[kind]) for kind in whole)
    handle.close()
    closed = look(model, optimizer)
    assert closed.engine == "none"
    assert closed.check() == ()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_moment_of_a_step_is_as_the_layout_says(world_size, stage):
    run_ranks(world_size, through_a_step, stage, "bfloat16" if stage == 2 else "float32")


def of_stage_3(rank, world_size):
    model = tiny_causal_lm()
    model.model.embed_tokens.weight.requires_grad_(False)
    handle, optimizer = make(model, stage=3, groups=two_groups, param_dtype="bfloat16")
    freed = steady_look(model, optimizer)
    model(input_ids=tokens(rank), labels=tokens(rank))  # the head stays whole for its backward
    one_unit = steady_look(model, optimizer)
    with handle.gathered():
        everything = steady_look(model, optimizer)
        assert_where_agrees(model, optimizer, everything, [UP, "model.embed_tokens.weight"])
    assert [row.status for row in freed.params] == ["freed"] * len(freed.params)
    assert {row.name for row in one_unit.params if row.status == "whole"} == {"model.norm.weight", "lm_head.weight"}
    assert [row.status for row in everything.params] == ["whole"] * len(freed.params)
    kept = [(h.attribute, h.cut) for h in freed.held if h.kind == "param"]
    assert kept == [("handle.buffers[0].kept", True)]  # of what is trained there is the master alone
    assert len([h for h in everything.held if h.attribute.endswith(".whole")]) == len(handle.buffers)
    memory = {row.category: row.nbytes for row in freed.memory}
    assert memory["parameters"] == handle.layout.buffers[0].shard_numel * 2
    assert everything.memory[0].nbytes == memory["parameters"] + sum(b.numel * 2 for b in handle.layout.buffers)
    found = where(freed, UP)
    assert {h.kind for h in found.holdings} == {"master"}
    assert repr(found).splitlines()[0].endswith(", units; here: freed")
    assert "FreedParameter(shape=(56, 32)): in the ranks' shards" in repr(model.model.layers[0].mlp.up_proj.weight)
    handle.close()


def test_at_stage_3_what_is_whole_is_shown_while_it_is():
    run_ranks(2, of_stage_3)


def aliases(rank, world_size):
    model = tiny_causal_lm()
    _, optimizer = make(model, param_dtype="bfloat16")
    snapshot = look(model, optimizer)
    rows = {row.name: row for row in snapshot.params}
    views = {h.buffer: h.view for h in snapshot.held if h.kind == "param"}
    b, k = snapshot.layout.find(UP)
    start = snapshot.layout.buffers[b].offsets[k]
    assert str(rows[UP].data) == f"handle.buffers[{b}].whole[{start}:{start + rows[UP].shape[0] * rows[UP].shape[1]}]"
    assert views[b].of == f"handle.buffers[{b}].whole"
    masters = {h.buffer: h.view for h in snapshot.held if h.kind == "master"}
    assert masters[b].of != views[b].of  # bfloat16: a copy in fp32
    plain = Perceptron()
    make(plain)
    both = {h.kind: h.view for h in look(plain).held if h.buffer == 0}
    shard_numel = look(plain).layout.buffers[0].shard_numel
    assert both["master"].of == both["param"].of  # fp32: the same memory
    assert both["master"].start == rank * shard_numel


def test_aliasing_is_told_by_storage():
    run_ranks(2, aliases)


def in_wrappers(rank, world_size):
    model = Perceptron()
    handle, optimizer = make(model)

    class Outer(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    outer = Outer(torch.compile(model, backend="eager"))
    found = look(outer)
    assert found.engine == "shardglass"
    assert kinds(found.model_chain) == ["Outer", "torch.compile", "shardglass", "Perceptron"]
    assert [link.where for link in found.model_chain] == ["model", "model.module"] + ["model.module._orig_mod"] * 2
    assert kinds(found.optimizer_chain) == ["shardglass", "AdamW"]
    assert found.optimizer_chain[0].in_place
    assert where(outer, "module._orig_mod.blocks.0.0.weight").name == "blocks.0.0.weight"
    assert kinds(look(model).scheduler_chain) == []
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert kinds(look(model, scheduler=scheduler).scheduler_chain) == ["LambdaLR"]
    assert look(model).groups[0].lr == optimizer.param_groups[0]["lr"]
    handle.compile_units(backend="eager")
    assert kinds(look(model).model_chain) == ["shardglass", "blocks compiled", "Perceptron"]


def test_the_handle_is_found_inside_any_wrapper_and_nothing_is_written_on_the_model():
    run_ranks(2, in_wrappers)


def one_line(rank, world_size):
    model = tiny_causal_lm()
    handle, optimizer = make(model, stage=2, param_dtype="bfloat16")
    shown = [repr(handle), repr(handle.buffers[1]), repr(handle.runs[1]), repr(look(model))]
    shown += [repr(unit) for unit in build_units(tiny_causal_lm(), None)]
    model(input_ids=tokens(rank), labels=tokens(rank)).loss.backward()
    optimizer.step()
    shown.append(repr(handle))
    handle.close()
    return [*shown, repr(handle)]


def test_handle_buffer_run_unit_and_snapshot_fit_a_variables_pane():
    first, second = run_ranks(2, one_line)
    held = "rank 0 of 2 · 23.4 of 46.8 kB bf16 · 19 of 27 tensors, last cut: lm_head.weight (1,536 of 3,104 here)"
    block = "model.layers.0/bfloat16/trainable"
    assert first == [
        f"{held} · ZeRO stage 2, step 0",
        f"{block} · rank 0 of 2 · 8.6 of 17.2 kB bf16 · 8 of 12 tensors, last cut: layers.0.mlp.gate_proj.weight "
        "(1,152 of 1,792 here) · master float32",
        f"group 0 of {block} · elements 0 to 4,287 · 8 tensors: layers.0.self_attn.q_proj.weight … "
        "layers.0.mlp.gate_proj.weight",
        held,
        "root unit root:0 · 1 tensor · 3,104 elements fp32",
        "block model.layers.0 · 12 tensors · 8,576 elements fp32",
        "block model.layers.1 · 12 tensors · 8,576 elements fp32",
        "root unit root:1 · 2 tensors · 3,136 elements fp32",
        f"{held} · ZeRO stage 2, step 1",
        "closed handle · ZeRO stage 2, step 1",
    ]
    assert second[0].startswith("rank 1 of 2 · 23.4 of 46.8 kB bf16 · 12 of 27 tensors")


def lists(rank, world_size, stage):
    handle, _ = make(Perceptron(), stage=stage)
    return (
        handle.params_in_partition,
        handle.params_not_in_partition,
        [(b.params_in_partition, b.params_not_in_partition) for b in handle.buffers],
        [(r.params_in_partition, r.params_not_in_partition) for r in handle.runs],
    )


def test_deepspeeds_lists_are_there_as_names():
    ins, outs, buffers, runs = run_ranks(2, lists, 2)[0]
    assert (ins[0][0], outs[0][-1]) == ("scale", "blocks.1.2.bias")
    assert set(ins[0]) & set(outs[0]) == set()
    assert {name for found, _ in buffers for name in found} == set(ins[0])
    assert {name for _, found in buffers for name in found} == set(outs[0])
    assert {name for found, _ in runs for name in found} == set(ins[0])
    everything, nothing, buffers, _ = run_ranks(2, lists, 0)[0]
    assert set(everything[0]) == set(ins[0]) | set(outs[0])
    assert nothing == {0: ()}
    assert all(found == () for _, found in buffers)


def mistakes(rank, world_size):
    model = Perceptron()
    _, optimizer = make(model)
    squared(0)(model).backward()
    with pytest.raises(UsageError, match=r"named 'blocks.0.0.wieght' \(did you mean 'blocks.0.0.weight'\?\)"):
        where(model, "blocks.0.0.wieght")
    with pytest.raises(UsageError, match="did you mean 'blocks.0.0.weight'"):
        state_of(model, "blocks.0.0.wieght")
    with pytest.raises(UsageError, match=r"look\(\) takes a model .* or a Trainer, not AdamW"):
        look(optimizer)
    with pytest.raises(UsageError, match="Tanh has no parameters"):
        look(nn.Tanh())


def test_mistakes_are_told_in_one_line():
    run_alone(mistakes)


def moved_away(rank, world_size):
    model = Perceptron()
    make(model)
    weight = model.blocks[0][0].weight
    weight.data = weight.data.clone()
    return [str(fault) for fault in look(model).check()]


def test_a_parameter_that_left_its_buffer_is_named():
    (fault,) = run_alone(moved_away)
    assert fault == "params.blocks.0.0.weight.data: begins at handle.buffers[1].whole[0] → blocks.0.0.weight.data[0:91]"


def other_plan(rank, world_size):
    model = tiny_causal_lm()
    optimizer = torch.optim.AdamW(two_groups(list(model.named_parameters())))
    handle = shard(model, optimizer, units=["model.layers.1"])
    one_unit = look(model)
    handle.close()
    shard(model, optimizer)
    return [str(change) for change in one_unit.diff(look(model))]


def test_a_run_with_other_units_than_planned_is_named():
    found = run_ranks(2, other_plan)[0]
    assert any(line.startswith("layout.model.layers.0.") and "at other offsets" in line for line in found)
    assert any("held.model.layers.0/float32/trainable.param: absent" in line for line in found)

"""Stage 3: what is whole when, what is gathered, and what happens to those who read a parameter in between."""

import copy
import gc

import pytest
import torch
from models import Perceptron, points, tiny_causal_lm, tokens
from oracle import Oracle
from process_memory import give_freed_runs_back
from ranks import run_alone, run_ranks
from sharded import assert_equal, gradients, make, squared, states
from tolerances import ORDER_FP32
from torch import nn

from shardglass.engine.freed import FreedParameter
from shardglass.errors import UsageError


def unit_numels(handle):
    sums = {}
    for buffer in handle.layout.buffers:
        sums[buffer.unit] = sums.get(buffer.unit, 0) + buffer.numel
    return sums


def whole_units(handle):
    return {buffer.layout.unit for buffer in handle.buffers if buffer.is_whole}


class Watch:
    """Counts gathers by buffer, and remembers which sets of units were whole together."""

    def __init__(self, handle, model):
        self.gathered, self.together = [], set()
        comm = handle._parts.comm
        gather = comm.gather

        def counted(buffer, *args, **kwargs):
            self.gathered.append(handle.layout.buffers[buffer].unit)
            self.together.add(frozenset(whole_units(handle)))
            return gather(buffer, *args, **kwargs)

        comm.gather = counted


def step_of_lm(model, handle, optimizer, *key):
    ids = tokens(*key)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def gathers_of_a_step(rank, world_size, tied):
    model = tiny_causal_lm(layers=4, tied=tied)
    handle, optimizer = make(model, stage=3)
    assert not whole_units(handle)
    watch = Watch(handle, model)
    rows = []
    for step in range(3):
        watch.gathered.clear()
        step_of_lm(model, handle, optimizer, step, rank)
        rows.append(list(watch.gathered))
        assert not whole_units(handle), "between uses a rank has its shards alone"
    most = max(len(units) for units in watch.together)
    handle.close()
    return rows, most


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_each_unit_is_gathered_once_a_direction_and_two_are_whole_at_most(tied):
    rows, most = run_ranks(2, gathers_of_a_step, tied)[0]
    blocks = [f"model.layers.{k}" for k in range(4)]
    # The last unit of forward stays for backward, and the backward of an embedding reads no weight.
    last = ["root:1", "root:0"] if tied else ["root:1"]
    expected = ["root:0", *blocks, *last, *([last[0]] if tied else []), *reversed(blocks)]
    assert rows == [expected] * 3
    assert most <= 2


def without_prefetch(rank, world_size, options):
    model, oracle = Perceptron(depth=3), Oracle(Perceptron(depth=3), world_size)
    handle, optimizer = make(model, stage=3, **options)
    watch = Watch(handle, model)
    for step in range(2):
        squared(step, rank)(model).backward()
        oracle.backward([squared(step, r) for r in range(world_size)])
        optimizer.step()
        oracle.step()
    assert_equal(states(handle, model), oracle.states(), 10 * ORDER_FP32)
    handle.close()
    return max(len(units) for units in watch.together)


@pytest.mark.parametrize(
    ("options", "most"),
    [({"prefetch_units": 0}, 1), ({"max_live_numel": 0}, 1), ({"prefetch_units": 3}, 4)],
    ids=["no prefetch", "no room for it", "three ahead"],
)
def test_the_options_say_how_much_is_whole(options, most):
    assert max(run_ranks(2, without_prefetch, options)) <= most


def frozen_base(rank, world_size):
    def build():
        model = Perceptron(depth=3)
        model.blocks[0].requires_grad_(False)
        model.blocks[1][0].requires_grad_(False)
        return model

    model, oracle = build(), Oracle(build(), world_size)
    handle, optimizer = make(model, stage=3)
    watch = Watch(handle, model)
    before = model.state_dict(keep_vars=True).keys()
    for step in range(2):
        watch.gathered.clear()
        squared(step, rank)(model).backward()
        oracle.backward([squared(step, r) for r in range(world_size)])
        assert_equal(gradients(handle, model), oracle.gradients, ORDER_FP32)
        optimizer.step()
        optimizer.zero_grad()
        oracle.step()
    assert handle.full_state_dict().keys() == before
    assert_equal(handle.full_state_dict(), dict(oracle.model.state_dict()), 10 * ORDER_FP32)
    kept = sum(b.layout.shard_numel for b in handle.buffers if not b.layout.trainable)
    assert handle.memory()["parameters"] == kept * 4
    count = watch.gathered.count("blocks.0")
    handle.close()
    return count


def test_a_frozen_unit_before_the_first_trainable_one_is_gathered_for_forward_alone():
    # Once in forward, and once in each of two full_state_dict().
    assert run_ranks(2, frozen_base) == [3, 3]


def reductions_of_a_step(rank, world_size, tied, frozen):
    model = tiny_causal_lm(layers=3, tied=tied)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    handle, optimizer = make(model, stage=3)
    comm, reduced = handle._parts.comm, []
    reduce_shard = comm.reduce_shard

    def counted(buffer, *args, **kwargs):
        reduced.append(buffer)
        return reduce_shard(buffer, *args, **kwargs)

    comm.reduce_shard = counted
    rows = []
    for step in range(2):
        reduced.clear()
        step_of_lm(model, handle, optimizer, step, rank)
        rows.append(list(reduced))
    expected = [b for b, buffer in enumerate(handle.layout.buffers) if buffer.trainable][::-1]
    handle.close()
    return rows, expected


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize(
    "frozen",
    [(), ("model.layers.0",), ("model.layers.0", "model.norm"), ("model.layers.1", "model.layers.2")],
    ids=["nothing frozen", "the first block", "the first block and the norm", "the other blocks"],
)
def test_each_buffer_is_reduced_once_a_step_when_its_last_gradient_is_there(tied, frozen):
    rows, expected = run_ranks(2, reductions_of_a_step, tied, frozen)[0]
    assert rows == [expected] * 2


class ReadsHead(nn.Module):
    """A language model that reads its head's weight without the head's forward, as fused losses do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7)) for _ in range(2))
        self.head = nn.Linear(7, 11, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.linear(x, self.head.weight) + self.embed.weight.sum()


def reads_head(rank, world_size):
    def loss(step, r):
        ids = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(10 * step + r))
        return lambda model: model(ids).square().mean()

    model, oracle = ReadsHead(), Oracle(ReadsHead(), world_size)
    handle, optimizer = make(model, stage=3)
    for step in range(3):
        loss(step, rank)(model).backward()
        oracle.backward([loss(step, r) for r in range(world_size)])
        optimizer.step()
        optimizer.zero_grad()
        oracle.step()
        assert not whole_units(handle)
    assert_equal(states(handle, model), oracle.states(), 10 * ORDER_FP32)
    handle.close()


def test_weights_read_without_their_module_are_gathered_in_forward_and_backward():
    run_ranks(2, reads_head, timeout_s=30)


def reading_outside(rank, world_size):
    model = Perceptron()
    handle, optimizer = make(model, stage=3)
    weight = model.blocks[1][0].weight
    readable = (tuple(weight.shape), weight.dtype, weight.numel(), weight.requires_grad, weight.grad)
    assert readable == ((13, 7), torch.float32, 91, True, None)
    assert isinstance(weight, nn.Parameter)
    assert "in the ranks' shards" in repr(weight)
    messages = []
    uses = (
        lambda: weight.sum(),
        lambda: weight.data,
        lambda: nn.init.zeros_(weight),
        lambda: model.state_dict(),
        lambda: model.load_state_dict({}),
        lambda: model.to(torch.float64),
        lambda: copy.deepcopy(model),
    )
    for use in uses:
        with pytest.raises(UsageError) as caught:
            use()
        messages.append(str(caught.value))
    squared(0, rank)(model).backward()
    optimizer.step()
    handle.close()
    assert not any(isinstance(p, FreedParameter) for p in model.parameters())
    assert torch.isfinite(weight).all()
    return messages


def test_reading_a_parameter_between_uses_is_a_clear_error_with_its_name():
    messages = run_ranks(2, reading_outside)[1]
    assert messages[0].startswith("blocks.1.0.weight: sum needs its values")
    assert "(unit blocks.1)" in messages[0]
    assert all("handle.gathered(...)" in message for message in messages)
    assert messages[3].startswith("model.state_dict(): ")


def changing(rank, world_size, stage, dtype, modifier_rank):
    model = Perceptron()
    handle, optimizer = make(model, stage=stage, param_dtype=dtype)
    if dtype is None:
        squared(0, rank)(model)  # a forward between
    before = handle.state_of("blocks.0.0.weight")["master"]
    with handle.gathered("blocks.0", modifier_rank=modifier_rank):
        assert stage != 3 or whole_units(handle) == {"blocks.0"}
        with torch.no_grad():
            if modifier_rank is not None or stage == 3:
                model.blocks[0][0].weight[3, 2:5] = 7.0 + rank
    after = handle.state_of("blocks.0.0.weight")["master"]
    expected = before.clone()
    if modifier_rank is not None:
        expected[3, 2:5] = 7.0 + modifier_rank
    assert torch.equal(after, expected), "what did not change keeps its low bits"
    assert stage != 3 or not whole_units(handle)
    with pytest.raises(UsageError, match="did you mean 'blocks.0'"), handle.gathered("block.0"):
        pass
    with pytest.raises(UsageError, match="the ranks are 0 to 1"), handle.gathered("blocks.0", modifier_rank=2):
        pass
    with pytest.raises(UsageError, match="the ranks are 0 to 1"), handle.gathered("blocks.0", modifier_rank="0"):
        pass
    with pytest.raises(UsageError, match="3 is no module, no parameter"), handle.gathered(3):
        pass
    with pytest.raises(UsageError, match="none of the sharded model"), handle.gathered(nn.Parameter(torch.ones(2))):
        pass
    weight = model.blocks[0][0].weight
    with handle.gathered([weight, "blocks.1"]):
        assert weight.sum().isfinite()
    handle.close()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("modifier_rank", [None, 1])
def test_one_rank_s_changes_inside_gathered_are_taken_over_by_all(stage, dtype, modifier_rank):
    run_ranks(2, changing, stage, dtype, modifier_rank)


def on_rank_0(rank, world_size):
    model = tiny_causal_lm(tied=True)
    plain = {name: t.clone() for name, t in model.state_dict().items()}
    handle, _ = make(model, stage=3)
    found = handle.full_state_dict(rank0_only=True)
    if rank == 0:
        assert list(found) == list(plain)
        assert_equal(found, plain)
        assert found["lm_head.weight"] is found["model.embed_tokens.weight"]
    handle.close()
    return len(found)


def test_the_whole_state_dict_can_be_kept_on_rank_0_alone():
    assert run_ranks(2, on_rank_0)[1] == 0


def evaluating(rank, world_size):
    model, plain = tiny_causal_lm(), tiny_causal_lm()
    handle, optimizer = make(model, stage=3)
    ids = tokens(5, rank)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert not whole_units(handle)
    made = model.generate(ids[:1, :4], max_new_tokens=3 + 4 * rank, do_sample=False, synced_gpus=True)
    assert torch.equal(made, plain.generate(ids[:1, :4], max_new_tokens=3 + 4 * rank, do_sample=False))
    step_of_lm(model, handle, optimizer, 0, rank)
    assert not whole_units(handle)
    handle.close()


def test_evaluation_and_generation_of_unequal_lengths_leave_nothing_whole():
    run_ranks(2, evaluating)


def offloading(rank, world_size):
    """Saved tensors that are no weights still go to hooks of the user's."""
    model, plain = Perceptron(), Perceptron()
    handle, _ = make(model, stage=3)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.numel()) or t, lambda t: t):
        loss = squared(0, rank)(model)
    loss.backward()
    squared(0, rank)(plain).backward()
    assert seen
    grads = gradients(handle, model)
    if world_size == 1:
        assert_equal(grads, {name: p.grad for name, p in plain.named_parameters()})
    handle.close()


def test_hooks_of_others_on_saved_tensors_still_get_the_activations():
    run_alone(offloading)


def steps_on_end(rank, world_size):
    import os
    import resource

    give_freed_runs_back()
    gc.collect()  # ends connections of what ran before in this process
    model = tiny_causal_lm(layers=3)
    handle, optimizer = make(model, stage=3)
    marks = []
    for step in range(220):
        step_of_lm(model, handle, optimizer, step, rank)
        if step in (19, 219):
            memory = sum(handle.memory().values())
            marks.append((memory, len(os.listdir("/proc/self/fd")), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    handle.close()
    return marks


def test_two_hundred_steps_more_take_no_more_memory_and_files():
    for before, after in run_ranks(2, steps_on_end):
        assert after[:2] == before[:2]
        assert after[2] - before[2] < 8 << 10  # KiB


def aborted(rank, world_size):
    """A forward that broke off on every rank leaves the next one in step."""
    model, oracle = Perceptron(depth=3), Oracle(Perceptron(depth=3), world_size)
    handle, optimizer = make(model, stage=3)
    hook = model.blocks[1].register_forward_pre_hook(lambda *a: (_ for _ in ()).throw(MemoryError("no room")))
    with pytest.raises(MemoryError):
        model(points(0))
    hook.remove()
    handle.abandon_step()
    squared(0, rank)(model).backward()
    oracle.backward([squared(0, r) for r in range(world_size)])
    assert_equal(gradients(handle, model), oracle.gradients, ORDER_FP32)
    optimizer.step()
    assert not whole_units(handle)
    handle.close()


def test_a_forward_that_broke_off_on_all_ranks_can_be_followed_by_another():
    run_ranks(2, aborted, timeout_s=20)

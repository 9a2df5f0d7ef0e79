"""What a user reads from a sharded model, and what closing leaves behind."""

import pytest
import torch
from models import Perceptron, points, tiny_causal_lm, tokens
from oracle import Oracle
from ranks import run_ranks
from sharded import assert_equal, make, squared, states

from shardglass.errors import UsageError
from shardglass.layout import slices_of_rank


def shapes(rank, world_size, stage):
    model = Perceptron()
    handle, optimizer = make(model, stage=stage, param_dtype="bfloat16")
    x = points(rank).bfloat16()
    model(x).square().mean().backward()
    during = {key: (tuple(t.shape), t.dtype) for key, t in handle.state_of("blocks.0.0.weight").items()}
    optimizer.step()
    after = {key: (tuple(t.shape), t.dtype) for key, t in handle.state_of("blocks.0.0.weight").items()}
    with pytest.raises(UsageError, match=r"did you mean 'blocks\.0\.0\.weight'"):
        handle.state_of("blocks.0.0.weigth")
    handle.close()
    return during, after


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_of_gives_whole_tensors_in_the_parameter_s_shape(stage):
    whole = ((13, 7), torch.float32)
    param = ((13, 7), torch.bfloat16)
    for during, after in run_ranks(3, shapes, stage):
        assert during == {"param": param, "master": whole, "grad": whole}
        step = ((), torch.float32)
        assert after == {"param": param, "master": whole, "exp_avg": whole, "exp_avg_sq": whole, "step": step}


def low_bits(rank, world_size):
    model = Perceptron()
    original = {name: t.clone() for name, t in model.state_dict().items()}
    handle, _ = make(model, param_dtype="bfloat16")
    masters = {name: handle.state_of(name)["master"] for name in original}
    assert_equal(masters, original)
    assert_equal(handle.full_state_dict(), {name: t.bfloat16() for name, t in original.items()})
    assert any(not torch.equal(t, t.bfloat16().float()) for t in original.values())
    handle.close()


def test_masters_keep_the_low_bits_of_an_fp32_checkpoint_under_a_bf16_model():
    run_ranks(2, low_bits)


def small_updates(rank, world_size):
    """100 updates of about 1e-5 to weights of 1: the bf16 numbers alone would never move."""
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    handle, optimizer = make(model, optimizers=lambda groups: torch.optim.AdamW(groups, lr=1e-5, weight_decay=0.0),
                             param_dtype="bfloat16")  # fmt: skip
    for _ in range(100):
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    master = handle.state_of("weight")["master"]
    handle.close()
    return master.flatten().tolist()


def test_masters_move_where_bf16_weights_would_stall():
    for values in run_ranks(2, small_updates):
        assert values == pytest.approx([1 - 100 * 1e-5] * 4, abs=1e-5)


def buffers_keep_dtype(rank, world_size):
    model = tiny_causal_lm()
    handle, _ = make(model, param_dtype="bfloat16")
    tables = {name: t.dtype for name, t in model.named_buffers()}
    weights = {p.dtype for p in model.parameters()}
    handle.close()
    return tables, weights


def test_rotary_tables_stay_fp32_in_a_bf16_model():
    for tables, weights in run_ranks(2, buffers_keep_dtype):
        assert tables
        assert set(tables.values()) == {torch.float32}
        assert weights == {torch.bfloat16}


class Counted(Perceptron):
    """A Perceptron with buffers of its own, one saved and one not."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(3, dtype=torch.int64))
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def full_state(rank, world_size, stage):
    model, oracle = Counted(), Oracle(Counted(), world_size)
    handle, optimizer = make(model, stage=stage)
    squared(rank)(model).backward()
    oracle.backward([squared(r) for r in range(world_size)])
    optimizer.step()
    oracle.step()
    whole = handle.full_state_dict()
    assert list(whole) == list(oracle.model.state_dict())
    assert_equal(whole, oracle.model.state_dict(), 1e-6)
    for name, t in whole.items():
        assert t.untyped_storage().nbytes() == t.numel() * t.element_size(), f"{name} drags a larger storage along"
    kept = {name: t.clone() for name, t in whole.items()}
    squared(rank)(model).backward()
    optimizer.step()
    handle.wait()
    assert_equal(whole, kept)
    handle.close()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_full_state_dict_has_the_unsharded_names_and_values_and_stands_alone(stage):
    run_ranks(2, full_state, stage)


def loading(rank, world_size):
    """load_state_dict into a sharded bf16 model: masters follow."""
    model = Perceptron()
    handle, optimizer = make(model, param_dtype="bfloat16")
    other = {name: t.bfloat16() for name, t in Perceptron(seed=5).state_dict().items()}
    model.load_state_dict(other)
    assert_equal({name: handle.state_of(name)["master"] for name in other}, {n: t.float() for n, t in other.items()})
    model(points(rank).bfloat16()).square().mean().backward()
    optimizer.step()
    for name, t in handle.full_state_dict().items():
        assert (t - other[name]).abs().max() < 2e-2, name
    handle.close()


def test_load_state_dict_writes_the_masters_too():
    run_ranks(2, loading)


def rank_zero_wins(rank, world_size):
    """Ranks start from different weights and buffers: rank 0's count."""
    model = Perceptron(seed=rank)
    handle, _ = make(model)
    assert_equal(handle.full_state_dict(), Perceptron(seed=0).state_dict())
    handle.close()


def test_every_rank_starts_from_the_weights_of_rank_zero():
    run_ranks(3, rank_zero_wins)


def raw_reads(rank, world_size):
    model = Perceptron()
    handle, optimizer = make(model)
    squared(rank)(model).backward()
    optimizer.step()
    handle.wait()
    raw = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert_equal(raw, {name: handle.state_of(name)["master"] for name in raw})
    with torch.no_grad():
        evaluated = model(points(9))
    optimizer.zero_grad()
    handle.close()
    fresh = Perceptron()
    fresh.load_state_dict(raw)
    assert torch.equal(evaluated, fresh(points(9)))


def test_raw_reads_after_wait_and_evaluation_see_the_updated_weights():
    run_ranks(3, raw_reads)


def train_lm(rank, *, evaluates):
    model = tiny_causal_lm()
    handle, optimizer = make(model)
    for step in range(2):
        for micro in range(2):
            ids = tokens(step, micro, rank)
            model(input_ids=ids, labels=ids).loss.backward()
            if evaluates:
                with torch.no_grad():
                    model(input_ids=ids)
                model.generate(ids, max_new_tokens=2 + rank, do_sample=False, pad_token_id=0)
        optimizer.step()
        optimizer.zero_grad()
    found = states(handle, model)
    handle.close()
    return found


def evaluation_between(rank, world_size):
    """Evaluation and generation between the micro-batches of one step change nothing of it."""
    assert_equal(train_lm(rank, evaluates=True), train_lm(rank, evaluates=False))


def test_evaluating_and_generating_in_the_middle_of_a_step_change_nothing():
    run_ranks(2, evaluation_between)


def owned_elements(rank, world_size, stage):
    model = Perceptron()
    handle, optimizer = make(model, stage=stage)
    squared(rank)(model).backward()
    optimizer.step()
    owned = sum(s.length for s in slices_of_rank(handle.layout, rank))
    held = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    memory = handle.memory()
    handle.close()
    return owned, held, memory, sum(b.numel for b in handle.layout.buffers)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_optimizer_holds_what_the_layout_says(stage):
    total = sum(p.numel() for p in Perceptron().parameters())
    results = run_ranks(3, owned_elements, stage)
    assert sum(owned for owned, _, _, _ in results) == total
    for owned, held, memory, padded in results:
        most = padded if stage == 0 else padded // 3
        assert (total if stage == 0 else owned) <= held <= most
        assert memory["parameters"] == (0 if stage == 3 else padded * 4)
        assert memory["optimizer exp_avg"] == held * 4


def closing(rank, world_size):
    model, oracle = Perceptron(), Oracle(Perceptron(), world_size)
    handle, optimizer = make(model)
    squared(rank)(model).backward()
    oracle.backward([squared(r) for r in range(world_size)])
    optimizer.step()
    oracle.step()
    squared(rank)(model).backward()  # gradients are left behind on purpose
    handle.close()
    handle.close()
    for module in model.modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
                     "_load_state_dict_post_hooks", "_state_dict_hooks", "_backward_hooks"):  # fmt: skip
            assert not getattr(module, kind), f"{kind} left on {type(module).__name__}"
    for name, p in model.named_parameters():
        assert not p._backward_hooks, name
        assert not p._post_accumulate_grad_hooks, name
        assert p.grad is None, name
        assert p.untyped_storage().nbytes() == p.numel() * 4, name
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert_equal(dict(model.state_dict()), dict(oracle.model.state_dict()), 1e-6)
    own = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = model.scale.detach().clone()
    squared(rank)(model).backward()
    own.step()
    assert not torch.equal(model.scale, before)
    with pytest.raises(UsageError, match="closed"):
        handle.state_of("scale")


def test_a_closed_handle_leaves_a_plain_model():
    run_ranks(2, closing)


def sharded_again(rank, world_size):
    """close(), freeze, shard() anew: the way the engine's own error message names."""
    model = Perceptron()
    handle, optimizer = make(model)
    squared(rank)(model).backward()
    optimizer.step()
    model.blocks[0].requires_grad_(False)
    with pytest.raises(UsageError, match=r"blocks\.0\.0\.weight was trainable.*close\(\)"):
        model(points(0))
    handle.close()
    kept = model.blocks[0][0].weight.detach().clone()
    handle, optimizer = make(model, stage=1)
    squared(rank)(model).backward()
    optimizer.step()
    handle.close()
    assert torch.equal(model.blocks[0][0].weight, kept)


def test_a_model_can_be_sharded_again_after_freezing():
    run_ranks(2, sharded_again)


def tied_by_either_name(rank, world_size, stage):
    model = tiny_causal_lm(tied=True)
    handle, _ = make(model, stage=stage)
    first, second = (handle.state_of(name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    handle.close()
    torch.testing.assert_close(second, first, rtol=0, atol=0)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_tied_parameter_is_found_by_either_name(stage):
    run_ranks(2, tied_by_either_name, stage)

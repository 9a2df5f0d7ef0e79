"""The accumulated gradient is the oracle's: over ranks, micro-batches, unequal paths, repeated use, recomputation.

Stages 1 and 2 share their path in a plain loop, so most cases take stages 0 and 2; the training matrix takes all three.
"""

from contextlib import nullcontext

import pytest
import torch
from models import Experts, Perceptron, Recomputed, Specks, points, tiny_causal_lm, tokens
from oracle import Oracle
from ranks import run_ranks
from sharded import assert_equal, gradients, make, oracle_gradients, squared, states
from tolerances import ORDER_FP32

from shardglass.errors import UsageError

STAGES = pytest.mark.parametrize("stage", [0, 2])
SET_TO_NONE = pytest.mark.parametrize("set_to_none", [True, False])


def label_loss(ids, kept, total):
    """The sum over ``kept`` label tokens of the sequence, over all label tokens there are anywhere."""

    def loss(model):
        logits = model(input_ids=ids).logits[0, :kept]
        return torch.nn.functional.cross_entropy(logits, ids[0, 1 : kept + 1], reduction="sum") / total

    return loss


def unequal_labels(rank, world_size, stage):
    """3 label tokens on one rank, 61 on another; the loss is divided by the global count, as a token mean."""
    kept = [[3, 61], [17, 1]]
    ids = [[tokens(m, r, batch=1, length=62) for r in range(2)] for m in range(2)]
    total = sum(map(sum, kept))
    model = tiny_causal_lm()
    handle, _ = make(model, stage=stage)
    for m in range(2):
        (label_loss(ids[m][rank], kept[m][rank], total)(model) * world_size).backward()
    found = gradients(handle, model)
    alone = [
        [lambda model, m=m, r=r: label_loss(ids[m][r], kept[m][r], total)(model)] for m in range(2) for r in range(2)
    ]
    assert_equal(found, oracle_gradients(tiny_causal_lm(), 1, alone), ORDER_FP32)
    handle.close()


@STAGES
def test_a_token_mean_over_unequal_ranks_and_micro_batches_is_the_one_of_a_single_process(stage):
    run_ranks(2, unequal_labels, stage)


def accumulate(rank, world_size, stage, local):
    model = Perceptron()
    handle, _ = make(model, stage=stage)
    for micro in range(3):
        with handle.no_sync() if local and micro < 2 else nullcontext():
            squared(micro, rank)(model).backward()
    expected = oracle_gradients(
        Perceptron(), world_size, [[squared(m, r) for r in range(world_size)] for m in range(3)]
    )
    assert_equal(gradients(handle, model), expected, ORDER_FP32)
    handle.close()


@STAGES
@pytest.mark.parametrize("local", [False, True], ids=["sync", "no_sync"])
def test_three_micro_batches_add_up(stage, local):
    run_ranks(3, accumulate, stage, local)


def all_local(rank, world_size):
    """Every backward under no_sync: the step reduces."""
    model, oracle = Perceptron(), Oracle(Perceptron(), world_size)
    handle, optimizer = make(model)
    for micro in range(2):
        with handle.no_sync():
            squared(micro, rank)(model).backward()
        oracle.backward([squared(micro, r) for r in range(world_size)])
    optimizer.step()
    oracle.step()
    assert_equal(states(handle, model), oracle.states(), ORDER_FP32)
    handle.close()


def test_the_step_reduces_what_no_sync_left():
    run_ranks(2, all_local)


def small_equal_gradients(rank, world_size, local):
    """64 micro-batches of one small gradient beside a large one: a bf16 sum would stop growing."""
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    handle, _ = make(model, param_dtype="bfloat16")
    for micro in range(65):
        size = 1.0 if micro == 0 else 2.0**-10
        with handle.no_sync() if local and micro < 64 else nullcontext():
            model(torch.full((1, 8), size, dtype=torch.bfloat16)).sum().backward()
    grad = handle.state_of("weight")["grad"]
    handle.close()
    return grad.dtype, grad.flatten().tolist()


def test_micro_batches_are_added_in_fp32_for_a_bf16_model():
    for dtype, values in run_ranks(2, small_equal_gradients, False):
        assert dtype == torch.float32
        assert values == [1.0 + 64 * 2.0**-10] * 8


def test_no_sync_sums_are_fp32_too_and_round_to_bf16_once_to_travel():
    for dtype, values in run_ranks(2, small_equal_gradients, True):
        assert dtype == torch.float32
        assert values == [1.0625] * 8  # 1 + 64/1024, which bf16 holds; a bf16 sum would still be 1.0


def two_backwards(rank, world_size, stage):
    model = Perceptron()
    handle, optimizer = make(model, stage=stage)
    oracle = Oracle(Perceptron(), world_size)
    for step in range(2):
        first, second = squared(step, 0, rank)(model), squared(step, 1, rank)(model)
        first.backward()
        second.backward()
        for part in range(2):
            oracle.backward([squared(step, part, r) for r in range(world_size)])
        assert_equal(gradients(handle, model), oracle.gradients, ORDER_FP32)
        optimizer.step()
        optimizer.zero_grad()
        oracle.step()
    handle.close()


@STAGES
def test_two_backwards_after_two_forwards_sum(stage):
    run_ranks(2, two_backwards, stage)


def retained(rank, world_size):
    model = Perceptron()
    handle, _ = make(model)
    loss = squared(0, rank)(model)
    loss.backward(retain_graph=True)
    loss.backward()
    twice = [[squared(0, r) for r in range(world_size)]] * 2
    assert_equal(gradients(handle, model), oracle_gradients(Perceptron(), world_size, twice), ORDER_FP32)
    handle.close()


def test_one_graph_walked_twice_counts_twice():
    run_ranks(2, retained)


def siamese_loss(rank):
    def loss(model):
        return (model(points(0, rank)) - model(points(1, rank))).square().mean()

    return loss


def siamese(rank, world_size, stage):
    model = Perceptron()
    handle, _ = make(model, stage=stage)
    siamese_loss(rank)(model).backward()
    expected = oracle_gradients(Perceptron(), world_size, [[siamese_loss(r) for r in range(world_size)]])
    assert_equal(gradients(handle, model), expected, ORDER_FP32)
    handle.close()


@STAGES
def test_a_module_used_twice_in_one_loss_gets_both_gradients(stage):
    run_ranks(2, siamese, stage)


def recomputed(rank, world_size, stage, reentrant, shared):
    model = Recomputed(reentrant=reentrant, shared=shared)
    handle, optimizer = make(model, stage=stage)
    oracle = Oracle(Recomputed(reentrant=reentrant, shared=shared), world_size)
    for step in range(2):
        for micro in range(2):
            squared(step, micro, rank)(model).backward()
            oracle.backward([squared(step, micro, r) for r in range(world_size)])
        assert_equal(gradients(handle, model), oracle.gradients, ORDER_FP32)
        optimizer.step()
        optimizer.zero_grad()
        oracle.step()
    handle.close()


@STAGES
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved_tensors", "reentrant"])
def test_recomputed_blocks_give_the_oracle_s_gradient(stage, reentrant, shared):
    run_ranks(2, recomputed, stage, reentrant, shared)


def checkpointed_lm(rank, world_size, reentrant):
    def build():
        model = tiny_causal_lm(layers=3)
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        return model.train()

    def loss(r):
        return lambda model: model(input_ids=tokens(r), labels=tokens(r)).loss

    model = build()
    handle, _ = make(model)
    loss(rank)(model).backward()
    expected = oracle_gradients(build(), world_size, [[loss(r) for r in range(world_size)]])
    assert_equal(gradients(handle, model), expected, ORDER_FP32)
    handle.close()


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved_tensors", "reentrant"])
def test_gradient_checkpointing_of_a_causal_lm_gives_the_oracle_s_gradient(reentrant):
    run_ranks(2, checkpointed_lm, reentrant)


def clear(model, optimizer, handle, how, set_to_none):
    if how == "handle":
        handle.zero_grad()
    else:
        (model if how == "model" else optimizer).zero_grad(set_to_none=set_to_none)


def cleared(rank, world_size, stage, how, set_to_none, local):
    model = Perceptron()
    handle, optimizer = make(model, stage=stage)
    oracle = Oracle(Perceptron(), world_size)
    for step in range(2):  # again, with buffers that exist already
        for micro in range(2):
            with handle.no_sync() if local else nullcontext():
                (squared(step, 10 + micro, rank)(model) * 1000).backward()
        clear(model, optimizer, handle, how, set_to_none)
        squared(step, rank)(model).backward()
        oracle.backward([squared(step, r) for r in range(world_size)])
        assert_equal(gradients(handle, model), oracle.gradients, ORDER_FP32)
        optimizer.step()
        oracle.step()
    handle.close()


@pytest.mark.parametrize("local", [False, True], ids=["sync", "no_sync"])
@pytest.mark.parametrize(
    ("stage", "how", "set_to_none"),
    [
        (2, "model", True),
        (2, "model", False),
        (2, "optimizer", True),
        (2, "optimizer", False),
        (2, "handle", True),
        (0, "model", True),
        (0, "optimizer", True),
    ],
)
def test_every_zero_grad_discards_what_was_accumulated(stage, how, set_to_none, local):
    run_ranks(2, cleared, stage, how, set_to_none, local)


def specks_cleared(rank, world_size, local):
    """Five tensors of one element on four ranks: some ranks' optimizers are empty, and must see the clear too."""
    model, oracle = Specks(), Oracle(Specks(), world_size)
    handle, optimizer = make(model)

    def loss(r):
        return lambda m: m(torch.tensor(1.0 + r))

    for _ in range(2):
        with handle.no_sync() if local else nullcontext():
            (loss(rank)(model) * 1000).backward()
        optimizer.zero_grad()
        loss(rank)(model).backward()
        oracle.backward([loss(r) for r in range(world_size)])
        assert_equal(gradients(handle, model), oracle.gradients, ORDER_FP32)
        optimizer.step()
        oracle.step()
    handle.close()


@pytest.mark.parametrize("local", [False, True], ids=["sync", "no_sync"])
def test_ranks_whose_optimizer_holds_nothing_clear_together_with_the_others(local):
    run_ranks(4, specks_cleared, local)


def cleared_before_the_step(rank, world_size, how, set_to_none):
    model = Perceptron()
    handle, optimizer = make(model)
    before = handle.full_state_dict()
    squared(rank)(model).backward()
    clear(model, optimizer, handle, how, set_to_none)
    optimizer.step()
    assert_equal(handle.full_state_dict(), before)
    handle.close()


@SET_TO_NONE
@pytest.mark.parametrize("how", ["model", "optimizer"])
def test_a_step_after_zero_grad_changes_nothing(how, set_to_none):
    run_ranks(2, cleared_before_the_step, how, set_to_none)


def never_cleared(rank, world_size):
    """The loop of the Trainer, which calls model.zero_grad() only, and of one that calls nothing."""
    model, oracle = Perceptron(), Oracle(Perceptron(), world_size)
    handle, optimizer = make(model)
    for step in range(3):
        squared(step, rank)(model).backward()
        oracle.backward([squared(step, r) for r in range(world_size)])
        optimizer.step()
        oracle.step()
    assert_equal(states(handle, model), oracle.states(), ORDER_FP32)
    handle.close()


def test_a_step_drops_its_gradients_even_if_nobody_clears():
    run_ranks(2, never_cleared)


def skipping(rank, world_size, stage, skips, max_norm):
    """Rank r leaves out the blocks ``skips[r]``: what it does not use has a zero gradient there."""
    model, oracle = Perceptron(depth=3), Oracle(Perceptron(depth=3), world_size)
    handle, optimizer = make(model, stage=stage)
    for step in range(3):
        for micro in range(2):
            squared(step, micro, rank, skip=skips[rank])(model).backward()
            oracle.backward([squared(step, micro, r, skip=skips[r]) for r in range(world_size)])
        if max_norm is not None:
            handle.clip_grad_norm_(max_norm)
            oracle.clip(max_norm)
        assert_equal(gradients(handle, model), oracle.gradients, ORDER_FP32)
        optimizer.step()
        oracle.step()
    assert_equal(states(handle, model), oracle.states(), 10 * ORDER_FP32)
    handle.close()


@STAGES
@pytest.mark.parametrize("max_norm", [None, 1e-2], ids=["", "clipped"])
@pytest.mark.parametrize(
    "skips",
    [((1,), ()), ((), (0, 1, 2)), ((0,), (2,)), ((1,), (1,)), ((0, 1, 2), (0, 1, 2))],
    ids=["one rank", "all blocks of one rank", "different blocks", "nobody uses it", "only the root is used"],
)
def test_blocks_skipped_on_some_ranks_count_as_zero_there(stage, skips, max_norm):
    run_ranks(2, skipping, stage, skips, max_norm, timeout_s=20)


def experts(rank, world_size, stage):
    model, oracle = Experts(), Oracle(Experts(), world_size)
    handle, optimizer = make(model, stage=stage)
    for step in range(3):
        squared(step, rank, expert=rank)(model).backward()
        oracle.backward([squared(step, r, expert=r) for r in range(world_size)])
        assert_equal(gradients(handle, model), oracle.gradients, ORDER_FP32)
        optimizer.step()
        optimizer.zero_grad()
        oracle.step()
    assert_equal(states(handle, model), oracle.states(), 10 * ORDER_FP32)
    handle.close()


@STAGES
def test_each_rank_through_its_own_expert_trains_both(stage):
    run_ranks(2, experts, stage, timeout_s=20)


def tied(rank, world_size, stage):
    model = tiny_causal_lm(tied=True)
    handle, optimizer = make(model, stage=stage)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = tokens(rank)
    model(input_ids=ids, labels=ids).loss.backward()
    found = gradients(handle, model)

    def loss(r):
        return lambda m: m(input_ids=tokens(r), labels=tokens(r)).loss

    expected = oracle_gradients(tiny_causal_lm(tied=True), world_size, [[loss(r) for r in range(world_size)]])
    assert_equal(found, expected, ORDER_FP32)
    untied = tiny_causal_lm(tied=False)
    untied.load_state_dict(tiny_causal_lm(tied=True).state_dict())
    parts = oracle_gradients(untied, world_size, [[loss(r) for r in range(world_size)]])
    both = parts["model.embed_tokens.weight"] + parts["lm_head.weight"]
    assert_equal({"both": found["model.embed_tokens.weight"]}, {"both": both}, ORDER_FP32)
    optimizer.step()
    handle.wait()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    whole = handle.full_state_dict()
    assert torch.equal(whole["lm_head.weight"], whole["model.embed_tokens.weight"])
    handle.close()
    assert model.lm_head.weight is model.model.embed_tokens.weight


@STAGES
def test_a_tied_weight_stays_one_tensor_and_gets_the_sum_of_both_uses(stage):
    run_ranks(2, tied, stage)


def read_by_mistake(rank, world_size):
    model = Perceptron()
    handle, _ = make(model)
    squared(rank)(model).backward()
    grad = model.blocks[0][0].weight.grad
    assert grad.shape == (13, 7)
    with pytest.raises(UsageError, match=r"handle\.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(UsageError, match=r"handle\.state_of"):
        grad.add(1.0)
    handle.close()


def test_computing_with_the_model_s_own_grad_is_an_error_that_names_the_right_call():
    run_ranks(2, read_by_mistake)


def stale(rank, world_size):
    """Two forwards, a step after the first backward: the second graph holds weights that are gone."""
    model = Perceptron()
    handle, optimizer = make(model)
    first, second = squared(0)(model), squared(1)(model)
    first.backward()
    optimizer.step()
    with pytest.raises(UsageError, match="step"):
        second.backward()
    handle.close()


def test_a_backward_through_weights_from_before_the_step_is_an_error_and_not_a_wrong_gradient():
    run_ranks(2, stale)

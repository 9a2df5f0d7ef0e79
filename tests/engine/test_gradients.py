"""The accumulated gradient is the oracle's: over ranks and micro-batches, in each dtype, and of tied weights.

Stages 1 and 2 share their path in a plain loop, so these cases take stages 0 and 2; the training
matrix takes all three.
"""

from contextlib import nullcontext

import pytest
import torch
from models import Perceptron, points, tiny_causal_lm, tokens
from oracle import Oracle
from ranks import run_ranks
from sharded import assert_equal, gradients, make, oracle_gradients, squared, states
from tolerances import ORDER_FP32

from shardglass.errors import UsageError

STAGES = pytest.mark.parametrize("stage", [0, 2, 3])


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


def reduced_in_fp32(rank, world_size, local):
    """A bf16 model whose gradients travel in fp32: the sum of no_sync loses nothing on its way."""
    model = Perceptron()
    handle, _ = make(model, param_dtype="bfloat16", reduce_dtype="float32")

    def loss(micro, r):
        return lambda m: m(points(micro, r).bfloat16()).square().mean()

    oracle = Oracle(Perceptron(), world_size, param_dtype=torch.bfloat16)
    for micro in range(3):
        with handle.no_sync() if local and micro < 2 else nullcontext():
            loss(micro, rank)(model).backward()
        oracle.backward([loss(micro, r) for r in range(world_size)])
    assert_equal(gradients(handle, model), oracle.gradients, ORDER_FP32)
    handle.close()


@pytest.mark.parametrize("local", [False, True], ids=["sync", "no_sync"])
def test_gradients_of_a_bf16_model_can_travel_in_fp32(local):
    run_ranks(2, reduced_in_fp32, local)


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

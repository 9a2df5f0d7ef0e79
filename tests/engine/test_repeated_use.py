"""Two backwards, a module used twice, recomputation: every use counts, and a graph from before a step is refused."""

import pytest
from models import Perceptron, Recomputed, points, tiny_causal_lm, tokens
from oracle import Oracle
from ranks import run_ranks
from sharded import assert_equal, gradients, make, oracle_gradients, squared
from tolerances import ORDER_FP32

from shardglass.errors import UsageError

STAGES = pytest.mark.parametrize("stage", [0, 2, 3])


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

"""Ranks that use different parts of the model: no hang, and right sums."""

import pytest
from models import Experts, Perceptron
from oracle import Oracle
from ranks import run_ranks
from sharded import assert_equal, gradients, make, squared, states
from tolerances import ORDER_FP32

STAGES = pytest.mark.parametrize("stage", [0, 2, 3])


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

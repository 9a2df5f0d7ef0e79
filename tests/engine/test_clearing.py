"""Every way to forget gradients, and that a step forgets them too."""

from contextlib import nullcontext

import pytest
import torch
from models import Perceptron, Specks
from oracle import Oracle
from ranks import run_ranks
from sharded import assert_equal, gradients, make, squared, states
from tolerances import ORDER_FP32

SET_TO_NONE = pytest.mark.parametrize("set_to_none", [True, False])


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

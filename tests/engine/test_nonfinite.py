"""Inf and nan gradients: every rank decides alike, the step is skipped and counted, the culprit is named."""

import math

import pytest
import torch
from heard import heard
from models import Perceptron
from ranks import run_ranks
from sharded import assert_equal, make, squared, states

from shardglass.errors import NonFiniteError

NAME = "blocks.1.0.weight"


def spoil(model, value):
    """Make one parameter's gradient ``value`` in the backward that follows; returns the hook."""
    return model.get_parameter(NAME).register_hook(lambda grad: torch.full_like(grad, value))


def one_bad_rank(rank, world_size, stage, value, dtype):
    model = Perceptron()
    handle, optimizer = make(model, stage=stage, param_dtype=dtype)
    seen = []
    for step in range(3):
        before = states(handle, model)
        for micro in range(2):
            hook = spoil(model, value) if (step, micro, rank) == (1, 1, 1) else None
            loss = model(torch.ones(2, 7, dtype=getattr(torch, dtype)) * (1 + micro)).square().mean()
            loss.backward()
            if hook is not None:
                hook.remove()
        norm = handle.clip_grad_norm_(1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        after = states(handle, model)
        if step == 1:
            assert_equal(after, before)
            assert not math.isfinite(norm)
            assert handle.state_of("scale")["step"].item() == 1.0
        seen.append((handle.step_skipped, handle.steps_skipped, handle.last_nonfinite))
    handle.close()
    return seen


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all_and_is_named(stage, value, dtype):
    results = run_ranks(2, one_bad_rank, stage, value, dtype)
    assert results[0] == results[1]
    assert [(skipped, count) for skipped, count, _ in results[0]] == [(False, 0), (True, 1), (False, 1)]
    (text,) = results[0][1][2]
    assert "rank 1" in text
    assert NAME in text
    assert "micro-batch 1" in text


def give_up(rank, world_size):
    model = Perceptron()
    handle, optimizer = make(model, max_skipped_steps=3)
    if rank == 0:
        spoil(model, math.inf)
    for _ in range(2):
        squared(rank)(model).backward()
        optimizer.step()
    squared(rank)(model).backward()
    with pytest.raises(NonFiniteError) as caught:
        optimizer.step()
    skipped = handle.steps_skipped
    handle.close()
    return skipped, str(caught.value)


def test_too_many_skipped_steps_in_a_row_end_the_run_on_every_rank():
    for skipped, text in run_ranks(2, give_up):
        assert skipped == 3
        assert "3 steps in a row" in text
        assert f"rank 0, {NAME}, micro-batch 0" in text


def not_in_a_row(rank, world_size):
    model = Perceptron()
    handle, optimizer = make(model, max_skipped_steps=2)
    for step in range(6):
        hook = spoil(model, math.nan) if step % 2 else None
        squared(rank)(model).backward()
        optimizer.step()
        if hook is not None:
            hook.remove()
    skipped = handle.steps_skipped
    handle.close()
    return skipped


def test_a_good_step_between_two_bad_ones_starts_the_count_anew():
    assert run_ranks(2, not_in_a_row) == [3, 3]


def no_skipping(rank, world_size):
    model = Perceptron()
    handle, optimizer = make(model, skip_nonfinite=False)
    if rank == 1:
        spoil(model, math.inf)
    squared(rank)(model).backward()
    optimizer.step()
    result = handle.step_skipped, handle.steps_skipped, handle.state_of(NAME)["master"].isnan().all().item()
    handle.close()
    return result


def test_skipping_can_be_turned_off():
    assert run_ranks(2, no_skipping) == [(False, 0, True)] * 2


def overflow_of_the_sum(rank, world_size):
    """Every rank's gradient is finite, their fp32 sum is not."""
    model = Perceptron()
    handle, optimizer = make(model)
    spoil(model, 3e38)
    squared(rank)(model).backward()
    optimizer.step()
    result = handle.step_skipped, handle.last_nonfinite
    handle.close()
    return result


def test_a_sum_that_overflows_is_skipped_and_said_to_be_one():
    for skipped, texts in run_ranks(2, overflow_of_the_sum):
        assert skipped
        assert "overflow" in texts[0]


def warnings_by_rank(rank, world_size):
    model = Perceptron()
    handle, optimizer = make(model)
    spoil(model, math.nan)
    with heard("shardglass") as texts:
        squared(rank)(model).backward()
        optimizer.step()
        handle.close()
    return texts


def test_only_rank_zero_warns_and_names_every_rank():
    first, second = run_ranks(2, warnings_by_rank)
    assert second == []
    (text,) = first
    assert f"rank 0, {NAME}" in text
    assert f"rank 1, {NAME}" in text


def local_backwards(rank, world_size):
    model = Perceptron()
    handle, optimizer = make(model)
    for micro in range(3):
        hook = spoil(model, math.inf) if (micro, rank) == (1, 1) else None
        with handle.no_sync():
            squared(micro, rank)(model).backward()
        if hook is not None:
            hook.remove()
    optimizer.step()
    result = handle.step_skipped, handle.last_nonfinite
    handle.close()
    return result


def test_the_micro_batch_is_named_under_no_sync_too():
    for skipped, texts in run_ranks(2, local_backwards):
        assert skipped
        assert texts == (f"rank 1, {NAME}, micro-batch 1",)

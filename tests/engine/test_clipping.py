"""The global gradient norm against float64, and what clipping does with it."""

import pytest
import torch
from models import Perceptron, tiny_causal_lm, tokens
from oracle import Oracle
from ranks import run_ranks
from sharded import assert_equal, gradients, make, squared, states
from tolerances import NORM_FLOAT64, ORDER_FP32

from shardglass.errors import UsageError


def clip_and_step(rank, world_size, stage, max_norm, micro_batches):
    model, oracle = Perceptron(), Oracle(Perceptron(), world_size)
    handle, optimizer = make(model, stage=stage)
    assert handle.grad_norm is None
    for micro in range(micro_batches):
        squared(micro, rank)(model).backward()
        oracle.backward([squared(micro, r) for r in range(world_size)])
    before = oracle.clip(max_norm)
    norm = handle.clip_grad_norm_(max_norm)
    assert norm.shape == ()
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(before, rel=NORM_FLOAT64)
    assert_equal(gradients(handle, model), oracle.gradients, ORDER_FP32)
    optimizer.step()
    oracle.step()
    assert handle.grad_norm == pytest.approx(before, rel=NORM_FLOAT64)
    assert handle.clipped_grad_norm == pytest.approx(min(before, max_norm), rel=1e-4)  # torch's 1e-6 beside the norm
    assert_equal(states(handle, model), oracle.states(), ORDER_FP32)
    handle.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("max_norm", [0.05, 1e3], ids=["bites", "does not bite"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_clipping_is_by_the_global_norm_of_the_accumulated_gradient(stage, max_norm, micro_batches):
    run_ranks(3, clip_and_step, stage, max_norm, micro_batches)


def without_clipping(rank, world_size):
    model, oracle = Perceptron(), Oracle(Perceptron(), world_size)
    handle, optimizer = make(model)
    squared(rank)(model).backward()
    oracle.backward([squared(r) for r in range(world_size)])
    optimizer.step()
    assert handle.grad_norm == pytest.approx(oracle.clip(), rel=NORM_FLOAT64)
    assert handle.clipped_grad_norm == handle.grad_norm
    handle.close()


def test_the_norm_is_known_after_a_step_that_did_not_clip():
    run_ranks(2, without_clipping)


class Wide(torch.nn.Module):
    """One tensor of 2^23 + 5 elements whose gradient is the input."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2**23 + 5))

    def forward(self, x):
        return (self.weight * x).sum()


def large_norm(rank, world_size):
    gradient = torch.rand(2**23 + 5, generator=torch.Generator().manual_seed(3)) * 1e-3
    model = Wide()
    handle, _ = make(model, optimizers=lambda groups: torch.optim.SGD(groups, lr=1.0))
    model(gradient).backward()
    norm = handle.clip_grad_norm_(1.0).item()
    handle.close()
    return norm, gradient.double().norm().item()


def test_the_norm_of_a_large_tensor_is_right_where_fp32_sums_are_not():
    for norm, exact in run_ranks(2, large_norm):
        assert norm == pytest.approx(exact, rel=NORM_FLOAT64)


def bf16_norm(rank, world_size):
    model, oracle = tiny_causal_lm(), Oracle(tiny_causal_lm(), world_size, param_dtype=torch.bfloat16)
    handle, _ = make(model, param_dtype="bfloat16")

    def loss(r):
        return lambda m: m(input_ids=tokens(r), labels=tokens(r)).loss

    loss(rank)(model).backward()
    oracle.backward([loss(r) for r in range(world_size)])
    assert handle.clip_grad_norm_(1.0).item() == pytest.approx(oracle.clip(1.0), rel=NORM_FLOAT64)
    handle.close()


def test_the_norm_of_a_bf16_model_is_that_of_the_fp32_mean():
    run_ranks(3, bf16_norm)


def clip_twice(rank, world_size):
    model = Perceptron()
    handle, _ = make(model)
    squared(rank)(model).backward()
    first = handle.clip_grad_norm_(0.05).item()
    second = handle.clip_grad_norm_(0.05).item()
    handle.close()
    return first, second


def test_clipping_again_leaves_the_clipped_gradient_as_it_is():
    for first, second in run_ranks(2, clip_twice):
        assert first > 0.06
        assert second == pytest.approx(0.05, rel=1e-4)


def clip_after_close(rank, world_size):
    handle, _ = make(Perceptron())
    handle.close()
    with pytest.raises(UsageError, match="closed"):
        handle.clip_grad_norm_(1.0)


def test_clipping_a_closed_handle_is_an_error():
    run_ranks(2, clip_after_close)

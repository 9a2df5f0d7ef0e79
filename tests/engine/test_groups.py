"""Param groups keep their parameters, rates and decay; groups may be empty on a rank, or frozen."""

import pytest
import torch
from models import Perceptron, Specks
from oracle import Oracle
from ranks import run_ranks
from sharded import assert_equal, make, squared, states
from tolerances import ORDER_FP32

from shardglass.layout.spec import RUN_ALIGN


def three_groups(named):
    """Weights, biases, and the rest, each with its own rate and decay."""
    weights = [p for name, p in named if name.endswith("weight")]
    biases = [p for name, p in named if name.endswith("bias")]
    rest = [p for name, p in named if name == "scale"]
    return [
        {"params": weights, "lr": 1e-3, "weight_decay": 0.1},
        {"params": rest, "lr": 0.0, "weight_decay": 0.1},
        {"params": biases, "lr": 1e-2, "weight_decay": 0.0},
    ]


def rates(rank, world_size, stage):
    model, oracle = Perceptron(), Oracle(Perceptron(), world_size, groups=three_groups)
    handle, optimizer = make(model, stage=stage, groups=three_groups)
    before = handle.full_state_dict()
    for step in range(3):
        squared(step, rank)(model).backward()
        oracle.backward([squared(step, r) for r in range(world_size)])
        optimizer.step()
        optimizer.zero_grad()
        oracle.step()
    assert_equal(states(handle, model), oracle.states(), ORDER_FP32)
    after = handle.full_state_dict()
    assert torch.equal(after["scale"], before["scale"])
    assert not torch.equal(after["blocks.0.0.weight"], before["blocks.0.0.weight"])
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(1e-3, 0.1), (0.0, 0.1), (1e-2, 0.0)]
    handle.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_group_keeps_its_rate_and_decay(world_size, stage):
    run_ranks(world_size, rates, stage)


def equal_groups(named):
    return [{"params": [p for _, p in named[0::2]]}, {"params": [p for _, p in named[1::2]]}]


def one_or_two(rank, world_size):
    found = []
    for groups in (equal_groups, lambda named: [{"params": [p for _, p in named]}]):
        model = Perceptron()
        handle, optimizer = make(model, groups=groups)
        for step in range(3):
            squared(step, rank)(model).backward()
            optimizer.step()
        found.append(states(handle, model))
        handle.close()
    assert_equal(found[0], found[1])


def test_two_groups_with_equal_options_give_the_bits_of_one():
    run_ranks(2, one_or_two)


def speck_groups(named):
    return [{"params": [p], "lr": 10.0 ** -(k + 1)} for k, (_, p) in enumerate(named)]


def specks(rank, world_size, stage):
    """Five groups of one element on four ranks: most ranks hold nothing of most groups."""
    model, oracle = Specks(), Oracle(Specks(), world_size, groups=speck_groups)
    handle, optimizer = make(model, stage=stage, groups=speck_groups)
    sizes = [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]

    def loss(r):
        return lambda m: m(torch.tensor(0.5 + r))

    for _ in range(3):
        loss(rank)(model).backward()
        oracle.backward([loss(r) for r in range(world_size)])
        assert handle.clip_grad_norm_(1.0).item() == pytest.approx(oracle.clip(1.0), rel=1e-6)
        optimizer.step()
        optimizer.zero_grad()
        oracle.step()
    assert_equal(states(handle, model), oracle.states(), ORDER_FP32)
    handle.close()
    return sizes


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_groups_that_are_empty_on_some_ranks_train(stage):
    sizes = run_ranks(4, specks, stage)
    if stage:
        # One element each, padded to whole vectors.
        assert [sum(of_group) for of_group in zip(*sizes, strict=True)] == [RUN_ALIGN] * 5
        assert any(0 in of_rank for of_rank in sizes)


def with_frozen_group(named):
    return [
        {"params": [p for _, p in named if p.requires_grad]},
        {"params": [p for _, p in named if not p.requires_grad], "lr": 1.0},
    ]


def frozen_group(rank, world_size):
    def build():
        model = Perceptron()
        model.blocks[0].requires_grad_(False)
        return model

    model, oracle = build(), Oracle(build(), world_size, groups=with_frozen_group)
    handle, optimizer = make(model, groups=with_frozen_group)
    assert optimizer.param_groups[1]["params"] == []
    for step in range(2):
        squared(step, rank)(model).backward()
        oracle.backward([squared(step, r) for r in range(world_size)])
        optimizer.step()
        optimizer.zero_grad()
        oracle.step()
    assert_equal(states(handle, model), oracle.states(), ORDER_FP32)
    after, fresh = handle.full_state_dict(), Perceptron().state_dict()
    assert torch.equal(after["blocks.0.0.weight"], fresh["blocks.0.0.weight"])
    assert set(handle.state_of("blocks.0.0.weight")) == {"param"}
    handle.close()


def test_a_group_of_frozen_parameters_costs_nothing_and_stays():
    run_ranks(2, frozen_group)


def scheduled(rank, world_size):
    model, oracle = Perceptron(), Oracle(Perceptron(), world_size, groups=three_groups)
    handle, optimizer = make(model, groups=three_groups)
    ours = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    theirs = torch.optim.lr_scheduler.LambdaLR(oracle.optimizer, lambda step: min(1.0, (step + 1) / 3))
    seen = []
    for step in range(4):
        squared(step, rank)(model).backward()
        oracle.backward([squared(step, r) for r in range(world_size)])
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        ours.step()
        oracle.step()
        theirs.step()
    assert_equal(states(handle, model), oracle.states(), ORDER_FP32)
    handle.close()
    return seen


def test_a_scheduler_made_after_sharding_drives_the_rates():
    for seen in run_ranks(2, scheduled):
        assert seen == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3])


def scheduled_before(rank, world_size):
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    from shardglass.engine.shard import shard

    handle = shard(model, optimizer)
    squared(rank)(model).backward()
    optimizer.step()
    scheduler.step()
    rate = optimizer.param_groups[0]["lr"]
    handle.close()
    return rate


def test_a_scheduler_made_before_sharding_drives_the_rates_too():
    assert run_ranks(2, scheduled_before) == [5e-3, 5e-3]

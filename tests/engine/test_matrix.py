"""Every stage, dtype, world size, accumulation, clipping and parameter setup, against unsharded training.

Three steps of a tiny Qwen2. What is compared: master weights, every optimizer state, the model's own weights, the loss
of every rank and micro-batch, and the gradient norm. The default run takes a set that covers every pair of values per
world size; `-m soak` takes the whole grid under fused AdamW.
"""

import functools
import math
from contextlib import nullcontext

import pytest
import tolerances
import torch
from matrix import Case, covering, every_case, pairs_of
from models import tiny_causal_lm, tokens
from oracle import Oracle
from ranks import run_alone, run_ranks

from shardglass.engine.shard import shard
from shardglass.lens.compare import compare_tensors
from shardglass.options import EngineOptions

STEPS = 3
MAX_NORM = 0.5  # below the norms that occur, so clipping bites
WORLD_SIZES = (1, 2, 3, 4)

CHOSEN = [case for world_size in WORLD_SIZES for case in covering(every_case(world_size))]
EVERY = [case for ws in WORLD_SIZES for case in every_case(ws) if case.optimizer == "adamw fused"]


def build(case):
    model = tiny_causal_lm(tied=case.tied)
    if case.frozen:
        model.model.layers[0].requires_grad_(False)
        model.model.norm.requires_grad_(False)
    return model


def param_groups(case, named):
    if case.groups == "one":
        return [{"params": [p for _, p in named]}]
    still = [p for name, p in named if "o_proj" in name]
    decayed = [p for name, p in named if p.ndim > 1 and "o_proj" not in name]
    rest = [p for name, p in named if p.ndim == 1]
    return [
        {"params": decayed, "lr": 1e-3, "weight_decay": 0.1},
        {"params": rest, "lr": 1e-2, "weight_decay": 0.0},
        {"params": still, "lr": 0.0, "weight_decay": 0.1},
    ]


def optimizer_of(case, groups):
    if case.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.1)
    fused = case.optimizer == "adamw fused"
    # eps is above the rounding noise of gradients that are zero in exact arithmetic (key biases under a softmax).
    eps = 1e-6 if case.dtype == "float32" else 1e-3
    return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1, eps=eps, fused=fused, foreach=False)


def loss_of(case, step, micro, rank):
    ids = tokens(step, micro, rank)

    def loss(model):
        return model(input_ids=ids, labels=ids).loss / case.micro_batches

    return loss


def expect(rank, world_size, case):
    """The oracle's (tensors, losses by step and micro-batch and rank, norms)."""
    oracle = Oracle(
        build(case),
        case.world_size,
        optimizers=functools.partial(optimizer_of, case),
        groups=functools.partial(param_groups, case),
        param_dtype=getattr(torch, case.dtype),
    )
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(case.micro_batches):
            losses.append(oracle.backward(loss_of(case, step, micro, r) for r in range(case.world_size)))
        norms.append(oracle.clip(MAX_NORM if case.clip else None))
        oracle.step()
    model = {f"{name}|model": t.clone() for name, t in oracle.model.state_dict().items()}
    return oracle.states() | model, losses, norms


def train(rank, world_size, case):
    """One rank's (tensors on rank 0, losses by step and micro-batch, norms, bits of its whole model)."""
    model = build(case)
    optimizer = optimizer_of(case, param_groups(case, list(model.named_parameters())))
    options = EngineOptions(param_dtype=case.dtype)
    handle = shard(model, optimizer, stage=case.stage, options=options)
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(case.micro_batches):
            local = case.no_sync and micro < case.micro_batches - 1
            with handle.no_sync() if local else nullcontext():
                loss = loss_of(case, step, micro, rank)(model)
                loss.backward()
            losses.append(loss.item())
        if case.clip:
            norms.append(handle.clip_grad_norm_(MAX_NORM).item())
        optimizer.step()
        if not case.clip:
            norms.append(handle.grad_norm)
        optimizer.zero_grad()
    found = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            states = handle.state_of(name)
            found |= {
                f"{name}|{key}": t for key, t in states.items() if t.shape == p.shape and key not in ("grad", "param")
            }
    whole = handle.full_state_dict()
    bits = {name: hash(t.contiguous().view(torch.uint8).numpy().tobytes()) for name, t in whole.items()}
    handle.close()
    found |= {f"{name}|model": t for name, t in whole.items()}
    return (found if rank == 0 else None), losses, norms, bits


@functools.cache
def expected(case):
    """The oracle does not know stages, so it runs once for all of them."""
    return run_alone(expect, case)


def trained(case):
    return run_ranks(case.world_size, train, case)


def tolerance(case):
    """(of tensors, of losses); zero where every rounding of the engine is the oracle's too."""
    sums_locally = case.no_sync and (case.world_size > 1 or case.dtype == "bfloat16")
    if not (sums_locally or case.clip or case.optimizer == "adamw fused"):
        return 0.0, 0.0
    if case.dtype == "bfloat16":
        return tolerances.TRAJECTORY_BF16, tolerances.LOSS_BF16
    return tolerances.ADAM_FP32, tolerances.LOSS_FP32


def hold_against_oracle(case):
    results = trained(case)
    tensors, losses, norms = expected(case.at_stage(0))
    found = compare_tensors(results[0][0], tensors)
    allowed, allowed_loss = tolerance(case)
    assert found.within(allowed), found.describe()
    if allowed == 0.0:
        assert found.bitwise, found.describe()
    for rank, (_, own_losses, own_norms, bits) in enumerate(results):
        assert own_losses == pytest.approx([row[rank] for row in losses], rel=max(allowed_loss, 1e-12))
        assert own_norms == pytest.approx(norms, rel=allowed_loss + tolerances.NORM_FLOAT64)
        assert bits == results[0][3], f"rank {rank} has other model weights than rank 0"
    assert all(math.isfinite(norm) for norm in results[0][2])


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_three_steps_equal_unsharded_training(case):
    hold_against_oracle(case)


@pytest.mark.soak
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_three_steps_equal_unsharded_training_on_the_whole_grid(case):
    hold_against_oracle(case)


SAME_BITS = [
    Case(
        world_size=world_size,
        stage=0,
        dtype=dtype,
        accumulation="1",
        clip=False,
        tied=world_size % 2 == 0,
        frozen=world_size == 3,
        groups="several",
        optimizer="adamw",
    )
    for world_size in WORLD_SIZES[1:]
    for dtype in ("float32", "bfloat16")
]


@pytest.mark.parametrize("case", SAME_BITS, ids=str)
def test_stages_give_the_same_bits_without_accumulation_and_clipping(case):
    whole, *others = [trained(case.at_stage(stage)) for stage in (0, 1, 2, 3)]
    for other in others:
        found = compare_tensors(other[0][0], whole[0][0])
        assert found.bitwise, found.describe()
        assert [losses for _, losses, _, _ in other] == [losses for _, losses, _, _ in whole]


def test_the_default_run_covers_every_pair_of_values():
    for world_size in WORLD_SIZES:
        chosen = [case for case in CHOSEN if case.world_size == world_size]
        assert len(chosen) < 20
        covered = set().union(*(pairs_of(case) for case in chosen))
        assert set().union(*(pairs_of(case) for case in every_case(world_size))) == covered

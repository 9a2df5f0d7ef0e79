"""The learning rates of a run do not depend on how its batch is spread over ranks and micro-batches."""

import math

import pytest

from shardglass.config import load_config
from shardglass.resolve import RunArguments, lr_at, resolve

STEPS = 20
SCHEDULES = {
    "WarmupLR": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    "WarmupDecayLR": {"warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
    "WarmupCosineLR": {"warmup_num_steps": "auto", "total_num_steps": "auto", "cos_min_ratio": 0},
}


def rates(kind, params, world_size, accumulation):
    args = RunArguments(
        learning_rate=1e-3,
        warmup_ratio=0.25,
        total_steps=STEPS,
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=16 // (world_size * accumulation),
        explicit=frozenset({"learning_rate", "warmup_ratio"}),
    )
    source = {
        "train_batch_size": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": kind, "params": params},
    }
    run = resolve(load_config(source), args, world_size=world_size)
    assert run.batch.train == 16
    return [lr_at(run.scheduler, step) for step in range(STEPS)]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_rates_are_the_same_list_for_every_world_size_and_accumulation(kind):
    lists = [rates(kind, SCHEDULES[kind], world_size, k) for world_size in (1, 2, 4) for k in (1, 4)]
    assert lists == [lists[0]] * 6
    # 0.25 x 20 = 5 steps of warm-up; step k runs at count k - 1, whose fraction is log(k) / log(5).
    assert lists[0][:2] == [0.0, 0.0]
    assert lists[0][3] == pytest.approx(1e-3 * math.log(3) / math.log(5), rel=1e-12)
    assert max(lists[0]) == pytest.approx(1e-3, rel=1e-12)
    if kind == "WarmupLR":
        assert lists[0][6:] == [1e-3] * (STEPS - 6)
    else:
        assert lists[0][6:] == sorted(lists[0][6:], reverse=True)
        assert lists[0][-1] < 0.2e-3

"""The learning rate of each step; RECORDED came from DeepSpeed 0.19.8's own schedulers, advanced once a step."""

import math

import pytest

from shardglass.errors import UsageError
from shardglass.schedules import SECOND_BETA, OneCycleSpec, RangeTestSpec, SchedulerSpec, betas_at, lr_at

RECORDED = [
    (
        SchedulerSpec(type="WarmupLR", warmup_max_lr=1e-5, warmup_num_steps=4),
        [0.0, 0.0, 5e-06, 7.9248125e-06, 1e-05, 1e-05, 1e-05],
    ),
    (
        SchedulerSpec(
            type="WarmupLR", warmup_min_lr=1e-3, warmup_max_lr=5e-3, warmup_num_steps=4, warmup_type="linear"
        ),
        [0.001, 0.001, 0.002, 0.003, 0.004, 0.005, 0.005],
    ),
    (
        SchedulerSpec(type="WarmupLR", warmup_max_lr=1e-5, warmup_num_steps=1),
        [0.0, 0.0, 1e-05, 1e-05],
    ),
    (
        SchedulerSpec(type="WarmupDecayLR", warmup_max_lr=1e-3, warmup_num_steps=3, total_num_steps=8),
        [0.0, 0.0, 0.000630929754, 0.001, 0.001, 0.0008, 0.0006, 0.0004, 0.0002, 0.0],
    ),
    (
        SchedulerSpec(
            type="WarmupDecayLR",
            warmup_min_lr=1e-4,
            warmup_max_lr=1e-3,
            warmup_num_steps=2,
            total_num_steps=6,
            warmup_type="linear",
        ),
        [0.0001, 0.0001, 0.00055, 0.001, 0.000775, 0.00055, 0.000325, 0.0001, 0.0001],
    ),
    (
        SchedulerSpec(type="WarmupDecayLR", warmup_max_lr=1e-3, warmup_num_steps=5, total_num_steps=3),
        [0.0, 0.0, 0.000430676558, 0.000682606194, 0.000861353116, 0.001, 0.0, 0.0],
    ),
    (
        SchedulerSpec(
            type="WarmupCosineLR",
            warmup_max_lr=0.01,
            warmup_num_steps=3,
            total_num_steps=8,
            warmup_min_ratio=0.1,
            cos_min_ratio=0.2,
        ),
        [0.0, 0.001, 0.00667836778, 0.01, 0.00923606798, 0.00723606798, 0.00476393202, 0.00276393202, 0.002, 0.002],
    ),
    (
        SchedulerSpec(
            type="WarmupCosineLR", warmup_max_lr=0.01, warmup_num_steps=2, total_num_steps=6, warmup_type="linear"
        ),
        [0.0, 0.0, 0.005, 0.00853568035, 0.0050005, 0.00146531965, 1e-06, 1e-06],
    ),
    (
        SchedulerSpec(type="WarmupCosineLR", warmup_max_lr=0.01, warmup_num_steps=4, total_num_steps=3),
        [0.0, 0.0, 0.005, 0.0079248125, 0.01, 1e-06, 1e-06],
    ),
]

RECORDED += [
    (
        RangeTestSpec(min_lr=1e-4, step_size=2, step_rate=3.0, is_staircase=False),
        [0.0001, 0.00025, 0.0004, 0.00055, 0.0007, 0.00085, 0.001],
    ),
    (
        RangeTestSpec(min_lr=1e-4, step_size=3, step_rate=0.5, is_staircase=True),
        [0.0001, 0.0001, 0.0001, 0.00015, 0.00015, 0.00015, 0.0002],
    ),
    (
        OneCycleSpec(min_lr=1e-4, max_lr=1e-3, first_size=4, second_size=3, decay_size=2, decay_rate=0.5),
        [
            *(0.0001, 0.000325, 0.00055, 0.000775, 0.001, 0.0007, 0.0004, 0.0001, 8e-05, 6.66666667e-05),
            *(5.71428571e-05, 5e-05, 4.44444444e-05, 4e-05),
        ],
    ),
    (
        OneCycleSpec(min_lr=1e-4, max_lr=1e-3, first_size=5, second_size=4, first_stairs=2, second_stairs=3),
        [0.0001, 0.0001, 0.0001, 0.00055, 0.00055, 0.001, 0.0007, 0.0004, 0.0001, 0.0001, 0.0001, 0.0001],
    ),
    (
        OneCycleSpec(min_lr=1e-4, max_lr=1e-3, first_size=4, second_size=4, first_stairs=2, second_stairs=2),
        [0.0001, 0.0001, 0.00055, 0.00055, 0.001, 0.00055, 0.00055, 0.0001, 0.0001],
    ),
    (
        OneCycleSpec(min_lr=1e-4, max_lr=1e-3, first_size=3, second_size=0, decay_size=1, decay_rate=1.0),
        [0.0001, 0.0004, 0.0007, 0.0001, 5e-05, 3.33333333e-05, 2.5e-05, 2e-05],
    ),
]

MOMENTA = [
    (
        OneCycleSpec(min_lr=1e-4, max_lr=1e-3, first_size=3, second_size=3, momentum=(0.8, 0.9)),
        [0.8, 0.866666667, 0.833333333, 0.8, 0.833333333, 0.866666667, 0.9, 0.9, 0.9],
    ),
    (
        OneCycleSpec(
            min_lr=1e-4, max_lr=1e-3, first_size=5, second_size=4, first_stairs=2, second_stairs=3, momentum=(0.8, 0.9)
        ),
        [0.8, 0.9, 0.9, 0.85, 0.85, 0.8, 0.833333333, 0.866666667, 0.9, 0.9],
    ),
    (
        OneCycleSpec(min_lr=1e-4, max_lr=1e-3, first_size=3, second_size=0, decay_size=1, momentum=(0.8, 0.9)),
        [0.8, 0.866666667, 0.833333333, 0.9, 0.9],
    ),
]


@pytest.mark.parametrize(("spec", "rates"), MOMENTA)
def test_momenta_equal_those_recorded_from_deepspeed(spec, rates):
    found = [betas_at(spec, step) for step in range(len(rates))]
    assert [first for first, _ in found] == pytest.approx(rates, rel=1e-8)
    assert {second for _, second in found} == {SECOND_BETA}


def test_schedulers_without_momentum_leave_it_alone():
    assert betas_at(OneCycleSpec(min_lr=0.0, max_lr=1.0, first_size=3, second_size=3), 1) is None
    assert betas_at(SchedulerSpec(type="WarmupLR", warmup_max_lr=1e-5, warmup_num_steps=4), 1) is None


@pytest.mark.parametrize(("spec", "rates"), RECORDED, ids=lambda value: value.type if hasattr(value, "type") else "")
def test_rates_equal_those_recorded_from_deepspeed(spec, rates):
    # nine significant digits were recorded
    assert [lr_at(spec, step) for step in range(len(rates))] == pytest.approx(rates, rel=1e-8, abs=1e-16)


def test_log_warmup_by_hand():
    """Step k runs at count k - 1: min + (max - min) · log(k) / log(N), so step 3 of N = 9 is at log 3 / log 9 = 1/2."""
    spec = SchedulerSpec(type="WarmupLR", warmup_min_lr=2e-5, warmup_max_lr=1e-4, warmup_num_steps=9)
    assert lr_at(spec, 0) == 2e-5
    assert lr_at(spec, 1) == 2e-5  # log 1 = 0
    assert lr_at(spec, 3) == pytest.approx(6e-5, rel=1e-12)
    assert lr_at(spec, 9) == pytest.approx(1e-4, rel=1e-12)  # log 9 / log 9
    assert lr_at(spec, 10**6) == pytest.approx(1e-4, rel=1e-12)


def test_cosine_by_hand():
    """After N = 10 warm-up steps of 20, step 15 has progress (14 - 10 + 1) / 10 = 1/2, where the cosine is 0."""
    spec = SchedulerSpec(
        type="WarmupCosineLR", warmup_max_lr=1.0, warmup_num_steps=10, total_num_steps=20, cos_min_ratio=0.0
    )
    assert lr_at(spec, 15) == pytest.approx(0.5, rel=1e-12)
    assert lr_at(spec, 20) == pytest.approx(0.0, abs=1e-15)
    assert lr_at(spec, 12) == pytest.approx((1 + math.cos(math.pi * 0.2)) / 2, rel=1e-12)


def test_a_schedule_without_its_numbers_says_so():
    spec = SchedulerSpec(type="WarmupLR", warmup_max_lr=1e-3, warmup_num_steps=None)
    with pytest.raises(UsageError, match="number of steps of WarmupLR is not known yet"):
        lr_at(spec, 0)
    with pytest.raises(UsageError, match="count from 0"):
        lr_at(spec, -1)

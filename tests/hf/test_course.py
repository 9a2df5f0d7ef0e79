"""A run's way through its data: every sample of an epoch once, in one order, whatever the batches before and after."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardglass.hf.course import Batching, Course, Place, place_of

sizes = st.integers(1, 5)


@st.composite
def batchings(draw, samples):
    return Batching(
        world_size=draw(sizes),
        per_device=draw(sizes),
        accumulation=draw(sizes),
        samples=samples,
        drop_last=draw(st.booleans()),
    )


@settings(deadline=None)
@given(st.data(), st.integers(1, 200), st.integers(0, 30))
def test_steps_take_the_samples_of_an_epoch_one_after_the_other_and_leave_none_but_a_dropped_tail(data, samples, steps):
    batching = data.draw(batchings(samples))
    start = Place(epoch=data.draw(st.integers(0, 3)), used=data.draw(st.integers(0, samples - 1)))
    course = Course(batching=batching, start=start, step=data.draw(st.integers(0, 50)))
    if not batching.steps(samples) or not course.first_steps:
        return  # the data fills no step, which is refused before
    before = course.at(course.step)
    assert before == start
    for step in range(course.step + 1, course.step + steps + 1):
        after = course.at(step)
        if after.epoch == before.epoch:
            assert after.used == before.used + batching.whole < samples
        else:
            left = samples - before.used
            assert (after.epoch, after.used) == (before.epoch + 1, 0)
            assert left <= batching.whole or (batching.drop_last and left - batching.whole < batching.micro)
        before = after


@settings(deadline=None)
@given(st.data(), st.integers(1, 200), st.integers(1, 4))
def test_whole_epochs_end_where_their_steps_end(data, samples, epochs):
    batching = data.draw(batchings(samples))
    if not batching.steps(samples):
        return
    course = Course(batching=batching, start=Place(epoch=0, used=0), step=0)
    total = course.total_steps(epochs)
    assert total == epochs * batching.steps_per_epoch
    assert course.at(total) == Place(epoch=epochs, used=0)
    for step in range(total):
        middle = course.at(step)
        again = Course(batching=batching, start=middle, step=step)
        assert again.is_regular
        assert again.total_steps(epochs) == total


def test_a_changed_batch_goes_on_at_the_same_sample_and_counts_what_is_left_in_its_own_steps():
    then = Batching(world_size=2, per_device=2, accumulation=2, samples=100)
    place = Course(batching=then, start=Place(epoch=0, used=0), step=0).at(5)
    assert place == Place(epoch=0, used=40)
    now = Batching(world_size=3, per_device=4, accumulation=1, samples=100)
    course = Course(batching=now, start=place, step=5)
    assert not course.is_regular
    assert course.first_steps == 5  # 60 samples left, 12 a step
    assert course.at(9) == Place(epoch=0, used=88)
    assert course.at(10) == Place(epoch=1, used=0)
    assert course.total_steps(2) == 10 + math.ceil(100 / 12)
    assert course.total_steps(1) == 10
    assert course.total_steps(0.5) == 6  # 10 samples are left of the half


@pytest.mark.parametrize(
    ("written", "epochs", "place"),
    [
        ({"epoch": 2, "used": 7, "samples": 10}, 9.9, Place(epoch=2, used=7)),
        ({"samples": 10}, 1.3, Place(epoch=1, used=3)),
        ({"samples": 10}, 2.0, Place(epoch=2, used=0)),
        ({"samples": 10}, 1.9999999999, Place(epoch=2, used=0)),
        ({}, 1.3, None),
        ({"samples": 10}, None, None),
    ],
)
def test_the_place_is_the_written_one_or_follows_from_the_epochs(written, epochs, place):
    assert place_of(written, epochs) == place

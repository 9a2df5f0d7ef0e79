"""Ranks that would wait for each other for ever are told so within seconds, and all of them fail."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import Perceptron
from ranks import run_ranks
from sharded import make, squared

from shardglass.engine import board
from shardglass.engine.circle import Wait, circle, circle_line
from shardglass.errors import CollectiveError

SERIES = ("1", "5", "control")


def waits_in(series, number, **started):
    return Wait(what=f"all-gather of {series}", series=series, number=number, started={series: number, **started})


def test_two_ranks_that_each_wait_for_what_the_other_has_not_started_are_a_circle():
    waits = {0: waits_in("a", 2, b=1), 1: waits_in("b", 2, a=1)}
    assert circle(waits) == [0, 1]
    told = circle_line([0, 1], waits)
    assert "ranks 0, 1 would wait" in told
    assert "rank 0 waits in the all-gather of a, which rank 1 has not started" in told
    assert "rank 1 waits in the all-gather of b, which rank 0 has not started" in told


@pytest.mark.parametrize(
    "waits",
    [
        {},
        {0: waits_in("a", 2)},
        {0: waits_in("a", 2), 1: waits_in("a", 2)},
        {0: waits_in("a", 2, b=2), 1: waits_in("b", 2, a=2)},  # both are started on both: the data is on its way
        {0: waits_in("a", 2, b=2), 1: waits_in("b", 2, a=1)},  # rank 1 goes on when its data is here
    ],
)
def test_ranks_of_which_one_may_still_go_on_are_no_circle(waits):
    assert circle(waits) is None


def test_a_circle_of_three_is_given_in_its_order_and_without_those_who_wait_for_it():
    waits = {
        0: waits_in("d", 1, a=1, b=1, c=1),  # waits for the others, none of which waits for it
        1: waits_in("a", 1, c=1),
        2: waits_in("c", 1, b=1),
        3: waits_in("b", 1, a=1),
    }
    assert circle(waits) == [1, 2, 3]


@given(
    st.dictionaries(
        st.integers(0, 5),
        st.tuples(st.sampled_from(SERIES), st.fixed_dictionaries({s: st.integers(0, 2) for s in SERIES})),
        max_size=6,
    )
)
def test_a_circle_is_found_exactly_where_some_ranks_can_never_go_on(drawn):
    waits = {}
    for rank, (series, started) in drawn.items():
        number = max(1, started[series])
        waits[rank] = Wait(what=series, series=series, number=number, started={**started, series: number})
    found = circle(waits)
    going = set(waits)  # by the definition: those who wait for nobody that is stuck go on, again and again
    while True:
        stuck = {r for r in going if any(waits[r].is_for(waits[s]) for s in going if s != r)}
        if stuck == going:
            break
        going = stuck
    assert (found is None) is (not going)
    if found is not None:
        assert len(set(found)) == len(found) > 1
        assert all(waits[r].is_for(waits[s]) for r, s in zip(found, found[1:] + found[:1], strict=True))


class Twice(Perceptron):
    """Its forward runs the first block once more, after the others, if it is told to."""

    is_longer = False

    def forward(self, x, **kwargs):
        x = super().forward(x, **kwargs)
        return self.blocks[0](x) if self.is_longer else x


def a_longer_forward(handle, model):
    model.is_longer = True


def a_state_dict(handle, model):
    handle.full_state_dict()


def an_open_gathered(handle, model):
    with handle.gathered(model.blocks[1]):
        pass


def train(model, rank, stage, differing, act):
    """Steps, alike until step 2, before which one rank does something of its own."""
    handle, optimizer = make(model, stage=stage)
    for step in range(6):
        if step == 2 and rank == differing:
            globals()[act](handle, model)  # a name: functions of test modules do not always pickle
        squared(step, rank)(model).backward()
        optimizer.step()
    handle.full_state_dict()
    handle.close()


def refused(rank, world_size, differing, act):
    board.POLL_S = 0.2
    try:
        with pytest.raises(CollectiveError) as caught:
            train(Twice(depth=3), rank, 3, differing, act)
        return str(caught.value)
    finally:
        board.POLL_S = 2.0


@pytest.mark.parametrize(
    ("world_size", "differing", "act"),
    [
        (2, 0, "a_longer_forward"),
        (2, 1, "a_longer_forward"),
        (3, 1, "a_longer_forward"),
        (2, 1, "a_state_dict"),
        (3, 2, "an_open_gathered"),
    ],
)
def test_what_one_rank_alone_gathers_is_an_error_on_all_that_names_ranks_unit_and_step(world_size, differing, act):
    told = run_ranks(world_size, refused, differing, act, timeout_s=30)
    assert len(set(told)) == 1
    assert f"rank {differing} waits in the all-gather of " in told[0]
    assert ", which rank " in told[0]
    assert "at step 2" in told[0] or "at step 3" in told[0]
    assert "would wait for each other for ever" in told[0]


def train_apart(rank, world_size, stage):
    train(Twice(depth=3), rank, stage, 1, "a_longer_forward")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_remedy_that_is_given_is_one(stage):
    run_ranks(2, train_apart, stage)

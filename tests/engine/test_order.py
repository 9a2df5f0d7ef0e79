"""The order of gathers: each place of the sequence once, whatever a rank uses."""

from hypothesis import given
from hypothesis import strategies as st

from shardglass.engine.order import Pass, Use, reordered, without_repeats


def gathers(sequence, used, *, depth=1, starts_with_first=False):
    """Everything that a pass gathers for a series of uses, ahead, in turn or at the end; and the uses out of turn."""
    order = Pass(sequence, starts_with_first=starts_with_first)
    gathered, odd = [], []
    for unit in used:
        due = order.use(unit)
        if due is None:
            odd.append(unit)
        else:
            gathered += due
        while (ahead := order.next_ahead(depth)) is not None:
            order.take_ahead()
            gathered.append(ahead)
    return [*gathered, *order.rest()], odd


UNITS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=8).map(
    lambda units: [use.unit for use in without_repeats(Use(unit) for unit in units)]
)


@given(UNITS, st.data(), st.integers(0, 3))
def test_whatever_is_skipped_every_place_is_gathered_once_in_order(sequence, data, depth):
    used = [unit for unit in sequence if data.draw(st.booleans())]
    gathered, _ = gathers(sequence, used, depth=depth)
    assert gathered == sequence


@given(UNITS, st.lists(st.sampled_from("abcde"), max_size=8), st.integers(0, 3))
def test_uses_out_of_turn_leave_the_sequence_as_it_is(sequence, used, depth):
    gathered, odd = gathers(sequence, used, depth=depth)
    assert gathered == sequence
    assert set(odd) <= set(used)
    assert {unit for unit in used if unit not in sequence} <= set(odd)


def test_a_unit_that_is_whole_from_before_is_not_gathered_again():
    assert gathers(["a", "b", "c"], ["a", "b", "c"], starts_with_first=True) == (["b", "c"], [])


def test_a_unit_in_use_is_not_gathered_ahead_of_its_next_use():
    order = Pass(["a", "b", "a"])
    assert order.use("a") == ("a",)
    assert order.next_ahead(3) == "b"
    order.take_ahead()
    assert order.next_ahead(3) is None
    assert order.use("b") == ()
    assert order.next_ahead(3) == "a"


def test_units_in_use_and_to_come_are_known():
    order = Pass(["a", "b", "c", "a"])
    assert order.still_ahead() == {"a", "b", "c"}
    order.use("b")
    assert order.still_ahead() == {"a", "b", "c"}
    order.use("a")
    assert order.still_ahead() == {"a"}


def test_a_new_order_keeps_what_was_not_used_behind_what_it_followed():
    uses = [Use(unit) for unit in "abcd"]
    assert reordered(uses, [Use("b"), Use("a"), Use("d")]) == tuple(Use(unit) for unit in "bcad")
    assert reordered(uses, [Use("d")]) == tuple(Use(unit) for unit in "abcd")
    assert reordered(uses, []) == tuple(uses)


def test_neighbours_of_one_unit_are_one_use_and_need_weights_if_one_does():
    uses = [Use("a", in_backward=False), Use("a"), Use("b", in_backward=False), Use("a", in_backward=False)]
    assert without_repeats(uses) == (Use("a"), Use("b", in_backward=False), Use("a", in_backward=False))

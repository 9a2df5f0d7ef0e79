"""Transfers and differences: what they refuse and name; ``test_every_scheme`` has the rest."""

from dataclasses import replace

import pytest

from shardglass.errors import UsageError
from shardglass.layout import (
    Change,
    Moved,
    ParamSpec,
    Transfer,
    difference,
    make_layout,
    received_by,
    secondary_layout,
    sent_by,
    transfers,
)

W = ParamSpec(name="w", shape=(5,), dtype="float32", trainable=True, group=0, unit="u")
V = replace(W, name="v", shape=(2, 2))


def test_a_transfer_list_says_from_where_to_where():
    source, target = make_layout("deepspeed-param", [W], 2), make_layout("dim0", [W], 3)
    assert [(t.source_rank, t.source_offset, t.start, t.length, t.target_rank, t.target_offset)
            for t in transfers(source, target)] == [
        (0, 0, 0, 2, 0, 0), (0, 2, 2, 1, 1, 0), (1, 0, 3, 1, 1, 1), (1, 1, 4, 1, 2, 0)
    ]  # fmt: skip
    assert list(sent_by(source, target, 1, name="w")) == [
        Transfer(name="w", start=3, length=1, source_rank=1, source_buffer=0, source_offset=0,
                 target_rank=1, target_buffer=0, target_offset=1),
        Transfer(name="w", start=4, length=1, source_rank=1, source_buffer=0, source_offset=1,
                 target_rank=2, target_buffer=0, target_offset=0),
    ]  # fmt: skip


def test_new_ranks_take_turns_among_those_that_hold_the_whole():
    source, target = make_layout("ddp", [W], 2), make_layout("ddp", [W], 5)
    assert [t.source_rank for t in transfers(source, target)] == [0, 1, 0, 1, 0]


def test_a_rank_that_holds_a_copy_gives_it_to_itself():
    source, target = secondary_layout([W], 4, 2), make_layout("ddp", [W], 4)
    pairs = [(t.start, t.source_rank, t.target_rank) for t in transfers(source, target)]
    # Elements 0 to 3 are on ranks 0 and 2, element 4 is on ranks 1 and 3.
    assert pairs == [(0, 0, 0), (4, 1, 0), (0, 2, 1), (4, 1, 1), (0, 2, 2), (4, 1, 2), (0, 2, 3), (4, 3, 3)]
    assert [(t.start, t.target_rank) for t in sent_by(source, target, 2)] == [(0, 1), (0, 2), (0, 3)]


def test_a_parameter_that_the_source_lacks_or_has_in_another_shape_is_an_error():
    source = make_layout("units", [W, V], 2)
    with pytest.raises(UsageError, match=r"u is in the layout of scheme dim0 and not in that of scheme units"):
        list(transfers(source, make_layout("dim0", [replace(W, name="u")], 2)))
    with pytest.raises(UsageError, match=r"w has shape \(5,\) in one layout and \(6,\) in the other"):
        list(received_by(source, make_layout("dim0", [replace(W, shape=(6,))], 2), 0))
    with pytest.raises(UsageError, match="v is in the layout of scheme units and not in that of scheme dim0"):
        list(sent_by(source, make_layout("dim0", [W], 2), 0, name="v"))
    with pytest.raises(UsageError, match="rank is 2; the layout has ranks 0 to 1"):
        list(sent_by(source, source, 2))
    with pytest.raises(UsageError, match="rank is -1; the layout has ranks 0 to 1"):
        list(received_by(source, source, -1))


def test_what_only_the_source_has_is_not_sent():
    source, target = make_layout("ddp", [W, V], 1), make_layout("ddp", [W], 1)
    assert [t.name for t in transfers(source, target)] == ["w"]
    assert [t.name for t in sent_by(source, target, 0)] == ["w"]


def test_a_difference_names_what_is_new_gone_and_changed():
    left = make_layout("units", [W, V, replace(W, name="gone")], 1)
    frozen = replace(V, trainable=False, group=None, dtype="bfloat16", shape=(4,))
    right = make_layout("ddp", [frozen, W, replace(W, name="new")], 1)
    found = difference(left, right)
    assert (found.only_left, found.only_right) == (("gone",), ("new",))
    assert found.changed == (
        Change(name="v", what="shape", left=(2, 2), right=(4,)),
        Change(name="v", what="dtype", left="float32", right="bfloat16"),
        Change(name="v", what="trainable", left=True, right=False),
        Change(name="v", what="group", left=0, right=None),
    )
    assert found.moved == (Moved(name="w", numel=5, moved=0, shifted=5),)  # in another buffer
    assert not found.is_empty
    assert difference(left, left).is_empty

"""The comparison core against hand-made differences."""

import math

import pytest
import torch

from shardglass.lens import compare
from shardglass.lens.compare import Match, compare_tensors


def test_the_same_tensors_are_bitwise_equal_and_within_zero():
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(4), "c": torch.tensor(True), "d": torch.randn(2).bfloat16()}
    found = compare_tensors(tensors, {name: t.clone() for name, t in tensors.items()})
    assert found.bitwise
    assert found.within(0.0)
    assert [row.max_rel for row in found.rows] == [0.0] * 4
    assert found.describe() == "4 tensors, all the same bits"


def test_the_relative_difference_is_to_the_largest_value_of_the_reference():
    reference = {"w": torch.tensor([1e-9, 2.0, -4.0])}
    found = compare_tensors({"w": torch.tensor([2e-9, 2.0, -4.5])}, reference)
    (row,) = found.rows
    assert row.max_abs == 0.5
    assert row.max_rel == 0.125
    assert not found.bitwise
    assert found.within(0.125)
    assert not found.within(0.12)


def test_the_worst_tensor_is_named_first():
    right = {name: torch.ones(2) for name in ("small", "large", "same")}
    left = {"small": torch.full((2,), 1.001), "large": torch.full((2,), 1.5), "same": torch.ones(2)}
    found = compare_tensors(left, right)
    assert found.worst is not None
    assert found.worst.name == "large"
    assert found.describe(1).splitlines() == [
        "2 of 3 tensors differ; the worst:",
        "  large (2,): max abs 5.000e-01, relative 5.000e-01",
        "  and 1 more",
    ]


def test_missing_extra_and_misshapen_names_are_never_within():
    right = {"here": torch.ones(2), "gone": torch.ones(2), "bent": torch.ones(2, 3)}
    left = {"here": torch.ones(2), "bent": torch.ones(3, 2), "new": torch.ones(1)}
    found = compare_tensors(left, right)
    assert {row.name: row.match for row in found.rows} == {
        "here": Match.COMPARED,
        "gone": Match.MISSING,
        "bent": Match.SHAPE,
        "new": Match.EXTRA,
    }
    assert not found.within(math.inf)
    assert not found.bitwise
    text = found.describe()
    assert "gone (2,): missing" in text
    assert "new (1,): extra" in text
    assert "bent: shape mismatch, (3, 2) against (2, 3)" in text


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (math.nan, 1.0, math.inf),
        (1.0, math.nan, math.inf),
        (math.nan, math.nan, 0.0),
        (math.inf, math.inf, 0.0),
        (math.inf, -math.inf, math.inf),
    ],
)
def test_nan_and_infinity_differ_unless_both_sides_have_them(left, right, expected):
    found = compare_tensors({"x": torch.tensor([left, 2.0])}, {"x": torch.tensor([right, 2.0])})
    assert found.rows[0].max_abs == expected


def test_another_dtype_with_equal_values_is_within_zero_but_not_bitwise():
    values = torch.tensor([0.5, 1.0])
    found = compare_tensors({"x": values}, {"x": values.bfloat16()})
    assert found.within(0.0)
    assert not found.bitwise


def test_minus_zero_is_equal_in_value_but_not_in_bits():
    found = compare_tensors({"x": torch.tensor([-0.0])}, {"x": torch.tensor([0.0])})
    assert found.within(0.0)
    assert not found.bitwise


def test_a_difference_in_a_tensor_of_zeros_is_not_hidden():
    assert not compare_tensors({"x": torch.tensor([1e-6])}, {"x": torch.zeros(1)}).within(1.0)


def test_the_last_element_of_a_tensor_of_several_blocks_is_seen(monkeypatch):
    monkeypatch.setattr(compare, "BLOCK_NUMEL", 7)
    right = torch.ones(50)
    left = right.clone()
    left[-1] = 1.25
    assert compare_tensors({"x": left}, {"x": right}).rows[0].max_rel == 0.25


def test_views_that_are_not_contiguous_and_empty_tensors_compare():
    base = torch.randn(4, 6)
    assert compare_tensors({"x": base.t(), "e": base[:0]}, {"x": base.t().clone(), "e": torch.empty(0, 6)}).bitwise


def test_nothing_on_either_side_has_no_worst_tensor():
    found = compare_tensors({}, {})
    assert found.worst is None
    assert found.within(0.0)
    assert found.describe() == "no tensors on either side"

"""The page "What ZeRO does to your model" is what plans say today."""

from pathlib import Path

import pytest

from shardglass.hf.zero_page import make_page
from shardglass.report.zero_page import MAKE

PAGE = Path(__file__).parents[2] / "docs" / "what-zero-does.md"


@pytest.fixture(scope="module")
def page():
    return make_page()


def test_the_page_in_the_tree_is_the_one_that_plans_make(page):
    assert PAGE.read_text(encoding="utf-8") == page, f"out of date: {MAKE}"


def test_its_numbers_are_those_of_recorded_deepspeed_runs(page):
    for line in (
        "qwen1.5-7b has 387 tensors with 7,721,324,544 elements",
        "| group 0 | 0 | 3,860,662,272 | 0 | 194 | 193 |",
        "| group 0 | 0 / 1 | 193 | `model.layers.16.self_attn.q_proj.weight` | 2,048 | 16,775,168 | 0.012 | 0, 2,048 |",
        "index 193 is tensor number 194. The 193 before it are whole on rank 0.",
    ):
        assert line in page

"""A layout in DeepSpeed's words: rules beside those that the recordings in ``test_deepspeed`` hold."""

import pytest

from shardglass.errors import UsageError
from shardglass.layout import (
    ParamSpec,
    SchemeOptions,
    deepspeed_flat_layout,
    deepspeed_param_layout,
    dim0_layout,
    element_at,
    first_offset,
    groups_padding,
    has_bf16_optimizer,
    params_in_partition,
    params_not_in_partition,
    persistent_parameters,
    round_robin_indices,
    sub_group_paddings,
    units_layout,
)


def spec(name, shape, group=0, *, unit="u"):
    return ParamSpec(name=name, shape=shape, dtype="float32", trainable=group is not None, group=group, unit=unit)


def test_padding_of_one_element_on_four_ranks_covers_all_of_them():
    layout = deepspeed_flat_layout([spec("scale", (1,))], 4)
    assert layout.buffers[0].shard_numel == 2
    assert [groups_padding(layout, rank)[0] for rank in range(4)] == [1, 2, 2, 2]
    assert [groups_padding(layout, rank, on_last_rank=True)[0] for rank in range(4)] == [0, 0, 0, 7]
    assert [first_offset(layout, rank) for rank in range(4)] == [{0: 0}] * 4
    assert element_at(layout, 0, 0, 0) == ("scale", 0)
    assert element_at(layout, 0, 0, 1) is None


def test_padding_of_a_sub_group_is_told_on_the_last_rank_even_if_others_have_it_too():
    layout = deepspeed_param_layout([spec("scale", (1,))], 4)
    assert [sub_group_paddings(layout, rank) for rank in (0, 3)] == [((0,),), ((3,),)]


def test_a_partition_that_begins_in_padding_between_parameters_has_first_offset_zero():
    params = [spec("a", (5,)), spec("b", (3,))]
    layout = deepspeed_flat_layout(params, 2, SchemeOptions(parameter_alignment=True))
    assert layout.buffers[0].offsets == (0, 8)
    assert layout.buffers[0].shard_numel == 6
    assert params_in_partition(layout, 1) == {0: ("b",)}
    assert first_offset(layout, 1) == {0: 0}


def test_the_bf16_optimizer_is_taken_only_if_fp32_accumulation_is_asked_for_at_stage_1():
    taken = {"stage": 1, "dtype": "bfloat16", "grad_accum_dtype": "float32", "offloads_optimizer": False}
    assert has_bf16_optimizer(**taken)
    for change in [{"stage": 2}, {"dtype": "float16"}, {"grad_accum_dtype": None}, {"offloads_optimizer": True}]:
        assert not has_bf16_optimizer(**(taken | change))


@pytest.mark.parametrize("count", range(9))
@pytest.mark.parametrize("ranks", range(1, 5))
def test_round_robin_deals_parameters_out_like_cards(count, ranks):
    hands = [[i for i in range(count) if i % ranks == rank] for rank in range(ranks)]
    dealt = [i for hand in hands for i in hand]
    assert [dealt.index(i) for i in range(count)] == round_robin_indices(count, ranks)


def test_parameters_persist_up_to_both_thresholds():
    params = [spec("a", (50,)), spec("b", (51,)), spec("c", (40,), None), spec("d", (30,)), spec("e", (10,))]
    assert persistent_parameters(params) == ("a", "b", "c", "d", "e")
    assert persistent_parameters(params, param_threshold=50) == ("a", "c", "d", "e")
    assert persistent_parameters(params, param_threshold=50, model_threshold=100) == ("a", "c", "e")


def test_the_lists_are_there_for_every_scheme_and_by_group():
    params = [spec("a", (40,), unit="1"), spec("b", (3,), 1, unit="1"), spec("c", (40,), unit="2")]
    layout = units_layout(params, 2)
    assert params_in_partition(layout, 0) == {0: ("a", "c"), 1: ()}
    assert params_in_partition(layout, 1) == {0: ("c",), 1: ("b",)}
    assert params_not_in_partition(layout, 0) == {0: (), 1: ("b",)}
    assert [first_offset(layout, rank) for rank in range(2)] == [{0: 0, 1: 0}, {0: 32, 1: 0}]
    short = dim0_layout([spec("a", (5, 2)), spec("b", (2,))], 4)
    assert [params_in_partition(short, rank)[0] for rank in range(4)] == [("a", "b"), ("a", "b"), ("a",), ()]
    assert [first_offset(short, rank)[0] for rank in range(4)] == [0, 4, 8, 0]


def test_paddings_are_refused_for_another_scheme_and_lists_for_a_rank_that_is_not_there():
    layout = deepspeed_param_layout([spec("w", (1,))], 2)
    with pytest.raises(UsageError, match="those of scheme deepspeed-flat; this layout is of scheme deepspeed-param"):
        groups_padding(layout, 0)
    for question in (params_in_partition, params_not_in_partition, first_offset, sub_group_paddings):
        with pytest.raises(UsageError, match="rank is 2; the layout has ranks 0 to 1"):
            question(layout, 2)

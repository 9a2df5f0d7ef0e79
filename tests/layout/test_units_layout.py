"""The units scheme and the questions to it, against a naive model that lists every element."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardglass.errors import InvariantError, UsageError
from shardglass.layout import (
    Layout,
    ParamSpec,
    boundary_cuts,
    element_at,
    group_runs,
    locate,
    make_layout,
    slices_of,
    slices_of_rank,
    units_layout,
)
from shardglass.options import DTYPE_BYTES

DTYPES = ("float32", "bfloat16", "float64")


def spec(name, shape, *, dtype="float32", group=0, unit="u"):
    return ParamSpec(name=name, shape=shape, dtype=dtype, trainable=group is not None, group=group, unit=unit)


@st.composite
def models(draw):
    """Parameters of a model with a few units, in model order; unit names may come back later."""
    count = draw(st.integers(1, 12))
    params = []
    for k in range(count):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        group = draw(st.sampled_from([0, 1, 2, None]))
        unit, dtype = draw(st.sampled_from("abc")), draw(st.sampled_from(DTYPES))
        params.append(spec(f"p{k}", shape, dtype=dtype, group=group, unit=unit))
    return params


def naive(params, world_size):
    """The specification: every buffer as a list of (name, element) or None for padding, one entry an element."""
    units = []
    for p in params:
        if p.unit not in units:
            units.append(p.unit)
    buffers = []
    for unit in units:
        for trainable in (True, False):
            kind = [p for p in params if p.unit == unit and p.trainable == trainable]
            dtypes = []
            for p in kind:
                if p.dtype not in dtypes:
                    dtypes.append(p.dtype)
            for dtype in dtypes:
                cells = []
                align = 16 // DTYPE_BYTES[dtype]
                for group in (None, 0, 1, 2):
                    while len(cells) % 32 and any(p.dtype == dtype and p.group == group for p in kind):
                        cells.append(None)
                    for p in kind:
                        if p.dtype == dtype and p.group == group:
                            while len(cells) % align:
                                cells.append(None)
                            cells += [(p.name, element) for element in range(p.numel)]
                while len(cells) % (32 * world_size):
                    cells.append(None)
                buffers.append(((unit, dtype, trainable), cells))
    return buffers


def cases(test):
    return settings(max_examples=40, deadline=None)(given(models(), st.integers(1, 5))(test))


@cases
def test_buffers_hold_the_elements_the_naive_model_lists(params, world_size):
    layout = units_layout(params, world_size)
    expected = naive(params, world_size)
    assert [(b.unit, b.dtype, b.trainable) for b in layout.buffers] == [kind for kind, _ in expected]
    for buffer, (_, cells) in zip(layout.buffers, expected, strict=True):
        assert buffer.numel == len(cells)
        assert buffer.shard_numel * world_size == buffer.numel
        for p, offset in zip(buffer.params, buffer.offsets, strict=True):
            assert cells[offset : offset + p.numel] == [(p.name, element) for element in range(p.numel)]
        assert buffer.real_numel == sum(cell is not None for cell in cells)


@cases
def test_every_element_is_found_where_the_naive_model_has_it(params, world_size):
    layout = units_layout(params, world_size)
    for b, (_, cells) in enumerate(naive(params, world_size)):
        shard = len(cells) // world_size
        for position, cell in enumerate(cells):
            if cell is not None:
                found = locate(layout, *cell)
                assert (found.buffer, found.rank, found.offset) == (b, position // shard, position % shard)


@cases
def test_the_ranks_slices_are_all_elements_once(params, world_size):
    layout = units_layout(params, world_size)
    seen = []
    for rank in range(world_size):
        for s in slices_of_rank(layout, rank):
            assert s.length > 0
            assert s.rank == rank
            for k in range(s.length):
                where = locate(layout, s.name, s.start + k)
                assert (where.buffer, where.rank, where.offset) == (s.buffer, rank, s.offset + k)
                seen.append((s.name, s.start + k))
    assert len(seen) == len(set(seen)) == sum(p.numel for p in params)


@cases
def test_parameters_start_at_16_bytes_and_shards_at_32_elements(params, world_size):
    for buffer in units_layout(params, world_size).buffers:
        assert all(offset * buffer.itemsize % 16 == 0 for offset in buffer.offsets)
        assert buffer.shard_numel % 32 == 0


@pytest.mark.parametrize("whole", [False, True])
@cases
def test_group_runs_cover_exactly_the_group_s_elements(whole, params, world_size):
    layout = units_layout(params, world_size)
    for rank in range(world_size):
        runs = group_runs(layout, rank, whole=whole)
        assert len({(run.buffer, run.group) for run in runs}) == len(runs)
        for run in runs:
            buffer = layout.buffers[run.buffer]
            base = 0 if whole else rank * buffer.shard_numel
            inside = {p.group for p, o in zip(buffer.params, buffer.offsets, strict=True)
                      if p.numel and o < base + run.stop and o + p.numel > base + run.start}  # fmt: skip
            assert inside == {run.group}
            assert run.slices[0].offset == run.start
            assert run.start % 32 == run.stop % 32 == 0
            assert 0 <= run.stop - (run.slices[-1].offset + run.slices[-1].length) < 32
            assert run.stop <= (buffer.numel if whole else buffer.shard_numel)
        total = sum(s.length for run in runs for s in run.slices)
        owned = sum(p.numel for p in params if p.trainable) if whole else sum(
            s.length for s in slices_of_rank(layout, rank) if layout.buffers[s.buffer].trainable
        )  # fmt: skip
        assert total == owned


@cases
def test_boundary_cuts_name_the_tensor_that_has_elements_on_both_sides(params, world_size):
    layout = units_layout(params, world_size)
    cuts = boundary_cuts(layout)
    assert len(cuts) == len(layout.buffers) * (world_size - 1)
    expected = naive(params, world_size)
    for cut in cuts:
        cells = expected[cut.buffer][1]
        boundary = (cut.left_rank + 1) * layout.buffers[cut.buffer].shard_numel
        before, after = (cell and cell[0] for cell in cells[boundary - 1 : boundary + 1] or (None, None))
        if before is not None and before == after:
            assert cut.name == before
            assert cut.left == sum(cell is not None and cell[0] == before for cell in cells[:boundary])
            assert cut.right == sum(cell is not None and cell[0] == before for cell in cells[boundary:])
        else:
            assert (cut.name, cut.left, cut.right) == (None, 0, 0)


@cases
def test_json_gives_back_an_equal_layout_with_the_same_fingerprint(params, world_size):
    layout = units_layout(params, world_size)
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert again.fingerprint == layout.fingerprint
    assert again.names == layout.names


def test_json_is_pinned_because_checkpoints_persist_it():
    params = [
        spec("emb", (3, 2), unit="root:0", group=1),
        spec("b.bias", (5,), unit="b", group=None),
        spec("b.weight", (2, 2), unit="b", group=1),
        spec("b.norm", (3,), unit="b", group=0),
    ]
    assert json.loads(units_layout(params, 2).to_json()) == {
        "version": 1,
        "scheme": "units",
        "world_size": 2,
        "buffers": [
            {"unit": "root:0", "dtype": "float32", "trainable": True, "shard_numel": 32,
             "params": [{"name": "emb", "shape": [3, 2], "group": 1, "offset": 0}]},
            {"unit": "b", "dtype": "float32", "trainable": True, "shard_numel": 32,
             "params": [{"name": "b.norm", "shape": [3], "group": 0, "offset": 0},
                        {"name": "b.weight", "shape": [2, 2], "group": 1, "offset": 32}]},
            {"unit": "b", "dtype": "float32", "trainable": False, "shard_numel": 32,
             "params": [{"name": "b.bias", "shape": [5], "group": None, "offset": 0}]},
        ],
    }  # fmt: skip


def test_json_of_other_cuts_is_version_2_and_pinned_too():
    params = [spec("a", (3, 2)), spec("b", (2,), group=None)]
    head = {"version": 2, "world_size": 2}
    a, b = {"name": "a", "shape": [3, 2], "group": 0}, {"name": "b", "shape": [2], "group": None}
    of_u = {"unit": "u", "dtype": "float32"}
    whole = {"num_shards": 1, "copies": 2, "first": 0, "stride": 1}
    assert json.loads(make_layout("deepspeed-flat", params, 2).to_json()) == head | {
        "scheme": "deepspeed-flat",
        "buffers": [
            {"unit": "group 0", "dtype": "float32", "trainable": True, "shard_numel": 4,
             "params": [a | {"offset": 0, "unit": "u"}]},
            of_u | {"trainable": False, "shard_numel": 2, "label": "b", "holders": whole,
                    "params": [b | {"offset": 0}]},
        ],
    }  # fmt: skip
    assert json.loads(make_layout("dim0", params, 2).to_json()) == head | {
        "scheme": "dim0",
        "buffers": [
            of_u | {"trainable": True, "shard_numel": 4, "label": "a", "chunks": [2], "dim": 0,
                    "params": [a | {"offset": 0}]},
            of_u | {"trainable": False, "shard_numel": 1, "label": "b", "chunks": [1], "dim": 0,
                    "params": [b | {"offset": 0}]},
        ],
    }  # fmt: skip


def test_the_fingerprint_of_a_layout_that_checkpoints_keep_does_not_change():
    params = [spec("emb", (7, 3)), spec("w", (5, 5), dtype="bfloat16", unit="b"), spec("n", (3,), group=1, unit="b")]
    assert units_layout(params, 3).fingerprint == "dd740e191d8cf7b4"


def test_a_bf16_parameter_starts_at_a_multiple_of_eight_elements():
    layout = units_layout([spec("a", (3,), dtype="bfloat16"), spec("b", (9,), dtype="bfloat16")], 3)
    (buffer,) = layout.buffers
    assert buffer.offsets == (0, 8)
    assert buffer.shard_numel == 32
    assert buffer.key == "u/bfloat16/trainable"


def test_the_fingerprint_changes_with_every_field():
    base = {"name": "w", "shape": (4, 6), "dtype": "float32", "trainable": True, "group": 0, "unit": "u"}
    changes = [{"name": "v"}, {"shape": (6, 4)}, {"dtype": "bfloat16"}, {"trainable": False, "group": None},
               {"group": 1}, {"unit": "t"}]  # fmt: skip
    layouts = [units_layout([ParamSpec(**(base | change))], 2) for change in [{}, *changes]]
    layouts.append(units_layout([ParamSpec(**base)], 3))
    assert len({layout.fingerprint for layout in layouts}) == len(layouts)


def test_a_huge_model_on_many_ranks_answers_without_listing_ranks():
    params = [spec(f"block.{k}.w", (100_000, 100_000), dtype="bfloat16", unit=f"block.{k}") for k in range(100)]
    layout = units_layout(params, 100_000)
    assert sum(b.real_numel for b in layout.buffers) == 10**12
    assert locate(layout, "block.99.w", 10**10 - 1).rank == 99_999
    assert len(slices_of_rank(layout, 5)) == 100


def test_an_unknown_name_is_answered_with_the_nearest():
    layout = units_layout([spec("model.layers.0.weight", (2,))], 1)
    with pytest.raises(UsageError, match=r"'model.layer.0.weight' \(did you mean 'model.layers.0.weight'\?\)"):
        locate(layout, "model.layer.0.weight", 0)


@pytest.mark.parametrize("element", [-1, 2])
def test_an_element_outside_the_tensor_is_an_error(element):
    with pytest.raises(UsageError, match="w has elements 0 to 1"):
        locate(units_layout([spec("w", (2,))], 1), "w", element)


def test_an_element_of_an_empty_tensor_is_an_error():
    with pytest.raises(UsageError, match="w has no elements; there is no element 0"):
        locate(units_layout([spec("w", (0, 2))], 1), "w", 0)


def test_a_rank_that_is_not_there_is_an_error():
    layout = units_layout([spec("w", (2,))], 2)
    for question in (
        lambda: slices_of_rank(layout, 2),
        lambda: slices_of(layout, "w", 2),
        lambda: element_at(layout, 0, 2, 0),
        lambda: boundary_cuts(layout, left_rank=2),
    ):
        with pytest.raises(UsageError, match="rank is 2; the layout has ranks 0 to 1"):
            question()


def test_optimizer_runs_of_another_scheme_are_a_fault_of_ours():
    with pytest.raises(InvariantError, match="this layout is of scheme dim0"):
        group_runs(make_layout("dim0", [spec("w", (2,))], 1), 0)


def test_a_layout_of_another_version_is_refused():
    text = units_layout([spec("w", (2,))], 1).to_json().replace('"version": 1', '"version": 3')
    with pytest.raises(UsageError, match="version 3, and versions 1 and 2 are understood"):
        Layout.from_json(text)


def test_a_name_twice_and_no_rank_are_faults_of_ours():
    with pytest.raises(InvariantError, match="'w' is in two buffers"):
        units_layout([spec("w", (2,)), spec("w", (2,), dtype="bfloat16")], 1)
    with pytest.raises(InvariantError, match="world_size is 0"):
        units_layout([spec("w", (2,))], 0)

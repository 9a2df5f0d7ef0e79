"""The fast answers of every scheme against a naive model that lists every element; see ``naive_layout``."""

from dataclasses import replace

import naive_layout as naive
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardglass.errors import UsageError
from shardglass.layout import SCHEMES as ALL_SCHEMES
from shardglass.layout import (
    Layout,
    ParamSpec,
    SchemeOptions,
    boundary_cuts,
    cuts_of,
    difference,
    element_at,
    first_offset,
    held_numel,
    iter_boundary_cuts,
    locate,
    make_layout,
    num_boundary_cuts,
    params_in_partition,
    params_not_in_partition,
    rank_bytes,
    received_by,
    secondary_layout,
    sent_by,
    slices_in,
    slices_of,
    slices_of_rank,
    transfers,
)
from shardglass.options import DTYPE_BYTES

SCHEMES = ("units", "deepspeed-flat", "deepspeed-param", "dim0", "replicated", "deepspeed-hpz", "experts")
OF_DEEPSPEED = {"deepspeed-hpz", "experts"}
"""Layouts of DeepSpeed that are no scheme of their own: the second copy of ZeRO++, and groups of experts."""


@st.composite
def models(draw):
    """Parameters with groups, units, frozen and empty ones; an optimizer group has one dtype, as DeepSpeed wants it."""
    params = []
    for k in range(draw(st.integers(1, 7))):
        shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
        group = draw(st.sampled_from([0, 0, 1, 2, None]))
        dtype = "float32" if group == 1 else "bfloat16"
        unit = draw(st.sampled_from("ab"))
        trainable = group is not None
        params.append(ParamSpec(name=f"p{k}", shape=shape, dtype=dtype, trainable=trainable, group=group, unit=unit))
    return params


def expert(number, part):
    return f"moe.deepspeed_experts.{number}.{part}"


def shifted(name, by):
    """The name of an expert that has a number higher by ``by``."""
    _, _, number, part = name.split(".")
    return expert(int(number) + by, part)


@st.composite
def cases(draw, scheme=None, params=None):
    """(layout, its naive form) of one scheme."""
    params = draw(models()) if params is None else params
    scheme = draw(st.sampled_from(SCHEMES)) if scheme is None else scheme
    world = draw(st.integers(1, 5))
    if scheme == "deepspeed-hpz":
        hpz = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
        return secondary_layout(params, world, hpz), naive.secondary(params, world, hpz)
    if scheme == "experts":
        size = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
        num_local = draw(st.integers(1, 3))
        parts = [replace(p, group=0, trainable=True, dtype="float32") for p in params if p.numel]
        local = [replace(p, name=expert(j, p.name)) for j in range(num_local) for p in parts]
        options = SchemeOptions(expert_parallel={0: size} if local else {})
        listed = naive.experts(local, world, size, lambda p, rank: shifted(p.name, rank * num_local))
        return make_layout("deepspeed-flat", local, world, options), listed
    if scheme == "deepspeed-flat":
        alive = {p.group for p in params if p.trainable and p.numel}
        params = [p for p in params if p.group is None or p.group in alive]
        options = SchemeOptions(round_robin_gradients=draw(st.booleans()), parameter_alignment=draw(st.booleans()))
        return make_layout(scheme, params, world, options), naive.deepspeed_flat(params, world, options)
    if scheme == "deepspeed-param":
        options = SchemeOptions(sub_group_size=draw(st.integers(0, 30)))
        return make_layout(scheme, params, world, options), naive.deepspeed_param(params, world, options)
    if scheme == "dim0":
        dims = {}
        for p in params:
            dim = draw(st.integers(-len(p.shape), len(p.shape) - 1))
            if dim % len(p.shape) == 0 or p.shape[dim] % world == 0:
                dims[p.name] = dim
        options = SchemeOptions(shard_dims=dims)
        return make_layout(scheme, params, world, options), naive.dim0(params, world, options)
    return make_layout(scheme, params, world), getattr(naive, scheme)(params, world)


def every_scheme(test):
    """Run a test on layouts of each scheme by itself, so that a failure names it and none is rare."""

    def on_one(scheme, data):
        layout, expected = data.draw(cases(scheme))
        test(layout, expected)

    on_one.__name__ = test.__name__
    bound = settings(max_examples=25, deadline=None)(given(data=st.data())(on_one))
    return pytest.mark.parametrize("scheme", SCHEMES)(bound)


@every_scheme
def test_every_element_is_found_where_the_naive_model_has_it(layout, expected):
    assert all(rank < layout.world_size for b in expected for ranks in b.ranks for rank in ranks)
    assert [b.numel for b in layout.buffers] == [sum(len(cells) for cells in b.shards) for b in expected]
    everywhere = naive.holders(expected)
    assert len(everywhere) == sum(layout.spec(name).numel for name in layout.names)
    for (name, element), (b, _, offset, ranks) in everywhere.items():
        found = locate(layout, name, element)
        assert (found.buffer, found.offset, list(found.ranks), found.rank) == (b, offset, ranks, ranks[0])


@every_scheme
def test_every_offset_has_the_element_or_the_padding_the_naive_model_has(layout, expected):
    for b, buffer in enumerate(expected):
        for cells, ranks in zip(buffer.shards, buffer.ranks, strict=True):
            for rank in ranks:
                assert [element_at(layout, b, rank, offset) for offset in range(len(cells))] == cells
                with pytest.raises(UsageError, match="there is no offset"):
                    element_at(layout, b, rank, len(cells))


@every_scheme
def test_a_rank_s_slices_are_the_naive_model_s_runs(layout, expected):
    for rank in range(layout.world_size):
        everything = []
        for b, buffer in enumerate(expected):
            cells = cells_on(buffer, rank)
            slices = slices_in(layout, b, rank)
            everything += slices
            filled = [None] * len(cells)
            for s in slices:
                assert s.rank == rank
                assert s.length > 0
                for i in range(s.length):
                    assert filled[s.offset + i] is None
                    filled[s.offset + i] = (s.name, s.start + i)
            assert filled == cells
            assert [s.offset for s in slices] == sorted(s.offset for s in slices)
            if cells:
                real = sum(cell is not None for cell in cells)
                assert held_numel(layout.buffers[b], layout.buffers[b].holders.shard_of(rank)) == real
        assert slices_of_rank(layout, rank) == tuple(everything)
        for name in layout.names:
            assert slices_of(layout, name, rank) == tuple(s for s in everything if s.name == name)


def cells_on(buffer, rank):
    """What a rank holds of a naive buffer."""
    return next((cells for cells, ranks in zip(buffer.shards, buffer.ranks, strict=True) if rank in ranks), [])


@every_scheme
def test_cuts_are_where_neighbouring_shards_have_parts_of_one_tensor(layout, expected):
    order = sorted(layout.names, reverse=True)
    cuts = boundary_cuts(layout, order=order)
    found = iter(cuts)
    for b, buffer in enumerate(expected):
        for s in range(len(buffer.shards) - 1):
            before = [cell for shard in buffer.shards[: s + 1] for cell in shard if cell]
            behind = [cell for shard in buffer.shards[s + 1 :] for cell in shard if cell]
            cut_names = [n for n in dict.fromkeys(n for n, _ in behind) if n in {name for name, _ in before}]
            cut_names.sort(key=layout.names.index)
            for name in cut_names:
                check_cut(layout, next(found), b, name, before, behind, order)
            if buffer.is_run and not cut_names:
                check_gap(layout, next(found), b, before, behind)
    assert next(found, None) is None
    for name in layout.names:
        assert cuts_of(layout, name, order=order) == tuple(c for c in cuts if c.name == name)
    own_order = [None if c.name is None else layout.names.index(c.name) for c in cuts]
    assert [c.index for c in boundary_cuts(layout)] == own_order
    assert num_boundary_cuts(layout) == len(cuts)
    first_holder = {ranks[0] for buffer in expected for ranks in buffer.ranks}
    few = sorted(first_holder)[::2]
    rows = iter_boundary_cuts(layout, order=order, left_ranks=few)
    assert num_boundary_cuts(layout, left_ranks=few) == len(tuple(rows))
    for rank in first_holder:
        alone = [c for c in boundary_cuts(layout, order=order, left_rank=rank) if c.left_rank == rank]
        assert alone == [c for c in cuts if c.left_rank == rank]


def check_cut(layout, cut, b, name, before, behind, order):
    shape = layout.spec(name).shape
    left = [element for n, element in before if n == name]
    right = [element for n, element in behind if n == name]
    assert (cut.buffer, cut.name, cut.left, cut.right) == (b, name, len(left), len(right))
    assert (cut.shape, cut.first_right, cut.before, cut.after) == (shape, min(right), name, name)
    assert order[cut.index] == name
    assert layout.buffers[b].params[cut.position].name == name
    assert cut.left_percent == pytest.approx(100 * len(left) / (len(left) + len(right)))
    assert cut.left_percent + cut.right_percent == pytest.approx(100)
    if len(shape) == 2:
        assert [(r, c) for r in range(shape[0]) for c in range(shape[1])][min(right)] == (cut.row, cut.column)
    else:
        assert cut.row is cut.column is None


def check_gap(layout, cut, b, before, behind):
    assert (cut.buffer, cut.name, cut.left, cut.right, cut.index) == (b, None, 0, 0, None)
    assert (cut.left_percent, cut.right_percent, cut.row, cut.column) == (0, 0, None, None)
    assert cut.before == (before[-1][0] if before else None)
    assert cut.after == (behind[0][0] if behind else None)
    params = layout.buffers[b].params
    assert cut.after == (params[cut.position].name if cut.position < len(params) else None)


@every_scheme
def test_bytes_of_a_rank_are_those_of_its_cells(layout, expected):
    for rank in range(layout.world_size):
        account = {"trainable parameters": 0, "frozen parameters": 0, "padding": 0, "state": 0}
        for buffer, listed in zip(layout.buffers, expected, strict=True):
            for cell in cells_on(listed, rank):
                kind = "padding"
                if cell is not None:
                    kind = "trainable parameters" if layout.spec(cell[0]).trainable else "frozen parameters"
                account[kind] += DTYPE_BYTES[buffer.dtype]
                account["state"] += 12 if buffer.trainable else 0
        assert rank_bytes(layout, rank, state={"state": 12}) == account


@every_scheme
def test_in_and_out_lists_and_the_first_offset_follow_the_cells(layout, expected):
    for rank in range(layout.world_size):
        inside, outside, offsets = {}, {}, {}
        for buffer, listed in zip(layout.buffers, expected, strict=True):
            if buffer.holders.shard_of(rank) is None:
                continue
            held = [cell for cell in cells_on(listed, rank) if cell]
            for p in buffer.params:
                if not (p.trainable and p.group is not None and p.numel):
                    continue
                inside.setdefault(p.group, [])
                outside.setdefault(p.group, [])
                elements = [element for name, element in held if name == p.name]
                if elements and not inside[p.group]:
                    offsets[p.group] = elements[0]
                (inside if elements else outside)[p.group].append(p.name)
        assert params_in_partition(layout, rank) == {g: tuple(names) for g, names in inside.items()}
        assert params_not_in_partition(layout, rank) == {g: tuple(names) for g, names in outside.items()}
        assert first_offset(layout, rank) == {g: offsets.get(g, 0) for g in inside}


@every_scheme
def test_json_gives_back_an_equal_layout(layout, expected):
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert [b.numel for b in again.buffers] == [sum(len(cells) for cells in b.shards) for b in expected]
    assert (again.fingerprint, again.names, again.units) == (layout.fingerprint, layout.names, layout.units)


# ---- two layouts ----


@st.composite
def pairs(draw):
    """Two layouts of one model, of any schemes and world sizes."""
    params = draw(models())
    alive = {p.group for p in params if p.trainable and p.numel}
    params = [p for p in params if p.group is None or p.group in alive]
    params.append(ParamSpec(name="w", shape=(4, 3), dtype="bfloat16", trainable=True, group=0, unit="a"))
    schemes = st.sampled_from([scheme for scheme in SCHEMES if scheme != "experts"])  # that has other names
    other = draw(st.permutations(params))
    return draw(cases(draw(schemes), params)), draw(cases(draw(schemes), other))


@settings(max_examples=150, deadline=None)
@given(pairs())
def test_a_transfer_list_fills_every_shard_of_the_target_from_what_the_source_has(pair):
    (source, naive_source), (target, naive_target) = pair
    memory = {
        (rank, b): [None] * len(cells_on(buffer, rank))
        for b, buffer in enumerate(naive_target)
        for rank in range(target.world_size)
    }
    everything = list(transfers(source, target))
    for t in everything:
        there = cells_on(naive_source[t.source_buffer], t.source_rank)
        for i in range(t.length):
            assert there[t.source_offset + i] == (t.name, t.start + i)
            assert memory[t.target_rank, t.target_buffer][t.target_offset + i] is None
            memory[t.target_rank, t.target_buffer][t.target_offset + i] = there[t.source_offset + i]
        holding = locate(source, t.name, t.start).ranks
        assert t.source_rank == t.target_rank if t.target_rank in holding else t.source_rank in holding
    for (rank, b), cells in memory.items():
        assert cells == cells_on(naive_target[b], rank)
    check_parts(source, target, everything)


def check_parts(source, target, everything):
    """What one rank receives, or sends, or one parameter, are parts of the whole list."""
    for rank in range(target.world_size):
        assert list(received_by(source, target, rank)) == [t for t in everything if t.target_rank == rank]
        mine = [t for t in everything if t.target_rank == rank and t.name == "w"]
        assert list(received_by(source, target, rank, name="w")) == mine
    sent = [t for rank in range(source.world_size) for t in sent_by(source, target, rank)]
    assert sorted(map(repr, joined(sent))) == sorted(map(repr, joined(everything)))
    named = [t for rank in range(source.world_size) for t in sent_by(source, target, rank, name="w")]
    assert named == [t for t in sent if t.name == "w"]


def joined(listed):
    """The elements a list moves, one entry each, so that runs may be cut differently."""
    return [
        (t.name, t.start + i, t.source_rank, t.source_offset + i, t.target_rank, t.target_offset + i)
        for t in listed
        for i in range(t.length)
    ]


@settings(max_examples=150, deadline=None)
@given(pairs())
def test_a_difference_counts_the_elements_that_are_elsewhere(pair):
    (left, naive_left), (right, naive_right) = pair
    found = difference(left, right)
    assert (found.only_left, found.only_right, found.changed) == ((), (), ())
    before, after = naive.holders(naive_left), naive.holders(naive_right)
    counts = {name: [0, 0] for name in left.names}
    for cell, (b, _, offset, ranks) in before.items():
        c, _, other, others = after[cell]
        counts[cell[0]][0] += ranks != others
        counts[cell[0]][1] += ranks == others and (b, offset) != (c, other)
    expected = [(name, left.spec(name).numel, *counts[name]) for name in left.names if any(counts[name])]
    assert [(m.name, m.numel, m.moved, m.shifted) for m in found.moved] == expected
    assert found.is_empty == (not expected)


def test_the_naive_models_are_there_for_every_scheme():
    assert set(SCHEMES) - OF_DEEPSPEED == {scheme.name for scheme in ALL_SCHEMES}

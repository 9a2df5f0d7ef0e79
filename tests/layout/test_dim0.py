"""Scheme dim0 against FSDP2 itself: what ``fully_shard`` puts on each rank, element by element."""

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.tensor import Shard

from shardglass.errors import UsageError
from shardglass.layout import ParamSpec, SchemeOptions, dim0_layout, locate, replicated_layout, slices_in

WORLDS = (1, 2, 3, 4)


class Uneven(nn.Module):
    """Sizes that no world size divides, fewer rows than ranks, an empty tensor, a frozen and a tied weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, n) for n in (5, 1, 3))
        self.cube = nn.Parameter(torch.empty(2, 4, 3))
        self.one = nn.Parameter(torch.empty(1))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.narrow = nn.Parameter(torch.empty(4, 0))
        self.norm = nn.Parameter(torch.empty(9), requires_grad=False)
        self.short = nn.Parameter(torch.empty(10, 2, dtype=torch.bfloat16))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def number(self):
        """Make every element its own index, so that a piece tells where it is from."""
        for p in self.parameters():
            p.data.copy_(torch.arange(p.numel()).reshape(p.shape))


def specs(model):
    return [
        ParamSpec(
            name=name,
            shape=tuple(p.shape),
            dtype=str(p.dtype).removeprefix("torch."),
            trainable=p.requires_grad,
            group=0 if p.requires_grad else None,
            unit="model",
        )
        for name, p in model.named_parameters()
    ]


def sharded_pieces(rank, world_size, dims):
    """(name, elements on this rank, elements of memory, in a trainable parameter) of each parameter."""
    from torch.distributed.fsdp import fully_shard

    model = Uneven()
    model.number()
    names = {p: name for name, p in model.named_parameters()}
    placement = {p: Shard(dims[name]) for p, name in names.items() if name in dims}
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, shard_placement_fn=placement.get)
    rows = []
    for name, p in model.named_parameters():
        local = p.to_local()
        assert local.is_contiguous()
        memory = local.untyped_storage().nbytes() // local.element_size()
        rows.append((name, local.flatten().tolist(), memory, p.requires_grad))
    return rows


def check_against_fsdp2(world_size, dims):
    layout = dim0_layout(specs(Uneven()), world_size, SchemeOptions(shard_dims=dims))
    for rank, rows in enumerate(run_ranks(world_size, sharded_pieces, dims)):
        assert tuple(name for name, *_ in rows) == layout.names
        for b, (name, elements, memory, trainable) in enumerate(rows):
            found = [None] * len(elements)
            for s in slices_in(layout, b, rank):
                assert s.name == name
                found[s.offset : s.offset + s.length] = range(s.start, s.start + s.length)
            assert found == elements, (name, rank)
            assert memory == layout.buffers[b].shard_numel, (name, rank)
            assert trainable == layout.buffers[b].trainable
            for offset, element in enumerate(elements):
                where = locate(layout, name, int(element))
                assert (where.ranks, where.buffer, where.offset) == (range(rank, rank + 1), b, offset)


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_rank_has_the_rows_that_fully_shard_gives_it(world_size):
    check_against_fsdp2(world_size, {})


@pytest.mark.parametrize(("world_size", "dims"), [(1, {"cube": 2}), (2, {"cube": 1, "embed.weight": -1}),
                                                  (3, {"cube": 2, "embed.weight": 1}), (4, {"cube": -2})])  # fmt: skip
def test_a_parameter_cut_along_another_dimension_is_several_runs_as_fully_shard_cuts_it(world_size, dims):
    check_against_fsdp2(world_size, dims)
    layout = dim0_layout(specs(Uneven()), world_size, SchemeOptions(shard_dims=dims))
    runs = slices_in(layout, layout.find("cube")[0], 0)
    assert len(runs) == {1: 1, 2: 2, 3: 8, 4: 2}[world_size]


def refusals(rank, world_size):
    """What FSDP2 says to a scalar and to an uneven cut along the second dimension."""
    from torch.distributed.fsdp import fully_shard

    scalar, uneven = nn.Module(), nn.Module()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    uneven.weight = nn.Parameter(torch.empty(2, 3))
    with pytest.raises(ValueError, match="doesn't support scalar parameters"):
        fully_shard(scalar)
    with pytest.raises(NotImplementedError, match="does not support uneven sharding on dim 1"):
        fully_shard(uneven, shard_placement_fn=lambda _: Shard(1))
    return "refused"


def spec(name, shape):
    return ParamSpec(name=name, shape=shape, dtype="float32", trainable=True, group=0, unit="u")


def test_what_fsdp2_refuses_is_refused():
    assert run_ranks(2, refusals) == ["refused"] * 2
    with pytest.raises(UsageError, match=r"scale is a scalar, .*; give it shape \(1,\), as FSDP2 asks"):
        dim0_layout([spec("scale", ())], 2)
    with pytest.raises(UsageError, match="weight has 3 indices along dimension 1, which 2 ranks do not divide"):
        dim0_layout([spec("weight", (2, 3))], 2, SchemeOptions(shard_dims={"weight": 1}))


def test_dimensions_are_given_to_parameters_that_have_them():
    with pytest.raises(UsageError, match=r"no parameter is named 'weigth' \(did you mean 'weight'\?\)"):
        dim0_layout([spec("weight", (2, 3))], 1, SchemeOptions(shard_dims={"weigth": 1}))
    with pytest.raises(UsageError, match=r"weight has shape \(2, 3\) and no dimension 2"):
        dim0_layout([spec("weight", (2, 3))], 1, SchemeOptions(shard_dims={"weight": 2}))


# ---- whole copies ----


def ddp_pieces(rank, world_size):
    """(name, elements on this rank, elements of memory) of each parameter that DDP holds."""
    model = Uneven()
    model.number()
    wrapped = nn.parallel.DistributedDataParallel(model)
    return [
        (name.removeprefix("module."), p.flatten().tolist(), p.untyped_storage().nbytes() // p.element_size())
        for name, p in wrapped.named_parameters()
    ]


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_of_ddp_has_every_element(world_size):
    layout = replicated_layout(specs(Uneven()), world_size)
    for rank, rows in enumerate(run_ranks(world_size, ddp_pieces)):
        assert tuple(name for name, *_ in rows) == layout.names
        for b, (name, elements, memory) in enumerate(rows):
            found = [(s.name, s.start, s.length, s.offset) for s in slices_in(layout, b, rank)]
            assert found == ([(name, 0, len(elements), 0)] if elements else [])
            assert memory == layout.buffers[b].shard_numel
            assert all(locate(layout, name, int(e)).ranks == range(world_size) for e in elements)

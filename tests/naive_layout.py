"""Every layout scheme as a list of every element: the specification that the fast answers are held against.

A naive layout is a list of buffers; a buffer is a list of shards, each with the ranks that hold it and a list of cells;
a cell is (name, element) or None for padding. Nothing here knows offsets, divisions or searches.
"""

import itertools
from dataclasses import dataclass

from shardglass.options import DTYPE_BYTES


@dataclass
class NaiveBuffer:
    """``shards[s]`` is the cells of shard s, ``ranks[s]`` who holds it; ``is_run`` if boundaries fall anywhere."""

    shards: list
    ranks: list
    is_run: bool


def cells_of(param):
    """One parameter, element by element."""
    return [(param.name, element) for element in range(param.numel)]


def padded(cells, multiple):
    cells = list(cells)
    while len(cells) % multiple:
        cells.append(None)
    return cells


def in_equal_runs(cells, ranks):
    """Deal a run of cells out in as many equal shards as there are lists of ranks."""
    size = len(cells) // len(ranks)
    shards = [[cells[s * size + i] for i in range(size)] for s in range(len(ranks))]
    return NaiveBuffer(shards, ranks, is_run=True)


def units(params, world):
    everyone = [[rank] for rank in range(world)]
    buffers = []
    for unit in dict.fromkeys(p.unit for p in params):
        for trainable in (True, False):
            kind = [p for p in params if p.unit == unit and p.trainable == trainable]
            for dtype in dict.fromkeys(p.dtype for p in kind):
                cells = []
                for group in (None, 0, 1, 2):
                    members = [p for p in kind if p.dtype == dtype and p.group == group]
                    if members:
                        cells = padded(cells, 32)
                    for p in members:
                        cells = padded(cells, 16 // DTYPE_BYTES[dtype]) + cells_of(p)
                buffers.append(in_equal_runs(padded(cells, 32 * world), everyone))
    return buffers


def optimized(params):
    """DeepSpeed's groups, and what is outside of them."""
    groups = {}
    for p in params:
        if p.trainable and p.group is not None and p.numel > 0:
            groups.setdefault(p.group, []).append(p)
    inside = [p for members in groups.values() for p in members]
    return [groups[group] for group in sorted(groups)], [p for p in params if p not in inside]


def replicated(params, world):
    return [NaiveBuffer([cells_of(p)], [list(range(world))], is_run=True) for p in params]


def deepspeed_flat(params, world, options):
    groups, outside = optimized(params)
    buffers = []
    for members in groups:
        if options.round_robin_gradients:
            members = [p for hand in range(world) for i, p in enumerate(members) if i % world == hand]
        cells = []
        for p in members:
            if options.parameter_alignment:
                cells = padded(cells, 16 // DTYPE_BYTES[p.dtype])
            cells += cells_of(p)
        buffers.append(in_equal_runs(padded(cells, 2 * world), [[rank] for rank in range(world)]))
    return buffers + replicated(outside, world)


def experts(params, world, size, name_on):
    """Every rank of an expert parallel group has experts of its own, cut over the ranks that have the same ones."""
    buffers = []
    for rank in range(size) if params else ():
        cells = [(name_on(p, rank), element) for p in params for element in range(p.numel)]
        sharers = [[r] for r in range(world) if r % size == rank]
        buffers.append(in_equal_runs(padded(cells, 2 * len(sharers)), sharers))
    return buffers


def dealt(param, ranks, size):
    """A flattened parameter, ``size`` elements a shard; the last ones are filled up."""
    cells = cells_of(param)
    return [[cells[i] if i < len(cells) else None for i in range(s * size, (s + 1) * size)] for s in range(len(ranks))]


def smallest_share(numel, world):
    size = 0
    while size * world < numel:
        size += 1
    return size


def deepspeed_param(params, world, options):
    groups, outside = optimized(params)
    ranks = [[rank] for rank in range(world)]
    buffers = []
    for members in groups:
        parts = [[]]
        for p in members:
            if parts[-1] and sum(smallest_share(q.numel, world) for q in parts[-1]) >= options.sub_group_size:
                parts.append([])
            parts[-1].append(p)
        for part in parts:
            pieces = [dealt(p, ranks, smallest_share(p.numel, world)) for p in part]
            shards = [list(itertools.chain.from_iterable(piece[s] for piece in pieces)) for s in range(world)]
            buffers.append(NaiveBuffer(shards, ranks, is_run=False))
    for p in outside:
        buffers.append(NaiveBuffer(dealt(p, ranks, smallest_share(p.numel, world)), ranks, is_run=False))
    return buffers


def secondary(params, world, hpz):
    ranks = [[rank for rank in range(world) if rank % hpz == s] for s in range(hpz)]
    return [
        NaiveBuffer(dealt(p, ranks, smallest_share(p.numel, world) * (world // hpz)), ranks, is_run=False)
        for p in params
    ]


def dim0(params, world, options):
    buffers = []
    for p in params:
        dim = options.shard_dims.get(p.name, 0) % len(p.shape)
        size = smallest_share(p.shape[dim], world)
        shards = [[] for _ in range(world)]
        for element, index in enumerate(itertools.product(*(range(n) for n in p.shape))):
            shards[[i for i in range(world) for _ in range(size)][index[dim]]].append((p.name, element))
        longest = len(shards[0])
        shards = [shard + [None] * (longest - len(shard)) for shard in shards]
        buffers.append(NaiveBuffer(shards, [[rank] for rank in range(world)], is_run=False))
    return buffers


def holders(naive):
    """Where every element is: (name, element) -> (buffer, shard, offset, ranks)."""
    found = {}
    for b, buffer in enumerate(naive):
        for s, cells in enumerate(buffer.shards):
            for offset, cell in enumerate(cells):
                if cell is not None:
                    assert cell not in found
                    found[cell] = (b, s, offset, buffer.ranks[s])
    return found

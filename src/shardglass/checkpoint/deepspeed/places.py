"""Where DeepSpeed's flat buffers keep each parameter, by arithmetic.

Owns the two layouts: a group's parameters one behind the other and then cut (stages 1 and 2), each parameter cut and
the cuts one behind the other (stage 3). Opens no file.

[Note: why not the slice mappings] The files of stages 1 and 2 also say where parameters lie, in
``param_slice_mappings``. With ``round_robin_gradients`` these are wrong in DeepSpeed 0.19.8: they follow the order of
the optimizer, memory that of ``round_robin_bit16_groups`` (``_link_all_hp_params`` in
``runtime/zero/stage_1_and_2.py``). ``param_shapes`` has the order of memory, and places follow from it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardglass.layout.deepspeed import START_ALIGN

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the elements of one flattened parameter are.

    Element e is number ``first + (base + e) % size`` of the buffer of rank ``(base + e) // size``. At stages 1 and 2
    ``base`` is where the parameter begins in its group and ``size`` a rank's part of the group; at stage 3 ``size`` is
    a rank's part of the parameter and ``first`` where that lies in the sub-group.

    Attributes:
        buffer: Which of each rank's buffers: the group (stages 1 and 2) or the sub-group (stage 3).
        base: Elements before the first one, in units of the cut.
        size: Elements between cuts.
        first: Where in each rank's buffer the cut thing begins.
    """

    buffer: int
    base: int
    size: int
    first: int

    def pieces(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """(rank, offset in its buffer, elements) of the runs that [start, start + length) consists of, in order."""
        at, end = self.base + start, self.base + start + length
        while at < end:
            rank, offset = divmod(at, self.size)
            count = min(self.size - offset, end - at)
            yield rank, self.first + offset, count
            at += count


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBuffer:
    """One buffer that every rank has a part of.

    Attributes:
        size: Elements of a rank's part, padding included.
        used: Elements before the padding at the end, counted over the ranks; None where every part is needed whole.
    """

    size: int
    used: int | None

    def least(self, rank: int) -> int:
        """Elements of a rank's part that are more than padding at the end."""
        return self.size if self.used is None else min(self.size, max(0, self.used - rank * self.size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where everything that is trained lies.

    Attributes:
        of: Place of each parameter by name, in flat order.
        buffers: The flat buffers.
    """

    of: Mapping[str, Place]
    buffers: tuple[FlatBuffer, ...]


def flat_places(groups: Sequence[Mapping[str, Shape]], paddings: Sequence[Sequence[int]], world_size: int) -> Places:
    """The layout of stages 1 and 2.

    Each group's parameters lie one behind the other, zeros follow up to a multiple of 2 elements a rank, and the whole
    is cut in equal parts (source: ``DeepSpeedZeroOptimizer.__init__``; ``BF16_Optimizer`` does the same).

    Args:
        groups: Shape by name of each group, in flat order.
        paddings: Zeros behind each parameter (``param_alignment_paddings``), like ``groups``.
        world_size: Number of ranks.
    """
    of: dict[str, Place] = {}
    buffers = []
    for number, (shapes, zeros) in enumerate(zip(groups, paddings, strict=True)):
        starts, at = {}, 0
        for (name, shape), behind in zip(shapes.items(), zeros, strict=True):
            starts[name] = at
            at += math.prod(shape) + behind
        size = START_ALIGN * math.ceil(at / (START_ALIGN * world_size))
        of |= {name: Place(buffer=number, base=base, size=size, first=0) for name, base in starts.items()}
        buffers.append(FlatBuffer(size=size, used=at))
    return Places(of=of, buffers=tuple(buffers))


def partitioned_places(sub_groups: Sequence[Mapping[str, Shape]], world_size: int) -> Places:
    """The layout of stage 3.

    Each parameter is cut in parts of ceil(numel / ranks) elements, and a rank's parts of a sub-group's parameters lie
    one behind the other (sources: ``partition_parameters.py``, ``stage3.py``). Padding lies behind each parameter.

    Args:
        sub_groups: Shape by name of each sub-group, in flat order.
        world_size: Number of ranks.
    """
    of, buffers = {}, []
    for number, shapes in enumerate(sub_groups):
        at = 0
        for name, shape in shapes.items():
            size = part_of(shape, world_size)
            of[name] = Place(buffer=number, base=0, size=size, first=at)
            at += size
        buffers.append(FlatBuffer(size=at, used=None))
    return Places(of=of, buffers=tuple(buffers))


def part_of(shape: Shape, world_size: int) -> int:
    """Elements of a parameter that stage 3 gives to each rank, padding included."""
    return math.ceil(math.prod(shape) / world_size)

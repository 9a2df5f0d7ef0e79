"""Parameters, the buffers they lie in, and the arithmetic of a cut.

Owns ParamSpec, Holders and Buffer: where an element of a parameter is, and what a shard holds of one. Leaves to
``spec`` the layout as a whole, and to the schemes which parameters share a buffer.

[Note: cuts] A buffer is cut in shards of equal size in one of three ways, and ``Buffer.place`` is the one function
that knows them:

- as one run (``chunks`` is None): shard s is elements [s * shard_numel, (s + 1) * shard_numel) of the whole buffer, so
  a boundary may fall anywhere in a parameter;
- parameter by parameter, flattened (``dim`` is None): shard s holds elements [s * chunk, (s + 1) * chunk) of each;
- parameter by parameter, along dimension ``dim``: shard s holds indices [s * chunk, (s + 1) * chunk) of that dimension.
  Along a dimension behind the first this is a run for every index of the dimensions before it.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardglass.options import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter, as far as a layout needs to know it.

    Attributes:
        name: Full dotted name, as ``named_parameters()`` gives it (a tied weight has its first name).
        shape: Shape of the whole parameter.
        dtype: Name of the dtype the model computes with, e.g. "bfloat16".
        trainable: Whether it gets a gradient and optimizer state.
        group: Index of its optimizer param_group; None for a frozen parameter.
        unit: Name of the unit it belongs to.
        numel: Number of elements, from the shape.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    group: int | None
    unit: str
    numel: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Count the elements once: plans of many ranks ask for them millions of times."""
        object.__setattr__(self, "numel", math.prod(self.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """Which ranks hold which shard: by arithmetic, never listed.

    Shard s is on ranks ``first + stride * (s + num_shards * c)`` for c in 0 … ``copies - 1``; other ranks hold nothing
    of the buffer. One shard and a copy per rank is what every rank holds whole.

    Attributes:
        num_shards: Shards the buffer is cut in.
        copies: Ranks that hold the same shard.
        first: The rank of shard 0.
        stride: Distance of two neighbouring shards' ranks.
    """

    num_shards: int
    copies: int = 1
    first: int = 0
    stride: int = 1

    def shard_of(self, rank: int) -> int | None:
        """The shard that a rank holds; None if it holds nothing of the buffer."""
        steps, rest = divmod(rank - self.first, self.stride)
        if rest or not 0 <= steps < self.num_shards * self.copies:
            return None
        return steps % self.num_shards

    def ranks_of(self, shard: int) -> range:
        """The ranks that hold a shard, ascending."""
        low = self.first + self.stride * shard
        step = self.stride * self.num_shards
        return range(low, low + step * (self.copies - 1) + 1, step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one element is in its buffer.

    Attributes:
        shard: The shard that has it.
        offset: Where in the shard.
        stop: First later element of the parameter that does not lie behind it in the same shard; its numel if none.
    """

    shard: int
    offset: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Parameters that lie in one run of elements, cut in equal shards; see [Note: cuts].

    Attributes:
        unit: Name of the unit, or of what else its parameters have in common, such as "group 0".
        dtype: Name of the dtype of every parameter in it.
        trainable: Whether its parameters are trained.
        params: The parameters, in the order they lie in memory.
        offsets: First element of each parameter, ascending: in the whole buffer if it is cut as one run, otherwise in
            every shard.
        shard_numel: Elements of one shard; ``numel`` is this times the number of shards.
        holders: Who holds which shard.
        chunks: None for one run; otherwise how many elements, or indices along ``dim``, a shard has of each parameter.
        dim: The dimension each parameter is cut along; None for the flattened parameter, or for one run.
        label: Its name among the buffers of one unit, if it is not the only one of its dtype there.
    """

    unit: str
    dtype: str
    trainable: bool
    params: tuple[ParamSpec, ...]
    offsets: tuple[int, ...]
    shard_numel: int
    holders: Holders
    chunks: tuple[int, ...] | None = None
    dim: int | None = None
    label: str | None = None

    @property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.shard_numel * self.holders.num_shards

    @property
    def real_numel(self) -> int:
        """Elements that belong to parameters."""
        return sum(p.numel for p in self.params)

    @property
    def itemsize(self) -> int:
        """Bytes per element of the model's dtype."""
        return DTYPE_BYTES[self.dtype]

    @property
    def key(self) -> str:
        """A readable, unique name: the label, or ``unit/dtype/trainable`` or ``unit/dtype/frozen``."""
        return self.label or f"{self.unit}/{self.dtype}/{'trainable' if self.trainable else 'frozen'}"

    def grid(self, k: int) -> tuple[int, int, int]:
        """Parameter ``k`` of a buffer cut parameter by parameter, as runs that repeat.

        Returns:
            (number of rows, elements of a row, elements of a row that a shard has); within a row the shards' parts
            follow each other.
        """
        chunk, shape = (self.chunks or ())[k], self.params[k].shape
        if self.dim is None:
            return 1, math.prod(shape), chunk
        if chunk >= shape[self.dim]:  # all of it on shard 0: one run, whatever the dimension
            return 1, math.prod(shape), math.prod(shape)
        inner = math.prod(shape[self.dim + 1 :])
        return math.prod(shape[: self.dim]), shape[self.dim] * inner, chunk * inner

    def place(self, k: int, element: int) -> Place:
        """Where an element of parameter ``k`` is; it must be one of the parameter's. O(1)."""
        offset = self.offsets[k]
        if self.chunks is None:
            shard, inside = divmod(offset + element, self.shard_numel)
            stop = min((shard + 1) * self.shard_numel - offset, self.params[k].numel)
            return Place(shard=shard, offset=inside, stop=stop)
        _, width, part = self.grid(k)
        row, column = divmod(element, width)
        shard, inside = divmod(column, part)
        length = min(part, width - shard * part)
        return Place(shard=shard, offset=offset + row * length + inside, stop=row * width + shard * part + length)

    def runs(self, k: int, shard: int) -> Iterator[tuple[int, int, int]]:
        """What a shard has of parameter ``k``: (first element, number of elements, offset in the shard) of each run."""
        offset = self.offsets[k]
        if self.chunks is None:
            low = shard * self.shard_numel - offset
            start, stop = max(0, low), min(self.params[k].numel, low + self.shard_numel)
            if start < stop:
                yield start, stop - start, start - low
            return
        rows, width, part = self.grid(k)
        length = min(part, width - shard * part)
        if length > 0:
            for row in range(rows):
                yield row * width + shard * part, length, offset + row * length

    def pieces(self, k: int, start: int, stop: int) -> Iterator[tuple[int, int, Place]]:
        """Where elements ``start`` to ``stop`` of parameter ``k`` are: (first element, number, place) of each run."""
        while start < stop:
            place = self.place(k, start)
            length = min(place.stop, stop) - start
            yield start, length, place
            start += length

    def boundary(self, k: int, shard: int) -> tuple[int, int]:
        """Where the end of a shard is in parameter ``k``: (elements up to there, first element behind)."""
        if self.chunks is None:
            left = min(max(0, (shard + 1) * self.shard_numel - self.offsets[k]), self.params[k].numel)
            return left, left
        rows, width, part = self.grid(k)
        edge = min((shard + 1) * part, width)
        return rows * edge, edge

    def members(self, shard: int) -> range:
        """The indices of the parameters that may have elements in a shard. O(log P) if the buffer is one run."""
        if self.chunks is not None:
            return range(len(self.params))
        low = shard * self.shard_numel
        first = max(0, bisect_right(self.offsets, low) - 1)
        return range(first, bisect_left(self.offsets, low + self.shard_numel))

    def element_at(self, shard: int, offset: int) -> tuple[int, int] | None:
        """The (index of the parameter, element) that lies at an offset of a shard; None for padding. O(log P)."""
        position = offset if self.chunks is not None else shard * self.shard_numel + offset
        k = bisect_right(self.offsets, position) - 1
        if k < 0:
            return None
        inside = position - self.offsets[k]
        if self.chunks is None:
            return (k, inside) if inside < self.params[k].numel else None
        rows, width, part = self.grid(k)
        length = min(part, width - shard * part)
        if length <= 0 or inside >= rows * length:
            return None
        row, column = divmod(inside, length)
        return k, row * width + shard * part + column


def own_buffer(param: ParamSpec, holders: Holders, *, chunk: int | None = None, dim: int | None = None) -> Buffer:
    """The buffer of a parameter that has memory of its own.

    Args:
        param: The parameter.
        holders: Who holds which shard.
        chunk: Elements, or indices along ``dim``, that a shard has; None if it is not cut.
        dim: The dimension it is cut along; None to cut the flattened parameter.
    """
    if chunk is None:
        shard_numel = param.numel
    elif dim is None:
        shard_numel = chunk
    else:
        shard_numel = math.prod((*param.shape[:dim], min(chunk, param.shape[dim]), *param.shape[dim + 1 :]))
    return Buffer(
        unit=param.unit,
        dtype=param.dtype,
        trainable=param.trainable,
        params=(param,),
        offsets=(0,),
        shard_numel=shard_numel,
        holders=holders,
        chunks=None if chunk is None else (chunk,),
        dim=dim,
        label=param.name,
    )

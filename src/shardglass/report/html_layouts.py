"""Layouts as the page draws them: columns of numbers, every scheme at several world sizes.

Owns which layouts a page brings along and their columns. Leaves the layouts themselves to ``layout``.

[Note: page layouts] Order, offsets, padding, chunks and holders of every layout are made here by ``layout``; the page
works out from them what ``Buffer.place``, ``runs`` and ``boundary`` say, in ``assets/layout.js``, which a test holds
against Python. So a rule of a scheme stands in ``layout`` alone, and a layout of 40,000 tensors is a few kilobytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardglass.errors import UsageError
from shardglass.layout import SCHEMES, Layout, ParamSpec, SchemeOptions, make_layout
from shardglass.options import DTYPE_BYTES

WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""World sizes that the page can switch to, beside the plan's own."""

FEW_WORLD_SIZES = (2, 8, 64)
"""Those of a model with many tensors."""

MANY_TENSORS = 5_000
"""Tensors above which a page brings fewer world sizes along, so that it stays small and is written in seconds."""

STAGES_OF: Mapping[str, tuple[int, ...]] = {
    "units": (0, 1, 2, 3),
    "deepspeed-flat": (1, 2),
    "deepspeed-param": (3,),
    "dim0": (2, 3),  # FSDP2 keeps gathered parameters if it is told reshard_after_forward=False
    "replicated": (0,),
}
"""Stages whose sharding a scheme is used for, by the frameworks that use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTable:
    """The tensors of a model, a column per property, in model order.

    Attributes:
        names: Full names.
        shapes: Shapes.
        dtypes: Index in ``dtype_names``.
        trainable: 1 for a trained tensor, 0 for a frozen one.
        groups: Optimizer group; -1 without one.
        units: Index in ``unit_names``.
        dtype_names: dtypes that occur.
        dtype_bytes: Bytes of an element of each.
        unit_names: Units in forward order; a row of the map each.
        tied: (index of the tensor, its second name).
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[int, ...]
    trainable: tuple[int, ...]
    groups: tuple[int, ...]
    units: tuple[int, ...]
    dtype_names: tuple[str, ...]
    dtype_bytes: tuple[int, ...]
    unit_names: tuple[str, ...]
    tied: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """One layout in columns; see [Note: page layouts].

    Attributes:
        scheme: Name of the scheme.
        world_size: Number of ranks.
        refused: Why the scheme takes no such model or world size; None if it does. All columns are empty then.
        order: The parameters, buffer by buffer: (index in the tensor table, number) of each run in model order.
        sizes: Parameters of each buffer.
        keys: Name of each buffer; empty if it is its only parameter's.
        shards: Elements of a shard of each buffer.
        holders: (shards, copies, first rank, stride) of each buffer, as ``Holders`` has them.
        gaps: Padding elements before each parameter, from the end of the one before it.
        chunks: What a shard has of each parameter, as ``Buffer.chunks``; -1 in a buffer that is one run.
        dims: The dimension each buffer is cut along; -1 for none.
    """

    scheme: str
    world_size: int
    refused: str | None = None
    order: tuple[tuple[int, int], ...] = ()
    sizes: tuple[int, ...] = ()
    keys: tuple[str, ...] = ()
    shards: tuple[int, ...] = ()
    holders: tuple[tuple[int, int, int, int], ...] = ()
    gaps: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    dims: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """How the page finds it."""
        return f"layout-{self.scheme}-{self.world_size}"


def tensor_table(params: Sequence[ParamSpec], tied: Sequence[tuple[str, str]] = ()) -> TensorTable:
    """The tensors in columns.

    Args:
        params: In model order.
        tied: (second name, name it is stored under).
    """
    dtypes = tuple(dict.fromkeys(p.dtype for p in params))
    units = tuple(dict.fromkeys(p.unit for p in params))
    dtype_index = {name: i for i, name in enumerate(dtypes)}
    unit_index = {name: i for i, name in enumerate(units)}
    index = {p.name: i for i, p in enumerate(params)}
    return TensorTable(
        names=tuple(p.name for p in params),
        shapes=tuple(p.shape for p in params),
        dtypes=tuple(dtype_index[p.dtype] for p in params),
        trainable=tuple(int(p.trainable) for p in params),
        groups=tuple(-1 if p.group is None else p.group for p in params),
        units=tuple(unit_index[p.unit] for p in params),
        dtype_names=dtypes,
        dtype_bytes=tuple(DTYPE_BYTES[name] for name in dtypes),
        unit_names=units,
        tied=tuple((index[first], second) for second, first in tied if first in index),
    )


def world_sizes(num_tensors: int, own: int) -> tuple[int, ...]:
    """The world sizes that a page can switch to, ascending."""
    shown = WORLD_SIZES if num_tensors <= MANY_TENSORS else FEW_WORLD_SIZES
    return tuple(sorted({*shown, own}))


def page_layouts(
    params: Sequence[ParamSpec], sizes: Sequence[int], *, own: str, options: SchemeOptions
) -> tuple[PageLayout, ...]:
    """Every scheme at every world size.

    Args:
        params: In model order.
        sizes: The world sizes.
        own: The scheme that the options are for; the others take their defaults.
        options: What that scheme is told beside.
    """
    index = {p.name: i for i, p in enumerate(params)}
    made = []
    for scheme in SCHEMES:
        told = options if scheme.name == own else SchemeOptions()
        for world_size in sizes:
            try:
                layout = make_layout(scheme.name, params, world_size, told)
            except UsageError as error:
                made.append(PageLayout(scheme=scheme.name, world_size=world_size, refused=str(error)))
            else:
                made.append(page_layout(layout, index))
    return tuple(made)


def page_layout(layout: Layout, index: Mapping[str, int]) -> PageLayout:
    """A layout in columns.

    Args:
        layout: The layout.
        index: Index in the tensor table, by name.
    """
    gaps: list[int] = []
    chunks: list[int] = []
    for buffer in layout.buffers:
        end = 0
        lengths = buffer.chunks or tuple(p.numel for p in buffer.params)
        for offset, length in zip(buffer.offsets, lengths, strict=True):
            gaps.append(offset - end)
            end = offset + length
        chunks += buffer.chunks or (-1,) * len(buffer.params)
    return PageLayout(
        scheme=layout.scheme,
        world_size=layout.world_size,
        order=_runs([index[name] for name in layout.names]),
        sizes=tuple(len(b.params) for b in layout.buffers),
        keys=tuple("" if b.label == b.params[0].name else b.key for b in layout.buffers),
        shards=tuple(b.shard_numel for b in layout.buffers),
        holders=tuple(
            (b.holders.num_shards, b.holders.copies, b.holders.first, b.holders.stride) for b in layout.buffers
        ),
        gaps=tuple(gaps),
        chunks=tuple(chunks),
        dims=tuple(-1 if b.dim is None else b.dim for b in layout.buffers),
    )


def _runs(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(first, how many) of each run of numbers that follow each other."""
    starts = [i for i, n in enumerate(numbers) if i == 0 or n != numbers[i - 1] + 1]
    return tuple((numbers[i], j - i) for i, j in zip(starts, [*starts[1:], len(numbers)], strict=True))

"""The values a layout is made of, and their JSON form.

Owns ParamSpec, Buffer and Layout. Leaves to ``schemes`` how parameters are put in buffers, and to ``query`` every
question.

A layout is a list of buffers. A buffer is a run of elements that holds whole parameters at known offsets and is cut in
``world_size`` equal shards; rank r owns elements [r * shard_numel, (r + 1) * shard_numel). Every scheme (ours,
DeepSpeed's, FSDP2's) is a choice of which parameters share a buffer, of the padding between them, and of
``shard_numel``.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardglass.errors import InvariantError, UsageError, suggestion
from shardglass.options import DTYPE_BYTES

LAYOUT_VERSION = 1

RUN_ALIGN = 32
"""Elements to which the run of an optimizer group and a shard are aligned: two 512-bit registers of fp32, 64 bytes of
bfloat16; see [Note: whole vectors] in ``schemes``."""


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
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    group: int | None
    unit: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Parameters of one (unit, dtype, trainable) in one run of elements, cut in equal shards.

    Attributes:
        unit: Name of the unit.
        dtype: Name of the dtype of every parameter in it.
        trainable: Whether its parameters are trained.
        params: The parameters, in the order they lie in memory.
        offsets: First element of each parameter, ascending.
        shard_numel: Elements of one rank's shard; ``numel`` is this times the world size.
        world_size: Number of shards.
    """

    unit: str
    dtype: str
    trainable: bool
    params: tuple[ParamSpec, ...]
    offsets: tuple[int, ...]
    shard_numel: int
    world_size: int

    @property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.shard_numel * self.world_size

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
        """A readable, unique name: ``unit/dtype/trainable`` or ``unit/dtype/frozen``."""
        return f"{self.unit}/{self.dtype}/{'trainable' if self.trainable else 'frozen'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where every parameter element is.

    Attributes:
        scheme: Name of the rule that made it, e.g. "units".
        world_size: Number of ranks.
        buffers: The buffers, unit by unit in forward order.
    """

    scheme: str
    world_size: int
    buffers: tuple[Buffer, ...]
    _index: Mapping[str, tuple[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the parameters by name.

        Raises:
            InvariantError: A name occurs twice.
        """
        index: dict[str, tuple[int, int]] = {}
        for b, buffer in enumerate(self.buffers):
            for k, param in enumerate(buffer.params):
                if param.name in index:
                    raise InvariantError(f"parameter {param.name!r} is in two buffers of one layout")
                index[param.name] = (b, k)
        object.__setattr__(self, "_index", index)

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units, in forward order."""
        return tuple(dict.fromkeys(b.unit for b in self.buffers))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters, in the order they lie in memory."""
        return tuple(self._index)

    def find(self, name: str) -> tuple[int, int]:
        """Return (index of the buffer, index of the parameter in it).

        Raises:
            UsageError: No parameter has this name; the message has the nearest one.
        """
        try:
            return self._index[name]
        except KeyError:
            raise UsageError(
                f"no parameter is named {name!r}{suggestion(name, self._index)}; "
                "names are those of model.named_parameters()"
            ) from None

    def to_json(self) -> str:
        """Return the versioned JSON form; ``from_json`` gives back an equal layout."""
        rows = [
            {
                "unit": b.unit,
                "dtype": b.dtype,
                "trainable": b.trainable,
                "shard_numel": b.shard_numel,
                "params": [
                    {"name": p.name, "shape": list(p.shape), "group": p.group, "offset": offset}
                    for p, offset in zip(b.params, b.offsets, strict=True)
                ],
            }
            for b in self.buffers
        ]
        head: dict[str, Any] = {"version": LAYOUT_VERSION, "scheme": self.scheme}
        return json.dumps({**head, "world_size": self.world_size, "buffers": rows})

    @staticmethod
    def from_json(text: str) -> "Layout":
        """Read what ``to_json`` wrote.

        Raises:
            UsageError: The text is of another version.
        """
        data = json.loads(text)
        if data.get("version") != LAYOUT_VERSION:
            raise UsageError(
                f"this layout is of version {data.get('version')!r}, and version {LAYOUT_VERSION} is understood"
            )
        world_size = data["world_size"]
        buffers = tuple(_buffer_from(row, world_size) for row in data["buffers"])
        return Layout(scheme=data["scheme"], world_size=world_size, buffers=buffers)

    @property
    def fingerprint(self) -> str:
        """A hash of everything in it: equal on two ranks exactly if their layouts are."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


def _buffer_from(row: Mapping[str, Any], world_size: int) -> Buffer:
    """One buffer of the JSON form."""
    params = tuple(
        ParamSpec(
            name=p["name"],
            shape=tuple(p["shape"]),
            dtype=row["dtype"],
            trainable=row["trainable"],
            group=p["group"],
            unit=row["unit"],
        )
        for p in row["params"]
    )
    return Buffer(
        unit=row["unit"],
        dtype=row["dtype"],
        trainable=row["trainable"],
        params=params,
        offsets=tuple(p["offset"] for p in row["params"]),
        shard_numel=row["shard_numel"],
        world_size=world_size,
    )

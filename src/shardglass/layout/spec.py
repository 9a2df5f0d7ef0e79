"""A whole layout and its JSON form.

Owns Layout. Leaves buffers and their arithmetic to ``buffer``, to the schemes how parameters are put in buffers, and to
``query`` and its neighbours every question.

A layout is a list of buffers; each holds whole parameters at known offsets and is cut in equal shards, see
[Note: cuts] in ``buffer``. Every scheme (ours, DeepSpeed's, FSDP2's) is a choice of which parameters share a buffer,
of the padding between them, of the cut and of who holds the shards.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardglass.errors import InvariantError, UsageError, suggestion
from shardglass.layout.buffer import Buffer, Holders, ParamSpec

PLAIN_VERSION, LAYOUT_VERSION = 1, 2
"""Version 1 knows one run per buffer, cut over all ranks; a layout that needs no more is still written as that."""

RUN_ALIGN = 32
"""Elements to which the run of an optimizer group and a shard are aligned: two 512-bit registers of fp32, 64 bytes of
bfloat16; see [Note: whole vectors] in ``schemes``."""


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
    _first: Sequence[int] = field(init=False, repr=False, compare=False)  # [len(buffers)] parameters before each

    def __post_init__(self) -> None:
        """Index the parameters by name.

        Raises:
            InvariantError: A name occurs twice.
        """
        index: dict[str, tuple[int, int]] = {}
        first: list[int] = []
        for b, buffer in enumerate(self.buffers):
            first.append(len(index))
            for k, param in enumerate(buffer.params):
                if param.name in index:
                    raise InvariantError(f"parameter {param.name!r} is in two buffers of one layout")
                index[param.name] = (b, k)
        object.__setattr__(self, "_index", index)
        object.__setattr__(self, "_first", first)

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units, in forward order."""
        return tuple(dict.fromkeys(b.unit for b in self.buffers))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters, in the order they lie in memory."""
        return tuple(self._index)

    def has(self, name: str) -> bool:
        """Whether there is a parameter of this name."""
        return name in self._index

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

    def position(self, buffer_index: int, k: int) -> int:
        """Index among ``names`` of a buffer's parameter ``k``."""
        return self._first[buffer_index] + k

    def spec(self, name: str) -> ParamSpec:
        """The parameter of this name.

        Raises:
            UsageError: As ``find``.
        """
        b, k = self.find(name)
        return self.buffers[b].params[k]

    def check_rank(self, rank: int) -> None:
        """Refuse a rank that the layout does not have.

        Raises:
            UsageError: With the ranks there are.
        """
        if not 0 <= rank < self.world_size:
            raise UsageError(f"rank is {rank}; the layout has ranks 0 to {self.world_size - 1}")

    def to_json(self) -> str:
        """Return the versioned JSON form; ``from_json`` gives back an equal layout."""
        everywhere = Holders(num_shards=self.world_size)
        rows = [_buffer_row(buffer, everywhere) for buffer in self.buffers]
        is_plain = all(_is_plain(buffer, everywhere) for buffer in self.buffers)
        version = PLAIN_VERSION if is_plain else LAYOUT_VERSION
        head: dict[str, Any] = {"version": version, "scheme": self.scheme, "world_size": self.world_size}
        return json.dumps({**head, "buffers": rows})

    @staticmethod
    def from_json(text: str) -> "Layout":
        """Read what ``to_json`` wrote, now or in an earlier version.

        Raises:
            UsageError: The text is of another version.
        """
        data = json.loads(text)
        version = data.get("version")
        if version not in (PLAIN_VERSION, LAYOUT_VERSION):
            raise UsageError(
                f"this layout is of version {version!r}, and versions {PLAIN_VERSION} and {LAYOUT_VERSION} are "
                "understood; it was written by a newer shardglass"
            )
        everywhere = Holders(num_shards=data["world_size"])
        buffers = tuple(_buffer_from(row, everywhere) for row in data["buffers"])
        return Layout(scheme=data["scheme"], world_size=data["world_size"], buffers=buffers)

    @property
    def fingerprint(self) -> str:
        """A hash of everything in it: equal on two ranks exactly if their layouts are."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


def _is_plain(buffer: Buffer, everywhere: Holders) -> bool:
    """Whether version 1 can say all of a buffer."""
    return (
        buffer.chunks is None
        and buffer.label is None
        and buffer.holders == everywhere
        and all(p.unit == buffer.unit for p in buffer.params)
    )


def _buffer_row(buffer: Buffer, everywhere: Holders) -> dict[str, Any]:
    """The JSON form of one buffer; what is as in version 1 is not written."""
    row: dict[str, Any] = {
        "unit": buffer.unit,
        "dtype": buffer.dtype,
        "trainable": buffer.trainable,
        "shard_numel": buffer.shard_numel,
    }
    if buffer.label is not None:
        row["label"] = buffer.label
    if buffer.holders != everywhere:
        h = buffer.holders
        row["holders"] = {"num_shards": h.num_shards, "copies": h.copies, "first": h.first, "stride": h.stride}
    if buffer.chunks is not None:
        row |= {"chunks": list(buffer.chunks), "dim": buffer.dim}
    row["params"] = [
        {"name": p.name, "shape": list(p.shape), "group": p.group, "offset": offset}
        | ({} if p.unit == buffer.unit else {"unit": p.unit})
        for p, offset in zip(buffer.params, buffer.offsets, strict=True)
    ]
    return row


def _buffer_from(row: Mapping[str, Any], everywhere: Holders) -> Buffer:
    """One buffer of the JSON form."""
    params = tuple(
        ParamSpec(
            name=p["name"],
            shape=tuple(p["shape"]),
            dtype=row["dtype"],
            trainable=row["trainable"],
            group=p["group"],
            unit=p.get("unit", row["unit"]),
        )
        for p in row["params"]
    )
    chunks = row.get("chunks")
    return Buffer(
        unit=row["unit"],
        dtype=row["dtype"],
        trainable=row["trainable"],
        params=params,
        offsets=tuple(p["offset"] for p in row["params"]),
        shard_numel=row["shard_numel"],
        holders=Holders(**row["holders"]) if "holders" in row else everywhere,
        chunks=None if chunks is None else tuple(chunks),
        dim=row.get("dim"),
        label=row.get("label"),
    )

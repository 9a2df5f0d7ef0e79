"""A model's weights as a plain folder that ``from_pretrained`` reads, from any source and in little memory.

Owns the cut in files and the streaming of tensors. The format: 8 bytes with the length of the header, the header
(JSON: name → dtype, shape and byte range), the bytes (source: safetensors' own description of it). The safetensors
package builds a whole file in memory, which is 5 GB here.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from shardglass.checkpoint.source import Source
from shardglass.checkpoint.weight_files import DTYPES
from shardglass.engine.state import Piece

SHARD_BYTES = 5_000_000_000
"""Bytes of one file, as transformers cuts them."""

READ_BYTES = 128 << 20
"""Bytes of fp32 that are read at once."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""How safetensors writes a dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A tensor to write.

    Attributes:
        name: Its name in the files.
        kind: Where the source has it: "master", "param" or "buffer".
        shape: Its shape.
        dtype: The dtype to write.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements."""
        return int(torch.Size(self.shape).numel())

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.numel * self.dtype.itemsize


def write_plain(
    source: Source,
    weights: Sequence[Weight],
    folder: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    tell: Callable[[int], None] = lambda written: None,
) -> list[str]:
    """Write weights as ``model.safetensors``, or as numbered files with an index.

    Args:
        source: Where their values are.
        weights: What to write, in order.
        folder: Where; it exists.
        shard_bytes: Bytes of a file, unless one tensor is larger.
        tell: Called with the bytes written so far.

    Returns:
        The names of the files, the index last.

    Raises:
        CheckpointError: The source cannot be read.
        OSError: A file cannot be written.
    """
    shards = _cut(weights, shard_bytes)
    count = len(shards)
    names = [f"model-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]
    if count == 1:
        names = ["model.safetensors"]
    done = 0
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            file.write(_header(shard))
            for value in _values(source, shard):
                done += _write(file, value)
                tell(done)
    if count > 1:
        index = {
            "metadata": {
                "total_size": sum(w.nbytes for w in weights),
                "total_parameters": sum(w.numel for w in weights),
            },
            "weight_map": {w.name: name for name, shard in zip(names, shards, strict=True) for w in shard},
        }
        names.append("model.safetensors.index.json")
        (folder / names[-1]).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return names


def _cut(weights: Sequence[Weight], limit: int) -> list[list[Weight]]:
    """Weights in order, in runs of at most ``limit`` bytes; at least one run."""
    shards: list[list[Weight]] = [[]]
    filled = 0
    for weight in weights:
        if shards[-1] and filled + weight.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(weight)
        filled += weight.nbytes
    return shards


def _header(weights: Sequence[Weight]) -> bytes:
    """The head of a file, filled up to a multiple of 8 bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for w in weights:
        entries[w.name] = {"dtype": NAMES[w.dtype], "shape": list(w.shape), "data_offsets": [at, at + w.nbytes]}
        at += w.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _values(source: Source, weights: Sequence[Weight]) -> Iterator[Tensor]:
    """The values in order, in runs of limited size, in the dtypes to write."""
    batch: list[tuple[Piece, torch.dtype]] = []
    filled = 0
    limit = READ_BYTES // 4
    for w in weights:
        step = max(1, w.numel) if w.kind == "buffer" else limit  # a buffer is read whole
        for start in range(0, w.numel, step):
            length = min(step, w.numel - start)
            if batch and filled + length > limit:
                yield from _read(source, batch)
                batch, filled = [], 0
            # Buffers keep their dtype; weights are read in fp32, which holds every value of a 16-bit one.
            value = torch.empty(length, dtype=w.dtype if w.kind == "buffer" else torch.float32)
            piece = Piece(kind=w.kind, name=w.name, start=start, numel=w.numel, is_scalar=False, value=value)
            batch.append((piece, w.dtype))
            filled += length
    yield from _read(source, batch)


def _read(source: Source, batch: Sequence[tuple[Piece, torch.dtype]]) -> Iterator[Tensor]:
    """Fill the pieces of a batch and give their values."""
    source.fill([p for p, _ in batch if p.kind != "buffer"], {p.name: p.value for p, _ in batch if p.kind == "buffer"})
    for piece, dtype in batch:
        yield piece.value.to(dtype)


def _write(file: BinaryIO, value: Tensor) -> int:
    """Write the elements of a tensor as they lie in memory; safetensors is little-endian, as are our machines."""
    return file.write(value.contiguous().view(torch.uint8).numpy().data) if value.numel() else 0


def weights_of(
    shapes: Mapping[str, Sequence[int]],
    trained: frozenset[str] | None,
    dtypes: Mapping[str, torch.dtype],
    buffers: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> list[Weight]:
    """What to write of a model.

    Args:
        shapes: By parameter, its shape.
        trained: Names of the trained parameters, whose master weights are read.
        dtypes: By parameter, the dtype to write.
        buffers: By persistent buffer, its shape and dtype.
    """
    found = [
        Weight(
            name=name,
            kind="param" if trained is not None and name not in trained else "master",
            shape=tuple(shape),
            dtype=dtypes[name],
        )
        for name, shape in shapes.items()
    ]
    return found + [
        Weight(name=name, kind="buffer", shape=shape, dtype=dtype) for name, (shape, dtype) in buffers.items()
    ]

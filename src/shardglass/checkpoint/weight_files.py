"""Safetensors files of a model, read in part.

Owns where each tensor lies in which file, and reading a run of its elements: only those bytes are read, and nothing is
mapped. Leaves what is done with them to ``sharded_start``. The format: 8 bytes with the length of the header, the
header (JSON: name → dtype, shape and byte range), the bytes (source: safetensors' own description of it).
"""

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardglass.errors import ModelError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""dtypes of weights; a file with another one is read by transformers."""

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
"""Names that transformers gives them, the first that is there counts; the index names several files."""

MOST_HEADER = 100 << 20
"""Bytes of a header that safetensors allows."""

COPY_AGAIN = "copy it again, or download it anew"
"""What to do about a broken file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        path: The file.
        dtype: Name of its dtype as safetensors writes it, such as "BF16".
        shape: Its shape.
        start: First byte in the file.
        nbytes: Bytes of all of it.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def files_in(folder: Path) -> list[Path] | None:
    """The safetensors files of a model in a folder; None if its weights are in none.

    Raises:
        ModelError: The index is broken.
    """
    for name in SAFETENSORS:
        path = folder / name
        if path.is_file():
            return [folder / file for file in named_in(path)] if path.suffix == ".json" else [path]
    return None


def named_in(index: Path) -> list[str]:
    """The files that an index of weights names.

    Raises:
        ModelError: It is no index.
    """
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [str(file) for file in dict.fromkeys(weight_map.values())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not an index of weights: {type(error).__name__}: {error}") from error


def stored_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Every tensor of safetensors files, by name.

    Raises:
        ModelError: A file is missing, or is no safetensors file.
    """
    return {name: tensor for file in files for name, tensor in _tensors_in(file)}


def check_header(path: Path) -> None:
    """Read what a file says of itself.

    Raises:
        ModelError: It is missing, cut off, or no safetensors file.
    """
    deque(_tensors_in(path), maxlen=0)


def _tensors_in(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Name and place of each tensor of one file.

    Raises:
        ModelError: It is missing, cut off, or no safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(MOST_HEADER, size - 8):
                raise ModelError(f"{path}: not a safetensors file, or cut off: {COPY_AGAIN}")
            header = json.loads(file.read(length))
        for name, row in header.items():
            if name == "__metadata__":
                continue
            low, high = row["data_offsets"]
            if not 0 <= low <= high <= size - 8 - length:
                raise ModelError(f"{path}: {name} lies behind the end of the file, which was cut off: {COPY_AGAIN}")
            yield (
                name,
                StoredTensor(
                    path=path, dtype=row["dtype"], shape=tuple(row["shape"]), start=8 + length + low, nbytes=high - low
                ),
            )
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: not a safetensors file: {COPY_AGAIN} ({type(error).__name__}: {error})") from error


class FileWeights:
    """Parameters of a model in safetensors files; an ``engine.sources.WeightSource``."""

    on_every_rank = True
    identity = "safetensors files"

    def __init__(self, stored: Mapping[str, StoredTensor], dtypes: Mapping[str, torch.dtype]) -> None:
        """Read nothing yet.

        Args:
            stored: Where each tensor is.
            dtypes: The dtype that the model has of each parameter.
        """
        self._stored, self._dtypes = stored, dtypes

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of a flattened parameter, in the model's dtype.

        Raises:
            ModelError: The file cannot be read, or is shorter than it was.
        """
        tensor = self._stored[name]
        stored = DTYPES[tensor.dtype]
        wanted = (stop - start) * stored.itemsize
        run = bytearray(wanted)
        try:
            with tensor.path.open("rb", buffering=0) as file:
                file.seek(tensor.start + start * stored.itemsize)
                done = 0
                while done < wanted:
                    count = file.readinto(memoryview(run)[done:])
                    if not count:
                        raise ModelError(f"{tensor.path}: ends before {name} does; it was changed while it was read")
                    done += count
        except OSError as error:
            raise ModelError(f"{tensor.path}: {name} cannot be read: {os.strerror(error.errno or 0)}") from error
        values = torch.frombuffer(run, dtype=stored) if wanted else torch.empty(0, dtype=stored)
        return values.to(self._dtypes[name])

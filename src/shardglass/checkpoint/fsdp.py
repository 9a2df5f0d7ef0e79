"""What torch.distributed.checkpoint saved of a model that FSDP2, DDP or nobody sharded, as a source of training states.

Such a folder names each tensor by its path in the dict that was saved. The model's are found by the names of the
parameters behind a common prefix ("model."), the optimizer's by "state.<parameter>.<key>" (source: PyTorch,
"torch.distributed.checkpoint.state_dict.get_state_dict"). Only tensors are read: the rest is pickled without a list of
what it may hold, so options of param_groups stay those of the run.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardglass.checkpoint.chunk import RowChunk, load_alone
from shardglass.checkpoint.known import KnownModel
from shardglass.engine.state import Piece, StateKind
from shardglass.errors import CheckpointError

DCP_METADATA = ".metadata"

READ_BYTES = 256 << 20
"""Bytes that are read before they are put in their places."""


class DcpCheckpoint:
    """A folder of ``torch.distributed.checkpoint.save``; see ``Source``."""

    trained: frozenset[str] | None = None
    optimizer: str | None = None
    groups: Sequence[Mapping[str, Any]] | None = None
    group_of: Mapping[str, int] | None = None

    def __init__(self, folder: Path, known: KnownModel) -> None:
        """Read the list of tensors.

        Raises:
            CheckpointError: It cannot be read, or has no weights of the model.
        """
        self.folder, self.writer = folder, "torch.distributed.checkpoint"
        self._reader = FileSystemReader(folder)
        try:
            entries = self._reader.read_metadata().state_dict_metadata
        except Exception as error:  # a pickle of torch's own classes: a damaged one may raise anything
            raise CheckpointError(f"{folder / DCP_METADATA}: cannot be read: {error!r}") from error
        self._stored = {key: value for key, value in entries.items() if isinstance(value, TensorStorageMetadata)}
        prefix = self._prefix(known)
        self._key = {name: prefix + name for name in known.shapes if prefix + name in self._stored}
        self._key |= {kept: prefix + name for name, kept in known.aliases.items() if prefix + name in self._stored}
        self._buffers = {name: prefix + name for name in known.buffers if prefix + name in self._stored}
        self.shapes: Mapping[str, Sequence[int]] = {name: self._stored[key].size for name, key in self._key.items()}
        self._state_key: dict[tuple[str, str], str] = {}
        self.states: Mapping[str, Mapping[str, StateKind]] = self._find_states(known)
        self.counters: Mapping[str, int] = {"step": 0}
        self.extra: Mapping[str, Any] = {}

    def _prefix(self, known: KnownModel) -> str:
        """What stands before the names of parameters.

        Raises:
            CheckpointError: No parameter of the model is there.
        """
        names = list(known.shapes)
        counted: dict[str, int] = {}
        for key in self._stored:
            for name in names[:1] + names[-1:]:
                before = key.removesuffix(name)
                if before != key and (not before or before.endswith(".")) and ".state." not in f".{before}":
                    counted[before] = counted.get(before, 0) + 1
        if not counted:
            raise CheckpointError(f"{self.folder}: no tensor in it has the name of a parameter, such as {names[0]}")
        return max(sorted(counted), key=lambda before: counted[before])

    def _find_states(self, known: KnownModel) -> dict[str, dict[str, StateKind]]:
        """By parameter, what is stored of the optimizer's state."""
        found: dict[str, dict[str, StateKind]] = {}
        trained = set(known.trained)
        for key, stored in self._stored.items():
            head, middle, rest = key.rpartition("state.") if key.count("state.") == 1 else key.partition("state.")
            name, _, kind = rest.rpartition(".")
            if not middle or (head and not head.endswith(".")) or name not in trained:
                continue
            self._state_key[name, kind] = key
            is_scalar = not tuple(stored.size)
            found.setdefault(name, {})[kind] = StateKind(dtype=stored.properties.dtype, is_scalar=is_scalar)
        return found

    def fill(self, pieces: Sequence[Piece], buffers: Mapping[str, Tensor]) -> None:
        """Read the rows that this rank's runs lie in, a limited number of bytes at a time."""
        jobs = [(self._key_of(p), p.start, p.value) for p in pieces]
        jobs += [(self._buffers[name], 0, value) for name, value in buffers.items() if name in self._buffers]
        for batch in _batches(jobs):
            read: dict[str, Tensor] = {}
            for key, start, value in batch:
                read[key] = self._chunk(key, start, start + value.numel())
            load_alone(read, self._reader)
            for key, start, value in batch:
                chunk = read[key]
                if isinstance(chunk, RowChunk):
                    low = start - chunk.row * _row(self._stored[key].size)
                    value.copy_(chunk.local.reshape(-1)[low : low + value.numel()])
                else:
                    value.copy_(chunk.reshape(-1)[start : start + value.numel()])

    def _key_of(self, piece: Piece) -> str:
        if piece.kind in ("master", "param"):
            return self._key[piece.name]
        return self._state_key[piece.name, piece.kind]

    def _chunk(self, key: str, start: int, stop: int) -> Tensor:
        """Room for the rows of a stored tensor that have the elements [start, stop) of the flattened one."""
        stored = self._stored[key]
        dtype, size = stored.properties.dtype, tuple(stored.size)
        if not size:
            return torch.empty((), dtype=dtype)
        row = _row(size)
        low, high = start // row, max(math.ceil(stop / row), start // row)
        return RowChunk(torch.empty((high - low, *size[1:]), dtype=dtype), low, size)


def _row(size: Sequence[int]) -> int:
    """Elements of one row of the first dimension; at least 1."""
    return max(1, math.prod(size[1:]))


def _batches(jobs: Sequence[tuple[str, int, Tensor]]) -> Iterator[list[tuple[str, int, Tensor]]]:
    """Jobs in batches of limited size, a key once in each."""
    batch: list[tuple[str, int, Tensor]] = []
    keys: set[str] = set()
    filled = 0
    for job in jobs:
        size = job[2].numel() * job[2].element_size()
        if batch and (filled + size > READ_BYTES or job[0] in keys):
            yield batch
            batch, keys, filled = [], set(), 0
        batch.append(job)
        keys.add(job[0])
        filled += size
    if batch:
        yield batch

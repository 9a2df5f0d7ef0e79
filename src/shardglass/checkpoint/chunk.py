"""A rank's part of a tensor, in the form torch.distributed.checkpoint understands.

Owns the adapters to its ``_Checkpointable`` protocol; planning, resharding and storage are then its work. Tensor
subclasses because DCP refuses other objects at save.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader


def load_alone(wanted: dict[str, Tensor], reader: StorageReader) -> None:
    """Read into chunks and tensors without asking another rank: each knows what it needs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        load(wanted, storage_reader=reader, no_dist=True)


class _Chunk(torch.Tensor):
    """Has a size, a dtype and no memory of its own: ``local`` lies at ``offsets`` in it."""

    local: Tensor  # read or written in place
    offsets: torch.Size

    @staticmethod
    def _wrap(cls: Any, local: Tensor, offsets: Sequence[int], size: Sequence[int]) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, tuple(size), dtype=local.dtype, device=local.device)
        made.local, made.offsets = local, torch.Size(offsets)
        return made

    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        """One item: the part at its offset."""
        chunk = ChunkStorageMetadata(offsets=self.offsets, sizes=self.local.size())
        data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.size())
        return [WriteItem(index=MetadataIndex(fqn, self.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Where the part lies."""
        return [ChunkStorageMetadata(offsets=self.offsets, sizes=self.local.size())]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The part itself."""
        return self.local

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """There is nothing to compute with."""
        raise NotImplementedError(f"{func} on a {cls.__name__}: it only tells where elements lie")

    def __repr__(self) -> str:  # type: ignore[override]
        """Where the part lies, and in what."""
        at, of = list(self.offsets), list(self.size())
        return f"{type(self).__name__}({list(self.local.size())} at {at} of {of}, {self.dtype})"


class FlatChunk(_Chunk):
    """A [numel] tensor of which this rank has the elements from ``start`` on, in ``local`` [length]."""

    @staticmethod
    def __new__(cls: type["FlatChunk"], local: Tensor, start: int, numel: int) -> "FlatChunk":
        """Wrap the elements [start, start + length) of a tensor of ``numel`` elements."""
        made: FlatChunk = _Chunk._wrap(cls, local, (start,), (numel,))
        return made


class RowChunk(_Chunk):
    """A tensor of ``size`` of which this rank has rows of the first dimension, from ``row`` on, in ``local``."""

    row: int

    @staticmethod
    def __new__(cls: type["RowChunk"], local: Tensor, row: int, size: Sequence[int]) -> "RowChunk":
        """Wrap the rows [row, row + len(local)) of a tensor of ``size``."""
        made: RowChunk = _Chunk._wrap(cls, local, (row, *(0 for _ in size[1:])), size)
        made.row = row
        return made

"""A rank's run of a flattened tensor, in the form torch.distributed.checkpoint understands.

Owns the adapter to its ``_Checkpointable`` protocol; planning, resharding and storage are then its work.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class FlatChunk(torch.Tensor):
    """A [numel] tensor of which this rank has the elements from ``start`` on, in ``local``.

    It has a size and a dtype and no memory of its own. A tensor subclass because DCP refuses other objects at save.
    """

    local: Tensor  # [length], read or written in place
    start: int

    @staticmethod
    def __new__(cls: type["FlatChunk"], local: Tensor, start: int, numel: int) -> "FlatChunk":
        """Wrap the elements [start, start + length) of a tensor of ``numel`` elements."""
        made: FlatChunk = torch.Tensor._make_wrapper_subclass(cls, (numel,), dtype=local.dtype, device=local.device)
        made.local, made.start = local, start
        return made

    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        """One item: the run at its offset."""
        offset = torch.Size((self.start,))
        chunk = ChunkStorageMetadata(offsets=offset, sizes=self.local.size())
        data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.size())
        return [WriteItem(index=MetadataIndex(fqn, offset), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Where the run lies."""
        return [ChunkStorageMetadata(offsets=torch.Size((self.start,)), sizes=self.local.size())]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The run itself."""
        return self.local

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """There is nothing to compute with."""
        raise NotImplementedError(f"{func} on a FlatChunk: it only tells where elements lie")

    def __repr__(self) -> str:  # type: ignore[override]
        """Where the run lies, and in what."""
        return f"FlatChunk({self.start}+{self.local.numel()} of {self.numel()}, {self.dtype})"

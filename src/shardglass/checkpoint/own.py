"""Checkpoints that ``save_checkpoint`` wrote, as a source of training states."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardglass.checkpoint.chunk import FlatChunk, load_alone
from shardglass.checkpoint.manifest import STATE, Manifest, read_layout, read_manifest, stored_name
from shardglass.engine.state import Piece, StateKind
from shardglass.errors import CheckpointError

Stored = Mapping[str, TensorStorageMetadata]
"""The tensors of a checkpoint: size, dtype and chunks by name."""


class _Reader(HuggingFaceStorageReader):
    """Reads the headers of all files once, not at each call of ``load``."""

    _headers: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """What lies in which file."""
        if self._headers is None:
            self._headers = super().read_metadata()
        return self._headers


class OwnCheckpoint:
    """A checkpoint of ours; see ``Source``.

    Attributes:
        manifest: What it says of itself.
        layout: The layout it was written with.
    """

    def __init__(self, folder: Path) -> None:
        """Read manifest and layout.

        Raises:
            CheckpointError: It is incomplete, or of another format.
        """
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self.layout = read_layout(folder)
        made = self.manifest
        self.writer = f"shardglass {made.shardglass}, ZeRO stage {made.stage}, {made.world_size} ranks"
        params = [p for buffer in self.layout.buffers for p in buffer.params]
        self.shapes: Mapping[str, Sequence[int]] = {p.name: p.shape for p in params}
        self.trained: frozenset[str] | None = frozenset(p.name for p in params if p.trainable)
        self.optimizer: str | None = made.optimizer
        self.groups: Sequence[Mapping[str, Any]] | None = made.groups
        self.group_of: Mapping[str, int] | None = {p.name: p.group for p in params if p.group is not None}
        self.counters: Mapping[str, int] = made.counters
        self.extra: Mapping[str, Any] = made.extra
        self._reader = _Reader(str(folder / STATE))
        stored: Any = self._reader.read_metadata().state_dict_metadata
        self._stored: Stored = stored
        self.states: Mapping[str, Mapping[str, StateKind]] = _states(made, stored)

    def fill(self, pieces: Sequence[Piece], buffers: Mapping[str, Tensor]) -> None:
        """Read the pieces, wherever they lie in the files."""
        wanted: dict[str, Tensor] = {
            stored_name(p.kind, p.name): FlatChunk(p.value.detach(), p.start, p.numel) for p in pieces
        }
        wanted |= {f"buffer/{name}": FlatChunk(value, 0, value.numel()) for name, value in buffers.items()}
        _check_whole(wanted, self._stored)
        load_alone(wanted, self._reader)


def _states(manifest: Manifest, stored: Stored) -> dict[str, dict[str, StateKind]]:
    """By parameter, the optimizer states that are stored of it."""
    found: dict[str, dict[str, StateKind]] = {}
    for fqn, tensor in stored.items():
        prefix, _, name = fqn.partition("/")
        key = prefix.removeprefix("optimizer.")
        if key != prefix:
            kind = StateKind(dtype=tensor.properties.dtype, is_scalar=manifest.states[key])
            found.setdefault(name, {})[key] = kind
    return found


def _check_whole(wanted: Mapping[str, Tensor], stored: Stored) -> None:
    """See that every element that is wanted is stored: DCP leaves what no file covers as it was.

    Raises:
        CheckpointError: Names the first tensors that are not whole.
    """
    faults = []
    for fqn, chunk in wanted.items():
        have = sum(math.prod(c.sizes) for c in stored[fqn].chunks) if fqn in stored else 0
        if have != chunk.numel():
            faults.append(f"{fqn} has {have} of {chunk.numel()} elements")
    if faults:
        shown = "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")
        raise CheckpointError(f"the checkpoint is not whole: {shown}; use another checkpoint")

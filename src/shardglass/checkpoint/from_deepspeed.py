"""DeepSpeed's checkpoints, as a source of training states."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardglass.checkpoint.deepspeed import open_deepspeed
from shardglass.checkpoint.known import KnownModel
from shardglass.engine.state import Piece, StateKind

log = logging.getLogger(__name__)

OPTIONS = ("lr", "initial_lr", "betas", "eps", "weight_decay", "momentum", "max_momentum", "base_momentum")
"""Options of a param_group that mean the same in torch's optimizers; DeepSpeed's own have more."""

STEP = "step"


class DeepSpeedSource:
    """A checkpoint of DeepSpeed's ZeRO stages 1 to 3; see ``Source``."""

    optimizer: str | None = None

    def __init__(self, folder: Path, known: KnownModel) -> None:
        """Read the lists, and no weights.

        Raises:
            CheckpointError: It cannot be read; says which file, and what to do.
        """
        self.folder = folder
        self._read = read = open_deepspeed(folder)
        for line in read.warnings:
            log.warning("%s", line)
        self.writer = f"DeepSpeed {read.version}, ZeRO stage {read.stage}, {read.world_size} ranks"
        # Of a tied pair DeepSpeed stores the one that named_parameters() gives first, as we do; names may be swapped.
        name_of = {alias: name for alias, name in known.aliases.items() if name not in {**read.params, **read.frozen}}
        self._stored = {name_of.get(stored, stored): stored for stored in (*read.params, *read.frozen)}
        shapes = {**read.params, **read.frozen}
        self.shapes: Mapping[str, Sequence[int]] = {name: shapes[stored] for name, stored in self._stored.items()}
        self.trained: frozenset[str] | None = frozenset(
            name for name, stored in self._stored.items() if stored in read.params
        )
        named_groups = [{k: v for k, v in group.items() if k in OPTIONS} for group in read.groups]
        self.groups: Sequence[Mapping[str, Any]] | None = named_groups if all(named_groups) else None
        self.group_of: Mapping[str, int] | None = {
            name: read.group_of[stored] for name, stored in self._stored.items() if stored in read.group_of
        }
        self.states: Mapping[str, Mapping[str, StateKind]] = {name: self._kinds(name) for name in self.trained}
        self.counters: Mapping[str, int] = {"step": read.global_steps, "skipped": read.skipped_steps}
        self.extra: Mapping[str, Any] = {"lr_scheduler": read.lr_scheduler, "samples": read.global_samples}

    def _kinds(self, name: str) -> dict[str, StateKind]:
        """The optimizer states that are stored of one parameter."""
        stored = self._stored[name]
        keys = [key for key in self._read.state_keys if self._read.has(key, stored)]
        found = {key: StateKind(dtype=self._read.run(key, stored, 0, 0).dtype, is_scalar=False) for key in keys}
        if self._read.step_of.get(stored) is not None:
            found[STEP] = StateKind(dtype=torch.float32, is_scalar=True)
        return found

    def fill(self, pieces: Sequence[Piece], buffers: Mapping[str, Tensor]) -> None:
        """Read the runs from the files that hold them."""
        for piece in pieces:
            stored = self._stored[piece.name]
            if piece.is_scalar:
                step = self._read.step_of[stored]
                piece.value.fill_(0 if step is None else step)
                continue
            kind = "weight" if piece.kind == "param" else piece.kind
            piece.value.copy_(self._read.run(kind, stored, piece.start, piece.value.numel()))
        for name, value in buffers.items():
            if name in self._read.buffers:
                value.copy_(self._read.buffers[name].reshape(-1))

"""What training states are read from: checkpoints of several writers, behind one form.

Owns the protocol. Each writer's form is a module of its own: ``own`` for ours, ``trainer`` for the plain Trainer's,
``deepspeed`` for DeepSpeed's, ``fsdp`` for a state that torch.distributed.checkpoint saved of an FSDP2 model.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from shardglass.engine.state import Piece, StateKind


class Source(Protocol):
    """A training state on disk, whoever wrote it.

    Attributes:
        folder: Where it is.
        writer: Who wrote it, readable: "shardglass 0.1.0, ZeRO stage 2, 4 ranks".
        shapes: By parameter, its shape.
        trained: Names of the parameters that were trained; None where the writer does not tell.
        states: By trained parameter, the optimizer states that are stored of it; empty if none are.
        optimizer: Class of the optimizer; None where the writer does not tell.
        groups: Options of each param_group but for its parameters; None where they are not stored.
        group_of: By trained parameter, the index of its param_group; None where the writer does not tell.
        counters: Steps so far under "step", and skipped ones, as ``Handle.counters``.
        extra: What else it says of the run, such as its place in the data.
    """

    folder: Path
    writer: str
    shapes: Mapping[str, Sequence[int]]
    trained: frozenset[str] | None
    states: Mapping[str, Mapping[str, StateKind]]
    optimizer: str | None
    groups: Sequence[Mapping[str, Any]] | None
    group_of: Mapping[str, int] | None
    counters: Mapping[str, int]
    extra: Mapping[str, Any]

    def fill(self, pieces: Sequence[Piece], buffers: Mapping[str, torch.Tensor]) -> None:
        """Read into the pieces and into flat buffers, in place; no other rank is asked.

        Args:
            pieces: Kinds "master" (of a trained parameter), "param" (of a frozen one) and the optimizer's.
            buffers: By name, [numel]; what is not stored stays as it is.

        Raises:
            CheckpointError: What is wanted is not stored whole, or cannot be read; names it.
        """

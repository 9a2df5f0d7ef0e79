"""Checkpoints of the plain Hugging Face Trainer, as a source of training states.

``model.safetensors`` (or its shards) has the weights, ``optimizer.pt`` what ``torch.optim.Optimizer.state_dict()``
gives: states by number, counted group by group in the order the optimizer was given its parameters (source: PyTorch,
"torch.optim.Optimizer.state_dict"). The Trainer gives them in the order of ``named_parameters()``.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from shardglass.checkpoint.known import KnownModel
from shardglass.checkpoint.manifest import IMPLEMENTATION
from shardglass.checkpoint.weight_files import DTYPES, FileWeights, files_in, stored_tensors
from shardglass.engine.state import Piece, StateKind
from shardglass.errors import CheckpointError

OPTIMIZER = "optimizer.pt"
TRAINER_STATE = "trainer_state.json"


class TrainerCheckpoint:
    """A ``checkpoint-N`` folder of ``transformers.Trainer``; see ``Source``."""

    trained: frozenset[str] | None = None
    optimizer: str | None = None

    def __init__(self, folder: Path, known: KnownModel) -> None:
        """Read what the files hold, and no weights.

        Raises:
            CheckpointError: A file is missing, damaged, or holds what the names of the model do not explain.
        """
        self.folder, self.writer = folder, "the Hugging Face Trainer"
        files = files_in(folder)
        if files is None:
            raise CheckpointError(f"{folder}: no model.safetensors in it; save with safetensors, and resume from that")
        stored = stored_tensors(files)
        strange = sorted(name for name, tensor in stored.items() if tensor.dtype not in DTYPES)
        self._stored = {known.aliases.get(name, name): tensor for name, tensor in stored.items() if name not in strange}
        self.shapes: Mapping[str, Sequence[int]] = {
            name: tensor.shape for name, tensor in self._stored.items() if name not in known.buffers
        }
        self.counters: Mapping[str, int] = {"step": _step_of(folder)}
        self.extra: Mapping[str, Any] = {}
        self.groups: Sequence[Mapping[str, Any]] | None = None
        self.group_of: Mapping[str, int] | None = None
        self.states: Mapping[str, Mapping[str, StateKind]] = {}
        self._values: dict[str, dict[str, Tensor]] = {}
        if (folder / OPTIMIZER).is_file():
            self._take_optimizer(known)

    def _take_optimizer(self, known: KnownModel) -> None:
        """Find out which state belongs to which parameter.

        Raises:
            CheckpointError: The groups or the shapes are others than the model's.
        """
        path = self.folder / OPTIMIZER
        saved = load_pickle(path)
        try:
            groups = [dict(group) for group in saved["param_groups"]]
            numbers = [list(group.pop("params")) for group in groups]
            states = saved["state"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: not the state of a torch optimizer: {error!r}") from error
        counts, here = [len(n) for n in numbers], [len(names) for names in known.groups]
        if counts != here:
            raise CheckpointError(
                f"{path}: its param_groups have {counts} parameters, and those of this run have {here}; resume with "
                "the optimizer settings (weight decay, frozen parameters) of the run that wrote it"
            )
        for k, group in enumerate(groups):
            self._take_group(path, numbers[k], known.groups[k], group.pop("param_names", None), states, known)
        self.groups = [{key: value for key, value in g.items() if key not in IMPLEMENTATION} for g in groups]
        self.states = {name: {key: _kind(v) for key, v in values.items()} for name, values in self._values.items()}

    def _take_group(
        self, path: Path, numbers: list[int], names: Sequence[str], told: Any, states: Any, known: KnownModel
    ) -> None:
        """The states of one group; ``told`` are the names that newer releases of torch keep."""
        names = list(told) if isinstance(told, (list, tuple)) and set(told) == set(names) else names
        for number, name in zip(numbers, names, strict=True):
            values = {key: _tensor(v) for key, v in states.get(number, {}).items() if v is not None}
            for key, value in values.items():
                if value.dim() and tuple(value.shape) != tuple(known.shapes[name]):
                    raise CheckpointError(
                        f"{path}: {key} number {number} has shape {list(value.shape)}, and {name}, the parameter of "
                        f"that number, {list(known.shapes[name])}; it is of another model or optimizer"
                    )
            self._values[name] = values

    def fill(self, pieces: Sequence[Piece], buffers: Mapping[str, Tensor]) -> None:
        """Read the runs of this rank from the files."""
        reader = FileWeights(self._stored, {name: DTYPES[t.dtype] for name, t in self._stored.items()})
        for piece in pieces:
            stop = piece.start + piece.value.numel()
            if piece.kind in ("master", "param"):
                piece.value.copy_(reader.read(piece.name, piece.start, stop))
            else:
                piece.value.copy_(self._values[piece.name][piece.kind].reshape(-1)[piece.start : stop])
        for name, value in buffers.items():
            if name in self._stored:
                value.copy_(reader.read(name, 0, value.numel()))


def load_pickle(path: Path) -> Any:
    """What a file of ``torch.save`` holds, mapped from the disk; no code in it is run.

    Raises:
        CheckpointError: It cannot be read, or holds more than tensors and plain values.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds objects that are not read, since reading them may run code: {_first_line(error)}"
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(f"{path}: cannot be read, perhaps cut off: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(float(value))


def _kind(value: Tensor) -> StateKind:
    return StateKind(dtype=value.dtype, is_scalar=value.dim() == 0)


def _step_of(folder: Path) -> int:
    """The step of the Trainer's state; 0 where there is none.

    Raises:
        CheckpointError: The file is damaged.
    """
    path = folder / TRAINER_STATE
    if not path.is_file():
        return 0
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a Trainer's state: {error!r}") from error

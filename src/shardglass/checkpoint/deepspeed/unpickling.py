"""One file of a DeepSpeed checkpoint, opened without DeepSpeed and without running what is pickled in it.

Owns the list of classes that a file may name, and what a damaged file is told as. Leaves what is in the file to
``model_states`` and ``optim_states``.

[Note: what is read of a file] ``torch.save`` writes a zip archive: a pickle with the structure, and a record of bytes
for each storage (source: ``torch/serialization.py``). Opening a file reads the archive's directory and its small
records, these against their checksums. The storages are mapped: their bytes come from the disk when a run of elements
is copied out of them, and only those. A flipped byte in a storage is therefore not noticed on reading; ``check_bytes``
reads everything and finds it.
"""

import pickle
import struct
import threading
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from shardglass.errors import CheckpointError

AGAIN = "copy it again from where it was written, or use another checkpoint"

_DAMAGE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""What zipfile, torch.load and its unpickler raise for bytes that are not what they should be."""

_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}
"""Members of DeepSpeed's ``ZeroStageEnum`` (source: ``runtime/zero/config.py``)."""

_FORMATS = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "u8": "Q", "u4": "I", "b1": "?"}
"""Codes of numpy's scalar types in those of ``struct``."""


class Record:
    """Stands for an object of DeepSpeed's of which only the attributes matter."""


class FragmentAddress(Record):
    """Stands for ``fragment_address``; not read, see [Note: why not the slice mappings] in ``places``."""


class LossScale(Record):
    """Stands for ``LossScaler`` and ``DynamicLossScaler``."""


class NumpyType:
    """Stands for ``numpy.dtype`` of a scalar, such as a learning rate that numpy computed."""

    def __init__(self, code: str, *_: object) -> None:
        """Keep the code, such as "f8"."""
        self.format, self.order = _FORMATS[code], "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Take the byte order, the second of what numpy keeps."""
        self.order = state[1] if state[1] in "<>" else "="


def _stage(value: int) -> int:
    """Stands for ``ZeroStageEnum``: the stage as a number."""
    return int(value)


def _member(owner: object, name: str) -> int:
    """Stands for ``getattr``, by which Python 3.11.0 to 3.11.3 pickle members of an Enum; knows no other owner."""
    if owner is not _stage:
        raise pickle.UnpicklingError("the pickle asks for an attribute of something other than ZeroStageEnum")
    return _STAGES[name]


def _scalar(kind: NumpyType, data: bytes) -> float:
    """Stands for the function that makes a numpy scalar: a Python number."""
    return float(struct.unpack(kind.order + kind.format, data)[0])


ALLOWED = (
    (_stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_member, "builtins.getattr"),
    (FragmentAddress, "deepspeed.utils.tensor_fragment.fragment_address"),
    (LossScale, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (LossScale, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (NumpyType, "numpy.dtype"),
    (_scalar, "numpy.core.multiarray.scalar"),
    (_scalar, "numpy._core.multiarray.scalar"),
)
"""What a file may name beside tensors and Python's own values, and what stands for it here."""

_ALLOWING = threading.Lock()  # torch keeps one list of allowed names per process


def load_file(path: Path) -> dict[str, Any]:
    """Open a file that DeepSpeed wrote; see [Note: what is read of a file].

    Returns:
        What was saved. Its tensors are on the CPU, mapped from the file, and must not be written.

    Raises:
        CheckpointError: The file is missing, cut off, damaged, or needs a class that is not in ``ALLOWED``.
    """
    _check_archive(path)
    try:
        with _ALLOWING, safe_globals(list(ALLOWED)):
            strange = sorted(get_unsafe_globals_in_checkpoint(str(path)))
            if strange:
                raise CheckpointError(
                    f"{path}: it needs {', '.join(strange)}, which no ZeRO checkpoint needs, and nothing of it was "
                    "run; write the checkpoint again without such an object in client_state or in the scheduler's state"
                )
            data = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except _DAMAGE as error:
        raise CheckpointError(f"{path}: cannot be read ({_said(error)}); {AGAIN}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: it holds a {type(data).__name__} and not what DeepSpeed saves; {AGAIN}")
    return data


def check_bytes(path: Path) -> None:
    """Read every byte of a file and hold it against the checksums that ``torch.save`` wrote.

    Raises:
        CheckpointError: The file is missing, cut off or damaged; names the record.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except _DAMAGE as error:
        raise CheckpointError(f"{path}: cannot be read ({_said(error)}); {AGAIN}") from error
    if bad is not None:
        raise CheckpointError(f"{path}: the bytes of {bad} are not those that were written; {AGAIN}")


def _check_archive(path: Path) -> None:
    """See that a file is a whole archive, and hold its small records against their checksums.

    Raises:
        CheckpointError: It is not.
    """
    try:
        with path.open("rb") as file:
            start = file.read(4)
        if not zipfile.is_zipfile(path):
            if start[:1] == b"\x80":
                raise CheckpointError(f"{path}: in PyTorch's format of before 1.6; write it again with torch.save")
            size = path.stat().st_size
            raise CheckpointError(f"{path}: cut off or damaged: {size} bytes, and no archive ends there; {AGAIN}")
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if "/data/" not in entry.filename:
                    archive.read(entry)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: the file is missing; the checkpoint is incomplete, use another one") from error
    except _DAMAGE as error:
        raise CheckpointError(f"{path}: cannot be read ({_said(error)}); {AGAIN}") from error


def _said(error: BaseException) -> str:
    """The first line of an error of torch or Python, with its class; of torch's unpickler without its advice."""
    text = str(error).rpartition("WeightsUnpickler error: ")[2].strip() or "no reason given"
    return f"{type(error).__name__}: {text.splitlines()[0]}"

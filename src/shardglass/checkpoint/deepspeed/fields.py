"""Keys of what a file holds, checked as they are read.

Owns the form of the message when a key is missing or of another type.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from shardglass.checkpoint.deepspeed.places import Shape
from shardglass.checkpoint.deepspeed.unpickling import AGAIN
from shardglass.errors import CheckpointError

_T = TypeVar("_T")


class Fields:
    """A dict out of a file."""

    path: Path
    data: Mapping[Any, Any]

    def __init__(self, path: Path, data: object, where: str = "") -> None:
        """Take what is at a place of a file.

        Args:
            path: The file.
            data: What is there.
            where: The keys that lead there, each in brackets; empty at the top.

        Raises:
            CheckpointError: It is no dict.
        """
        self.path, self._where = path, where
        if not isinstance(data, Mapping):
            raise CheckpointError(f"{path}: {where or 'it'} is a {type(data).__name__} and not a dict; {AGAIN}")
        self.data = data

    def get(self, key: object, kind: type[_T]) -> _T:
        """The value of a key.

        Raises:
            CheckpointError: It is missing or of another type.
        """
        if key not in self.data:
            raise self.fault(key, "is missing: the file is no ZeRO checkpoint of a DeepSpeed that is known here")
        value = self.data[key]
        if not isinstance(value, kind):
            raise self.fault(key, f"is a {type(value).__name__} and not a {kind.__name__}")
        return value

    def optional(self, key: object, kind: type[_T]) -> _T | None:
        """The value of a key; None if it is None or missing.

        Raises:
            CheckpointError: It is of another type.
        """
        return None if self.data.get(key) is None else self.get(key, kind)

    def below(self, key: object) -> "Fields":
        """The dict that is the value of a key.

        Raises:
            CheckpointError: It is missing or no dict.
        """
        return Fields(self.path, self.get(key, Mapping), self._at(key))  # type: ignore[type-abstract]

    def list_of(self, key: object, kind: type[_T]) -> list[_T]:
        """The list that is the value of a key; its items are of one type.

        Raises:
            CheckpointError: It is missing, no list, or an item is of another type.
        """
        values = self.get(key, list)
        for number, value in enumerate(values):
            if not isinstance(value, kind):
                raise self.fault(key, f"has a {type(value).__name__} at {number} and not a {kind.__name__}")
        return values

    def fault(self, key: object, text: str) -> CheckpointError:
        """The error that says what is wrong with a key."""
        return CheckpointError(f"{self.path}: {self._at(key)} {text}; {AGAIN}")

    def _at(self, key: object) -> str:
        return f"{self._where}[{key!r}]"


def shapes_in(path: Path, data: object, where: str) -> dict[str, Shape]:
    """Names with their shapes, in the order of the file.

    Raises:
        CheckpointError: It is something else.
    """
    fields = Fields(path, data, where)
    found = {}
    for name, shape in fields.data.items():
        if not isinstance(name, str) or not isinstance(shape, tuple | list):
            raise fields.fault(name, "is no shape")
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise fields.fault(name, "is no shape")
        found[name] = tuple(shape)
    return found


def tensors_in(path: Path, data: object, where: str) -> dict[str, Tensor]:
    """Names with their tensors; values that are no tensors are left out.

    Raises:
        CheckpointError: It is no dict.
    """
    found = Fields(path, data, where).data
    return {str(name): value for name, value in found.items() if isinstance(value, Tensor)}

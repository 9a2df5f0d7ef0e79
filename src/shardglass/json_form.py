"""Frozen dataclasses to JSON and back.

Owns the form: an object per dataclass with its fields by name, an array per tuple. Leaves versions, and values that
have a JSON form of their own, to whoever writes the file.
"""

import types
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from shardglass.errors import UsageError

T = TypeVar("T")


def to_tree(value: Any, *, without: Sequence[str] = ()) -> Any:
    """What ``json.dumps`` takes: dicts, lists and plain values.

    Args:
        value: A dataclass, a tuple of them, or a plain value.
        without: Fields of the outermost dataclass that are left out.
    """
    if is_dataclass(value):
        names = [field.name for field in fields(value) if field.init and field.name not in without]
        return {name: to_tree(getattr(value, name)) for name in names}
    return [to_tree(item) for item in value] if isinstance(value, tuple) else value


def from_tree(cls: type[T], tree: object, where: str, **given: Any) -> T:
    """Read what ``to_tree`` made of a dataclass.

    Args:
        cls: The dataclass.
        tree: The parsed JSON.
        where: What it is, for the message, such as "snapshot".
        given: Fields that the tree does not have, by name.

    Raises:
        UsageError: A field is missing, unknown or of another type; says which.
    """
    hints = get_type_hints(cls)
    names = [f.name for f in fields(cls) if f.init and f.name not in given]  # type: ignore[arg-type]
    if not isinstance(tree, dict):
        raise UsageError(f"{where} must be an object, not {type(tree).__name__}")
    odd = [name for name in names if name not in tree] + [name for name in tree if name not in names]
    if odd:
        raise UsageError(f"{where}.{odd[0]} is {'missing' if odd[0] in names else 'unknown'}")
    return cls(**{name: _read(hints[name], tree[name], f"{where}.{name}") for name in names}, **given)


def _read(kind: Any, value: object, where: str) -> Any:
    """One value of a declared type."""
    if isinstance(kind, type) and is_dataclass(kind):
        return from_tree(kind, value, where)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else _read(next(a for a in args if a is not types.NoneType), value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise UsageError(f"{where} must be an array, not {type(value).__name__}")
        return tuple(_read(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise UsageError(f"{where} is {value!r}; it must be of type {kind.__name__}")
    return value

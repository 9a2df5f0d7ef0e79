"""The schema as a list: every key with its rule, and names by their place.

Owns the walk over the sections. What the walk finds is what ``load`` checks a file with and what ``docs/config.md``
shows, so the two cannot differ.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from pydantic.fields import FieldInfo

from shardglass.config.keys import Key, Section
from shardglass.config.sections import DeepSpeedConfig
from shardglass.errors import InvariantError

KeyPath = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKey:
    """A key that a file may give.

    Attributes:
        path: Names from the top of the file.
        rule: What becomes of it.
        heading: The section it is shown under, from the docstring of its class.
    """

    path: KeyPath
    rule: Key
    heading: str

    @property
    def key(self) -> str:
        """Its dotted path."""
        return dotted(self.path)


def dotted(path: KeyPath) -> str:
    """Write a path with dots."""
    return ".".join(path)


def known_keys() -> tuple[KnownKey, ...]:
    """Every key that is not a section, in the order of the schema."""
    return tuple(_walk(DeepSpeedConfig, ()))


def rule_of(info: FieldInfo) -> Key:
    """The rule of a key that is not a section.

    Raises:
        InvariantError: The field carries no rule.
    """
    rules = [item for item in info.metadata if isinstance(item, Key)]
    if not rules:
        raise InvariantError("a field of the schema is neither a section nor carries a rule")
    return rules[0]


def section_of(info: FieldInfo) -> type[Section] | None:
    """The section that a field holds; None if it holds a value."""
    found = [item for item in get_args(info.annotation) if isinstance(item, type) and issubclass(item, Section)]
    return found[0] if found else None


def names_at(path: KeyPath) -> tuple[str, ...]:
    """The names known inside the object at ``path``; none where nothing is known of it."""
    model: type[Section] = DeepSpeedConfig
    for part in path:
        info = model.model_fields.get(part)
        if info is None:
            return ()
        inner = section_of(info)
        if inner is None:
            return rule_of(info).known or ()
        model = inner
    return tuple(model.model_fields)


def all_paths() -> tuple[KeyPath, ...]:
    """The paths of all keys and sections."""
    return tuple(_paths(DeepSpeedConfig, ()))


def _walk(model: type[Section], path: KeyPath) -> Iterator[KnownKey]:
    for name, info in model.model_fields.items():
        inner = section_of(info)
        if inner is not None:
            yield from _walk(inner, (*path, name))
        else:
            yield KnownKey(path=(*path, name), rule=rule_of(info), heading=_heading(model, name))


def _heading(model: type[Section], name: str) -> str:
    """The first line of the docstring of the class that declares the field."""
    owner = next((cls for cls in reversed(model.__mro__) if name in cls.__dict__.get("__annotations__", {})), model)
    return (owner.__doc__ or "").partition("\n")[0].rstrip(".").replace("``", "`")


def _paths(model: type[Section], path: KeyPath) -> Iterator[KeyPath]:
    for name, info in model.model_fields.items():
        yield (*path, name)
        inner = section_of(info)
        if inner is not None:
            yield from _paths(inner, (*path, name))

"""Reading the JSON text of a config: where it is, where its syntax breaks and why, which keys stand in it twice.

Owns everything that needs the text. Leaves the meaning of the keys to ``sections``.
"""

import json
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from shardglass.errors import ConfigError
from shardglass.json_text import likely_cause, read_text

Json = dict[str, object]


def read_source(source: str | PathLike[str] | Mapping[str, Any]) -> tuple[Json, str]:
    """Return the JSON object, without comment keys, and the name to use in messages.

    Args:
        source: A path, the JSON text itself (a string that begins with a brace), or a nested mapping.

    Raises:
        ConfigError: The file cannot be read, is no JSON, holds a key twice, or is no object.
    """
    if isinstance(source, Mapping):
        return _mapping(source), "the DeepSpeed config"
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return parse(source, "the DeepSpeed config"), "the DeepSpeed config"
    if not isinstance(source, str | PathLike):
        raise ConfigError(f"a DeepSpeed config is a path or a mapping, not {type(source).__name__}")
    missing = f"; the path counts from {Path.cwd()}"
    return parse(read_text(Path(source), ConfigError, missing=missing), str(source)), str(source)


def parse(text: str, name: str) -> Json:
    """Parse JSON text.

    Raises:
        ConfigError: With line, column, the line itself and the likely cause.
    """
    try:
        tree = json.loads(text, object_pairs_hook=_Pairs, parse_constant=_Constant)
    except json.JSONDecodeError as error:
        raise ConfigError(_syntax_fault(text, name, error)) from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply to be a DeepSpeed config") from None
    except ValueError as error:  # a whole number of more digits than Python converts
        raise ConfigError(f"{name}: {error}") from None
    if not isinstance(tree, _Pairs):
        raise ConfigError(f"{name}: the file holds no JSON object; a DeepSpeed config begins with {{")
    faults: list[str] = []
    plain = _object(tree, "", text, faults)
    if faults:
        raise ConfigError(f"{name}:\n" + "\n".join(f"  {fault}" for fault in faults))
    return plain


class _Pairs:
    """An object of the JSON as its pairs, so that a key given twice is not lost."""

    __slots__ = ("items",)

    def __init__(self, items: list[tuple[str, object]]) -> None:
        self.items = items


class _Constant(str):
    """NaN, Infinity or -Infinity, which Python's parser takes and JSON does not have."""

    __slots__ = ()


def _object(pairs: _Pairs, path: str, text: str, faults: list[str]) -> Json:
    plain: Json = {}
    for key, value in pairs.items:
        here = f"{path}.{key}" if path else key
        if key.startswith("_"):
            continue
        if key in plain:
            faults.append(f"{here}: given twice{_lines_of(key, text)}; JSON would keep the last one, remove one")
        plain[key] = _value(value, here, text, faults)
    return plain


def _value(value: object, path: str, text: str, faults: list[str]) -> object:
    if isinstance(value, _Pairs):
        return _object(value, path, text, faults)
    if isinstance(value, list):
        return [_value(item, f"{path}[{index}]", text, faults) for index, item in enumerate(value)]
    if isinstance(value, _Constant):
        faults.append(f"{path}: {value} is not a JSON number; write a finite number")
        return None
    return value


def _lines_of(key: str, text: str) -> str:
    """Say on which lines ``key`` stands; nothing unless it stands exactly twice, as elsewhere it may be meant."""
    matches = list(re.finditer(re.escape(json.dumps(key)) + r"\s*:", text))
    if len(matches) != 2:
        return ""
    first, second = (text.count("\n", 0, match.start()) + 1 for match in matches)
    return f" (lines {first} and {second})"


def _mapping(source: Mapping[Any, object]) -> Json:
    faults: list[str] = []
    try:
        plain = _plain(source, "", faults)
    except RecursionError:
        raise ConfigError("the DeepSpeed config: nested too deeply, or contains itself") from None
    if faults:
        raise ConfigError("the DeepSpeed config:\n" + "\n".join(f"  {fault}" for fault in faults))
    return plain


def _plain(source: Mapping[Any, object], path: str, faults: list[str]) -> Json:
    plain: Json = {}
    for key, value in source.items():
        here = f"{path}.{key}" if path else str(key)
        if not isinstance(key, str):
            faults.append(f"{here}: a key must be a string, not {type(key).__name__}")
        elif not key.startswith("_"):
            plain[key] = _plain(value, here, faults) if isinstance(value, Mapping) else value
    return plain


def _syntax_fault(text: str, name: str, error: json.JSONDecodeError) -> str:
    line = text.splitlines()[error.lineno - 1] if text.splitlines()[error.lineno - 1 :] else ""
    shown = line[max(0, error.colno - 61) : error.colno + 39]
    caret = " " * min(error.colno - 1, 60) + "^"
    cause = likely_cause(text, error, by_text=_BY_TEXT, by_message=_BY_MESSAGE)
    return f"{name}: line {error.lineno}, column {error.colno}: {cause}\n  {shown}\n  {caret}"


_BY_TEXT = (
    (r"\0(?://|#|/\*)", "JSON has no comments; remove it, or use a key that begins with an underscore"),
    (r"\0$", "the file ends inside an object or a list; a closing bracket is missing"),
)
_BY_MESSAGE = (
    ("Expecting ',' delimiter", "a comma is missing before this, or a bracket was not closed"),
    ("Expecting property name", "a key in double quotes is expected here"),
    ("Unterminated string", "a string is not closed; add the quotation mark"),
    ("Invalid control character", "a string is not closed on its line; add the quotation mark"),
    ("Extra data", "the object ended before this; remove what follows, or a bracket too many"),
)

"""Reading the JSON text of a config: where it is, where its syntax breaks and why, which keys stand in it twice.

Owns everything that needs the text. Leaves the meaning of the keys to ``sections``.
"""

import base64
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from shardglass.errors import ConfigError
from shardglass.json_text import is_text, likely_cause, read_text

Json = dict[str, object]


def read_source(source: str | PathLike[str] | Mapping[str, Any]) -> tuple[Json, str]:
    """Return the JSON object, without comment keys, and the name to use in messages.

    Args:
        source: A path, the JSON text itself (a string that begins with a brace) or its base64, or a nested mapping.

    Raises:
        ConfigError: The file cannot be read, is no JSON, holds a key twice, or is no object.
    """
    if isinstance(source, Mapping):
        return _cleaned(source, "the DeepSpeed config"), "the DeepSpeed config"
    text = _text_itself(source) if isinstance(source, str) else None
    if text is not None:
        return parse(text, "the DeepSpeed config"), "the DeepSpeed config"
    if not isinstance(source, str | PathLike):
        raise ConfigError(f"a DeepSpeed config is a path or a mapping, not {type(source).__name__}")
    missing = f"; the path counts from {Path.cwd()}"
    return parse(read_text(Path(source), ConfigError, missing=missing), str(source)), str(source)


def _text_itself(source: str) -> str | None:
    """JSON text given in place of a path, plain or in base64 as launchers pass it; None if it is a path."""
    if source.lstrip().startswith("{"):
        return source
    try:
        text = base64.b64decode(source, altchars=b"-_", validate=True).decode()
    except ValueError:
        return None
    return text if text.lstrip().startswith("{") else None


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
    return _cleaned(tree, name, text)


class _Pairs:
    """An object of the JSON as its pairs, so that a key given twice is not lost."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        self.pairs = pairs

    def items(self) -> list[tuple[str, object]]:
        """The pairs, as a mapping has them."""
        return self.pairs


class _Constant(str):
    """NaN, Infinity or -Infinity, which Python's parser takes and JSON does not have."""

    __slots__ = ()


@dataclass(slots=True, kw_only=True)
class _Cleaner:
    """Copies a tree without comment keys, and keeps what JSON does not have as faults."""

    text: str = ""
    faults: list[str] = field(default_factory=list)

    def copied(self, node: Mapping[Any, object] | _Pairs, path: str) -> Json:
        """Copy an object; keys that begin with an underscore are comments."""
        plain: Json = {}
        for key, value in node.items():
            here = f"{path}.{_seen(str(key))}" if path else _seen(str(key))
            if not isinstance(key, str):
                self.faults.append(f"{here}: a key must be a string, not {type(key).__name__}")
                continue
            if key.startswith("_"):
                continue
            if not is_text(key):
                self.faults.append(f"{here}: this key holds half of a surrogate pair, which is no text")
            if key in plain:
                twice = f"given twice{_lines_of(key, self.text)}"
                self.faults.append(f"{here}: {twice}; JSON would keep the last one, remove one")
            plain[str(key)] = self.copied_value(value, here)
        return plain

    def copied_value(self, value: object, path: str) -> object:
        """Copy a value."""
        if isinstance(value, Mapping | _Pairs):
            return self.copied(value, path)
        if isinstance(value, list | tuple):
            return [self.copied_value(item, f"{path}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, _Constant) or (isinstance(value, float) and not math.isfinite(value)):
            self.faults.append(f"{path} is {value}; it must be a finite number")
        elif isinstance(value, str) and not is_text(value):
            self.faults.append(f"{path}: holds half of a surrogate pair, which is no text")
        elif value is not None and not isinstance(value, str | int | float):
            self.faults.append(f"{path}: is a value of type {type(value).__name__}, which JSON does not have")
        else:
            return value
        return None


def _seen(key: str) -> str:
    """A key as messages show it: what is no text is escaped."""
    return key.encode("utf-8", "backslashreplace").decode()


def _lines_of(key: str, text: str) -> str:
    """Say on which lines ``key`` stands; nothing unless it stands exactly twice, as elsewhere it may be meant."""
    matches = list(re.finditer(re.escape(json.dumps(key)) + r"\s*:", text))
    if len(matches) != 2:
        return ""
    first, second = (text.count("\n", 0, match.start()) + 1 for match in matches)
    return f" (lines {first} and {second})"


def _cleaned(node: Mapping[Any, object] | _Pairs, name: str, text: str = "") -> Json:
    """The tree without comments.

    Raises:
        ConfigError: Every fault of its keys and values.
    """
    cleaner = _Cleaner(text=text)
    try:
        plain = cleaner.copied(node, "")
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply to be a DeepSpeed config, or contains itself") from None
    if cleaner.faults:
        count = "1 fault" if len(cleaner.faults) == 1 else f"{len(cleaner.faults)} faults"
        raise ConfigError(f"{name}: {count}\n" + "\n".join(f"  {fault}" for fault in cleaner.faults))
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

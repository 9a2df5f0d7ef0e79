"""The text of a data file: where it is, and how it falls into JSON records.

Owns everything that needs the text: the nearest file name, JSON or JSON Lines, line and column of a fault and its
likely cause. Leaves what a record must hold to ``records``.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from shardglass.errors import DataError, nearest
from shardglass.json_text import likely_cause, read_text

_LINES_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines")


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRecord:
    """A value of the file before it is judged; ``fault`` says why its line is no JSON, None if it is."""

    place: str
    value: object
    fault: str | None = None


def check_records_file(path: Path) -> None:
    """Find out early, and without reading it, that a file is not there or is a folder.

    Raises:
        DataError: As ``read_records_text`` raises.
    """
    try:
        seems_right = path.exists() and not path.is_dir()
    except (OSError, ValueError):  # a name too long, a null byte: reading says so
        seems_right = False
    if not seems_right:
        read_records_text(path)


def read_records_text(path: Path) -> str:
    """Return the text of the file.

    Raises:
        DataError: It cannot be read; a missing one names the nearest file beside it.
    """
    try:
        missing = "" if path.exists() else _neighbour(path)
    except OSError:  # a name too long, a folder that may not be looked into: reading says so
        missing = ""
    return read_text(path, DataError, missing=missing)


def _neighbour(path: Path) -> str:
    """Say which file was meant, or that its folder is missing."""
    folder = path.parent
    if not folder.is_dir():
        return f"; its folder {folder} does not exist either (paths count from {Path.cwd()})"
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    close = nearest(path.name, names)
    if close:
        return f" (did you mean {str(folder / close)!r}?)"
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"; {folder} holds {shown}" if names else f"; {folder} holds no file"


def split_records(text: str, name: str) -> list[RawRecord]:
    """Cut the text in records: a JSON list, one record alone, or JSON Lines.

    Raises:
        DataError: The text is no JSON (line, column, likely cause), or no list.
    """
    if not text.strip():
        raise DataError(f"{name}: the file is empty; give it a JSON list of records, or one record a line")
    if _is_lines(text, name):
        return _lines(text)
    reader = _Reader()
    value = reader.read(text)
    if isinstance(value, ValueError | RecursionError):
        raise DataError(f"{name}: not valid JSON: {_fault(text, value, None)}")
    if isinstance(value, dict):
        if not {"conversations", "messages"} & value.keys():
            lists = [key for key, entry in value.items() if isinstance(entry, list)]
            hint = f"; its key {lists[0]!r} holds a list: save that list alone" if lists else ""
            raise DataError(f"{name}: the file holds one JSON object, not a list of records{hint}")
        value = [value]
    if not isinstance(value, list):
        raise DataError(f"{name}: the file holds {kind_of(value)}, not a list of records")
    return [
        RawRecord(place=_place(index, None, record), value=record, fault=reader.fault_of(record))
        for index, record in enumerate(value)
    ]


def _is_lines(text: str, name: str) -> bool:
    """Tell JSON Lines by the name's ending, or by a first line that is a whole object with more behind it."""
    start = text.lstrip()
    first, _, rest = start.partition("\n")
    if name.lower().endswith(_LINES_SUFFIXES):
        # A list saved under such a name is still a list, unless more follows it.
        return not start.startswith("[") or (bool(rest.strip()) and isinstance(_Reader().read(first), list))
    return start.startswith("{") and bool(rest.strip()) and isinstance(_Reader().read(first), dict)


def _lines(text: str) -> list[RawRecord]:
    """Read one record a line; blank lines are none. A line that is no JSON is a bad record."""
    raws: list[RawRecord] = []
    # Not splitlines(): U+2028 and its like may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        reader = _Reader()
        value = reader.read(line)
        fault = reader.fault_of(value)
        if isinstance(value, ValueError | RecursionError):
            fault = _fault(line, value, number)
        elif isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
            fault = "a list of records stands on one line; write one record a line, or save the file as .json"
        raws.append(RawRecord(place=_place(len(raws), number, value), value=value, fault=fault))
    return raws


class _Reader:
    """Reads one JSON text, and remembers objects that hold a key twice: Python would keep the last one unsaid."""

    def __init__(self) -> None:
        self._twice: dict[int, tuple[dict[str, object], str]] = {}  # by id; the objects are kept, so ids stay theirs

    def read(self, text: str) -> object:
        """Return the JSON value, or the error."""
        try:
            return json.loads(text, object_pairs_hook=self._object)
        except (ValueError, RecursionError) as error:  # ValueError also for whole numbers of too many digits
            return error

    def fault_of(self, record: object) -> str | None:
        """Say which key a record holds twice in one object; None if there is none."""
        rest = [record] if self._twice else []
        while rest:  # no recursion: a record may be nested as deeply as the parser allows
            value = rest.pop()
            if id(value) in self._twice:
                return f"holds the key {self._twice[id(value)][1]!r} twice in one object; keep one"
            rest += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return None

    def _object(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        made = dict(pairs)
        if len(made) != len(pairs):
            keys = [key for key, _ in pairs]
            self._twice[id(made)] = (made, next(key for key in keys if keys.count(key) > 1))
        return made


def _place(index: int, line: int | None, record: object) -> str:
    parts = [f"line {line}"] if line is not None else []
    identity = record.get("id") if isinstance(record, dict) else None
    if isinstance(identity, str | int):
        parts.append(f"id {str(identity)[:40]!r}")
    return f"record {index}" + (f" ({', '.join(parts)})" if parts else "")


_BY_TEXT = (
    (r"\0(?://|#|/\*)", "JSON has no comments; remove it"),
    (r"\0$", "the file ends inside a record or a list (was it cut off?); a closing bracket is missing"),
)
_BY_MESSAGE = (
    (
        "Expecting ',' delimiter",
        'a comma is missing before this, or a quotation mark in a string is not written as \\"',
    ),
    ("Unterminated string", "a string is not closed (was the file cut off?)"),
    ("Invalid control character", "a line break or tab stands inside a string; write it as \\n or \\t"),
    ("Invalid \\", "a backslash in a string is not written as \\\\"),
    ("Extra data", "several JSON values follow each other; put them in one list, or write one record a line"),
)


def _fault(text: str, error: ValueError | RecursionError, line: int | None) -> str:
    """Say where the syntax breaks and why; ``line`` is the line in the file when ``text`` is only that line."""
    if isinstance(error, RecursionError):
        return "nested too deeply to be conversations"
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    cause = likely_cause(text, error, by_text=_BY_TEXT, by_message=_BY_MESSAGE)
    return f"line {line or error.lineno}, column {error.colno}: {cause}"


def kind_of(value: object) -> str:
    """Name the JSON kind of a value, with its article."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")

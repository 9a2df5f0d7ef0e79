"""VS Code's ``.vscode/launch.json``: entries are added, and everything that is there stays, comments too.

Owns the file. Leaves the entries to ``debug_config`` and the syntax to ``jsonc``.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardglass.errors import ConfigError
from shardglass.json_text import read_text
from shardglass.jsonc import JsoncError, Node, insert_item, line_indent, parse

Entry = Mapping[str, Any]

_NEW = '{\n    "version": "0.2.0",\n    "configurations": []\n}\n'


def add_entries(path: Path, entries: Sequence[Entry]) -> list[str]:
    """Add entries to a launch.json, or make one; it is written in one piece.

    Args:
        path: The file.
        entries: What to add. One that is there already, with the same values, is not added again; one whose name is
            taken by another gets a number behind it.

    Returns:
        The names that the entries have in the file.

    Raises:
        ConfigError: The file cannot be read, is no JSON with comments, or cannot be written; it is as it was.
    """
    text = ""
    if path.exists() or path.is_symlink():
        text = _read(path)
    names = []
    for entry in entries:
        text, name = _with_entry(text, entry, path)
        names.append(name)
    _write(path, text)
    return names


def _read(path: Path) -> str:
    """The text with its own line ends, which ``read_text`` would make all alike."""
    read_text(path, ConfigError, missing="")
    return path.read_bytes().decode("utf-8")


def _with_entry(text: str, entry: Entry, path: Path) -> tuple[str, str]:
    """The text with one entry more, and the entry's name in it."""
    root = _parsed(text, path)
    if root is None:  # empty, or comments alone
        text = (text + "\n" if text.strip() and not text.endswith("\n") else text) + _NEW
        root = _parsed(text, path)
    if root is None or not isinstance(root.value, dict):
        raise ConfigError(f"{path}: it must be an object; nothing was written")
    newline = "\r\n" if "\r\n" in text else "\n"
    step = _indentation(text, root)
    if "configurations" not in root.members:
        outer = line_indent(text, root.start) + step
        text = insert_item(text, root, '"configurations": []', indent=outer, newline=newline)
        return _with_entry(text, entry, path)
    array = root.members["configurations"]
    if not isinstance(array.value, list):
        raise ConfigError(f'{path}: "configurations" must be an array; nothing was written')
    name, is_there = _free_name(array.value, entry)
    if is_there:
        return text, name
    if array.items:
        first = array.items[0]
        indent = line_indent(text, first.start) or line_indent(text, array.start) + step
    else:
        indent = line_indent(text, array.start) + step
    lines = json.dumps({**entry, "name": name}, indent=step, ensure_ascii=False).split("\n")
    return insert_item(text, array, f"{newline}{indent}".join(lines), indent=indent, newline=newline), name


def _parsed(text: str, path: Path) -> Node | None:
    try:
        return parse(text)
    except JsoncError as error:
        raise ConfigError(f"{path} is no JSON with comments, {error}; mend it; nothing was written") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; nothing was written") from None


def _free_name(there: Sequence[Any], entry: Entry) -> tuple[str, bool]:
    """The name for an entry, and whether an equal one is there."""
    taken = {old.get("name"): old for old in there if isinstance(old, dict)}
    name, number = entry["name"], 1
    while name in taken:
        if taken[name] == {**entry, "name": name}:
            return name, True
        number += 1
        name = f"{entry['name']} ({number})"
    return name, False


def _indentation(text: str, root: Node) -> str:
    """What one level is indented by."""
    for node in root.members.values():
        inner, outer = line_indent(text, node.start), line_indent(text, root.start)
        if len(inner) > len(outer):
            return inner[len(outer) :]
    return "    "


def _write(path: Path, text: str) -> None:
    """Write beside the file, or what it links to, then move."""
    target = Path(os.path.realpath(path))
    beside: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".launch-", suffix=".json", dir=target.parent)
        beside = Path(name)
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, beside)
        else:
            beside.chmod(0o666 & ~_umask())
        os.replace(beside, target)
    except OSError as error:
        if beside is not None:
            with contextlib.suppress(OSError):
                beside.unlink()
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

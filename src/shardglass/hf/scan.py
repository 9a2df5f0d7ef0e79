"""From a command line to values: every fault of it in one list.

Owns how flags are written: ``_`` or ``-``, ``--flag value`` or ``--flag=value``, switches as ``--x``, ``--x True`` and
``--no_x``, old names. transformers' HfArgumentParser reads the same flags, but stops at the first fault by ending the
process, and needs torch before it can answer. Leaves what the values mean to ``arguments``.
"""

import ast
import dataclasses
import importlib.util
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardglass.errors import nearest
from shardglass.hf.renamed import ALIASES, NEW_NAMES, NEW_VALUES, NO_EFFECT, SWITCHES

Kind = Literal["bool", "int", "float", "text", "list", "text or list", "switch or text", "json", "object"]
"""How the values of a flag are read: ``list`` takes one or more, ``object`` cannot be written on a command line."""

TRUE = ("true", "t", "yes", "y", "1")
FALSE = ("false", "f", "no", "n", "0")


def kind_of(annotation: object) -> Kind:
    """Return how a field with this annotation, a type or its text, is read."""
    text = annotation.__name__ if type(annotation) is type else str(annotation)
    if "Union[" in text or "DebugOption" in text:
        return "text"
    if "ParallelismConfig" in text:
        return "object"
    names = {part.strip().rpartition(".")[2] for part in re.sub(r"\[[^\[\]]*\]", "", text).split("|")}
    if "list" in names:
        return "text or list" if "str" in names else "list"
    if "str" in names:
        return "switch or text" if "bool" in names else "text"
    for kind in ("bool", "int", "float"):
        if kind in names:
            return kind
    return "json"


def kinds_of(*classes: type) -> dict[str, Kind]:
    """Return the flags of dataclasses."""
    return {f.name: kind_of(f.type) for cls in classes for f in dataclasses.fields(cls) if f.init}


def kinds_in_source() -> dict[str, Kind]:
    """Return the flags of transformers' TrainingArguments, read from its source.

    Importing it takes seconds, as it imports torch; empty if its source is not to be found.
    """
    spec = importlib.util.find_spec("transformers")
    folders = spec.submodule_search_locations if spec else None
    source = Path(folders[0], "training_args.py") if folders else None
    if source is None or not source.is_file():
        return {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments":
            declared = [item for item in node.body if isinstance(item, ast.AnnAssign)]
            return {ast.unparse(item.target): kind_of(ast.unparse(item.annotation)) for item in declared}
    return {}


@dataclass(slots=True, kw_only=True)
class Scanned:
    """A command line as far as it was understood.

    Attributes:
        values: Field name → value.
        notes: What the user should know, once each.
        faults: What cannot be used, one line each.
        wants_help: ``-h`` or ``--help`` stands in it.
    """

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    wants_help: bool = False
    written: dict[str, str] = field(default_factory=dict)

    def put(self, name: str, value: object, as_written: str) -> None:
        """Keep a value; the last one of a flag counts and that is said, but two names of one flag must agree."""
        before = self.written.get(name)
        if before is not None and before != as_written and self.values[name] != value:
            self.faults.append(f"--{before} and --{as_written} are the same flag with two values: give one of them")
        elif before is not None and self.values[name] != value:
            self.note(f"--{as_written} is given twice, {self.values[name]} and {value}: the last counts")
        self.values[name] = value
        self.written[name] = as_written

    def note(self, text: str) -> None:
        """Keep a note, once."""
        if text not in self.notes:
            self.notes.append(text)


def groups_of(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Cut a command line into flags with their values.

    Returns:
        Pairs of the name, with ``_`` and without dashes, and its values; values before any flag have the name "".
    """
    groups: list[tuple[str, list[str]]] = []
    for token in argv:
        if token == "-h" or (token.startswith("--") and len(token) > 2):
            name, equals, value = (token[2:] or "help").partition("=")
            groups.append((name.replace("-", "_"), [value] if equals else []))
        elif groups:
            groups[-1][1].append(token)
        else:
            groups.append(("", [token]))
    return groups


def scan(argv: Sequence[str], known: Mapping[str, Kind], *, elsewhere: Mapping[str, str] | None = None) -> Scanned:
    """Read a command line.

    Args:
        argv: The flags, without the program's name.
        known: Every flag that is understood.
        elsewhere: Flags that another program takes → what to say about them.
    """
    scanned = Scanned()
    for name, values in groups_of(argv):
        if name in ("h", "help"):
            scanned.wants_help = True
        elif not name:
            scanned.faults.append(f"{' '.join(values)!r} belongs to no flag")
        elif elsewhere is not None and name in elsewhere:
            scanned.faults.append(f"--{name}: {elsewhere[name]}")
        else:
            _take(scanned, name, values, known)
    return scanned


def _take(scanned: Scanned, name: str, values: list[str], known: Mapping[str, Kind]) -> None:
    """Understand one flag under its own, its second or its old name."""
    if ALIASES.get(name) in known:
        _convert(scanned, name, ALIASES[name], values, known)
    elif name in known:
        _convert(scanned, name, name, values, known)
    elif NEW_NAMES.get(name) in known:
        scanned.note(f"--{name} is called --{NEW_NAMES[name]} now: taken as that")
        _convert(scanned, name, NEW_NAMES[name], values, known)
    elif name in SWITCHES and SWITCHES[name][0] in known:
        _switch_of_ours(scanned, name, values)
    elif name in NEW_VALUES:
        _old_switch(scanned, name, values)
    elif name in NO_EFFECT:
        scanned.note(f"--{name} has no effect: {NO_EFFECT[name]}")
    elif name.startswith("no_") and known.get(name[3:]) == "bool" and not values:
        scanned.put(name[3:], value=False, as_written=name)
    else:
        near = nearest(name, [*known, *NEW_NAMES, *NEW_VALUES, *SWITCHES, *ALIASES])
        scanned.faults.append(f"--{name}: unknown flag" + (f" (did you mean --{near}?)" if near else ""))


def _switch_of_ours(scanned: Scanned, name: str, values: list[str]) -> None:
    flag, on, off = SWITCHES[name]
    try:
        scanned.put(flag, on if _switch(values) else off, name)
    except ValueError as error:
        scanned.faults.append(f"--{name} {' '.join(values)}: {error}")


def _old_switch(scanned: Scanned, name: str, values: list[str]) -> None:
    flag, value = NEW_VALUES[name]
    try:
        is_on = _switch(values)
    except ValueError as error:
        scanned.faults.append(f"--{name} {' '.join(values)}: {error}")
        return
    if is_on:
        scanned.note(f"--{name} is written --{flag} {value} now: taken as that")
        scanned.put(flag, [value] if flag == "include_for_metrics" else value, name)
    else:
        scanned.note(f"--{name} is off and needs no flag any more: left out")


def _convert(scanned: Scanned, written: str, name: str, values: list[str], known: Mapping[str, Kind]) -> None:
    try:
        value = _value(known[name], values)
    except ValueError as error:
        scanned.faults.append(f"{' '.join([f'--{written}', *values])}: {error}")
    else:
        scanned.put(name, value, written)


def _value(kind: Kind, values: list[str]) -> object:
    """Convert the values of one flag; ValueError says what is wrong with them."""
    if kind == "bool" or (kind == "switch or text" and not values):
        return _switch(values)
    if not values:
        raise ValueError("a value is missing")
    if kind == "list" or (kind == "text or list" and len(values) > 1):
        return list(values)
    if len(values) > 1:
        raise ValueError("it takes one value")
    return _single(kind, values[0])


def _single(kind: Kind, text: str) -> object:
    if kind == "int":
        try:
            return int(text)
        except ValueError:
            raise ValueError("not a whole number") from None
    if kind == "float":
        try:
            number = float(text)
        except ValueError:
            raise ValueError("not a number") from None
        if not math.isfinite(number):
            raise ValueError("not a finite number")
        return number
    if kind == "json":
        try:
            return json.loads(text)
        except ValueError:
            raise ValueError("not JSON; write it as '{\"key\": value}'") from None
    if kind == "object":
        raise ValueError("it cannot be given on the command line")
    if kind == "switch or text" and text.lower() in (*TRUE, *FALSE):
        return text.lower() in TRUE
    return text


def _switch(values: list[str]) -> bool:
    if len(values) > 1:
        raise ValueError("it takes one value")
    word = values[0].lower() if values else "true"
    if word not in (*TRUE, *FALSE):
        raise ValueError("it must be True or False")
    return word in TRUE

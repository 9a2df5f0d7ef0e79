"""Loading a config: text → checked value, every fault of the file in one error.

Owns the collection of faults, unknown keys with the nearest known one, and the list of the keys a file gives. Leaves
the text to ``source``, the rules to ``sections``, everything that depends on flags to ``shardglass.resolve``.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shardglass.config.keys import Section, Status
from shardglass.config.schema import KeyPath, all_paths, dotted, names_at, rule_of
from shardglass.config.sections import DeepSpeedConfig
from shardglass.config.source import Json, read_source
from shardglass.config.types import OPTIMIZERS, SCHEDULERS, TypeRow
from shardglass.config.zero import TWINS
from shardglass.errors import ConfigError, nearest, suggestion


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenKey:
    """A key that the file gives.

    Attributes:
        key: Its dotted path.
        value: The value as read.
        status: What becomes of it.
        say: A remark for the run's notes, or an empty string.
    """

    key: str
    value: object
    status: Status
    say: str


def load_config(
    source: str | PathLike[str] | Mapping[str, Any], *, allow_unknown: bool = False, planning: bool = False
) -> DeepSpeedConfig:
    """Read and check a DeepSpeed config.

    Args:
        source: A path, JSON text that begins with a brace, or a nested mapping.
        allow_unknown: Leave unknown keys out and name them in ``notes``, instead of refusing them.
        planning: Leave values out that cannot run yet and name them in ``left_out``, instead of refusing them.

    Returns:
        The config; ``auto`` values are still in it.

    Raises:
        ConfigError: Names every fault of the file with its key.
    """
    tree, name = read_source(source)
    faults = [*_type_faults(tree), *_twin_faults(tree)]
    try:
        config, unknown, more, later = _validated(tree)
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply to be a DeepSpeed config") from None
    notes = [f"unknown key left out: {dotted(path)}{_hint(path)}" for path in unknown] if allow_unknown else []
    if not allow_unknown:
        faults += [f"{dotted(path)}: unknown key{_hint(path)}" for path in unknown]
    faults += more if planning else [*more, *later.values()]
    if config is None or faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise ConfigError(f"{name}: {count}\n" + "\n".join(f"  {fault}" for fault in faults))
    config._source = name
    config._notes = tuple(notes)
    config._left_out = later
    return config


def given_keys(config: DeepSpeedConfig) -> tuple[GivenKey, ...]:
    """Return every key that the file gives, in the order of the schema; null counts as absent."""
    return tuple(_given(config, ()))


def _given(section: Section, path: KeyPath) -> Iterator[GivenKey]:
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if value is None:
            continue
        if isinstance(value, Section):
            yield from _given(value, (*path, name))
            continue
        rule = rule_of(info)
        yield GivenKey(key=dotted((*path, name)), value=value, status=rule.status, say=rule.say)


def _validated(tree: Json) -> tuple[DeepSpeedConfig | None, list[KeyPath], list[str], dict[str, str]]:
    """Check the tree; unknown keys and values that cannot run yet are taken out of it, so that the rest is checked.

    Returns:
        (config or None, unknown keys, faults, faults of values that cannot run yet by their dotted key).
    """
    tree = _without_refused_types(tree)
    unknown: list[KeyPath] = []
    try:
        return DeepSpeedConfig.model_validate(tree), unknown, [], {}
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
    faults = []
    later: dict[str, str] = {}
    for detail in details:
        paths = _unknown_paths(detail)
        unknown += paths
        path = tuple(str(part) for part in detail["loc"])
        if detail["type"] == "not_yet":
            later[dotted(path)] = _fault(detail)
            _remove(tree, path)
        elif not paths:
            faults.append(_fault(detail))
    for path in unknown:
        _remove(tree, path)
    if faults:
        return None, unknown, faults, later
    return DeepSpeedConfig.model_validate(tree), unknown, [], later


def _unknown_paths(detail: ErrorDetails) -> list[KeyPath]:
    path = tuple(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return [path]
    if detail["type"] == "unknown_names":
        return [(*path, str(name)) for name in detail["ctx"]["names"]]
    return []


def _fault(detail: ErrorDetails) -> str:
    text = "must be an object" if detail["type"] in ("model_type", "model_attributes_type") else detail["msg"]
    path = dotted(tuple(str(part) for part in detail["loc"]))
    return f"{path} {text}" if detail["type"] in ("bad_value", "not_yet") else f"{path}: {text}"


def _remove(tree: Json, path: KeyPath) -> None:
    node: object = tree
    for part in path[:-1]:
        node = node[part] if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(path[-1], None)


def _hint(path: KeyPath) -> str:
    """Name the nearest known key of the same object, or where a key of exactly this name belongs."""
    elsewhere = [dotted(known) for known in all_paths() if known[-1] == path[-1]]
    if elsewhere and not nearest(path[-1], names_at(path[:-1])):
        return f" here (it belongs to {' or '.join(elsewhere[:3])})"
    return suggestion(path[-1], names_at(path[:-1]))


# ---- faults between keys ----

_TABLES: tuple[tuple[str, dict[str, TypeRow]], ...] = (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS))


def _row(section: object, rows: dict[str, TypeRow]) -> tuple[str, TypeRow] | None:
    """The row of the section's type; None when there is no readable type."""
    kind = section.get("type") if isinstance(section, dict) else None
    if not isinstance(kind, str):
        return None
    return next(((name, row) for name, row in rows.items() if name.lower() == kind.strip().lower()), None)


def _without_refused_types(tree: Json) -> Json:
    """Copy the tree without the params of a type that is refused anyway: their names are not in the schema."""
    tree = copy.deepcopy(tree)
    for key, rows in _TABLES:
        section, found = tree.get(key), _row(tree.get(key), rows)
        if isinstance(section, dict) and found and found[1].params is None:
            section.pop("params", None)
    return tree


def _type_faults(tree: Json) -> list[str]:
    """Faults that depend on a section's type: no type, or params of another type."""
    faults = []
    for key, rows in _TABLES:
        section = tree.get(key)
        if isinstance(section, dict) and section.get("type") is None:
            faults.append(f"{key}.type: missing; give one of {', '.join(rows)}, or drop the section")
        found = _row(section, rows)
        params = section.get("params") if isinstance(section, dict) else None
        if not found or not isinstance(params, dict):
            continue
        name, row = found
        known_to_all = set(names_at((key, "params")))
        wrong = [param for param in params if row.params and param in known_to_all and param not in row.params]
        faults += [f"{key}.params.{param}: {name} takes no such value" for param in wrong]
    return faults


def _twin_faults(tree: Json) -> list[str]:
    """Faults of keys that are given under two of their names; null counts as absent."""
    faults = []
    if tree.get("bf16") is not None and tree.get("bfloat16") is not None:
        faults.append("bfloat16: the old name of bf16, which is given too; remove it")
    zero = tree.get("zero_optimization")
    if isinstance(zero, dict):
        given = [(twin, name) for twin, name in TWINS.items() if None not in (zero.get(twin), zero.get(name))]
        faults += [f"zero_optimization.{twin}: a second name of {name}, which is given too" for twin, name in given]
    return faults

"""``docs/config.md``: every key of the DeepSpeed JSON and what becomes of it here, as one page.

Owns the page's form. What stands on it is the schema that the loader checks files with; what a missing key and ``auto``
mean is read from resolved runs. `python -m shardglass.report.config_page > docs/config.md` writes it.
"""

import json
import sys
from collections.abc import Iterable, Iterator

from shardglass.config import KnownKey, Status, known_keys, load_config
from shardglass.config.types import OPTIMIZERS, SCHEDULERS, TypeRow
from shardglass.options import STAGES
from shardglass.resolve import ResolvedValue, RunArguments, resolve

_HEAD = """\
# The DeepSpeed JSON here

Written by `python -m shardglass.report.config_page > docs/config.md` from the schema that the loader uses.

- **honoured**: its value decides something in the run.
- **no effect**: understood, and without influence on the result here; the run says so once.
- **refused**: understood, and an error when its value asks for something; `false`, `"none"`, an empty object and
  `"enabled": false` ask for nothing.

A key that stands nowhere on this page is an error that names the nearest known one; `--allow_unknown_config` leaves it
out with a note instead. Keys that begin with an underscore are comments. Numbers and booleans may stand in quotes,
`2e8` is a whole number, and `null` counts as absent.

"if missing" is what a missing key means while its flag is not given; "derived" follows from other values. The flag
fills a missing key and `"auto"`, where `auto` may stand; a value beside a flag that was given must equal it, and all
contradictions come in one error.
"""

_TABLE = "| key | here | what it does, or why not | if missing | flag | `auto` |\n|---|---|---|---|---|---|"

_ARGUMENTS = RunArguments(total_steps=100, hidden_size=1000)


def config_page() -> str:
    """The page as Markdown."""
    missing, flags = _origins()
    rows: dict[str, list[str]] = {}
    for known in known_keys():
        cells = (
            f"`{known.key}`",
            _fate(known),
            _words(known),
            missing.get(known.key, ""),
            flags.get(known.key, ""),
            "yes" if _takes_auto(known) else "",
        )
        rows.setdefault(known.heading, []).append("| " + " | ".join(cells) + " |")
    parts = [_HEAD]
    for heading, lines in rows.items():
        parts += [f"## {heading}\n", _TABLE, *lines, ""]
    parts += [*_types("optimizer", OPTIMIZERS), "", *_types("scheduler", SCHEDULERS)]
    return "\n".join(parts) + "\n"


def _fate(known: KnownKey) -> str:
    rule = known.rule
    if rule.status is Status.NO_EFFECT:
        return "no effect"
    if rule.status is Status.HONOURED:
        return "honoured" if rule.fine is None else f"only {_values(rule.fine)}"
    if rule.fine:
        return f"refused unless {_values(rule.fine)}"
    return "refused" if rule.fine == () else "refused if it asks for something"


def _words(known: KnownKey) -> str:
    """Meaning or reason, the remedy of a refused value, and the names of an object."""
    rule = known.rule
    parts = [rule.about]
    if rule.say and rule.status is not Status.NO_EFFECT:
        parts.append(rule.say)
    if rule.known is not None:
        parts.append("names: " + ", ".join(f"`{name}`" for name in rule.known))
    return "; ".join(parts).replace("|", "\\|")


def _values(values: Iterable[object]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in values)


def _takes_auto(known: KnownKey) -> bool:
    try:
        return known.rule.read("auto") == "auto" and known.rule.status is not Status.NOT_YET
    except ValueError:
        return False


def _types(section: str, rows: dict[str, TypeRow]) -> Iterator[str]:
    """Which params each type of a section takes."""
    yield f"## Types of `{section}`\n"
    yield "| type | here | params |"
    yield "|---|---|---|"
    for name, row in rows.items():
        params = "" if row.params is None else ", ".join(f"`{param}`" for param in sorted(row.params))
        yield f"| `{name}` | {'refused' if row.params is None else 'honoured'} | {params} |"


def _origins() -> tuple[dict[str, str], dict[str, str]]:
    """What a missing key means, and its flag, by key; read from runs of every type."""
    missing: dict[str, dict[str, list[str]]] = {}
    flags: dict[str, str] = {}
    for name, rows in _runs():
        for row in rows:
            if row.flag is not None:
                flags[row.key] = ", ".join(f"`{flag}`" for flag in row.flag.split(", "))
            if row.source != "json":
                said = "derived" if row.source == "derived" else f"`{json.dumps(row.value)}`"
                missing.setdefault(row.key, {}).setdefault(said, []).append(name)
    return {key: _by_type(key, said) for key, said in missing.items()}, flags


def _by_type(key: str, said: dict[str, list[str]]) -> str:
    """The one meaning of all types, or each with its types."""
    if len(said) == 1:
        return next(iter(said))
    index = 0 if key.startswith("optimizer") else 1
    return ", ".join(
        f"{value} ({', '.join(dict.fromkeys(name.split()[index] for name in names))})" for value, names in said.items()
    )


def _runs() -> Iterator[tuple[str, tuple[ResolvedValue, ...]]]:
    """A run of every pair of types with nothing but the types given.

    Once more with the old name of bf16, and at the stage where the most keys decide something.
    """
    more: tuple[dict[str, object], ...] = (
        {"bf16": {}},
        {"bfloat16": {}},
        {"zero_optimization": {"stage": max(STAGES)}},
    )
    for optimizer in _supported(OPTIMIZERS):
        for scheduler in _supported(SCHEDULERS):
            params = dict.fromkeys(SCHEDULERS[scheduler].needs, 100)
            source = {"optimizer": {"type": optimizer}, "scheduler": {"type": scheduler, "params": params}}
            for given in more:
                run = resolve(load_config({**source, **given}), _ARGUMENTS, world_size=1)
                yield f"{optimizer} {scheduler}", run.values


def _supported(rows: dict[str, TypeRow]) -> list[str]:
    return [name for name, row in rows.items() if row.params is not None]


if __name__ == "__main__":
    sys.stdout.write(config_page())

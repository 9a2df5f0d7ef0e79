"""The resolved config of a run: every key with its final value, where it came from, and whether it is used.

Owns two forms of one table: JSON for the file beside the run, and a table for a terminal. Leaves the values to
``shardglass.resolve``.
"""

import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardglass.resolve import Resolved, ResolvedValue

CONFIG_VERSION = 1
"""Version of the JSON."""

_ORIGINS = {"json": "config", "flag": "flag", "derived": "derived", "default": "default"}


def config_json(resolved: Resolved) -> str:
    """The table as JSON, versioned; a value that is not known yet is null."""
    body = {
        "version": CONFIG_VERSION,
        "config": resolved.origin,
        "world_size": resolved.batch.world_size,
        "values": [_plain(row) for row in resolved.values],
        "notes": list(resolved.notes),
        "pending": list(resolved.pending),
    }
    return json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False)


def render_config(resolved: Resolved, console: Console) -> None:
    """Print the table: what decides something first, then what has no effect here.

    Args:
        resolved: The values.
        console: Where to.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("key", overflow="fold")
    table.add_column("value", overflow="fold")
    for title in ("from", "used"):
        table.add_column(title, no_wrap=True)
    used = [row for row in resolved.values if row.used == "honoured"]
    unused = [row for row in resolved.values if row.used != "honoured"]
    for row in (*used, *unused):
        style = "" if row.used == "honoured" else "dim"
        cells = (row.key, _shown(row.value), _origin(row), "yes" if row.used == "honoured" else "no")
        table.add_row(*(Text(cell, style) for cell in cells))
    ranks = resolved.batch.world_size
    head = f"Resolved config: {resolved.origin}, {ranks} rank{'' if ranks == 1 else 's'}"
    console.print(Text(head, "bold"), soft_wrap=True)
    console.print(table)


def _plain(row: ResolvedValue) -> dict[str, object]:
    return {"key": row.key, "value": row.value, "source": row.source, "flag": row.flag, "used": row.used == "honoured"}


def _origin(row: ResolvedValue) -> str:
    """Where the value came from, with the flag if one decided it."""
    name = _ORIGINS[row.source]
    return f"{name} {row.flag}" if row.source == "flag" and row.flag else name


def _shown(value: object) -> str:
    """A value as JSON writes it; one that is not known yet is a dash."""
    return "-" if value is None else json.dumps(value, ensure_ascii=False)

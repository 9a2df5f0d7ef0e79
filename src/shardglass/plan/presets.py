"""Models that can be planned by a short name: their configs, written from public figures.

Owns the list. The files are ``config.json`` files as transformers reads them; what a name means is in its file alone.
"""

import json
from importlib.resources import files
from typing import Any

FOLDER = files("shardglass.plan") / "model_configs"


def preset_names() -> tuple[str, ...]:
    """The names, in alphabetical order."""
    return tuple(sorted(entry.name.removesuffix(".json") for entry in FOLDER.iterdir() if entry.name.endswith(".json")))


def preset_config(name: str) -> dict[str, Any] | None:
    """The config of a preset; None if there is none of this name. Upper and lower case do not matter."""
    wanted = name.lower()
    if wanted not in preset_names():
        return None
    config: dict[str, Any] = json.loads((FOLDER / f"{wanted}.json").read_text(encoding="utf-8"))
    return config

"""A model's config: from a preset, a config file, a folder or the hub.

Owns finding it and its checks. Leaves the model that it describes to ``meta``. Transformers is imported where a config
is made, so that a wrong name is told in a second.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardglass.errors import ModelError, suggestion
from shardglass.json_text import likely_cause, read_text
from shardglass.plan.presets import preset_config, preset_names

NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
"""Keys without which a config's class takes those of its smallest or first model, in silence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundConfig:
    """A model's config.

    Attributes:
        name: What the user called the model.
        source: "preset", "file", "folder" or "hub".
        config: The config, as transformers has it.
    """

    name: str
    source: str
    config: Any


def find_config(name: str, *, cache_dir: str | None = None, trust_remote_code: bool = False) -> FoundConfig:
    """The config of a model that is named as on the command line.

    Args:
        name: A preset, a ``config.json``, a folder that holds one, or a name on the hub.
        cache_dir: Where downloads are kept.
        trust_remote_code: Run code that comes with the model; only if the user asked.

    Raises:
        ModelError: There is none, it cannot be read, or its model type is unknown.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{name}: this folder has no config.json; give the folder of a Hugging Face model")
        return FoundConfig(
            name=name, source="folder", config=_config_of(path / "config.json", trust_remote_code=trust_remote_code)
        )
    if path.is_file():
        return FoundConfig(name=name, source="file", config=_config_of(path, trust_remote_code=trust_remote_code))
    preset = preset_config(name)
    if preset is not None:
        return FoundConfig(name=name.lower(), source="preset", config=_made(preset, name))
    if path.is_absolute() or name.startswith(("./", "../", "~")) or name.endswith(".json") or name.count("/") > 1:
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ModelError(f"{name}: there is no such file or folder{suggestion(path.name, beside)}")
    if "/" not in name:
        raise ModelError(
            f"{name}: no preset has this name{suggestion(name.lower(), preset_names())}; presets are "
            f"{', '.join(preset_names())}; a name on the hub is written owner/name"
        )
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name, cache_dir=cache_dir, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        hint = suggestion(name.rpartition("/")[2].lower(), preset_names())
        raise ModelError(f"{name}: its config cannot be read from the hub: {first_line(error)}{hint}") from None
    return FoundConfig(name=name, source="hub", config=config)


def _config_of(path: Path, *, trust_remote_code: bool) -> Any:
    """The config of a file, checked."""
    text = read_text(path, ModelError, missing="")
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        cause = likely_cause(text, error, by_text=(), by_message=())
        raise ModelError(f"{path}:{error.lineno}:{error.colno}: not JSON: {cause}") from None
    if not isinstance(tree, dict):
        raise ModelError(f"{path}: not a model's config: it must be an object")
    if trust_remote_code and "auto_map" in tree:
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(path.parent, trust_remote_code=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelError(f"{path}: {first_line(error)}") from None
    return _made(tree, str(path))


def _made(tree: Mapping[str, Any], where: str) -> Any:
    """The config object of a parsed ``config.json``.

    Raises:
        ModelError: No or an unknown model type, keys that are missing, or values that its class refuses.
    """
    kind = tree.get("model_type")
    if not isinstance(kind, str):
        raise ModelError(f'{where}: no "model_type"; it says which class of transformers the model is, such as "qwen2"')
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        remote = "; it brings its own code: --trust-remote-code runs it" if "auto_map" in tree else ""
        raise ModelError(
            f"{where}: transformers knows no model type {kind!r}{suggestion(kind, CONFIG_MAPPING)}{remote}"
        )
    cls = CONFIG_MAPPING[kind]
    missing = [key for key in NEEDED if _is_needed(cls, key) and not _gives(cls, tree, key)]
    if missing:
        raise ModelError(f"{where}: without {', '.join(missing)} the size of the model is not known; add them")
    try:
        return cls.from_dict(dict(tree))
    except Exception as error:  # a config class of transformers raises whatever its checks raise
        raise ModelError(f"{where}: {cls.__name__} refuses it: {first_line(error)}") from error


def _is_needed(cls: Any, key: str) -> bool:
    """Whether a config class has a value of its own for a key, under any name; models inside it do not count."""
    return isinstance(getattr(cls(), key, None), int)


def _gives(cls: Any, tree: Mapping[str, Any], key: str) -> bool:
    """Whether a file gives a key under its general name or the class's own."""
    return tree.get(key) is not None or tree.get(cls.attribute_map.get(key, key)) is not None


def first_line(error: BaseException) -> str:
    """The first line of an error's text; its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

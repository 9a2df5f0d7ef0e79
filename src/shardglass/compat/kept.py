"""Whether this process trains under ZeRO-3, as far as it can be known from handles and from configs that are alive.

Owns the list of configs that somebody keeps. Leaves reading them to ``shardglass.config``.
"""

import weakref
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

from shardglass.config import load_config
from shardglass.config.source import read_source
from shardglass.engine.registry import live_handles
from shardglass.options import STAGES

ConfigSource = str | PathLike[str] | Mapping[str, Any]

_KEPT: list[tuple[weakref.ref[object], Callable[[], bool]]] = []
"""Who keeps a config, and what says whether it shards parameters; those that are gone are taken out."""


def keep(owner: object, source: ConfigSource | None, *, stage: int | None = None) -> None:
    """Have a config count for ``is_zero3_enabled`` as long as its owner lives; it is read when somebody asks.

    Args:
        owner: Whose config it is; only a weak reference is held.
        source: The DeepSpeed JSON: a path, its text or a mapping; None if there is none.
        stage: The ZeRO stage that was asked for beside it; None if none was.
    """
    _KEPT.append((weakref.ref(owner), lambda: _shards_params(stage) or _shards_params(_stage_of(source))))


def is_zero3_enabled() -> bool:
    """Whether parameters are sharded in this process, or a config that is kept alive says that they will be.

    True while a handle of stage 3 is open, an ``HfDeepSpeedConfig`` with stage 3 is alive, or a
    ``ZeroTrainingArguments`` whose ``deepspeed`` JSON or ``zero_stage`` says 3.

    Raises:
        ConfigError: The JSON of such arguments cannot be used.
    """
    if any(handle.options.rules.shards_params for handle in live_handles()):
        return True
    _KEPT[:] = [row for row in _KEPT if row[0]() is not None]
    return any(shards_params() for _, shards_params in _KEPT)


class HfDeepSpeedConfig:
    """A DeepSpeed JSON that is checked and kept, as transformers' class of this name keeps one.

    While the object is alive ``is_zero3_enabled()`` knows its stage. It changes nothing else: ``from_pretrained``
    loads the whole model on every rank also while a config of stage 3 is alive, and ``shard()`` cuts it afterwards.
    A model that no rank loads whole is opened by ``shardglass.open_model``.

    Attributes:
        config: The JSON as nested dicts, without comment keys; a copy.
    """

    def __init__(self, config_file_or_dict: ConfigSource) -> None:
        """Read and check the JSON.

        Args:
            config_file_or_dict: A path, the JSON's text or its base64, or a mapping.

        Raises:
            ConfigError: Names every fault of the file with its key.
        """
        load_config(config_file_or_dict)
        self.config: dict[str, Any] = read_source(config_file_or_dict)[0]
        keep(self, self.config)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a key, given with dots as in ``zero_optimization.stage``; ``default`` if it is not there."""
        node: Any = self.config
        for part in ds_key_long.split("."):
            if not isinstance(node, dict) or part not in node:
                return default
            node = node[part]
        return node

    def is_true(self, ds_key_long: str) -> bool:
        """Whether the key is there and means yes."""
        return bool(self.get_value(ds_key_long, default=False))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether the key is there and means no."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Whether the stage is 2."""
        return bool(self.get_value("zero_optimization.stage") == STAGES[2].number)

    def is_zero3(self) -> bool:
        """Whether the stage is 3."""
        return bool(self.get_value("zero_optimization.stage") == STAGES[3].number)

    def is_offload(self) -> bool:
        """Always False: a config that asks for offload is refused when it is read."""
        return False


def _stage_of(source: ConfigSource | None) -> int | None:
    section = None if source is None else load_config(source).zero_optimization
    return None if section is None else section.stage


def _shards_params(stage: int | None) -> bool:
    return stage in STAGES and STAGES[stage].shards_params

"""ZeRO fine-tuning for Hugging Face models, with glass walls.

Owns the list of public names and the version. A name is imported from its module when it is first asked for, so
``import shardglass`` loads neither torch nor transformers and the command line answers ``--help`` at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardglass.checkpoint.load import load_checkpoint
    from shardglass.checkpoint.save import save_checkpoint
    from shardglass.engine.handle import Handle
    from shardglass.engine.shard import shard
    from shardglass.errors import (
        CheckpointError,
        CollectiveError,
        ConfigError,
        DataError,
        InvariantError,
        ModelError,
        NonFiniteError,
        OptimizerError,
        ShardglassError,
        UsageError,
    )
    from shardglass.hf.arguments import ZeroTrainingArguments
    from shardglass.hf.random_start import new_model
    from shardglass.hf.sharded_start import open_model
    from shardglass.hf.trainer import ZeroMixin, ZeroTrainer
    from shardglass.lens.look import look, state_of, where
    from shardglass.lens.snapshot import Snapshot
    from shardglass.options import EngineOptions

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "DataError",
    "EngineOptions",
    "Handle",
    "InvariantError",
    "ModelError",
    "NonFiniteError",
    "OptimizerError",
    "ShardglassError",
    "Snapshot",
    "UsageError",
    "ZeroMixin",
    "ZeroTrainer",
    "ZeroTrainingArguments",
    "__version__",
    "load_checkpoint",
    "look",
    "new_model",
    "open_model",
    "save_checkpoint",
    "shard",
    "state_of",
    "where",
]

_HOMES = {
    "EngineOptions": "shardglass.options",
    "Handle": "shardglass.engine.handle",
    "Snapshot": "shardglass.lens.snapshot",
    "ZeroMixin": "shardglass.hf.trainer",
    "ZeroTrainer": "shardglass.hf.trainer",
    "ZeroTrainingArguments": "shardglass.hf.arguments",
    "load_checkpoint": "shardglass.checkpoint.load",
    "look": "shardglass.lens.look",
    "new_model": "shardglass.hf.random_start",
    "open_model": "shardglass.hf.sharded_start",
    "save_checkpoint": "shardglass.checkpoint.save",
    "shard": "shardglass.engine.shard",
    "state_of": "shardglass.lens.look",
    "where": "shardglass.lens.look",
}
"""Module of each public name that is not an error."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _HOMES:
        import_module("shardglass.versions").check_versions()
    value = getattr(import_module(_HOMES.get(name, "shardglass.errors")), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

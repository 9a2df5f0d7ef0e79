"""The DeepSpeed JSON as a checked value: reading it, its schema, and its faults, all reported at once.

Never loads torch. ``readers`` says how one value is read, ``keys`` what can become of a key, ``sections``, ``zero``,
``precision`` and ``types`` which keys exist and what becomes of each, ``schema`` lists them, ``source`` reads the file,
``load`` puts them together. Filling ``auto`` and comparing with flags
is left to ``shardglass.resolve``.
"""

from shardglass.config.keys import Status
from shardglass.config.load import GivenKey, given_keys, load_config
from shardglass.config.readers import AUTO, Auto
from shardglass.config.schema import KnownKey, known_keys
from shardglass.config.sections import DeepSpeedConfig

__all__ = [
    "AUTO",
    "Auto",
    "DeepSpeedConfig",
    "GivenKey",
    "KnownKey",
    "Status",
    "given_keys",
    "known_keys",
    "load_config",
]

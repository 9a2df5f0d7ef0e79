"""The DeepSpeed JSON as a checked value: reading it, its schema, and its faults, all reported at once.

Never loads torch. ``keys`` says how one value is read, ``sections``, ``precision`` and ``types`` which keys exist and
what becomes of each, ``source`` reads the file, ``load`` puts them together. Filling ``auto`` and comparing with flags
is left to ``shardglass.resolve``.
"""

from shardglass.config.keys import AUTO, Auto, Status
from shardglass.config.load import GivenKey, given_keys, load_config
from shardglass.config.sections import DeepSpeedConfig

__all__ = ["AUTO", "Auto", "DeepSpeedConfig", "GivenKey", "Status", "given_keys", "load_config"]

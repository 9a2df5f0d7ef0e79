"""DeepSpeed's names for scripts that already use them, on the engine of shardglass.

Owns no behaviour of the engine: each name is a few lines on a ``Handle``. ``kept`` says whether a run is ZeRO-3,
``gathered`` makes parameters whole, ``consolidated`` the state dict. Which lines of a script change is in
docs/migrating.md.
"""

from shardglass.compat.consolidated import zero3_consolidated_16bit_state_dict
from shardglass.compat.gathered import GatheredParameters, maybe_zero_3
from shardglass.compat.kept import HfDeepSpeedConfig, is_zero3_enabled

is_deepspeed_zero3_enabled = is_zero3_enabled
"""The name that transformers gives it."""

__all__ = [
    "GatheredParameters",
    "HfDeepSpeedConfig",
    "is_deepspeed_zero3_enabled",
    "is_zero3_enabled",
    "maybe_zero_3",
    "zero3_consolidated_16bit_state_dict",
]

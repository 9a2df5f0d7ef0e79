"""``generate()`` on ranks that need each other for every forward.

Owns the one word that transformers asks a model for. Where parameters are sharded a rank whose texts are finished must
go on with forwards until those of all ranks are, or the others wait for its shards for ever. transformers does so for
models that say that FSDP manages them; there is no other way in but ``generate(synced_gpus=True)`` at every call.
"""

import weakref

from torch import nn
from transformers import PreTrainedModel

from shardglass.engine.handle import Handle


class WhileSharded:
    """True while a handle shards parameters; a copy of it is a plain False."""

    def __init__(self, handle: Handle) -> None:
        self._handle = weakref.ref(handle)

    def __bool__(self) -> bool:
        handle = self._handle()
        return handle is not None and not handle.closed and handle.options.rules.shards_params

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return bool, ()


def keep_ranks_together(model: nn.Module, handle: Handle) -> None:
    """Have ``generate()`` of a model, and of what is wrapped in it, go on until all ranks are done."""
    if handle.options.rules.shards_params:
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module._is_fsdp_managed_module = WhileSharded(handle)  # type: ignore[assignment]

"""Which of DeepSpeed's optimizers a live one is, and its reader.

Owns the choice; the readers are ``deepspeed_flat`` (stages 1 and 2) and ``deepspeed_param`` (stage 3).
"""

from typing import Any

from torch import nn

from shardglass.lens.chains import class_names, links
from shardglass.lens.deepspeed_common import zero_of
from shardglass.lens.deepspeed_flat import BF16_OPTIMIZER, read_flat
from shardglass.lens.deepspeed_param import read_param
from shardglass.lens.reading import Reading
from shardglass.lens.wrappers import MODELS, OPTIMIZERS

ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
READERS = {
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": read_flat,
    BF16_OPTIMIZER: read_flat,
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": read_param,
}


def engine_in(model: Any) -> Any:
    """The DeepSpeedEngine in a chain of wrappers; None if there is none."""
    return next((value for value, _ in links(model, MODELS) if ENGINE in class_names(value)), None)


def read_deepspeed(model: nn.Module, optimizer: Any, *, root: str) -> Reading | None:
    """What a live DeepSpeed engine holds; None if there is no ZeRO optimizer.

    Args:
        model: The outermost model; it, or an object inside, may be a DeepSpeedEngine.
        optimizer: The outermost optimizer, or None.
        root: What it is called.

    Raises:
        UsageError: It is a form of ZeRO that the lens does not read.
    """
    engine, path = engine_in(model), root
    for value, kind in links(optimizer, OPTIMIZERS):
        reader = next((READERS[name] for name in class_names(value) if name in READERS), None)
        if reader is not None:
            return reader(zero_of(value, path, engine, model))
        path = f"{path}.{kind.inner}" if kind is not None else path
    return None

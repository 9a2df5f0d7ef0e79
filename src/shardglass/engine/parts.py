"""The engine's objects for one model, as its hooks and its handle share them."""

from dataclasses import dataclass

from shardglass.engine.buffers import ParamBuffer
from shardglass.engine.comm import Comm
from shardglass.engine.gathers import Gathers
from shardglass.engine.grads import Gradients
from shardglass.engine.optim import OptimizerShards


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Storage, collectives and updates of one model.

    Attributes:
        comm: Every collective.
        buffers: Parameters and master weights, in layout order.
        gathers: When parameters are whole.
        grads: Gradients on their way to the shards.
        shards: The optimizer on this rank's shards.
    """

    comm: Comm
    buffers: list[ParamBuffer]
    gathers: Gathers
    grads: Gradients
    shards: OptimizerShards

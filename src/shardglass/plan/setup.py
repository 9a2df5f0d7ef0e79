"""What a plan is made for, beside the model: ranks, stage, dtypes, optimizer, batch, memory.

Owns the values, their checks, and how sizes of memory are written. Leaves to the caller how flags and a DeepSpeed JSON
fill them.
"""

import re
from dataclasses import dataclass
from typing import Literal

from shardglass.errors import UsageError
from shardglass.options import DTYPE_BYTES, STAGES, EngineOptions
from shardglass.plan.activations import ATTENTIONS, Attention
from shardglass.plan.kinds import OptimizerKind, PlannedOptions, StepShape

Device = Literal["cuda", "cpu"]

DTYPES = ("float32", "bfloat16", "float16")
"""dtypes that a model can be planned to compute in."""

GIB = 1 << 30

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?)i?b?\s*", re.IGNORECASE)


def parse_size(text: str, what: str) -> int:
    """Bytes of a size such as "24GB" or "81559MiB".

    GB and GiB are both 2^30 bytes: that is how makers of GPUs label them.

    Args:
        text: The size.
        what: What it is, for the message, such as "--gpu".

    Raises:
        UsageError: It is no size above 0.
    """
    match = _SIZE.fullmatch(text)
    size = 0 if match is None else int(float(match.group(1)) * _UNITS[match.group(2).lower()])
    if match is not None and 0 < size < 1 << 20:
        raise UsageError(f"{what} {text}: that is {size:,} bytes; say the unit, as in {text.strip()}GB")
    if size < 1:
        raise UsageError(f"{what} {text}: it must be a size above 0, such as 24GB or 81559MiB")
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A run as it is planned.

    Attributes:
        world_size: Number of ranks.
        stage: The ZeRO stage.
        scheme: Name of the layout scheme that the partition is shown in.
        dtype: dtype the model computes in.
        reduce_dtype: dtype gradients travel in; None means ``dtype``.
        accum_dtype: dtype gradients are accumulated in.
        prefetch_units: Units gathered ahead of their use, at a stage that gathers them.
        max_live_numel: Elements of whole parameters there beyond which no unit is gathered ahead; None sets no limit.
        optimizer: Class and options of the optimizer.
        num_groups: Optimizer groups: 1, or 2 as the Trainer makes them, with and without weight decay.
        micro_batch: Sequences of a micro-batch on one rank.
        accumulation: Micro-batches of a step.
        length: Tokens of a sequence.
        recomputes: Gradient checkpointing.
        attention: The attention kernel.
        device: Where it runs.
        ranks_per_node: Ranks of one machine.
        memory: Bytes that one rank may use: of its GPU, or its part of the machine's RAM; None if not said.
        reserve: Bytes kept for what no form knows; None takes the assumption.
        host_free: Bytes of a machine's RAM that are free; None if not known.
    """

    world_size: int = 1
    stage: int = 2
    scheme: str = "units"
    dtype: str = "bfloat16"
    reduce_dtype: str | None = None
    accum_dtype: str = "float32"
    prefetch_units: int = EngineOptions().prefetch_units
    max_live_numel: int | None = EngineOptions().max_live_numel
    optimizer: OptimizerKind = OptimizerKind(name="AdamW", groups=({"fused": True}, {"fused": True}))
    num_groups: int = 2
    micro_batch: int = 1
    accumulation: int = 1
    length: int = 2048
    recomputes: bool = False
    attention: Attention = "sdpa"
    device: Device = "cuda"
    ranks_per_node: int = 8
    memory: int | None = None
    reserve: int | None = None
    host_free: int | None = None

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            UsageError: Names all that cannot be planned.
        """
        counts = {
            "world size": self.world_size,
            "micro-batch": self.micro_batch,
            "accumulation": self.accumulation,
            "sequence length": self.length,
            "GPUs per node": self.ranks_per_node,
        }
        faults = [f"the {name} is {count}; it must be at least 1" for name, count in counts.items() if count < 1]
        if self.stage not in STAGES:
            faults.append(f"the stage is {self.stage}; it must be one of {', '.join(map(str, STAGES))}")
        for name, dtype in (("dtype", self.dtype), ("accumulation dtype", self.accum_dtype)):
            if dtype not in DTYPES:
                faults.append(f"the {name} is {dtype}; it must be one of {', '.join(DTYPES)}")
        if self.attention not in ATTENTIONS:
            faults.append(f"the attention is {self.attention}; it must be one of {', '.join(ATTENTIONS)}")
        if self.reserve is not None and self.reserve < 0:
            faults.append(f"the reserve is {self.reserve} bytes; it must not be negative")
        if faults:
            raise UsageError(f"plan: {'; '.join(faults)}")

    @property
    def shape(self) -> StepShape:
        """How its steps use the engine; as the Trainer does, a stage that keeps gradients whole adds them up first."""
        return StepShape(
            micro_batches=(self.accumulation,),
            accumulates_locally=not STAGES[self.stage].shards_grads,
            backend="nccl" if self.device == "cuda" else "gloo",
        )

    @property
    def options(self) -> PlannedOptions:
        """The engine's options."""
        return PlannedOptions(
            stage=self.stage,
            reduce_dtype=self.reduce_dtype,
            accum_dtype=self.accum_dtype,
            prefetch_units=self.prefetch_units,
            max_live_numel=self.max_live_numel,
        )

    @property
    def node_ranks(self) -> int:
        """Ranks of the machine with the most of them."""
        return min(self.world_size, self.ranks_per_node)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the compute dtype."""
        return DTYPE_BYTES[self.dtype]

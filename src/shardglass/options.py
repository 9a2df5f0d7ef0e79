"""What a stage shards, and the options of the engine; planner and engine read the same rows.

Owns the stage table and the frozen options. Leaves to ``resolve`` how they are filled from a DeepSpeed JSON and flags.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardglass.errors import ConfigError

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element, by torch's name of a dtype."""

REDUCTIONS_IN_FLIGHT = 1
"""Reductions under way while the next buffer fills: one hides behind a unit's backward; more cost a buffer each."""

SUM_CHUNK = 1 << 18
"""Elements added at a time on CPU: two fp32 pieces of this size fit the second-level cache."""

FLOAT_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What one ZeRO stage keeps sharded between uses (Rajbhandari et al. 2020, section 5).

    Attributes:
        number: The stage as users name it.
        shards_state: Optimizer state and master weights exist on their owner only.
        shards_grads: A whole gradient is freed as soon as it was reduced, after every micro-batch; otherwise whole
            gradients may be kept until the accumulation boundary.
        shards_params: Parameters are gathered before use and freed after.
    """

    number: int
    shards_state: bool
    shards_grads: bool
    shards_params: bool


STAGES = {
    0: Stage(number=0, shards_state=False, shards_grads=False, shards_params=False),
    1: Stage(number=1, shards_state=True, shards_grads=False, shards_params=False),
    2: Stage(number=2, shards_state=True, shards_grads=True, shards_params=False),
    3: Stage(number=3, shards_state=True, shards_grads=True, shards_params=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The options of one engine, given once.

    Attributes:
        stage: 0, 1, 2 or 3.
        param_dtype: dtype the model computes in: "float32", "bfloat16", or None to keep each parameter's own.
        reduce_dtype: dtype gradients travel in; None means the parameter's.
        accum_dtype: dtype gradients are accumulated in over micro-batches; "float32" unless asked otherwise.
        skip_nonfinite: Skip a step whose gradient is inf or nan on any rank, instead of taking it.
        max_skipped_steps: Skipped steps in a row after which the run stops with NonFiniteError.
        collective_timeout_s: Seconds after which a collective that did not end is an error on every rank.
        allow_any_optimizer: Take an optimizer class that is not known to be element-wise.
        prefetch_units: Units gathered ahead of their use at stage 3.
        max_live_numel: Elements of whole parameters at stage 3 beyond which nothing is gathered ahead; None sets no
            limit.
    """

    stage: int = 2
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    accum_dtype: str = "float32"
    skip_nonfinite: bool = True
    max_skipped_steps: int = 20
    collective_timeout_s: float = 1800.0
    allow_any_optimizer: bool = False
    prefetch_units: int = 1
    max_live_numel: int | None = None

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            ConfigError: Names all values that cannot be used.
        """
        faults = []
        if self.stage not in STAGES:
            faults.append(f"stage is {self.stage!r}; it must be one of {sorted(STAGES)}")
        for key in ("param_dtype", "reduce_dtype", "accum_dtype"):
            value = getattr(self, key)
            if value is not None and value not in FLOAT_DTYPES:
                faults.append(f"{key} is {value!r}; it must be one of {', '.join(FLOAT_DTYPES)}")
            if value == "float16":
                faults.append(f"{key} float16 needs loss scaling, which is not supported yet; use bfloat16 or float32")
        faults += self._numbers_out_of_range()
        if faults:
            raise ConfigError("engine options: " + "; ".join(faults))

    def _numbers_out_of_range(self) -> Iterator[str]:
        least = {"max_skipped_steps": 1, "prefetch_units": 0, "max_live_numel": 0}
        for key, low in least.items():
            value = getattr(self, key)
            if value is not None and value < low:
                yield f"{key} is {value}; it must be at least {low}"
        if self.collective_timeout_s <= 0:
            yield f"collective_timeout_s is {self.collective_timeout_s}; it must be positive"

    @property
    def rules(self) -> Stage:
        """The row of ``STAGES`` for this stage."""
        return STAGES[self.stage]

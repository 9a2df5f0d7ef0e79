"""What a run will need, told before it starts: plain arithmetic on a layout, no torch, no processes."""

from shardglass.plan.kinds import OptimizerKind, StepShape, unknown_state
from shardglass.plan.memory import heaviest_rank, planned_bytes

__all__ = ["OptimizerKind", "StepShape", "heaviest_rank", "planned_bytes", "unknown_state"]

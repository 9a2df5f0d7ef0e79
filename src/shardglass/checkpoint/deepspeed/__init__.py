"""DeepSpeed's ZeRO checkpoints, stages 1 to 3, read without DeepSpeed, at any world size, a slice at a time."""

from shardglass.checkpoint.deepspeed.folder import is_deepspeed_checkpoint
from shardglass.checkpoint.deepspeed.reader import DeepSpeedCheckpoint, open_deepspeed

__all__ = ["DeepSpeedCheckpoint", "is_deepspeed_checkpoint", "open_deepspeed"]

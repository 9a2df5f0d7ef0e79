"""Bytes of a rank, by category, as far as a layout says.

Owns the count of what lies in a rank's shards. Leaves everything that depends on how an engine runs (whole gradients,
communication, activations) to ``plan``.
"""

from collections.abc import Mapping

from shardglass.layout.buffer import Buffer
from shardglass.layout.spec import Layout


def rank_bytes(layout: Layout, rank: int, *, state: Mapping[str, int] | None = None) -> dict[str, int]:
    """Bytes of one rank's shards, by category.

    Args:
        layout: The layout.
        rank: Whose shards.
        state: Bytes per element of what is kept beside each trainable element of a shard, by category, such as
            {"master weights": 4, "optimizer exp_avg": 4, "optimizer exp_avg_sq": 4}. Padding has it too, as DeepSpeed's
            flat partitions do.

    Returns:
        "trainable parameters", "frozen parameters" and "padding" in the dtype of each buffer, then the categories of
        ``state``.

    Raises:
        UsageError: No such rank.
    """
    layout.check_rank(rank)
    kinds = {"trainable parameters": 0, "frozen parameters": 0, "padding": 0}
    trainable_numel = 0
    for buffer in layout.buffers:
        shard = buffer.holders.shard_of(rank)
        if shard is None:
            continue
        real = held_numel(buffer, shard)
        kinds["trainable parameters" if buffer.trainable else "frozen parameters"] += real * buffer.itemsize
        kinds["padding"] += (buffer.shard_numel - real) * buffer.itemsize
        trainable_numel += buffer.shard_numel if buffer.trainable else 0
    return kinds | {category: trainable_numel * size for category, size in (state or {}).items()}


def held_numel(buffer: Buffer, shard: int) -> int:
    """Elements of parameters in a shard of a buffer; the rest of it is padding."""
    if buffer.chunks is not None:
        grids = (buffer.grid(k) for k in range(len(buffer.params)))
        return sum(rows * max(0, min(part, width - shard * part)) for rows, width, part in grids)
    inside = buffer.members(shard)
    if not inside:
        return 0
    total = sum(buffer.params[k].numel for k in inside)
    # Only the first may begin before the shard, and only the last end behind it.
    first, last = inside[0], inside[-1]
    low, high = shard * buffer.shard_numel, (shard + 1) * buffer.shard_numel
    begins_before = min(buffer.params[first].numel, max(0, low - buffer.offsets[first]))
    ends_behind = min(buffer.params[last].numel, max(0, buffer.offsets[last] + buffer.params[last].numel - high))
    return total - begins_before - ends_behind

"""What a rank holds, in one line for a debugger's variables pane.

Owns the words and numbers of that line. Leaves every count to ``query`` and ``account``.
"""

from collections.abc import Sequence

from shardglass.layout.account import held_numel
from shardglass.layout.buffer import Buffer
from shardglass.layout.spec import Layout

DTYPE_WORDS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
"""Short names of the dtypes that weights have."""

_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def rank_line(layout: Layout, rank: int, *, whole: bool = False) -> str:
    """One line: how much of the parameters a rank's shards have, how many tensors, and the last one that is cut.

    Args:
        layout: The layout.
        rank: The rank.
        whole: The rank keeps each buffer whole, whatever the layout cuts.

    Returns:
        Such as "rank 0 of 2 · 7.7 of 15.4 GB bf16 · 194 of 387 tensors, last cut:
        layers.16.self_attn.q_proj.weight (2,048 of 16,777,216 here)". Bytes are those of the elements, in the dtype of
        the model, without padding; the name is without the ``model.`` that it begins with.

    Raises:
        UsageError: No such rank.
    """
    layout.check_rank(rank)
    return f"rank {rank} of {layout.world_size} · {held_line(layout.buffers, rank, whole=whole)}"


def held_line(buffers: Sequence[Buffer], rank: int, *, whole: bool = False) -> str:
    """``rank_line`` of some buffers, without the rank."""
    here = total = num_here = num_total = 0
    cut: tuple[str, int, int] | None = None
    for buffer in buffers:
        shard = buffer.holders.shard_of(rank)
        total += buffer.real_numel * buffer.itemsize
        num_total += len(buffer.params)
        if whole:
            here, num_here = here + buffer.real_numel * buffer.itemsize, num_here + len(buffer.params)
        elif shard is not None:
            here += held_numel(buffer, shard) * buffer.itemsize
            count, last = _held(buffer, shard)
            num_here += count
            cut = last or cut
    dtypes = "+".join(dict.fromkeys(DTYPE_WORDS.get(b.dtype, b.dtype) for b in buffers))
    said = "none cut" if cut is None else f"last cut: {cut[0].removeprefix('model.')} ({cut[1]:,} of {cut[2]:,} here)"
    return f"{share(here, total)} {dtypes} · {num_here:,} of {num_total:,} tensors, {said}"


def _held(buffer: Buffer, shard: int) -> tuple[int, tuple[str, int, int] | None]:
    """How many tensors have elements in a shard, and of the last one that is cut: name, elements there, elements."""
    count, last = 0, None
    for k in buffer.members(shard):
        numel = buffer.params[k].numel
        held = buffer.boundary(k, shard)[0] - (buffer.boundary(k, shard - 1)[0] if shard else 0)
        count += held > 0
        if 0 < held < numel:
            last = (buffer.params[k].name, held, numel)
    return count, last


def share(here: int, total: int) -> str:
    """Two byte counts in the unit of the larger one, such as "7.7 of 15.4 GB" (10^9 bytes)."""
    for unit_bytes, unit in _UNITS:
        if total >= unit_bytes:
            return f"{here / unit_bytes:.1f} of {total / unit_bytes:.1f} {unit}"
    return f"{here} of {total} bytes"

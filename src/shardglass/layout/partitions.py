"""A layout in DeepSpeed's words, for those who know its optimizers from the debugger.

Owns what the attributes of DeepSpeed's ZeRO optimizers say about the layout: the in- and out-lists of a rank, its first
offset, the paddings, the order of round robin, and which parameters stay gathered. Lists of a rank are by optimizer
group, and only those groups are there of which the rank holds a shard. They answer for layouts of every scheme.
"""

import sys
from collections.abc import Iterable, Iterator

from shardglass.errors import UsageError
from shardglass.layout.buffer import Buffer, ParamSpec
from shardglass.layout.spec import Layout

PARAM_PERSISTENCE_THRESHOLD = 100_000
"""DeepSpeed's default of ``stage3_param_persistence_threshold``."""


def params_in_partition(layout: Layout, rank: int, *, whole: bool = False) -> dict[int, tuple[str, ...]]:
    """Names of the parameters of which a rank optimizes elements, by group, in memory order.

    Args:
        layout: The layout.
        rank: The rank.
        whole: It optimizes every buffer whole, whatever the layout cuts.

    Raises:
        UsageError: No such rank.
    """
    return _by_group(layout, rank, inside=True, whole=whole)


def params_not_in_partition(layout: Layout, rank: int, *, whole: bool = False) -> dict[int, tuple[str, ...]]:
    """Names of the other parameters that are optimized, by group, in memory order; arguments as above.

    Raises:
        UsageError: No such rank.
    """
    return _by_group(layout, rank, inside=False, whole=whole)


def first_offset(layout: Layout, rank: int) -> dict[int, int]:
    """Elements of a rank's first parameter of each group that belong to earlier ranks; 0 if it has only padding.

    Raises:
        UsageError: No such rank.
    """
    layout.check_rank(rank)
    offsets: dict[int, int] = {}
    has_elements = set()
    for group, buffer, k, shard in _optimized(layout, rank):
        offsets.setdefault(group, 0)
        run = None if group in has_elements else next(buffer.runs(k, shard), None)
        if run is not None:
            has_elements.add(group)
            offsets[group] = run[0]
    return offsets


def _by_group(layout: Layout, rank: int, *, inside: bool, whole: bool) -> dict[int, tuple[str, ...]]:
    """The parameters with elements on a rank, or those without."""
    layout.check_rank(rank)
    found: dict[int, list[str]] = {}
    for group, buffer, k, shard in _optimized(layout, rank):
        names = found.setdefault(group, [])
        if (whole or next(buffer.runs(k, shard), None) is not None) == inside:
            names.append(buffer.params[k].name)
    return {group: tuple(names) for group, names in sorted(found.items())}


def _optimized(layout: Layout, rank: int) -> Iterator[tuple[int, Buffer, int, int]]:
    """(group, buffer, index in it, the rank's shard) of each parameter that is optimized where the rank takes part."""
    for buffer in layout.buffers:
        shard = buffer.holders.shard_of(rank)
        if shard is None or not buffer.trainable:
            continue
        for k, param in enumerate(buffer.params):
            if param.group is not None and param.numel:
                yield param.group, buffer, k, shard


def groups_padding(layout: Layout, rank: int, *, on_last_rank: bool = False) -> dict[int, int]:
    """Tail padding in a rank's partition of each group at stages 1 and 2; it may cover several ranks' partitions.

    Args:
        layout: A layout of scheme "deepspeed-flat".
        rank: Whose partition.
        on_last_rank: As BF16_Optimizer records it: all of it on the last rank.

    Raises:
        UsageError: No such rank, or another scheme.
    """
    paddings = {}
    for group, buffer, shard in _groups(layout, rank, "deepspeed-flat"):
        end = buffer.offsets[-1] + buffer.params[-1].numel
        if on_last_rank:
            is_last = shard == buffer.holders.num_shards - 1
            paddings[group] = buffer.numel - end if is_last else 0
        else:
            paddings[group] = min(buffer.shard_numel, max(0, (shard + 1) * buffer.shard_numel - end))
    return paddings


def param_alignment_paddings(layout: Layout, rank: int) -> dict[int, tuple[int, ...]]:
    """Zeros behind each parameter of a rank's groups, in memory order; 0 behind the last (its tail is apart).

    Args:
        layout: A layout of scheme "deepspeed-flat".
        rank: Whose groups; they differ only for experts.

    Raises:
        UsageError: No such rank, or another scheme.
    """
    paddings = {}
    for group, buffer, _ in _groups(layout, rank, "deepspeed-flat"):
        ends = [offset + p.numel for offset, p in zip(buffer.offsets, buffer.params, strict=True)]
        following = (*buffer.offsets[1:], ends[-1])
        paddings[group] = tuple(start - end for start, end in zip(following, ends, strict=True))
    return paddings


def sub_group_paddings(layout: Layout, rank: int) -> tuple[tuple[int, ...], ...]:
    """``groups_padding`` of stage 3: for each sub-group the padding of its parameters, all of it on the last rank.

    Where a parameter has so few elements that several ranks hold padding alone, the number exceeds what lies on the
    last rank.

    Args:
        layout: A layout of scheme "deepspeed-param".
        rank: Whose sub-groups.

    Raises:
        UsageError: No such rank, or another scheme.
    """
    return tuple(
        tuple(
            chunk * buffer.holders.num_shards - p.numel if shard == buffer.holders.num_shards - 1 else 0
            for p, chunk in zip(buffer.params, buffer.chunks or (), strict=True)
        )
        for _, buffer, shard in _groups(layout, rank, "deepspeed-param")
    )


def _groups(layout: Layout, rank: int, scheme: str) -> Iterator[tuple[int, Buffer, int]]:
    """(group, buffer, the rank's shard) of the flat buffers that a rank's optimizer works on."""
    layout.check_rank(rank)
    if layout.scheme != scheme:
        raise UsageError(f"these paddings are those of scheme {scheme}; this layout is of scheme {layout.scheme}")
    for buffer in layout.buffers:
        shard, group = buffer.holders.shard_of(rank), buffer.params[0].group
        if shard is not None and group is not None and buffer.label is None:
            yield group, buffer, shard


def round_robin_indices(num_params: int, num_ranks: int) -> list[int]:
    """Where ``round_robin_gradients`` puts each parameter of a group: ``round_robin_bit16_indices``."""
    indices = [0] * num_params
    positions = iter(range(num_params))
    for first in range(num_ranks):
        for original in range(first, num_params, num_ranks):
            indices[original] = next(positions)
    return indices


def persistent_parameters(
    params: Iterable[ParamSpec],
    *,
    param_threshold: int = PARAM_PERSISTENCE_THRESHOLD,
    model_threshold: int = sys.maxsize,
) -> tuple[str, ...]:
    """Which parameters stage 3 keeps gathered on every rank; their partitions stay as they are.

    Args:
        params: In model order, frozen ones too.
        param_threshold: ``stage3_param_persistence_threshold``: elements of the largest such parameter.
        model_threshold: ``stage3_model_persistence_threshold``: elements of all together; one that would exceed it is
            passed over, a smaller one behind it is not.
    """
    names = []
    total = 0
    for p in params:
        if p.numel <= param_threshold and total + p.numel <= model_threshold:
            names.append(p.name)
            total += p.numel
    return tuple(names)


def has_bf16_optimizer(*, stage: int, dtype: str, grad_accum_dtype: str | None, offloads_optimizer: bool) -> bool:
    """Whether DeepSpeed takes its BF16_Optimizer (source: ``engine._do_optimizer_sanity_check``).

    It lays out like the other one of stages 1 and 2, but without round robin and parameter alignment.

    Args:
        stage: ZeRO stage.
        dtype: dtype of the model, by torch's name.
        grad_accum_dtype: ``data_types.grad_accum_dtype``; None is the model's.
        offloads_optimizer: Whether the optimizer is offloaded.
    """
    return stage == 1 and dtype == "bfloat16" and grad_accum_dtype == "float32" and not offloads_optimizer

"""DeepSpeed's optimizers of ZeRO stages 1 and 2, read live: DeepSpeedZeroOptimizer and BF16_Optimizer.

Owns what their attributes mean and where the tensors of the layout are in them. The layout itself is computed by
``shardglass.layout`` from the groups' parameters; ``check`` holds it against what is read here.

[Note: two names] ``bit16`` and ``fp16`` are names only: an fp32 model has such groups too. And the two equal tensors
that people see in ``parallel_partitioned_bit16_groups[0]`` at two ranks are the two partitions of one optimizer group,
not two groups.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardglass.engine.inventory import HeldTensor
from shardglass.layout import Layout, SchemeOptions, make_layout
from shardglass.lens.chains import is_kind
from shardglass.lens.deepspeed_common import Zero, inner_groups, master_path, pieces, states
from shardglass.lens.reading import Attribute, ParamTensor, Reading, Root, own_grad, spec

BF16_OPTIMIZER = "deepspeed.runtime.bf16_optimizer.BF16_Optimizer"
MOST_PARTITIONS = 8
"""Partitions of a group that have rows of their own; of more, the first ones, this rank's and the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """What one of the two classes calls its lists; one entry per optimizer group in each."""

    groups: str
    flat: str
    partitions: str
    master: str
    paddings: str


_ZERO = _Names(
    groups="bit16_groups",
    flat="bit16_groups_flat",
    partitions="parallel_partitioned_bit16_groups",
    master="single_partition_of_fp32_groups",
    paddings="groups_padding",
)
_BF16 = _Names(
    groups="bf16_groups",
    flat="bf16_groups_flat",
    partitions="bf16_partitioned_groups",
    master="fp32_groups_flat_partition",
    paddings="group_paddings",
)


def read_flat(zero: Zero) -> Reading:
    """What this rank's optimizer holds.

    Args:
        zero: A DeepSpeedZeroOptimizer or a BF16_Optimizer.

    Raises:
        UsageError: Its groups are none that the layout knows.
    """
    optimizer = zero.optimizer
    is_bf16 = is_kind(optimizer, BF16_OPTIMIZER)
    words = _BF16 if is_bf16 else _ZERO
    groups: list[list[Tensor]] = getattr(optimizer, words.groups)
    layout = _layout(zero, groups)
    masters = getattr(optimizer, words.master)
    held = list(_parameters(zero, layout, words))
    for g, master in enumerate(masters):
        held.append(
            HeldTensor(buffer=g, kind="master", cut=True, first=0, tensor=master, attribute=master_path(zero, g))
        )
    held += _bf16_gradients(zero) if is_bf16 else _gradients(zero)
    state, scalars = states(zero, masters)
    partitions = not is_bf16 and bool(optimizer.partition_gradients)
    return Reading(
        engine="deepspeed",
        stage=2 if partitions else 1,
        rank=zero.rank,
        world_size=zero.world_size,
        step=zero.step,
        layout=layout,
        params=list(_params(zero)),
        held=held + state,
        scalars=scalars,
        attributes=[*_attributes(zero, words), *(_bf16_attributes(zero) if is_bf16 else _zero_attributes(zero))],
        param_groups=zero.inner.param_groups,
        roots=[
            *(
                Root(label=f"{zero.path}.{words.flat}[{g}]", tensor=t)
                for g, t in enumerate(getattr(optimizer, words.flat))
            ),
            *(Root(label=master_path(zero, g), tensor=t) for g, t in enumerate(masters)),
            *_gradient_roots(zero, is_bf16=is_bf16),
        ],
        group=optimizer.dp_process_group,
        device=groups[0][0].device,
    )


def _layout(zero: Zero, groups: Sequence[Sequence[Tensor]]) -> Layout:
    """The layout by arithmetic, from the groups' parameters and the optimizer's options."""
    optimizer = zero.optimizer
    specs, inside = [], set()
    for g, params in enumerate(groups):
        for p in params:
            name = zero.names[p]
            inside.add(name)
            specs.append(spec(name, p.shape, p.dtype, trainable=True, group=g, unit=f"group {g}"))
    for p, name in zero.names.items():
        if name not in inside:
            specs.append(spec(name, p.shape, p.dtype, trainable=p.requires_grad, group=None, unit=name))
    options = SchemeOptions(
        round_robin_gradients=bool(getattr(optimizer, "round_robin_gradients", False)),
        parameter_alignment=bool(getattr(optimizer, "parameter_alignment", False)),
    )
    return make_layout("deepspeed-flat", specs, zero.world_size, options)


def _params(zero: Zero) -> Iterator[ParamTensor]:
    """Every parameter; all are whole on every rank."""
    for p, name in zero.names.items():
        yield ParamTensor(
            name=name,
            aliases=zero.aliases.get(name, ()),
            param=p,
            shape=tuple(p.shape),
            status="whole",
            grad=own_grad(p),
        )


def _parameters(zero: Zero, layout: Layout, words: _Names) -> Iterator[HeldTensor]:
    """The flat tensors that the model's parameters are views of, and the parameters that are in none."""
    flats: list[Tensor] = getattr(zero.optimizer, words.flat)
    for g, flat in enumerate(flats):
        path = f"{zero.path}.{words.flat}[{g}]"
        yield HeldTensor(buffer=g, kind="param", cut=False, first=0, tensor=flat, attribute=path)
    by_name = {name: p for p, name in zero.names.items()}
    for b in range(len(flats), len(layout.buffers)):
        name = layout.buffers[b].params[0].name
        tensor = by_name[name].detach()
        yield HeldTensor(buffer=b, kind="param", cut=False, first=0, tensor=tensor, attribute=f"{name}.data")


def _gradients(zero: Zero) -> Iterator[HeldTensor]:
    """The reduced gradients of this rank's partitions, from the last backward of a step until the step."""
    for g, grads in zero.optimizer.averaged_gradients.items():
        if grads is not None:
            yield from pieces(g, grads, f"{zero.path}.averaged_gradients[{g}]")
    for g, master in enumerate(zero.optimizer.single_partition_of_fp32_groups):
        if master.grad is not None and zero.optimizer.averaged_gradients.get(g) is None:
            path = f"{zero.path}.single_partition_of_fp32_groups[{g}].grad"
            yield HeldTensor(buffer=g, kind="grad", cut=True, first=0, tensor=master.grad, attribute=path)


def _bf16_gradients(zero: Zero) -> Iterator[HeldTensor]:
    """The sums of gradients: of all parameters on every rank, and a step uses only this rank's partition of them."""
    for g, grads in enumerate(zero.optimizer.fp32_groups_gradient_flat_partition):
        if any(zero.optimizer.fp32_groups_has_gradients[g]):
            path = f"{zero.path}.fp32_groups_gradient_flat_partition[{g}]"
            yield HeldTensor(buffer=g, kind="grad", cut=True, first=0, tensor=grads, attribute=path)


def _gradient_roots(zero: Zero, *, is_bf16: bool) -> Iterator[Root]:
    """Memory of gradients beside that of the layout's buffers."""
    if is_bf16:
        for g, flat in enumerate(zero.optimizer.fp32_groups_gradients_flat):
            yield Root(label=f"{zero.path}.fp32_groups_gradients_flat[{g}]", tensor=flat, category="gradients")
        return
    for g, grads in zero.optimizer.averaged_gradients.items():
        for k, grad in enumerate(grads or ()):
            yield Root(label=f"{zero.path}.averaged_gradients[{g}][{k}]", tensor=grad, category="gradients")
    for g, grads in zero.optimizer.all_grad_tensors.items():
        for k, grad in enumerate(grads or ()):
            if isinstance(grad, Tensor):
                yield Root(label=f"{zero.path}.all_grad_tensors[{g}][{k}]", tensor=grad, category="gradients")


# ---- the attributes, explained ----


def _attributes(zero: Zero, words: _Names) -> Iterator[Attribute]:
    """What both classes have, under two sets of names."""
    optimizer, path, rank = zero.optimizer, zero.path, zero.rank
    names = dict(optimizer.param_names)
    yield Attribute(
        attribute=f"{path}.param_names", meaning="every parameter of the model (the key) to its name", value=names
    )
    groups: list[list[Tensor]] = getattr(optimizer, words.groups)
    yield Attribute(
        attribute=f"{path}.{words.groups}",
        meaning="the model's trainable parameters, a list per optimizer group; their data are views of the flat tensor "
        "below. The name says 16 bit, the dtype is the model's",
        value=groups,
    )
    for g, params in enumerate(groups):
        flat, partitions = getattr(optimizer, words.flat)[g], getattr(optimizer, words.partitions)[g]
        yield Attribute(
            attribute=f"{path}.{words.groups}[{g}]",
            meaning=f"the parameters of optimizer group {g}, in the optimizer's order",
            value=params,
            names=zero.names_of(params),
            group=g,
        )
        yield Attribute(
            attribute=f"{path}.{words.flat}[{g}]",
            meaning=f"all of group {g} in one run of memory, padded to a multiple of 2 × {zero.world_size} elements; "
            "whole on every rank",
            value=flat,
            group=g,
        )
        yield Attribute(
            attribute=f"{path}.{words.partitions}[{g}]",
            meaning=f"the run cut in {zero.world_size} equal partitions, one per rank: these are the partitions of one "
            "optimizer group, not groups",
            value=partitions,
            group=g,
        )
        for r in _shown(zero.world_size, rank):
            whose = "this rank" if r == rank else f"rank {r}"
            yield Attribute(
                attribute=f"{path}.{words.partitions}[{g}][{r}]",
                meaning=f"partition {r} of group {g}: the elements that {whose} updates",
                value=partitions[r],
                group=g,
            )
        yield Attribute(
            attribute=f"{path}.{words.master}[{g}]",
            meaning=f"this rank's partition of group {g} once more, as the weights that the optimizer updates; a copy, "
            "not a view",
            value=getattr(optimizer, words.master)[g],
            group=g,
        )
        on_last = " on the last rank" if words is _BF16 else ""
        yield Attribute(
            attribute=f"{path}.{words.paddings}[{g}]",
            meaning=f"elements at the end of this rank's partition of group {g} that belong to no parameter",
            value=int(getattr(optimizer, words.paddings)[g]),
            fact=f"groups_padding{on_last}",
            group=g,
        )
    yield from inner_groups(zero, per="one tensor per group, this rank's partition in fp32")


def _shown(count: int, rank: int) -> list[int]:
    """The partitions that have a row."""
    first = range(min(count, MOST_PARTITIONS))
    return sorted({*first, rank, count - 1})


def _zero_attributes(zero: Zero) -> Iterator[Attribute]:
    """What DeepSpeedZeroOptimizer alone has."""
    optimizer, path = zero.optimizer, zero.path
    for g in range(len(optimizer.bit16_groups)):
        numbers: tuple[tuple[str, str, str], ...] = (
            ("partition_size", f"elements of each partition of group {g}, padding included", "shard_numel"),
            (
                "first_offset",
                f"elements of the first tensor of params_in_partition[{g}] that are in earlier ranks' partitions",
                "first_offset",
            ),
        )
        for name, meaning, fact in numbers:
            value = int(getattr(optimizer, name)[g])
            yield Attribute(attribute=f"{path}.{name}[{g}]", meaning=meaning, value=value, fact=fact, group=g)
        lists = (
            (
                "params_in_partition",
                f"the parameters of group {g} with elements in this rank's partition; a tensor that is cut is in it "
                "on every rank it touches",
            ),
            ("params_not_in_partition", f"the other parameters of group {g}: other ranks update them"),
        )
        for name, meaning in lists:
            params = getattr(optimizer, name)[g]
            yield Attribute(
                attribute=f"{path}.{name}[{g}]",
                meaning=meaning,
                value=params,
                names=zero.names_of(params),
                fact=name,
                group=g,
            )
    yield from _gradient_attributes(zero)
    if optimizer.round_robin_gradients:
        yield Attribute(
            attribute=f"{path}.round_robin_bit16_groups",
            meaning="the groups in the order they lie in memory: parameters 0, w, 2w, … first, for w ranks",
            value=optimizer.round_robin_bit16_groups,
        )


def _gradient_attributes(zero: Zero) -> Iterator[Attribute]:
    """Where gradients are, and where they are not."""
    optimizer, path = zero.optimizer, zero.path
    held: dict[int, Any] = {g: grads for g, grads in optimizer.averaged_gradients.items() if grads is not None}
    yield Attribute(
        attribute=f"{path}.averaged_gradients",
        meaning="by group, the mean gradients of this rank's partition, a tensor per parameter in it, cut where the "
        "partition is; filled at the last backward of a step, emptied by the step. param.grad is None then",
        value=held,
    )
    for g, grads in held.items():
        yield Attribute(
            attribute=f"{path}.averaged_gradients[{g}]",
            meaning=f"those of group {g}, in the order of params_in_partition[{g}], with the padding behind",
            value=list(grads),
            group=g,
        )


def _bf16_attributes(zero: Zero) -> Iterator[Attribute]:
    """What BF16_Optimizer alone has."""
    optimizer, path = zero.optimizer, zero.path
    for g in range(len(optimizer.bf16_groups)):
        yield Attribute(
            attribute=f"{path}.fp32_groups_gradients_flat[{g}]",
            meaning=f"sums of the gradients of all of group {g} in fp32, on every rank: this class keeps them whole",
            value=optimizer.fp32_groups_gradients_flat[g],
            group=g,
        )
        yield Attribute(
            attribute=f"{path}.fp32_groups_gradient_flat_partition[{g}]",
            meaning="the part of it that this rank's step uses",
            value=optimizer.fp32_groups_gradient_flat_partition[g],
            group=g,
        )

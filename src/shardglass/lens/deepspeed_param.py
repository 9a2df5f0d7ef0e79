"""DeepSpeed's optimizer of ZeRO stage 3, read live: DeepSpeedZeroOptimizer_Stage3.

Owns what its attributes and those on parameters mean, and where the tensors of the layout are in them. The layout
itself is computed by ``shardglass.layout``; ``check`` holds it against what is read here.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from shardglass.engine.inventory import HeldTensor
from shardglass.errors import UsageError
from shardglass.layout import Layout, SchemeOptions, make_layout
from shardglass.lens.deepspeed_common import Zero, inner_groups, master_path, pieces, states
from shardglass.lens.reading import Attribute, ParamTensor, Reading, Root, own_grad, spec


def read_param(zero: Zero) -> Reading:
    """What this rank's optimizer holds.

    Args:
        zero: A DeepSpeedZeroOptimizer_Stage3.

    Raises:
        UsageError: Its weights are swapped out to files, or it is laid out over several groups of ranks.
    """
    optimizer = zero.optimizer
    if getattr(optimizer, "swap_optimizer", False) or getattr(optimizer, "params_in_nvme_and_cpu", False):
        raise UsageError("this DeepSpeed optimizer keeps its tensors on NVMe; the lens reads what is in memory")
    layout = _layout(zero)
    masters = optimizer.fp32_partitioned_groups_flat
    held = list(_parameters(zero, layout))
    for s, master in enumerate(masters):
        held.append(
            HeldTensor(buffer=s, kind="master", cut=True, first=0, tensor=master, attribute=master_path(zero, s))
        )
    for s, grads in (optimizer.averaged_gradients or {}).items():
        if grads is not None:
            held += pieces(s, grads, f"{zero.path}.averaged_gradients[{s}]")
    state, scalars = states(zero, masters)
    first = next(iter(zero.names))
    return Reading(
        engine="deepspeed",
        stage=3,
        rank=zero.rank,
        world_size=zero.world_size,
        step=zero.step,
        layout=layout,
        params=list(_params(zero)),
        held=held + state,
        scalars=scalars,
        attributes=[*_attributes(zero), *_on_parameters(zero)],
        param_groups=optimizer.trainable_param_groups,
        roots=list(_roots(zero, masters)),
        group=optimizer.dp_process_group,
        device=first.device,
    )


def _layout(zero: Zero) -> Layout:
    """The layout by arithmetic, from the sub-groups' parameters and the optimizer's options."""
    optimizer = zero.optimizer
    specs, inside = [], set()
    p: Any  # DeepSpeed's ds_ attributes are on it
    for s, params in enumerate(optimizer.fp16_groups):
        group = int(optimizer.sub_group_to_group_id[s])
        for p in params:
            name = zero.names[p]
            inside.add(name)
            specs.append(spec(name, p.ds_shape, p.dtype, trainable=True, group=group, unit=f"group {group}"))
    for p, name in zero.names.items():
        if name not in inside:
            specs.append(spec(name, p.ds_shape, p.dtype, trainable=p.requires_grad, group=None, unit=name))
    options = SchemeOptions(sub_group_size=int(optimizer.sub_group_size))
    return make_layout("deepspeed-param", specs, zero.world_size, options)


def _params(zero: Zero) -> Iterator[ParamTensor]:
    """Every parameter: gathered now, or only this rank's part of it."""
    p: Any
    for p, name in zero.names.items():
        yield ParamTensor(
            name=name,
            aliases=zero.aliases.get(name, ()),
            param=p,
            shape=tuple(p.ds_shape),
            status=f"{p.ds_status.name}" + (", persistent" if p.ds_persist else ""),
            shard=p.ds_tensor,
            grad=own_grad(p),
        )


def _parameters(zero: Zero, layout: Layout) -> Iterator[HeldTensor]:
    """This rank's parts of the parameters: flat by sub-group, and those of frozen parameters by themselves."""
    optimizer = zero.optimizer
    count = len(optimizer.fp16_groups)
    for s in range(count):
        flat = optimizer.fp16_partitioned_groups_flat[s]
        if flat is not None:
            path = f"{zero.path}.fp16_partitioned_groups_flat[{s}]"
            yield HeldTensor(buffer=s, kind="param", cut=True, first=0, tensor=flat, attribute=path)
    by_name: dict[str, Any] = {name: p for p, name in zero.names.items()}
    for b in range(count, len(layout.buffers)):
        name = layout.buffers[b].params[0].name
        shard = by_name[name].ds_tensor
        yield HeldTensor(buffer=b, kind="param", cut=True, first=0, tensor=shard, attribute=f"{name}.ds_tensor")


def _roots(zero: Zero, masters: Sequence[Tensor]) -> Iterator[Root]:
    """Tensors that several others are views of."""
    optimizer = zero.optimizer
    parts: tuple[tuple[str, str], ...] = (
        ("lp_param_buffer", "parameters"),
        ("grad_partitions_flat_buffer", "gradients"),
    )
    for name, category in parts:
        tensor = getattr(optimizer, name, None)
        if isinstance(tensor, Tensor):
            yield Root(label=f"{zero.path}.{name}", tensor=tensor, category=category)
    for s, master in enumerate(masters):
        yield Root(label=master_path(zero, s), tensor=master)


def _attributes(zero: Zero) -> Iterator[Attribute]:
    """The optimizer's own attributes."""
    optimizer, path = zero.optimizer, zero.path
    yield Attribute(
        attribute=f"{path}.param_names",
        meaning="every parameter of the model (the key) to its name",
        value=dict(optimizer.param_names),
    )
    buffer = getattr(optimizer, "lp_param_buffer", None)
    if isinstance(buffer, Tensor):
        yield Attribute(
            attribute=f"{path}.lp_param_buffer",
            meaning="this rank's parts of all trainable parameters behind each other, sub-group by sub-group",
            value=buffer,
        )
    yield from inner_groups(zero, per="the fp32 tensors of its sub-groups, one at a time while it steps")
    yield Attribute(
        attribute=f"{path}.persistent_parameters",
        meaning="parameters so small that they stay gathered on every rank; their parts are partitioned all the same",
        value=list(optimizer.persistent_parameters),
        names=zero.names_of(optimizer.persistent_parameters),
    )
    for s, params in enumerate(optimizer.fp16_groups):
        yield from _sub_group(zero, s, params)


def _sub_group(zero: Zero, s: int, params: Sequence[Tensor]) -> Iterator[Attribute]:
    """The attributes of one sub-group."""
    optimizer, path = zero.optimizer, zero.path
    group = int(optimizer.sub_group_to_group_id[s])
    rows: tuple[tuple[str, str, Any], ...] = (
        (
            "fp16_groups",
            f"the parameters of sub-group {s} (of optimizer group {group}); param.data is empty unless gathered, so "
            "numel() is 0",
            list(params),
        ),
        (
            "fp16_partitioned_groups",
            "this rank's part of each: the ds_tensor of each parameter",
            list(optimizer.fp16_partitioned_groups[s]),
        ),
        ("fp16_partitioned_groups_flat", "these parts in one run of memory", optimizer.fp16_partitioned_groups_flat[s]),
        (
            "fp32_partitioned_groups_flat",
            "this rank's parts once more, as the weights that the optimizer updates; a copy, not a view",
            optimizer.fp32_partitioned_groups_flat[s],
        ),
    )
    for name, meaning, value in rows:
        yield Attribute(
            attribute=f"{path}.{name}[{s}]",
            meaning=meaning,
            value=value,
            names=zero.names_of(params) if name == "fp16_groups" else None,
            group=group,
        )
    yield Attribute(
        attribute=f"{path}.sub_group_to_group_id[{s}]",
        meaning="the optimizer group of this sub-group",
        value=group,
        group=group,
    )
    grads = (optimizer.averaged_gradients or {}).get(s)
    yield Attribute(
        attribute=f"{path}.averaged_gradients[{s}]",
        meaning="this rank's parts of the mean gradients, from backward until the step; param.grad is None then",
        value=[] if grads is None else list(grads),
        group=group,
    )


def _on_parameters(zero: Zero) -> Iterator[Attribute]:
    """What DeepSpeed puts on each parameter, shown for the largest one."""
    param: Any = max(zero.names, key=_whole_numel)
    name = zero.names[param]
    rows: tuple[tuple[str, str, Any], ...] = (
        ("data", "the whole values while gathered, otherwise an empty tensor: this is why numel() is 0", param.data),
        (
            "ds_tensor",
            f"this rank's part: ceil(numel / {zero.world_size}) elements, the last may be padding",
            param.ds_tensor,
        ),
        ("ds_numel", "elements of the whole parameter: the total that numel() does not tell", int(param.ds_numel)),
        ("ds_shape", "shape of the whole parameter", str(tuple(param.ds_shape))),
        (
            "ds_status",
            "AVAILABLE: gathered; NOT_AVAILABLE: only ds_tensor; INFLIGHT: on its way",
            param.ds_status.name,
        ),
        ("ds_id", "number in the order of partitioning, the same on every rank", int(param.ds_id)),
        ("ds_persist", "whether it stays gathered", str(bool(param.ds_persist))),
    )
    for attribute, meaning, value in rows:
        yield Attribute(attribute=f"{name}.{attribute}", meaning=meaning, value=value)


def _whole_numel(param: Any) -> int:
    """Elements of the whole parameter."""
    return int(param.ds_numel)

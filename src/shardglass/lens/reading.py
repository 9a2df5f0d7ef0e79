"""What a reader finds in a live engine, and how it becomes a Snapshot.

Owns the form that all readers give back, storages and their labels (see [Note: views] in ``rows``), and the count
of bytes. Leaves to each reader what its engine keeps where.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardglass.engine.freed import FreedParameter
from shardglass.engine.inventory import HeldTensor
from shardglass.engine.placeholder import GradientElsewhere
from shardglass.engine.units import dtype_name
from shardglass.errors import ModelError
from shardglass.layout import Layout, ParamSpec
from shardglass.lens.rows import AttributeRow, GroupRow, Held, MemoryRow, ParamRow, Storage, View
from shardglass.lens.whereabouts import clean_name
from shardglass.options import DTYPE_BYTES

CATEGORIES = {"param": "parameters", "master": "master weights", "grad": "gradients"}
"""Names of the categories of memory, by kind; an optimizer's key is "optimizer <key>"."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParamTensor:
    """One parameter of a live model.

    Attributes:
        name: Its name, cleaned.
        aliases: Its other names.
        param: The Parameter as the model has it now.
        shape: Its whole shape.
        status: As ``ParamRow.status``.
        shard: This rank's part, where that is another tensor.
        grad: Its gradient; None if there is none, or if it only stands for one that is elsewhere.
    """

    name: str
    aliases: tuple[str, ...]
    param: Tensor
    shape: tuple[int, ...]
    status: str
    shard: Tensor | None = None
    grad: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attribute:
    """One attribute to be explained; ``value`` is what it is."""

    attribute: str
    meaning: str
    value: Any
    names: tuple[str, ...] | None = None
    fact: str | None = None
    group: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scalar:
    """A number that the optimizer keeps for all parameters of a buffer, such as "step"."""

    buffer: int
    kind: str
    tensor: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Root:
    """A tensor that names a storage, as the readers know more than one attribute of it."""

    label: str
    tensor: Tensor
    category: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading:
    """What a reader found; the fields of the same name are those of Snapshot.

    Attributes:
        engine: Name of the engine.
        stage: ZeRO stage, if it has one.
        rank: The rank in ``group``.
        world_size: Its size.
        step: Steps taken.
        layout: The layout that the engine should have, by arithmetic.
        params: Every parameter, in model order.
        held: Tensors with elements of the layout's buffers.
        scalars: What the optimizer keeps beside.
        attributes: Attributes to be explained.
        param_groups: The optimizer's groups.
        roots: Tensors that name storages, in order of precedence.
        memory: Bytes by category, if the engine counts itself.
        group: The process group it is sharded over; None for the default one.
        device: The device of its parameters.
    """

    engine: str
    stage: int | None
    rank: int
    world_size: int
    step: int | None
    layout: Layout
    params: Sequence[ParamTensor]
    held: Sequence[HeldTensor]
    scalars: Sequence[Scalar] = ()
    attributes: Sequence[Attribute] = ()
    param_groups: Sequence[Mapping[str, Any]] = ()
    roots: Sequence[Root] = ()
    memory: Mapping[str, int] | None = None
    group: Any = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


# ---- parameters ----


def named(
    owner: nn.Module, tensors: Mapping[tuple[int, str], Tensor] | None = None, *, clean: bool = True
) -> Iterator[tuple[list[str], Tensor]]:
    """Every parameter of a module with all its names, in model order.

    Args:
        owner: The module.
        tensors: What stands for single parameters, by id of the module that has them and their name there.
        clean: Take out of the names what wrappers put into them.
    """
    names: dict[int, list[str]] = {}
    found: dict[int, Tensor] = {}
    for prefix, module in owner.named_modules(remove_duplicate=False):
        for last, registered in module._parameters.items():
            if registered is None:
                continue
            param = (tensors or {}).get((id(module), last), registered)
            found[id(param)] = param
            name = f"{prefix}.{last}" if prefix else last
            names.setdefault(id(param), []).append(clean_name(name) if clean else name)
    for key, param in found.items():
        yield list(dict.fromkeys(names[key])), param


def spec(
    name: str, shape: Sequence[int], dtype: torch.dtype, *, trainable: bool, group: int | None, unit: str
) -> ParamSpec:
    """A ParamSpec of a live parameter.

    Raises:
        ModelError: Its dtype is not known.
    """
    word = dtype_name(dtype)
    if word not in DTYPE_BYTES:
        raise ModelError(
            f"{name} is of dtype {word}, which has no place in a layout; there are {', '.join(DTYPE_BYTES)}"
        )
    return ParamSpec(name=name, shape=tuple(shape), dtype=word, trainable=trainable, group=group, unit=unit)


def own_grad(param: Tensor) -> Tensor | None:
    """A parameter's gradient, if it has memory."""
    grad = param.grad
    return None if grad is None or isinstance(grad, GradientElsewhere) else grad


def as_plain(tensor: Tensor) -> Tensor:
    """The tensor that has the memory: of a DTensor its local part."""
    local = getattr(tensor, "_local_tensor", None)
    plain: Tensor = tensor if local is None else local
    return plain.detach()


# ---- memory ----


class Storages:
    """Storages by address, with their labels."""

    def __init__(self) -> None:
        self._rows: dict[int, Storage] = {}

    def view(self, tensor: Tensor, label: str) -> View | None:
        """A tensor as part of its storage; ``label`` names the storage if it has no name yet.

        Returns:
            None for a tensor without memory.
        """
        if isinstance(tensor, FreedParameter):
            return None
        plain = as_plain(tensor)
        if plain.is_meta or not plain.numel():
            return None
        storage = plain.untyped_storage()
        if not storage.nbytes():
            return None
        row = self._rows.setdefault(
            storage.data_ptr(), Storage(label=label, device=str(plain.device), nbytes=storage.nbytes())
        )
        start = int(plain.storage_offset())
        return View(of=row.label, start=start, stop=start + _extent(plain))

    def nbytes(self, label: str) -> int:
        """Bytes of the storage of a label."""
        return next(row.nbytes for row in self._rows.values() if row.label == label)

    def rows(self) -> tuple[Storage, ...]:
        """All of them, in the order they were met."""
        return tuple(self._rows.values())


def _extent(tensor: Tensor) -> int:
    """Elements from the first to the last of a tensor in its storage."""
    return 1 + sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def param_row(found: ParamTensor, storages: Storages) -> ParamRow:
    """The row of one parameter."""
    param, grad = found.param, found.grad
    return ParamRow(
        name=found.name,
        aliases=found.aliases,
        shape=found.shape,
        seen=tuple(param.shape),
        dtype=dtype_name(param.dtype),
        device=str(param.device),
        trainable=param.requires_grad,
        status=found.status,
        data=storages.view(param, f"{found.name}.data"),
        shard=None if found.shard is None else storages.view(found.shard, f"{found.name}'s shard"),
        grad=None if grad is None else storages.view(grad, f"{found.name}.grad"),
        grad_dtype=None if grad is None else dtype_name(grad.dtype),
    )


def held_row(held: HeldTensor, storages: Storages) -> Held:
    """The row of one tensor of a buffer."""
    return Held(
        buffer=held.buffer,
        kind=held.kind,
        dtype=dtype_name(held.tensor.dtype),
        cut=held.cut,
        first=held.first,
        numel=as_plain(held.tensor).numel(),
        attribute=held.attribute,
        view=storages.view(held.tensor, held.attribute),
    )


def attribute_row(row: Attribute, storages: Storages) -> AttributeRow:
    """The row of one explained attribute."""
    value = row.value
    view = storages.view(value, row.attribute) if isinstance(value, Tensor) else None
    return AttributeRow(
        attribute=row.attribute,
        meaning=row.meaning,
        form=form_of(value),
        dtype=dtype_name(value.dtype) if isinstance(value, Tensor) else None,
        shape=tuple(value.shape) if isinstance(value, Tensor) else None,
        nbytes=sum(t.numel() * t.element_size() for t in _tensors(value)),
        view=str(view) if view is not None else _common_view(value, storages),
        names=row.names,
        number=value if isinstance(value, int) and not isinstance(value, bool) else None,
        fact=row.fact,
        group=row.group,
    )


def form_of(value: Any) -> str:
    """What a debugger shows of a value, in words."""
    if isinstance(value, nn.Parameter):
        return "parameter"
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, (list, tuple)):
        inner = {type(item).__name__ if isinstance(item, (list, tuple)) else form_of(item) for item in value}
        what = inner.pop() if len(inner) == 1 else "item"
        return f"{type(value).__name__} of {len(value)} {what}{'s' * (len(value) != 1)}" if value else "empty list"
    if isinstance(value, dict):
        return f"dict of {len(value)}" if value else "empty dict"
    if isinstance(value, int) and not isinstance(value, bool):
        return "number"
    return str(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors in lists and values of dicts."""
    if isinstance(value, Tensor):
        yield as_plain(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _common_view(value: Any, storages: Storages) -> str | None:
    """The storages that a list's tensors are views of, if they are known."""
    labels = dict.fromkeys(
        view.of for view in (storages.view(t, "memory of its own") for t in _tensors(value)) if view is not None
    )
    if not labels:
        return None
    shown = list(labels)[:2]
    return ", ".join(shown) + (f" and {len(labels) - 2} more" if len(labels) > 2 else "")


def count_memory(reading: Reading) -> Mapping[str, int]:
    """Bytes by category, each storage counted once, in the first category that has it."""
    counted: dict[str, list[Tensor]] = {"parameters": []}
    for found in reading.params:
        counted["parameters"] += [found.param] + ([] if found.shard is None else [found.shard])
    for held in reading.held:
        counted.setdefault(CATEGORIES.get(held.kind, f"optimizer {held.kind}"), []).append(held.tensor)
    grads = [found.grad for found in reading.params if found.grad is not None]
    if grads:
        counted.setdefault("gradients", []).extend(grads)
    for root in reading.roots:
        if root.category is not None:
            counted.setdefault(root.category, []).append(root.tensor)
    for scalar in reading.scalars:
        counted.setdefault(f"optimizer {scalar.kind}", []).append(scalar.tensor)
    seen: set[int] = set()
    return {category: sum(_new_bytes(tensor, seen) for tensor in tensors) for category, tensors in counted.items()}


def _new_bytes(tensor: Tensor, seen: set[int]) -> int:
    """Bytes of a tensor's storage if it was not counted yet."""
    plain = as_plain(tensor)
    if plain.is_meta:
        return 0
    storage = plain.untyped_storage()
    if storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()


def group_rows(reading: Reading) -> tuple[GroupRow, ...]:
    """The optimizer's groups, with what the layout says is in them."""
    members: dict[int, list[int]] = {}
    for buffer in reading.layout.buffers:
        for param in buffer.params:
            if param.group is not None:
                members.setdefault(param.group, []).append(param.numel)
    return tuple(
        GroupRow(
            index=g,
            lr=float(group.get("lr", 0.0)),
            weight_decay=float(group.get("weight_decay", 0.0)),
            num_params=len(members.get(g, ())),
            numel=sum(members.get(g, ())),
        )
        for g, group in enumerate(reading.param_groups)
    )


def memory_rows(reading: Reading) -> tuple[MemoryRow, ...]:
    """Bytes by category."""
    counted = count_memory(reading) if reading.memory is None else reading.memory
    return tuple(MemoryRow(category=category, nbytes=nbytes) for category, nbytes in counted.items())

"""From the outermost wrapper to the model, the optimizer and the scheduler inside.

Owns the walk through live objects of other libraries and the probes of their attributes. The table of wrappers is in
``wrappers``. Nothing is imported from those libraries: a class is known by its name.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from shardglass.lens.rows import Wrapper
from shardglass.lens.wrappers import (
    MADE,
    MODEL_CHANGES,
    MODEL_END,
    MODELS,
    OPTIMIZER_CHANGE,
    OPTIMIZER_END,
    OPTIMIZERS,
    SCHEDULER_END,
    SCHEDULERS,
    WrapperKind,
)

MOST_LINKS = 32
"""More wrappers than anybody nests: a chain that is longer leads in a circle."""


def class_names(value: object) -> list[str]:
    """Module and name of an object's class and of all its bases."""
    return [f"{cls.__module__}.{cls.__qualname__}" for cls in type(value).__mro__]


def is_kind(value: object, cls: str) -> bool:
    """Whether an object is of a class, given by module and name."""
    return cls in class_names(value)


def links(value: Any, table: Sequence[WrapperKind]) -> list[tuple[Any, WrapperKind | None]]:
    """An object, what it wraps, and so on, each with what it is; the last one is of no known kind.

    A module that has ``module`` as its only child is taken as a wrapper that is not known, and followed.
    """
    found: list[tuple[Any, WrapperKind | None]] = []
    while value is not None and len(found) < MOST_LINKS:
        names = class_names(value)
        kind = next((row for row in table if row.cls in names), None)
        found.append((value, kind))
        value = _inner(value, kind)
    return found


def _inner(value: Any, kind: WrapperKind | None) -> Any:
    """What an object wraps; None if nothing."""
    if kind is not None:
        return None if kind.inner is None else getattr(value, kind.inner, None)
    if isinstance(value, nn.Module) and [name for name, _ in value.named_children()] == ["module"]:
        return value.module
    return None


def innermost(value: Any, table: Sequence[WrapperKind]) -> Any:
    """What a chain ends in."""
    return links(value, table)[-1][0]


def model_chain(model: Any, root: str, named: dict[str, Any], handle: Any) -> tuple[Wrapper, ...]:
    """The chain of a model.

    Args:
        model: The outermost wrapper.
        root: What it is called.
        named: Other names that objects have, such as {"trainer.model": ...}.
        handle: Our handle that shards it or a part of it; None if there is none.
    """
    rows: list[Wrapper] = []
    where = root
    chain = links(model, MODELS)
    for k, (value, kind) in enumerate(chain):
        also = ", ".join(name for name, other in named.items() if other is value and name != where) or None
        for change in _changes(value, handle, is_last=k == len(chain) - 1):
            rows.append(_row(where, also, change, value, in_place=True))
        if kind is not None:
            rows.append(_row(where, also, kind, value))
            where = f"{where}.{kind.inner}"
        elif k < len(chain) - 1:
            rows.append(_unknown(where, also, value, "a wrapper of the module inside", "not known"))
            where = f"{where}.module"
        else:
            rows.append(_unknown(where, also, value, MODEL_END, MADE["model"]))
    return tuple(rows)


def _changes(value: Any, handle: Any, *, is_last: bool) -> Iterable[WrapperKind]:
    """What was done to a module in place, outermost first."""
    if is_kind(value, MODEL_CHANGES["FSDP2"].cls):
        yield MODEL_CHANGES["FSDP2"]
    if handle is not None and handle.model is value:
        yield MODEL_CHANGES["shardglass"]
    if getattr(value, "_compiled_call_impl", None) is not None:
        yield MODEL_CHANGES["compiled in place"]
    if "_original_forward" in vars(value):
        yield MODEL_CHANGES["autocast"]
    if is_last and any(_is_compiled(module) for module in value.modules() if module is not value):
        yield MODEL_CHANGES["blocks compiled"]


def _is_compiled(module: nn.Module) -> bool:
    """Whether a module inside of a model is compiled by itself."""
    forward = vars(module).get("forward")
    return (
        is_kind(module, "torch._dynamo.eval_frame.OptimizedModule")
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(forward, "_torchdynamo_orig_callable")
    )


def optimizer_chain(optimizer: Any, root: str, handle: Any) -> tuple[Wrapper, ...]:
    """The chain of an optimizer; empty if there is none."""
    return _chain(optimizer, root, OPTIMIZERS, (OPTIMIZER_END, MADE["optimizer"]), handle)


def scheduler_chain(scheduler: Any, root: str) -> tuple[Wrapper, ...]:
    """The chain of a scheduler; empty if there is none."""
    return _chain(scheduler, root, SCHEDULERS, (SCHEDULER_END, MADE["scheduler"]), None)


def _chain(
    value: Any, root: str, table: Sequence[WrapperKind], end: tuple[str, str], handle: Any
) -> tuple[Wrapper, ...]:
    """The chain of an object, as rows."""
    rows: list[Wrapper] = []
    where = root
    for item, kind in links(value, table):
        if handle is not None and handle.optimizer is item:
            rows.append(_row(where, None, OPTIMIZER_CHANGE, item, in_place=True))
        if kind is None:
            rows.append(_unknown(where, None, item, *end))
        else:
            rows.append(_row(where, None, kind, item))
            where = f"{where}.{kind.inner}"
    return tuple(rows)


def _row(where: str, also: str | None, kind: WrapperKind, value: object, *, in_place: bool = False) -> Wrapper:
    return Wrapper(
        where=where,
        also=also,
        kind=kind.kind,
        type=class_names(value)[0],
        in_place=in_place,
        does=kind.does,
        when=kind.when,
    )


def _unknown(where: str, also: str | None, value: object, does: str, when: str) -> Wrapper:
    return Wrapper(
        where=where,
        also=also,
        kind=type(value).__name__,
        type=class_names(value)[0],
        in_place=False,
        does=does,
        when=when,
    )

"""Parameters whose values are elsewhere: sharded, between two uses.

Owns what happens when somebody computes with such a parameter. Its shape, dtype, gradient and hooks stay readable; a
use of its values asks the owner, who gathers them or says why not. Without this, torch would read memory that is not
there.

[Note: class] While it is freed a parameter has a class of its own, a subclass of the one it had: objects stay the
same, so optimizers, tied names and autograd graphs hold, and a whole parameter costs nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardglass.engine.intercepted import called

_FREE = {
    *("__hash__", "__len__", "__repr__", "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size"),
    *("storage_offset", "untyped_storage", "is_contiguous", "is_floating_point", "is_complex", "get_device"),
    *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "is_shared", "is_same_size"),
}
"""Functions that give no value of an element."""

_FREE_PROPERTIES = {
    *("shape", "dtype", "device", "layout", "ndim", "names", "itemsize", "nbytes"),
    *("grad", "grad_fn", "requires_grad", "retains_grad", "is_leaf", "output_nr", "name", "_version"),
    *("is_sparse", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_quantized", "is_nested", "is_sparse_csr"),
    *("_backward_hooks", "_post_accumulate_grad_hooks", "_grad_fn", "_base", "_is_view"),
}

UseOfFreed = Callable[[nn.Parameter, str], None]
"""Called with a freed parameter and what is to be done with it; returns once it is whole, or raises."""


class FreedParameter(nn.Parameter):
    """Base of the classes that ``freed_class`` makes."""

    _on_use: UseOfFreed
    _class_when_whole: type

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what needs no value; for the rest have the values gathered first."""
        name, access = called(func)
        if name == "__repr__":
            where = getattr(type(args[0])._on_use, "where", "in the ranks' shards, see handle.state_of(name)")
            return f"FreedParameter(shape={tuple(args[0].shape)}): {where}"
        if name not in (_FREE_PROPERTIES if access else _FREE):
            for param in _freed_in((args, kwargs or {})):
                type(param)._on_use(param, name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def freed_class(whole: type, on_use: UseOfFreed) -> type:
    """The class of freed parameters that are of class ``whole`` otherwise."""
    fields = {"_on_use": staticmethod(on_use), "_class_when_whole": whole, "__module__": __name__}
    return type("FreedParameter", (FreedParameter, whole) if whole is not nn.Parameter else (FreedParameter,), fields)


def _freed_in(value: object) -> Iterator[FreedParameter]:
    """Every freed parameter among the arguments of a function."""
    if isinstance(value, Tensor):
        if isinstance(value, FreedParameter):
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _freed_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _freed_in(item)

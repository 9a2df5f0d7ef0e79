"""What stands in a parameter's ``.grad`` while the gradient itself is in the shards.

Owns one tensor subclass. It makes two things possible without touching the user's objects: a clear error where
somebody would compute with a gradient that is elsewhere, and seeing that ``zero_grad()`` was called.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardglass.engine.intercepted import called
from shardglass.errors import UsageError

_ALLOWED = {"__hash__", "size", "dim", "numel", "is_contiguous", "__len__"}
_SELF = {"detach_", "requires_grad_"}
"""What ``zero_grad`` calls on a gradient before it zeroes it."""
_READABLE = {
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "grad",
    "grad_fn",
    "requires_grad",
    "is_leaf",
    "is_sparse",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_quantized",
    "_version",
    "_backward_hooks",
}
"""Properties that give no value of an element; ``.data`` and ``.T`` would."""
_ZEROING = {"zero_", "_foreach_zero_"}


class GradientElsewhere(torch.Tensor):
    """A gradient that is sharded: it has the parameter's shape, and no memory.

    Asking for its shape, dtype or device works, and so do both forms of ``zero_grad``. Any computation raises
    UsageError.
    """

    cleared: bool

    @staticmethod
    def for_param(param: Tensor) -> "GradientElsewhere":
        """A placeholder that autograd accepts as the gradient of ``param``."""
        made: GradientElsewhere = torch.Tensor._make_wrapper_subclass(
            GradientElsewhere, param.shape, dtype=param.dtype, device=param.device
        )
        made.cleared = False
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse what reaches torch's kernels past ``__torch_function__``."""
        raise _refusal(str(func))

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Note a zeroing, allow what asks for no value, refuse the rest."""
        name, access = called(func)
        if name in _ZEROING:
            targets = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            for target in targets:
                if isinstance(target, GradientElsewhere):
                    target.cleared = True
                else:
                    target.zero_()
            return None
        if name == "__repr__":
            return f"GradientElsewhere(shape={tuple(args[0].shape)}): sharded, see handle.state_of(name)['grad']"
        if name in _SELF:
            return args[0]
        if access in ("", "__get__") and (name in _ALLOWED or name in _READABLE):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise _refusal(name)


def _refusal(what: str) -> UsageError:
    return UsageError(
        f"{what}: the gradients of a sharded model are in its shards, not in param.grad. To clip, call "
        "handle.clip_grad_norm_(max_norm) instead of torch.nn.utils.clip_grad_norm_; to read one, "
        "handle.state_of(name)['grad']"
    )

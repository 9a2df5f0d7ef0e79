"""What torch calls on a tensor subclass.

Shared by the engine's two stand-ins: ``freed`` for parameters and ``placeholder`` for gradients.
"""

from typing import Any


def called(func: Any) -> tuple[str, str]:
    """What a call of ``__torch_function__`` is for.

    Returns:
        (name of the function or property, how a property is accessed: ``__get__``, ``__set__`` or ``__delete__``; empty
        for a function).
    """
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", name), name
    return name, ""

"""Peak bytes of live tensors in a region, whatever engine runs in it.

Every storage that an operator returns is counted until it is freed; what was alive before counts from the start. Memory
that no tensor of Python has (a backend's own buffers) is not seen, on no engine.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Peak = TypeVar("Peak", bound="LivePeak")


class LivePeak(TorchDispatchMode):
    """Counts bytes of live storages: ``now`` and ``peak``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}  # bytes of each live storage, by its address
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self: Peak) -> Peak:
        """Count what is alive already, then watch."""
        gc.collect()
        for found in gc.get_objects():
            if issubclass(type(found), Tensor):
                self._see(found)
        self._watch_resize()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *args: Any) -> None:
        """Stop watching."""
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*args)  # type: ignore[no-untyped-call]

    def _watch_resize(self) -> None:
        """Engines free and allocate parameters by resizing their storage, which is no operator."""
        original, sizes = self._resize, self._sizes

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            out = original(storage, size)
            if storage._cdata in sizes:
                self._add(storage._cdata, storage.nbytes() - sizes[storage._cdata])
                sizes[storage._cdata] = storage.nbytes()
            return out

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment,method-assign]

    def _add(self, key: int, size: int) -> None:
        """A storage has come, grown, shrunk or, with all its bytes, gone."""
        self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count what it returned."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return out

    def _see(self, tensor: Tensor) -> None:
        inner = getattr(tensor, "_local_tensor", tensor)  # a DTensor has its memory in here
        try:
            storage = inner.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a wrapper without memory
            return
        key = storage._cdata
        if inner.device.type == "meta" or key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self._add(key, storage.nbytes())
        weakref.finalize(storage, self._forgetter(key))

    def _forgetter(self, key: int) -> Callable[[], None]:
        def forget() -> None:
            self._add(key, -self._sizes.pop(key))

        return forget

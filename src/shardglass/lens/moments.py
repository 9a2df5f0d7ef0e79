"""What is alive at the highest point of each part of a step, by category, and the module that ran then.

Owns the account by moment and category. Leaves counting live bytes to ``live``; it sees what ``live`` sees, in a real
run and under fake tensors alike.

torch's own ``MemTracker`` answers the same question, but goes through all modules at every operator, which is slow for
models of many modules.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor
from torch.distributed._tools.mod_tracker import ModTracker

from shardglass.lens.live import LivePeak

ELSEWHERE = "what was there before"
"""Category of a storage that was alive when the count began and belongs to no known category."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakAt:
    """The highest point of one moment.

    Attributes:
        bytes: Bytes of live tensors.
        module: Name of the module whose forward or backward ran; "" outside every module.
        categories: The bytes by category, the largest first; those that were made meanwhile have the moment's name.
    """

    bytes: int
    module: str
    categories: dict[str, int]


class MomentPeaks(LivePeak):
    """Counts bytes of live storages by category and keeps the highest point of each moment.

    Example::

        with MomentPeaks(handle.tensors_by_category()) as peaks:
            with peaks.moment("forward"):
                loss = model(**batch).loss
            with peaks.moment("backward"):
                loss.backward()
        peaks.at["backward"].bytes
    """

    def __init__(self, known: Mapping[str, Sequence[Tensor]]) -> None:
        """Prepare.

        Args:
            known: Tensors that are there already, by category; of two tensors with one storage the first counts.
        """
        super().__init__()
        self.at: dict[str, PeakAt] = {}
        self._known: dict[int, str] = {}
        for category, tensors in known.items():
            for tensor in tensors:
                self._known.setdefault(tensor.untyped_storage()._cdata, category)
        self._made_by: dict[int, str] = {}
        self._by_category: dict[str, int] = {}
        self._moment = ELSEWHERE
        self._modules = ModTracker()

    @contextmanager
    def moment(self, name: str) -> Iterator[None]:
        """What is made inside has this name as its category; the highest point inside is kept in ``at``."""
        before, self._moment = self._moment, name
        self._look()
        try:
            with self._modules:
                yield
        finally:
            self._moment = before

    def _add(self, key: int, size: int) -> None:
        category = self._made_by.setdefault(key, self._known.get(key, self._moment))
        self._by_category[category] = self._by_category.get(category, 0) + size
        if key not in self._sizes:  # it is gone, and its address may be another's next
            del self._made_by[key]
            self._known.pop(key, None)
        super()._add(key, size)
        if size > 0:
            self._look()

    def _look(self) -> None:
        """Keep this point if it is the highest of its moment."""
        best = self.at.get(self._moment)
        if self._moment == ELSEWHERE or (best is not None and best.bytes >= self.now):
            return
        held = sorted(((k, v) for k, v in self._by_category.items() if v), key=lambda item: -item[1])
        self.at[self._moment] = PeakAt(bytes=self.now, module=self._module(), categories=dict(held))

    def _module(self) -> str:
        inside = [name for name in self._modules.parents if name != "Global"]
        if not inside:
            return ""
        # The root has its class's name, with which every other name begins.
        root, _, below = max(inside, key=len).partition(".")
        return below or root

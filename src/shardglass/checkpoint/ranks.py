"""The ranks that write or read a checkpoint together: what is needed of them."""

from typing import Any, Protocol

import torch.distributed as dist


class Ranks(Protocol):
    """Ranks that can agree; a ``Handle`` is one, and so is the group apart that it gives."""

    @property
    def rank(self) -> int:
        """This one, from 0."""

    @property
    def world_size(self) -> int:
        """How many there are."""

    @property
    def host_group(self) -> dist.ProcessGroup:
        """A gloo group of them."""

    def agree(self, what: str, value: Any) -> list[Any]:
        """Every rank's small picklable value, by rank; collective."""

"""What a checkpoint of another writer is read against: the names of the model that is there.

Other writers number parameters instead of naming them, store tied weights under either name, or put names behind a
prefix; the model tells them apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shardglass.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """The names of a model.

    Attributes:
        shapes: By parameter, its shape, in the order of ``named_parameters()``; a tied one under its first name.
        aliases: Other names of tied parameters, with the first one.
        buffers: Names of buffers.
        groups: By param_group, the names of its parameters in the order of ``named_parameters()``.
    """

    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    buffers: frozenset[str]
    groups: Sequence[Sequence[str]]

    @property
    def trained(self) -> list[str]:
        """Names of the parameters that are trained, group by group."""
        return [name for group in self.groups for name in group]


def known_model(model: nn.Module, layout: Layout) -> KnownModel:
    """Read the names off a model that is sharded."""
    first = {id(p): name for name, p in model.named_parameters()}
    every = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    specs = {p.name: p for b in layout.buffers for p in b.params}
    count = max((p.group for p in specs.values() if p.group is not None), default=-1) + 1
    names = [name for name in first.values() if name in specs]
    return KnownModel(
        shapes={name: specs[name].shape for name in names},
        aliases={name: kept for name, kept in every.items() if name != kept},
        buffers=frozenset(name for name, _ in model.named_buffers(remove_duplicate=False)),
        groups=[[name for name in names if specs[name].group == g] for g in range(count)],
    )

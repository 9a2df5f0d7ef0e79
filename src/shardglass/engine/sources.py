"""Models whose parameters have no memory yet, and where their values come from.

Owns hollow parameters and the note of their source. ``shard`` fills its buffers from there, unit by unit, so that no
rank ever holds the model whole. Leaves files to whoever knows them.

[Note: hollow] A hollow parameter has its shape, dtype and device, and a storage of no bytes. Until ``shard`` gives it
values a use of them is an error that names it; see ``freed``. Ranks that have no source, as only rank 0 read the files,
get what it spreads.
"""

import weakref
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from shardglass.engine.freed import FreedParameter, freed_class
from shardglass.errors import ModelError


class WeightSource(Protocol):
    """Where the values of a model's parameters are.

    Attributes:
        on_every_rank: Each rank reads its own part; otherwise rank 0 alone has it, and reads each parameter once.
        identity: What must be equal on ranks that read their own parts, in words.
    """

    on_every_rank: bool
    identity: str

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of a flattened parameter, in the model's dtype.

        Returns:
            [stop - start], on the CPU.
        """


_BY_MODEL: "weakref.WeakKeyDictionary[nn.Module, WeightSource]" = weakref.WeakKeyDictionary()


def note_source(model: nn.Module, source: WeightSource) -> None:
    """Remember where the values of a hollow model are."""
    _BY_MODEL[model] = source


def take_source(model: nn.Module) -> WeightSource | None:
    """Where the values are, once; None if the parameters have them, or rank 0 knows."""
    return _BY_MODEL.pop(model, None)


class BesideOwn:
    """A source for a model of which some parameters have values already, such as a head put in after it was opened."""

    def __init__(self, source: WeightSource, params: Mapping[str, nn.Parameter]) -> None:
        self._source, self.on_every_rank, self.identity = source, source.on_every_rank, source.identity
        self._own = {name: param.detach() for name, param in params.items() if not _is_hollow(param)}

    @property
    def own(self) -> Mapping[str, Tensor]:
        """The values that are here, by name."""
        return self._own

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of a flattened parameter."""
        if name in self._own:
            return self._own[name].reshape(-1)[start:stop]
        return self._source.read(name, start, stop)


def is_hollow(model: nn.Module) -> bool:
    """Whether parameters of a model, or all of them, have no values yet."""
    return any(_is_hollow(param) for param in model.parameters())


def hollow_out(model: nn.Module, device: torch.device) -> None:
    """Give every parameter that is on the meta device a hollow one on ``device``; tied ones stay tied."""
    names = {id(param): name for name, param in model.named_parameters() if param.is_meta}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, param in module._parameters.items():
            if param is None or id(param) not in names:
                continue
            if id(param) not in made:
                made[id(param)] = _hollow(param, device, names[id(param)])
            module._parameters[key] = made[id(param)]


def take_guard_off(param: nn.Parameter) -> bool:
    """Make an ordinary one of a hollow parameter, as its values come now; whether it was hollow."""
    if not _is_hollow(param):
        return False
    param.__class__ = nn.Parameter
    return True


def _is_hollow(param: nn.Parameter) -> bool:
    return isinstance(param, FreedParameter) and isinstance(type(param)._on_use, _NotYet)


def _hollow(param: nn.Parameter, device: torch.device, name: str) -> nn.Parameter:
    made = nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device=device), requires_grad=param.requires_grad)
    made.untyped_storage().resize_(0)
    made.__class__ = freed_class(nn.Parameter, _NotYet(name))
    return made


class _NotYet:
    """What happens when somebody wants the values of a hollow parameter."""

    where = "not loaded yet, shard() does it"

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, param: nn.Parameter, what: str) -> None:
        """There are none.

        Raises:
            ModelError: Names the parameter, and what was to be done with it.
        """
        raise ModelError(
            f"{what} of {self._name}: its values are not loaded yet, they come when the model is sharded; call "
            "shard(), or train() of a ZeroTrainer, first"
        )

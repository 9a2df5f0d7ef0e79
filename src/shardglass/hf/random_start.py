"""A model of random values that no rank draws whole.

Owns the order in which values are drawn, so that they are those of one process: ``to_empty`` on a model made on the
meta device, then ``init_weights``, with the same seed. Leaves their way into the shards to the engine.

[Note: parts] transformers initialises children before their parents, one module at a time, from one generator. The
model is cut in parts in that order: each block (see ``engine.units``), each module outside of blocks, each parent with
the parameters it has itself. Before a part is drawn the state of the generator is kept, so it can be drawn once more
when its values are wanted. A rank draws every part before the last one that it has elements of, keeps its slices and
lets the rest go.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers import initialization as init

from shardglass.engine.sources import hollow_out, note_source
from shardglass.engine.units import find_blocks
from shardglass.errors import ModelError, UsageError
from shardglass.hf.open_options import OF_A_CONFIG, check_device, check_options
from shardglass.hf.sharded_start import code_options, dtype_of_parameters, empty_model, to_device

Initialise = Callable[[nn.Module], None]
"""Gives the parameters that a module has itself their first values."""


def new_model(
    config: PretrainedConfig,
    *,
    seed: int,
    device: torch.device | str | int | None = None,
    **options: Any,
) -> Any:
    """A causal language model to be trained from nothing, without values; ``shard`` brings them. Every rank calls it.

    Args:
        config: What the model is.
        seed: Of the values, 0 to 2^63 - 1; the same on every rank, which ``shard`` checks. No generator of torch is
            moved.
        device: Where it is going to be; None is this rank's GPU, or the CPU where there is none.
        options: ``dtype`` of the parameters, by default the config's or float32, ``attn_implementation``, and for a
            model with code of its own ``trust_remote_code`` and ``code_revision``; None counts as absent.

    Returns:
        The model; once it is sharded it has the numbers of one process that makes it on the meta device, moves it to
        the CPU with ``to_empty`` and calls ``init_weights``, at any world size and stage.

    Raises:
        ModelError: It cannot be made, or cannot be drawn in parts; says why.
        UsageError: The seed is none, an argument is none that can be used, or an option is not taken.
    """
    if not isinstance(config, PretrainedConfig):
        raise UsageError(f"new_model({config!r}): not a config; AutoConfig.from_pretrained(name) reads one")
    if type(seed) is not int or not 0 <= seed < 1 << 63:
        raise UsageError(f"new_model(seed={seed!r}): not a whole number from 0 to 2^63 - 1")
    given = check_options("new_model", options, ("seed", "device"), OF_A_CONFIG)
    place = check_device("new_model", device)
    dtype = dtype_of_parameters(given, config, {})
    code = code_options(config, given, trust_remote_code=bool(given.get("trust_remote_code")))
    given.pop("code_revision", None)
    model = empty_model(f"new_model({type(config).__name__})", config, dtype, **given, **code)
    source = RandomWeights(copy.deepcopy(model), seed)
    hollow_out(model, place)
    to_device(model, place)
    note_source(model, source)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What is drawn at once.

    Attributes:
        name: Dotted name of the module.
        steps: Modules in the order they are initialised, and by what.
        places: Owner and key of each parameter by full name.
    """

    name: str
    steps: tuple[tuple[nn.Module, Initialise], ...]
    places: dict[str, tuple[nn.Module, str]]

    @property
    def module(self) -> nn.Module:
        """The module, which is initialised last."""
        return self.steps[-1][0]


class RandomWeights:
    """Parameters that are drawn when they are read; an ``engine.sources.WeightSource``."""

    on_every_rank = True

    def __init__(self, model: Any, seed: int) -> None:
        """Draw nothing yet.

        Args:
            model: A model on the meta device, of this object's own.
            seed: Of the values.
        """
        self._model, self.identity = model, f"random values of seed {seed}"
        blocks = set(find_blocks(model))
        self._parts = list(_parts(model, "", _of_model(model), blocks))
        self._part_of = {name: k for k, part in enumerate(self._parts) for name in part.places}
        self._states = [torch.Generator().manual_seed(seed).get_state()]  # before each part, as far as is known
        self._held: tuple[int, dict[str, Tensor]] | None = None

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of a flattened parameter.

        Raises:
            ModelError: The model class gives it no first value, or gives one from outside its part.
        """
        wanted = self._part_of[name]
        if self._held is None or self._held[0] != wanted:
            self._held = None
            for k in range(len(self._states) - 1, wanted):
                self._draw(k)
            self._held = (wanted, self._draw(wanted))
        return self._held[1][name].reshape(-1)[start:stop]

    def _draw(self, k: int) -> dict[str, Tensor]:
        """The values of one part, by name; its parameters are on the meta device again afterwards.

        Raises:
            ModelError: As ``read``.
        """
        part = self._parts[k]
        before = {name: getattr(owner, key) for name, (owner, key) in part.places.items()}
        own = {id(p) for p in before.values()}
        below = [p for p in part.module.parameters() if id(p) not in own]  # of parts that are drawn apart
        versions = [p._version for p in below]
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.set_rng_state(self._states[k])
            for name, (owner, key) in part.places.items():
                owner._parameters[key] = _unset(before[name])
            with torch.no_grad(), init.guard_torch_init_functions():
                for module, initialise in part.steps:
                    vars(module).pop("_is_hf_initialized", None)
                    initialise(module)
            if len(self._states) == k + 1:
                self._states.append(torch.get_rng_state())
        values = {name: getattr(owner, key).detach() for name, (owner, key) in part.places.items()}
        for name, (owner, key) in part.places.items():
            owner._parameters[key] = before[name]
        if versions != [p._version for p in below]:
            raise ModelError(
                f"{type(self._model).__name__} initialises parameters of its blocks from outside of them (in "
                f"{part.name or 'the whole model'}), so it cannot be drawn in parts; save a model with values once and "
                "open that"
            )
        for name, value in values.items():
            if torch.isnan(value).any():
                raise ModelError(
                    f"{name}: {type(self._model).__name__} gives it no first value in _init_weights, so a model made "
                    "on the meta device has none; set it there, or save a model with values once and open that"
                )
        return values


def _parts(module: Any, name: str, initialise: Initialise, blocks: set[str]) -> Iterator[_Part]:
    """The parts of a module in the order of transformers' ``initialize_weights``: children, then itself."""
    prefix = f"{name}." if name else ""
    if name in blocks or not any(block.startswith(prefix) for block in blocks):
        places = {
            f"{prefix}{inner}.{key}" if inner else f"{prefix}{key}": (owner, key)
            for inner, owner in module.named_modules()
            for key, param in owner._parameters.items()
            if param is not None
        }
        yield _Part(name=name, steps=tuple(_steps(module, initialise)), places=places)
        return
    for key, child in module.named_children():
        own = _of_model(child) if isinstance(child, PreTrainedModel) else initialise
        yield from _parts(child, f"{prefix}{key}", own, blocks)
    own_places = {f"{prefix}{key}": (module, key) for key, param in module._parameters.items() if param is not None}
    yield _Part(name=name, steps=((module, initialise),), places=own_places)


def _steps(module: nn.Module, initialise: Initialise) -> Iterator[tuple[nn.Module, Initialise]]:
    """Every module of a part, children first, with the function of the model it belongs to."""
    for child in module.children():
        own = _of_model(child) if isinstance(child, PreTrainedModel) else initialise
        yield from _steps(child, own)
    yield module, initialise


def _of_model(model: Any) -> Initialise:
    custom = model.is_custom_code()
    return lambda module: model._initialize_weights(module, custom)


def _unset(param: nn.Parameter) -> nn.Parameter:
    """A parameter on the CPU of which nothing is known: nan."""
    return nn.Parameter(torch.full(param.shape, float("nan"), dtype=param.dtype), requires_grad=param.requires_grad)

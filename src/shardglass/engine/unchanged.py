"""That a model still has the parameters it was sharded with.

Owns the check, and its message. Leaves to ``handle`` and ``runtime`` when it is made: before everything that would
otherwise train, gather or save tensors of before, or show others as if they had been trained.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from shardglass.engine.units import place_of
from shardglass.errors import UsageError


class SameParams:
    """The parameters of a model at one time, to be found there later; a look at every module's own lists finds out."""

    def __init__(self, model: nn.Module, params: Mapping[str, nn.Parameter]) -> None:
        """Remember them.

        Args:
            model: The model.
            params: Its parameters, each under its first name, as they lie in the engine's buffers.
        """
        self._model = model
        self._every = _every(model)
        self._places = {name: (param, place_of(param)) for name, param in params.items()}
        self._lists = _Lists(model)

    def check(self) -> None:
        """Find them all, and no others.

        Raises:
            UsageError: Parameters were replaced, added or taken away, or have other memory; names them.
        """
        faults = list(self._faults())
        if faults:
            raise UsageError(
                f"{'; '.join(faults)}. The engine trains, gathers and saves the tensors that the model had in shard(): "
                "change a model before that, or call handle.close(), change it then, make the optimizer anew and "
                "shard() again"
            )

    def _faults(self) -> Iterator[str]:
        known = self._every
        now = known if self._lists.are_same() else _every(self._model)
        if now is not known:
            yield from _said([n for n in now if n in known and now[n] is not known[n]], "was", "were", "replaced")
            yield from _said([n for n in now if n not in known], "was", "were", "added")
            yield from _said([n for n in known if n not in now], "was", "were", "taken away")
        moved = [name for name, (param, place) in self._places.items() if place_of(param) != place]
        yield from _said(
            [name for name in moved if now.get(name) is known[name]],
            "does",
            "do",
            "not lie in the engine's buffer any more: model.to(), .half(), .bfloat16(), resize_token_embeddings() or "
            "an assignment to .data replaced it",
        )


def _every(model: nn.Module) -> dict[str, Tensor]:
    """What stands where parameters do, by every name."""
    return dict(model.named_parameters(remove_duplicate=False))


class _Lists:
    """What every module has itself, parameters and modules: the dicts that torch keeps them in, and what is in them."""

    def __init__(self, model: nn.Module) -> None:
        kept = [held for module in model.modules() for held in (module._parameters, module._modules)]
        self._lengths = [(held, len(held)) for held in kept]
        self._items: list[tuple[Mapping[str, object], str, object]] = [
            (held, key, item) for held in kept for key, item in held.items()
        ]

    def are_same(self) -> bool:
        """Whether every list still has the same objects, and no others."""
        return all(len(held) == length for held, length in self._lengths) and all(
            held.get(key) is item for held, key, item in self._items
        )


def _said(names: Sequence[str], one: str, several: str, what: str) -> Iterator[str]:
    """One clause about parameters, the first few by name; nothing if there are none."""
    if names:
        verb = one if len(names) == 1 else several
        yield f"{first_few(names)} {verb} {what}"


def first_few(names: Iterable[str], most: int = 3) -> str:
    """Names as a message gives them."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")

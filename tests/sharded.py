"""Short words for tests of the engine on ranks: reading a handle, and holding it against the oracle."""

from collections.abc import Callable, Iterable

import torch
from oracle import Groups, Optimizers, Oracle, adamw, one_group
from torch import Tensor, nn

from shardglass.engine.handle import Handle
from shardglass.engine.shard import shard
from shardglass.lens.compare import compare_tensors
from shardglass.options import EngineOptions

Loss = Callable[[nn.Module], Tensor]


def make(
    model: nn.Module,
    *,
    optimizers: Optimizers = adamw,
    groups: Groups = one_group,
    stage: int = 2,
    **options: object,
) -> tuple[Handle, torch.optim.Optimizer]:
    """Shard a model under an optimizer made from it."""
    optimizer = optimizers(groups(list(model.named_parameters())))
    return shard(model, optimizer, options=EngineOptions(stage=stage, **options)), optimizer


def trained_names(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def gradients(handle: Handle, model: nn.Module) -> dict[str, Tensor]:
    """The accumulated mean gradient of every trained parameter, whole; collective."""
    return {name: handle.state_of(name)["grad"] for name in trained_names(model)}


def states(handle: Handle, model: nn.Module) -> dict[str, Tensor]:
    """What ``Oracle.states`` gives, from the shards; collective."""
    return {
        f"{name}|{key}": value
        for name in trained_names(model)
        for key, value in handle.state_of(name).items()
        if key not in ("grad", "param", "step")
    }


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
    """Same names and values; with no tolerance, the same bits."""
    comparison = compare_tensors(found, expected)
    assert comparison.within(tolerance), comparison.describe()
    assert tolerance or comparison.bitwise, comparison.describe()


def oracle_gradients(model: nn.Module, world_size: int, micro_batches: Iterable[list[Loss]]) -> dict[str, Tensor]:
    """What the oracle accumulates over micro-batches, each given as a loss per rank."""
    oracle = Oracle(model, world_size)
    for losses in micro_batches:
        oracle.backward(losses)
    return oracle.gradients


def squared(*key: int, **forward: object) -> Loss:
    """A loss of a model over ``models.points(*key)``."""
    from models import points

    return lambda model: model(points(*key), **forward).square().mean()

"""The whole state dict that scripts save, under the name that DeepSpeed's engine gives it."""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from shardglass.engine.handle import Handle
from shardglass.engine.registry import live_handle
from shardglass.errors import UsageError


@runtime_checkable
class HoldsModel(Protocol):
    """A Trainer."""

    model: Any


def zero3_consolidated_16bit_state_dict(
    model: nn.Module | HoldsModel | Handle,
    exclude_frozen_parameters: bool = False,  # noqa: FBT001, FBT002 (DeepSpeed's signature)
) -> dict[str, Tensor] | None:
    """The whole weights on the CPU, in the dtype that the model computes in; collective, so call it on every rank.

    As ``engine._zero3_consolidated_16bit_state_dict()`` of DeepSpeed, but at every stage. One block at a time is
    whole on a rank.

    Args:
        model: The sharded model, the trainer that has it, or its handle.
        exclude_frozen_parameters: Leave parameters out that are not trained.

    Returns:
        Every name of ``model.state_dict()`` with a copy of its own, tied names with a common one; None on other
        ranks than 0.

    Raises:
        UsageError: The model is not sharded.
    """
    handle = _handle_of(model)
    state = handle.full_state_dict(rank0_only=True)
    if handle.rank != 0:
        return None
    if not exclude_frozen_parameters:
        return state
    named = handle.model.named_parameters(remove_duplicate=False)
    frozen = {name for name, p in named if not p.requires_grad}
    return {name: tensor for name, tensor in state.items() if name not in frozen}


def _handle_of(model: object) -> Handle:
    if isinstance(model, Handle):
        return model
    module = model
    if not isinstance(model, nn.Module) and isinstance(model, HoldsModel):  # a module may have a `model` too
        module = model.model
    handle = live_handle(module) if isinstance(module, nn.Module) else None
    if handle is None:
        raise UsageError(
            f"zero3_consolidated_16bit_state_dict: this {type(model).__name__} has no sharded model. Call it after "
            "training began and before handle.close(); a model that is not sharded has model.state_dict()"
        )
    return handle

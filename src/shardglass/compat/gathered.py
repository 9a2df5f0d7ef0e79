"""``GatheredParameters``: whole parameters to read or change, found from the parameters alone.

Owns the way from parameters to the handle that shards them. Leaves gathering to ``Handle.gathered``.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType

from torch import Tensor, nn

from shardglass.engine.handle import Handle
from shardglass.engine.registry import live_handles
from shardglass.errors import UsageError

Parameters = Tensor | nn.Module | Iterable[Tensor]


class GatheredParameters:
    """Whole parameters inside of a ``with``, as ``deepspeed.zero.GatheredParameters`` gives them; collective.

    At stage 3 the parameters are gathered, a block at a time, and dropped again. At other stages they are whole
    anyway. The changes of ``modifier_rank`` are taken over by all ranks and into the master weights at every stage.
    Parameters of no sharded model are left alone; ``shard()`` takes rank 0's values of them.
    """

    def __init__(
        self,
        params: Parameters,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,  # noqa: FBT001, FBT002 (DeepSpeed's signature)
    ) -> None:
        """Remember what to gather.

        Args:
            params: A parameter, an iterable of parameters, or a module for all of its parameters.
            modifier_rank: The rank whose changes inside are taken over by all; None is to read alone. It counts in
                the ranks that the model is sharded over.
            fwd_module: No effect: a weight is gathered where backward reads it, whoever used it in forward.
            enabled: Whether to do anything.

        Raises:
            UsageError: ``params`` is something else.
        """
        self._params = _listed(params) if enabled else []
        self._modifier_rank = modifier_rank
        self._open: list[ExitStack] = []  # innermost last

    def __enter__(self) -> None:
        """Gather.

        Raises:
            UsageError: There is no such ``modifier_rank``.
        """
        with ExitStack() as stack:
            for handle, names in _by_handle(self._params):
                stack.enter_context(handle.gathered(names, modifier_rank=self._modifier_rank))
            self._open.append(stack.pop_all())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take over the changes of ``modifier_rank`` and let go."""
        self._open.pop().__exit__(kind, error, trace)


def maybe_zero_3(
    param: Tensor,
    ignore_status: bool = False,  # noqa: FBT001, FBT002 (the signature in the scripts)
    name: str | None = None,
) -> Tensor:
    """A copy of a whole parameter on the CPU, sharded or not; collective at stage 3.

    Stands for the function that many scripts define under this name, whose ``hasattr(param, "ds_id")`` is never true
    here. Every call gathers the parameter's block; for a whole model ``zero3_consolidated_16bit_state_dict`` gathers
    each block once.

    Args:
        param: The parameter.
        ignore_status: No effect: no parameter is in a state that needs a warning.
        name: No effect: it stood in that warning.
    """
    with GatheredParameters(param):
        return param.detach().cpu().clone()


def _listed(params: object) -> list[Tensor]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    if isinstance(params, Tensor):
        return [params]
    found = []
    for item in params if isinstance(params, Iterable) else [params]:
        if not isinstance(item, Tensor):
            raise UsageError(
                f"GatheredParameters takes a parameter, an iterable of parameters or a module, and was given "
                f"{type(item).__name__}; by name, use `with handle.gathered([...])`"
            )
        found.append(item)
    return found


def _by_handle(params: list[Tensor]) -> list[tuple[Handle, list[str]]]:
    """Names of the parameters by the handle that shards them, in an order that is the same on every rank."""
    wanted = {id(p) for p in params}
    found = []
    for handle in live_handles() if wanted else ():
        names = [name for name, p in handle.model.named_parameters() if id(p) in wanted]
        if names:
            found.append((handle, names))
    return found

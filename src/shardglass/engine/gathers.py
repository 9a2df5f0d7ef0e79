"""When parameters are whole, and which collectives make them so.

Owns the gathers of all stages: after the step at a stage that shards the optimizer's state alone, before use at one
that shards parameters; and there also when their memory is dropped. Leaves the order to ``order``, memory to
``buffers``, and the hooks that call it to ``runtime``.

[Note: need and drop] Stage 3. A unit is gathered when it is needed, and the next one of the sequence behind it while
it computes. It is dropped when another unit is needed, unless its module's forward is still running. Backward needs
a unit when autograd unpacks the first weight it saved of it, or when checkpointing runs its forward again. Autograd
runs later operations first, so by then the backward of the unit before is through. A weight is gathered when it
is unpacked, whoever saved it (see ``saved``); where nothing was saved (an embedding) nothing is gathered.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from shardglass.engine.buffers import ParamBuffer
from shardglass.engine.comm import Comm, Pending
from shardglass.engine.order import Pass, Use, reordered, without_repeats
from shardglass.engine.saved import SavedWeights
from shardglass.engine.units import Unit
from shardglass.errors import UsageError
from shardglass.options import EngineOptions


class Gathers:
    """The parameters of all units: which are whole, which are on their way."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        buffers: Sequence[ParamBuffer],
        comm: Comm,
        options: EngineOptions,
    ) -> None:
        self._comm, self._options = comm, options
        self._shards_params = options.rules.shards_params
        self._buffers: dict[str, list[ParamBuffer]] = {unit.name: [] for unit in units}
        for buffer in buffers:
            self._buffers[buffer.layout.unit].append(buffer)
        self._pending: dict[str, list[Pending]] = {}  # by unit, in the order they were launched
        self._whole: set[str] = set() if self._shards_params else set(self._buffers)
        self._active: list[str] = []  # units whose modules are running, innermost last
        self._pinned: list[str] = []
        self._pass: Pass | None = None
        self._is_backward = False
        self._sequence = without_repeats(_in_module_order(model, units)) if self._shards_params else ()
        self._observed: tuple[Use, ...] = ()  # in the last forward
        self._on_passed: Callable[[set[str]], None] = lambda ahead: None
        unit_of = {b.storage_key: unit for unit, held in self._buffers.items() for b in held}
        self._saved = SavedWeights(unit_of, self.need)
        if self._shards_params:
            for unit, held in self._buffers.items():
                for buffer in held:
                    buffer.guard(self._user_of(unit))

    def on_passed(self, callback: Callable[[set[str]], None]) -> None:
        """Call back in backward with the units that are still in use or to come."""
        self._on_passed = callback

    # ---- all stages ----

    def spread(self) -> None:
        """The master weights changed: gather them, in forward order, or drop what is whole and old."""
        if self._shards_params:
            self._refuse_pinned()
            self._drop_all()
            return
        for unit, held in self._buffers.items():
            for buffer in held:
                if buffer.master is None:
                    continue
                buffer.write_back()
                if buffer.state_range != (0, buffer.layout.numel):
                    pending = self._comm.gather(buffer.index, buffer.layout.key, buffer.whole)
                    self._pending.setdefault(unit, []).append(pending)

    def need(self, unit: str, *, in_backward: bool = True) -> None:
        """Make sure that a unit's parameters are whole and the updated ones.

        Args:
            unit: The unit.
            in_backward: Of a use in forward, whether its backward will read weights.
        """
        if not self._shards_params:
            self._await(unit)
        elif unit not in self._whole or (self._pass is not None and self._pass.current != unit):
            self._need(unit, in_backward=in_backward)

    def settle(self) -> None:
        """Make sure that no gather is under way; where parameters stay whole, all of them are the updated ones."""
        for unit in list(self._pending):
            self._await(unit)

    def wait_ahead(self, unit: str) -> None:
        """Where parameters stay whole, have a unit's ones here before a use that no module announces."""
        if not self._shards_params:
            self._await(unit)

    def whole_outside(self, what: str) -> None:
        """Have all parameters whole for a use outside of forward.

        Raises:
            UsageError: Parameters are sharded.
        """
        if self._shards_params and self._whole != set(self._buffers):
            raise UsageError(
                f"model.{what}: the parameters are in the ranks' shards. Take handle.full_state_dict() on every rank, "
                "or read and change them inside `with handle.gathered(...)`"
            )
        self.settle()

    def _await(self, unit: str) -> None:
        for pending in self._pending.pop(unit, ()):
            pending.wait()
        if self._shards_params and unit not in self._whole:
            self._whole.add(unit)
            for buffer in self._buffers[unit]:
                buffer.show_whole()

    # ---- gather and drop ----

    def _need(self, unit: str, *, in_backward: bool) -> None:
        due = self._pass.use(unit, in_backward=in_backward) if self._pass is not None else None
        self._drop_others(unit)
        turn_came = due is not None
        if due is None:
            due = () if unit in self._whole or unit in self._pending else (unit,)
        for passed in due:
            self._launch(passed)
        if unit not in self._whole and unit not in self._pending:  # dropped since its last use in this pass
            self._launch(unit)
        if turn_came:
            self._tell_passed()
        for passed in due[:-1]:
            self._drop(passed)
        self._await(unit)
        self._prefetch()

    def _tell_passed(self) -> None:
        """In backward, have the gradients of units that will not be used again reduced, see ``order``.

        The gradient of an embedding is still to come although no gather of it is.
        """
        if self._pass is not None and self._is_backward:
            self._on_passed(self._pass.still_ahead() | {use.unit for use in self._sequence if not use.in_backward})

    def _launch(self, unit: str) -> None:
        """Start gathering a unit; one that is whole is gathered once more where its turn in the sequence has come."""
        if unit in self._pinned:
            return
        if unit in self._pending:
            self._await(unit)
        works = []
        for buffer in self._buffers[unit]:
            buffer.make_room()
            works.append(self._comm.gather(buffer.index, buffer.layout.key, buffer.whole))
        self._pending[unit] = works

    def _prefetch(self) -> None:
        """Gather ahead what the sequence has next, as far as the options allow."""
        while self._pass is not None:
            unit = self._pass.next_ahead(self._options.prefetch_units)
            if unit is None or not self._fits(unit):
                return
            self._pass.take_ahead()
            self._launch(unit)

    def _fits(self, unit: str) -> bool:
        """Whether one more whole unit stays within the limit of the options."""
        limit = self._options.max_live_numel
        return limit is None or self._live_numel() + self._numel(unit) <= limit

    def _numel(self, unit: str) -> int:
        return sum(buffer.layout.numel for buffer in self._buffers[unit])

    def _live_numel(self) -> int:
        return sum(self._numel(unit) for unit in self._whole | set(self._pending))

    def _drop(self, unit: str) -> None:
        """Free a unit's memory; what is in use stays."""
        if unit in self._pending:
            self._await(unit)
        if unit in self._whole and unit not in self._active and unit not in self._pinned:
            self._whole.discard(unit)
            for buffer in self._buffers[unit]:
                buffer.drop()

    def _drop_others(self, unit: str | None) -> None:
        """Free what is whole and not on its way to be used."""
        for other in list(self._whole):
            if other != unit and other not in self._pending:
                self._drop(other)

    def _drop_all(self) -> None:
        self._drop_others(None)
        for unit in list(self._pending):
            self._drop(unit)

    # ---- passes ----

    def begin_forward(self) -> None:
        """The root's forward begins: a pass of its own. One that broke off before is ended."""
        if not self._shards_params:
            return
        self.end_pass()
        self._pass, self._is_backward = Pass([use.unit for use in self._sequence]), False

    def end_forward(self, *, keeps_last: bool) -> None:
        """The root's forward ended: gather and drop what no module needed; backward begins with the last unit."""
        if self._pass is None or self._is_backward:
            return
        self._observed = without_repeats(self._pass.observed)
        self._finish(self._sequence[-1].unit if keeps_last else None)

    def begin_backward(self) -> None:
        """A backward begins: the forward's sequence in reverse."""
        if not self._shards_params or self._pass is not None:
            return
        uses = without_repeats(use for use in reversed(self._trained_uses()) if use.in_backward)
        sequence = [use.unit for use in uses]
        self._drop_others(sequence[0] if sequence else None)
        holds_first = bool(sequence) and sequence[0] in self._whole
        self._pass, self._is_backward = Pass(sequence, starts_with_first=holds_first), True

    def _trained_uses(self) -> Sequence[Use]:
        """The forward's sequence without the frozen units at its beginning: nothing flows back through them."""
        for k, use in enumerate(self._sequence):
            if any(buffer.layout.trainable for buffer in self._buffers[use.unit]):
                return self._sequence[k:]
        return ()

    def end_backward(self) -> None:
        """A backward ended, if one was under way: nothing is whole between a backward and the next use."""
        if self._shards_params and (self._pass is None or self._is_backward):
            self.end_pass()

    def end_pass(self) -> None:
        """The pass ended: ranks are together again, and nothing is whole where parameters are sharded."""
        if self._shards_params:
            self._finish(None)
            self._drop_all()

    def _finish(self, kept: str | None) -> None:
        if self._pass is None:
            return
        for unit in self._pass.rest():
            self._launch(unit)
            self._tell_passed()
            if unit != kept:
                self._drop(unit)
        self._pass, self._is_backward = None, False
        for unit in list(self._pending):
            self._await(unit)
        self._drop_others(kept)

    @property
    def order_number(self) -> int:
        """A number for the order in which the last forward used the units, equal on ranks where they agree."""
        return zlib.crc32("\n".join(use.unit for use in self._observed).encode())

    def adopt_order(self) -> None:
        """Gather from now on in the order that the last forward observed; only where all ranks observed the same."""
        if self._observed and self._observed != self._sequence:
            self._sequence = reordered(self._sequence, self._observed)

    # ---- use ----

    def enter(self, unit: str | None) -> None:
        """A module's forward begins: of a unit, which stays whole until it ends, or of the root (None)."""
        if not self._shards_params:
            return
        if unit is not None:
            self._active.append(unit)
        self._saved.enter()

    def leave(self, unit: str | None) -> None:
        """It ended."""
        if not self._shards_params:
            return
        if unit is not None and unit in self._active:
            self._active.remove(unit)
        self._saved.leave()

    def _user_of(self, unit: str) -> Callable[[nn.Parameter, str], None]:
        """What happens when a dropped parameter is used, see ``freed``."""

        def use(param: nn.Parameter, what: str) -> None:
            if self._saved.is_open or self._pass is not None:
                self.need(unit)
                return
            raise UsageError(
                f"{self._name_of(unit, param)}: {what} needs its values, and between uses each rank has its shard of "
                f"them alone (unit {unit}). Inside the model's forward it is gathered by itself; elsewhere use `with "
                "handle.gathered(...)`, handle.state_of(name) or handle.full_state_dict(), on every rank"
            )

        return use

    def _name_of(self, unit: str, param: nn.Parameter) -> str:
        for buffer in self._buffers[unit]:
            for spec, held in zip(buffer.layout.params, buffer.params, strict=True):
                if held is param:
                    return spec.name
        return "a parameter"

    # ---- whole on request ----

    def pin(self, units: Sequence[str]) -> None:
        """Gather units and keep them whole until ``unpin``; collective at a stage that shards parameters."""
        for unit in units:
            if self._shards_params and unit not in self._whole and unit not in self._pending:
                self._launch(unit)
            self._await(unit)
            self._pinned.append(unit)

    def unpin(self, units: Sequence[str]) -> None:
        """Let units go again."""
        for unit in units:
            self._pinned.remove(unit)
            if self._shards_params and self._pass is None:
                self._drop(unit)

    def each_unit_whole(self) -> Iterator[list[ParamBuffer]]:
        """The buffers of one unit after the other, whole meanwhile; collective at a stage that shards parameters."""
        for unit, held in self._buffers.items():
            self.pin([unit])
            try:
                yield held
            finally:
                self.unpin([unit])

    def take_over(self, places: Sequence[tuple[int, int]], source: int) -> None:
        """Take one rank's values of parameters, given by index of buffer and in it, for all; they are whole."""
        by_index = {b.index: b for held in self._buffers.values() for b in held}
        for index, k in places:
            by_index[index].take_over(k, self._comm, source)

    def _refuse_pinned(self) -> None:
        if self._pinned:
            raise UsageError(f"optimizer.step() inside handle.gathered(): {self._pinned[0]} is held whole there")


def reads_in_backward(module: nn.Module) -> bool:
    """Whether the backward of a module reads its weights; that of an embedding does not."""
    return type(module) is not nn.Embedding


def _in_module_order(model: nn.Module, units: Sequence[Unit]) -> list[Use]:
    """The use of each module in the order modules are registered: a first guess at the order they run in.

    Parameters that lie in a module beside other units' modules are guessed to be used after these.
    """
    units_of: dict[int, list[str]] = {}
    for unit in units:
        for module in unit.modules:
            units_of.setdefault(id(module), []).append(unit.name)
    found: list[Use] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            walk(child)
        found.extend(Use(unit, in_backward=reads_in_backward(module)) for unit in units_of.get(id(module), ()))

    walk(model)
    return found

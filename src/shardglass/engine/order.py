"""The order in which units are gathered, at a stage that shards parameters.

Owns one pass over the model, forward or backward, as a sequence of units of which each is gathered once. Pure Python.
Leaves memory and collectives to ``gathers``.

[Note: one sequence] Ranks must gather the same units in the same order, or they wait for each other for ever. The
order in which modules run may differ between ranks (a layer skipped on one of them), so it does not decide. A pass has
a sequence that all ranks share: a unit that is needed has everything before it in the sequence gathered first, and
what was not needed when the pass ends is gathered then, and dropped. So a rank that skips a unit still takes part in
its gather. Only a use that the sequence does not have (a unit used once more on its own) is gathered out of turn, and
must happen on every rank; where it does not, ``circle`` sees that ranks wait for each other, and all fail.

[Note: no waiting in a circle] In backward a rank may wait for a gather, or for a reduction before it starts the next.
A rank that waits for the gather at one place of the sequence has started the reductions of all units that lie before
that place and do not come again, with zeros for what it has no gradients of. So the rank that is furthest behind waits
for nothing that another one has yet to start.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a unit in forward.

    Attributes:
        unit: The unit.
        in_backward: Whether its backward reads weights; that of an embedding does not.
    """

    unit: str
    in_backward: bool = True


class Pass:
    """A forward or a backward under way.

    Attributes:
        sequence: Units in the order of their gathers; neighbours differ.
        observed: The uses so far, in order; neighbours are of different units.
    """

    def __init__(self, sequence: Sequence[str], *, starts_with_first: bool = False) -> None:
        """Begin.

        Args:
            sequence: The order of gathers, equal on all ranks.
            starts_with_first: Whether the first unit is whole already, from the pass before.
        """
        self.sequence = tuple(sequence)
        self.observed: list[Use] = []
        self._launched = int(starts_with_first and bool(sequence))  # positions gathered or being gathered
        self._used = -1  # position of the last use

    def use(self, unit: str, *, in_backward: bool = True) -> tuple[str, ...] | None:
        """Note that a unit is needed; which units to gather first, in order, itself at the end.

        Returns:
            Nothing if it was gathered ahead or used last; None for a use out of turn.
        """
        if self.current == unit:
            self.observed[-1] = Use(unit, in_backward or self.observed[-1].in_backward)
            return ()
        self.observed.append(Use(unit, in_backward))
        ahead = next((k for k in range(self._used + 1, self._launched) if self.sequence[k] == unit), None)
        if ahead is not None:
            self._used = ahead
            return ()
        later = next((k for k in range(self._launched, len(self.sequence)) if self.sequence[k] == unit), None)
        if later is None:
            return None
        due = self.sequence[self._launched : later + 1]
        self._launched, self._used = later + 1, later
        return due

    @property
    def current(self) -> str | None:
        """The unit that was used last."""
        return self.observed[-1].unit if self.observed else None

    def next_ahead(self, depth: int) -> str | None:
        """The unit to gather next ahead of its use; None if ``depth`` are on their way, or it is in use itself."""
        if self._launched >= len(self.sequence) or self._launched - 1 - self._used >= depth:
            return None
        unit = self.sequence[self._launched]
        return None if unit in self.sequence[max(self._used, 0) : self._launched] else unit

    def take_ahead(self) -> None:
        """The unit that ``next_ahead`` gave is being gathered."""
        self._launched += 1

    def still_ahead(self) -> set[str]:
        """The units in use and to come: those of the sequence from the last use on."""
        return set(self.sequence[max(self._used, 0) :])

    def rest(self) -> Iterator[str]:
        """What was not gathered in this pass, in order; each counts as gathered and used when it is given."""
        while self._launched < len(self.sequence):
            self._used = self._launched
            self._launched += 1
            yield self.sequence[self._used]


def without_repeats(uses: Iterable[Use]) -> tuple[Use, ...]:
    """Uses in order, neighbours of one unit as one."""
    found: list[Use] = []
    for use in uses:
        if found and found[-1].unit == use.unit:
            found[-1] = Use(use.unit, found[-1].in_backward or use.in_backward)
        else:
            found.append(use)
    return tuple(found)


def reordered(sequence: Sequence[Use], observed: Sequence[Use]) -> tuple[Use, ...]:
    """The sequence in the order of the uses that were observed, with what was not used behind what preceded it.

    Nothing is taken out: a unit that was not needed this time may be the next time, on some ranks alone.
    """
    made = list(observed)
    seen = {use.unit for use in observed}
    for k, use in enumerate(sequence):
        if use.unit in seen:
            continue
        before = sequence[k - 1].unit if k else None
        at = max((i + 1 for i, other in enumerate(made) if other.unit == before), default=0)
        made.insert(at, use)
        seen.add(use.unit)
    return without_repeats(made)

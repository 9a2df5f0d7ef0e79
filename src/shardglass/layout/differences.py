"""How two layouts differ.

Owns the comparison of layouts of any two schemes and world sizes; a rank is the same one in both if it has the same
number. Leaves to ``moves`` what must travel.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardglass.layout.buffer import Buffer
from shardglass.layout.spec import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One parameter that is not the same in two layouts.

    Attributes:
        name: The parameter.
        what: "shape", "dtype", "trainable" or "group".
        left: What it is in the first layout.
        right: What it is in the second.
    """

    name: str
    what: str
    left: object
    right: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One parameter of which elements are elsewhere in another layout.

    Attributes:
        name: The parameter.
        numel: Its elements.
        moved: Elements that other ranks hold.
        shifted: Elements that the same ranks hold at another offset or in another buffer.
    """

    name: str
    numel: int
    moved: int
    shifted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How two layouts differ.

    Attributes:
        only_left: Parameters that only the first one has.
        only_right: Parameters that only the second one has.
        changed: What is not the same of parameters that both have.
        moved: Parameters of one shape of which elements are elsewhere.
    """

    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    changed: tuple[Change, ...]
    moved: tuple[Moved, ...]

    @property
    def is_empty(self) -> bool:
        """Whether every element of the one is at the same place in the other."""
        return not (self.only_left or self.only_right or self.changed or self.moved)


def difference(left: Layout, right: Layout) -> Difference:
    """How two layouts differ, parameter by parameter in the order of the first. O(pieces of both).

    Args:
        left: A layout.
        right: Another one, of any scheme and world size.
    """
    both = [name for name in left.names if right.has(name)]
    places = (_moved(left, right, name) for name in both if left.spec(name).shape == right.spec(name).shape)
    return Difference(
        only_left=tuple(name for name in left.names if not right.has(name)),
        only_right=tuple(name for name in right.names if not left.has(name)),
        changed=tuple(change for name in both for change in _changes(left, right, name)),
        moved=tuple(m for m in places if m.moved or m.shifted),
    )


def _changes(left: Layout, right: Layout, name: str) -> Iterator[Change]:
    """What is not the same of a parameter; its unit is a matter of the scheme."""
    a, b = left.spec(name), right.spec(name)
    pairs = (
        ("shape", a.shape, b.shape),
        ("dtype", a.dtype, b.dtype),
        ("trainable", a.trainable, b.trainable),
        ("group", a.group, b.group),
    )
    for what, was, now in pairs:
        if was != now:
            yield Change(name=name, what=what, left=was, right=now)


def _moved(left: Layout, right: Layout, name: str) -> Moved:
    """Count a parameter's elements that are elsewhere."""
    (a, j), (b, k) = left.find(name), right.find(name)
    before, after = left.buffers[a], right.buffers[b]
    numel = before.params[j].numel
    moved = shifted = element = 0
    if _is_same_cut(before, j, after, k):
        element = numel
        shifted = numel if a != b else 0
    while element < numel:
        here, there = before.place(j, element), after.place(k, element)
        stop = min(here.stop, there.stop)
        if before.holders.ranks_of(here.shard) != after.holders.ranks_of(there.shard):
            moved += stop - element
        elif (a, here.offset) != (b, there.offset):
            shifted += stop - element
        element = stop
    return Moved(name=name, numel=numel, moved=moved, shifted=shifted)


def _is_same_cut(before: Buffer, j: int, after: Buffer, k: int) -> bool:
    """Whether a parameter lies alike in both without looking at its pieces."""
    return (
        (before.holders, before.shard_numel, before.dim, before.offsets[j])
        == (after.holders, after.shard_numel, after.dim, after.offsets[k])
        and (before.chunks and before.chunks[j]) == (after.chunks and after.chunks[k])
    )  # fmt: skip

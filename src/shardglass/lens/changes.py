"""What differs between two snapshots: two moments of one run, two ranks, or a plan and a run.

Owns the comparison and the rows it gives. Facts that one side cannot have are not compared: a plan has no wrappers, no
views and no attributes.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from shardglass.layout import Layout, difference
from shardglass.lens.rows import LIVE, Held, Wrapper

if TYPE_CHECKING:
    from shardglass.lens.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotChange:
    """One fact that differs.

    Attributes:
        where: What it is about, such as "memory.gradients" or "params.lm_head.weight.status".
        left: What it is in the first snapshot; None if it is not there.
        right: What it is in the second.
    """

    where: str
    left: str | None
    right: str | None

    def __str__(self) -> str:
        absent = "absent"
        left, right = (absent if side is None else side for side in (self.left, self.right))
        return f"{self.where}: {left} → {right}"


def changes(left: "Snapshot", right: "Snapshot") -> tuple[SnapshotChange, ...]:
    """Everything that differs between two snapshots, outermost facts first.

    Args:
        left: The earlier one, or the plan.
        right: The later one, or the run.
    """
    found = [_change(name, getattr(left, name), getattr(right, name)) for name in ("engine", "stage", "world_size")]
    found += _layout_changes(left.layout, right.layout)
    if left.source == right.source == LIVE:
        found += [_change(name, getattr(left, name), getattr(right, name)) for name in ("rank", "step")]
        for name in ("model_chain", "optimizer_chain", "scheduler_chain"):
            found += _chain_changes(name, getattr(left, name), getattr(right, name))
        found += _rows_changes("params", _by(left.params, "name"), _by(right.params, "name"))
        found += _rows_changes("attributes", _by(left.attributes, "attribute"), _by(right.attributes, "attribute"))
        found += _rows_changes("groups", _by(left.groups, "index"), _by(right.groups, "index"))
    found += _rows_changes("held", _sums(left), _sums(right))
    found += _rows_changes("memory", _by(left.memory, "category"), _by(right.memory, "category"))
    return tuple(change for change in found if change is not None)


def _change(where: str, left: object, right: object) -> SnapshotChange | None:
    """A row if two values differ."""
    if left == right:
        return None
    return SnapshotChange(
        where=where, left=None if left is None else str(left), right=None if right is None else str(right)
    )


def _layout_changes(left: Layout, right: Layout) -> Iterator[SnapshotChange | None]:
    """What differs between two layouts."""
    if left == right:
        return
    yield _change("layout.scheme", left.scheme, right.scheme)
    yield _change("layout.world_size", left.world_size, right.world_size)
    found = difference(left, right)
    for name in found.only_left:
        yield SnapshotChange(where=f"layout.{name}", left=str(left.spec(name).shape), right=None)
    for name in found.only_right:
        yield SnapshotChange(where=f"layout.{name}", left=None, right=str(right.spec(name).shape))
    for changed in found.changed:
        yield _change(f"layout.{changed.name}.{changed.what}", changed.left, changed.right)
    for moved in found.moved:
        text = f"{moved.moved:,} of {moved.numel:,} elements on other ranks, {moved.shifted:,} at other offsets"
        yield SnapshotChange(where=f"layout.{moved.name}.place", left="as laid out", right=text)


def _chain_changes(name: str, left: tuple[Wrapper, ...], right: tuple[Wrapper, ...]) -> Iterator[SnapshotChange | None]:
    """Two chains of wrappers, as one line each."""
    yield _change(name, chain_text(left) or None, chain_text(right) or None)


def chain_text(chain: Iterable[Wrapper]) -> str:
    """A chain in one line, outermost first, such as "DDP(torch.compile(Qwen2ForCausalLM))"."""
    kinds = [link.kind for link in chain]
    return "(".join(kinds) + ")" * (len(kinds) - 1)


def _by(rows: Iterable[Any], key: str) -> dict[str, Any]:
    """Rows by their name."""
    return {str(getattr(row, key)): row for row in rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sum:
    """All tensors of one kind of one buffer together."""

    dtype: str
    cut: bool
    numel: int


def _sums(snapshot: "Snapshot") -> dict[str, _Sum]:
    """What is held of each buffer, kind by kind; how many tensors it lies in does not count."""
    groups: dict[str, list[Held]] = {}
    for held in snapshot.held:
        groups.setdefault(f"{snapshot.layout.buffers[held.buffer].key}.{held.kind}", []).append(held)
    return {
        key: _Sum(dtype=members[0].dtype, cut=members[0].cut, numel=sum(h.numel for h in members))
        for key, members in groups.items()
    }


def _rows_changes(where: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[SnapshotChange | None]:
    """Rows with the same name field by field, then those that one side lacks."""
    for name, row in left.items():
        if name not in right:
            yield SnapshotChange(where=f"{where}.{name}", left="present", right=None)
        elif row != right[name]:
            for f in fields(row):
                yield _change(f"{where}.{name}.{f.name}", getattr(row, f.name), getattr(right[name], f.name))
    for name in right:
        if name not in left:
            yield SnapshotChange(where=f"{where}.{name}", left=None, right="present")

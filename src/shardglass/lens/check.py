"""A live snapshot against its own layout: is what runs what is shown?

Owns the comparison of memory and attributes with what the layout says about them; every difference is a row that names
its place. A snapshot without a row is laid out as shown, to the element. Leaves two snapshots side by side to
``changes``.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardglass.layout import (
    Layout,
    Slice,
    first_offset,
    groups_padding,
    params_in_partition,
    params_not_in_partition,
    slices_in,
)
from shardglass.lens.changes import SnapshotChange
from shardglass.lens.rows import AttributeRow, Held, ParamRow, View

if TYPE_CHECKING:
    from shardglass.lens.snapshot import Snapshot


def check(snapshot: "Snapshot") -> tuple[SnapshotChange, ...]:
    """Every place where memory is not as the layout says; ``left`` is the layout's word, ``right`` what is there."""
    by_buffer: dict[int, list[Held]] = {}
    for held in snapshot.held:
        by_buffer.setdefault(held.buffer, []).append(held)
    rows = {row.name: row for row in snapshot.params}
    found: list[SnapshotChange] = []
    for b, held_here in by_buffer.items():
        slices = slices_in(snapshot.layout, b, snapshot.rank)
        for kind, cut in dict.fromkeys((h.kind, h.cut) for h in held_here):
            members = [h for h in held_here if (h.kind, h.cut) == (kind, cut)]
            found += _check_kind(snapshot.layout, b, members, slices)
        for held in held_here:
            if held.kind == "param" and held.view is not None:
                found += _check_views(snapshot, held, held.view, rows, slices)
    for row in snapshot.attributes:
        found += _check_attribute(snapshot, row)
    missing = [name for name in snapshot.layout.names if rows and name not in rows]
    found += [SnapshotChange(where=f"params.{name}", left="in the layout", right=None) for name in missing]
    return tuple(found)


def _check_kind(layout: Layout, b: int, held: list[Held], slices: tuple[Slice, ...]) -> Iterator[SnapshotChange]:
    """All tensors of one kind of one buffer, or of its shard: they must fit, and have every slice of this rank.

    Gradients and optimizer states may be missing for single parameters (unused ones), weights may not.
    """
    buffer, kind, attribute = layout.buffers[b], held[0].kind, held[0].attribute
    limit = buffer.shard_numel if held[0].cut else buffer.numel
    end = max(h.first + h.numel for h in held)
    if end > limit:
        yield SnapshotChange(where=attribute, left=f"{limit:,} elements", right=f"{end:,} elements")
    if kind not in ("param", "master"):
        return
    runs = [(s.name, s.offset, s.length) for s in slices]
    if not held[0].cut:
        runs = [(p.name, offset, p.numel) for p, offset in zip(buffer.params, buffer.offsets, strict=True) if p.numel]
    for name, offset, length in runs:
        if not any(h.first <= offset and offset + length <= h.first + h.numel for h in held):
            there = f"{kind} of {name}: elements {offset:,} to {offset + length - 1:,} of {buffer.key}"
            yield SnapshotChange(where=attribute, left=there, right=None)


def _check_views(
    snapshot: "Snapshot", held: Held, view: View, rows: dict[str, ParamRow], slices: tuple[Slice, ...]
) -> Iterator[SnapshotChange]:
    """Each parameter's memory, or that of this rank's part, must be where the layout has it in the buffer's tensor."""
    buffer = snapshot.layout.buffers[held.buffer]
    if held.cut:
        firsts: dict[str, Slice] = {}
        for s in slices:
            if held.first <= s.offset < held.first + held.numel:
                firsts.setdefault(s.name, s)
        places = [(s.name, s.offset) for s in firsts.values()]
    else:
        places = [(p.name, offset) for p, offset in zip(buffer.params, buffer.offsets, strict=True) if p.numel]
    for name, offset in places:
        row = rows.get(name)
        if row is None:
            continue
        seen = row.shard if held.cut and row.shard is not None else row.data
        at = view.start + offset - held.first
        if seen is None or (seen.of, seen.start) != (view.of, at):
            what = f"params.{name}.{'shard' if held.cut and row.shard is not None else 'data'}"
            yield SnapshotChange(
                where=what, left=f"begins at {view.of}[{at}]", right=None if seen is None else str(seen)
            )


def _check_attribute(snapshot: "Snapshot", row: AttributeRow) -> Iterator[SnapshotChange]:
    """What a foreign engine says of itself against what the layout says."""
    if row.fact is None or row.group is None:
        return
    layout, rank, group = snapshot.layout, snapshot.rank, row.group
    if row.names is not None:
        lists = {"params_in_partition": params_in_partition, "params_not_in_partition": params_not_in_partition}
        said = lists[row.fact](layout, rank).get(group, ())
        if said != row.names:
            only = next((a for a, b in zip((*said, None), (*row.names, None), strict=False) if a != b), None)
            left = f"{len(said)} names" + (f", with {only} at the first difference" if only else "")
            yield SnapshotChange(where=row.attribute, left=left, right=f"{len(row.names)} names: {_some(row.names)}")
        return
    numbers = {
        "first_offset": lambda: first_offset(layout, rank),
        "groups_padding": lambda: groups_padding(layout, rank),
        "groups_padding on the last rank": lambda: groups_padding(layout, rank, on_last_rank=True),
        "shard_numel": lambda: _shard_numels(layout),
    }
    expected = numbers[row.fact]().get(group)
    if expected != row.number:
        yield SnapshotChange(where=row.attribute, left=str(expected), right=str(row.number))


def _shard_numels(layout: Layout) -> dict[int, int]:
    """Elements of a rank's partition of each group, for layouts with one buffer per group."""
    return {b.params[0].group: b.shard_numel for b in layout.buffers if b.params[0].group is not None}


def _some(names: tuple[str, ...], most: int = 3) -> str:
    """The first names."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")

"""The tables of a look at a run: wrappers, memory, tensors, attributes, cuts, parameters.

Owns their form. Leaves the page they stand on to ``look_terminal``, and every value to the snapshot.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from shardglass.layout import slices_of
from shardglass.lens.rows import AttributeRow, Held, View, Wrapper
from shardglass.lens.snapshot import Snapshot
from shardglass.lens.whereabouts import Whereabouts
from shardglass.options import DTYPE_BYTES
from shardglass.report.cuts import CutRow

_INDEX = re.compile(r"\[(\d+)\]")


def chain_table(snapshot: Snapshot) -> Table:
    """What wraps model, optimizer and scheduler, outermost first."""
    table = _table("reached as", "kind", "what it does", "when it is put on", left=4)
    for chain in (snapshot.model_chain, snapshot.optimizer_chain, snapshot.scheduler_chain):
        for link in chain:
            table.add_row(_place(link), link.kind, link.does, link.when)
    return table


def _place(link: Wrapper) -> str:
    also = f"\n= {link.also}" if link.also else ""
    return f"{link.where}{also}{' (in place)' if link.in_place else ''}"


def memory_table(live: Snapshot, plan: Snapshot | None) -> Table:
    """Bytes by category, beside the planned ones where there are any."""
    planned = {} if plan is None else {row.category: row.nbytes for row in plan.memory}
    there = {row.category: row.nbytes for row in live.memory}
    table = _table("memory", "bytes", "MiB", *(["planned"] if planned else []), left=1)
    for category in dict.fromkeys((*there, *planned)):
        size = there.get(category, 0)
        cells = [f"{size:,}", _mib(size)]
        if planned:
            cells.append("=" if planned.get(category, 0) == size else f"{planned.get(category, 0):,}")
        table.add_row(category, *cells)
    total = sum(there.values())
    table.add_row("in all", f"{total:,}", _mib(total), *([""] if planned else []), style="bold")
    return table


def attribute_table(snapshot: Snapshot) -> Table:
    """What a debugger shows, what it is, and whose memory it is: alike ones in one row."""
    table = _table("attribute", "what it is", "dtype", "tensors", "elements", "bytes", "memory of", left=2)
    table.columns[-1].justify = "left"
    groups: dict[tuple[object, ...], list[Held]] = {}
    for held in snapshot.held:
        key = (_INDEX.sub("[]", held.attribute), held.kind, held.dtype, held.cut, _shares(held.attribute, held.view))
        groups.setdefault(key, []).append(held)
    for members in groups.values():
        table.add_row(*_held_cells(members))
    for row in snapshot.attributes:
        table.add_row(*_attribute_cells(row))
    return table


def _held_cells(members: Sequence[Held]) -> tuple[str, ...]:
    held = members[0]
    numel = sum(h.numel for h in members)
    views = [h.view for h in members if h.view is not None]
    memory = pattern_of(v.of for v in views) if _shares(held.attribute, held.view) else "its own"
    whole = "this rank's shard" if held.cut else "the whole buffer"
    return (
        pattern_of(h.attribute for h in members),
        f"{held.kind} of {whole}",
        held.dtype,
        f"{len(members):,}",
        f"{numel:,}",
        f"{numel * DTYPE_BYTES[held.dtype]:,}",
        memory if views else "none",
    )


def _shares(attribute: str, view: View | None) -> bool:
    """Whether a tensor lies in memory that goes by another name."""
    return view is not None and view.of != attribute


def _attribute_cells(row: AttributeRow) -> tuple[str, ...]:
    shape = "" if row.shape is None else " × ".join(f"{size:,}" for size in row.shape) or "0-d"
    number = row.form if row.number is None else f"{row.number:,}"
    return row.attribute, row.meaning, row.dtype or "", number, shape, f"{row.nbytes:,}", row.view or ""


def pattern_of(attributes: Iterable[str]) -> str:
    """Attributes that differ in indices alone, as one: ``handle.buffers[0..31].whole``."""
    found = list(attributes)
    columns = zip(*(_INDEX.findall(text) for text in found), strict=True)
    words = []
    for column in columns:
        numbers = sorted({int(word) for word in column})
        words.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}..{numbers[-1]}")
    parts = iter(words)
    return _INDEX.sub(lambda _: f"[{next(parts)}]", found[0])


def cut_table(cuts: Sequence[CutRow], most: int) -> Table:
    """Tensors that lie on two ranks."""
    table = _table("ranks", "left", "right", "% left", "cut tensor", left=1)
    table.columns[-1].justify = "left"
    for cut in cuts[:most]:
        share = f"{100 * cut.left / (cut.left + cut.right):.3f}"
        table.add_row(f"{cut.left_rank} | {cut.left_rank + 1}", f"{cut.left:,}", f"{cut.right:,}", share, cut.pattern)
    return table


def tensor_table(snapshot: Snapshot, names: Sequence[str]) -> Table:
    """Parameters one by one, with what this rank has of each."""
    table = _table("tensor", "shape", "dtype", "group", "state", "elements in this shard", "param.data", left=5)
    table.columns[-1].justify = "left"
    for row in snapshot.params:
        if row.name not in names:
            continue
        group = snapshot.layout.spec(row.name).group
        runs = [(s.start, s.start + s.length) for s in slices_of(snapshot.layout, row.name, snapshot.rank)]
        here = ", ".join(f"{start:,} to {stop - 1:,}" for start, stop in runs) or "none"
        table.add_row(
            "\n= ".join((row.name, *row.aliases)),
            " × ".join(f"{size:,}" for size in row.shape) or "0-d",
            row.dtype,
            "frozen" if not row.trainable else "-" if group is None else str(group),
            row.status if row.seen == row.shape else f"{row.status}, shows {row.seen}",
            here,
            str(row.data) if row.data is not None else "no memory",
        )
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRow:
    """A row of ``where``: a run of elements, and where a debugger finds it in each rank's process."""

    rank: int
    kind: str
    start: int
    stop: int
    offset: int
    buffer: str
    cut: bool
    dtype: str
    nbytes: int
    attribute: str | None


def place_rows(found: Sequence[tuple[int, Whereabouts]]) -> tuple[PlaceRow, ...]:
    """Rank by rank what each process has of one parameter.

    Args:
        found: Rank, and where the parameter is by that rank's snapshot.
    """
    return tuple(
        PlaceRow(
            rank=rank,
            kind=h.kind,
            start=h.start,
            stop=h.stop,
            offset=h.offset,
            buffer=h.buffer,
            cut=h.cut,
            dtype=h.dtype,
            nbytes=h.nbytes,
            attribute=h.attribute,
        )
        for rank, whereabouts in found
        for h in whereabouts.holdings
        if rank in range(*h.ranks)
    )


def place_table(rows: Sequence[PlaceRow]) -> Table:
    """Where one parameter is."""
    table = _table("rank", "kind", "elements", "at", "of", "dtype", "bytes", "in a debugger", left=2)
    table.columns[-1].justify = "left"
    before = None
    for row in rows:
        table.add_row(
            "" if row.rank == before else str(row.rank),
            row.kind,
            f"{row.start:,} to {row.stop - 1:,}",
            f"{row.offset:,}",
            "shard" if row.cut else "buffer",
            row.dtype,
            f"{row.nbytes:,}",
            row.attribute or "",
        )
        before = row.rank
    return table


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.2f}"


def _table(*titles: str, left: int = 0) -> Table:
    """A table without lines; the first ``left`` columns hold words, the others numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    for k, title in enumerate(titles):
        table.add_column(title, justify="left" if k < left else "right", overflow="fold")
    return table

"""A look at a run in a terminal, and as JSON: the snapshots of one step, held against the plan.

Owns the page and what counts as a difference. Leaves the tables to ``look_tables``.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from shardglass.json_form import to_tree
from shardglass.layout import boundary_cuts
from shardglass.lens.changes import SnapshotChange
from shardglass.lens.snapshot import Snapshot
from shardglass.lens.whereabouts import Whereabouts
from shardglass.options import STAGES
from shardglass.report.cuts import CutRow, rows_of_cuts
from shardglass.report.look_tables import (
    attribute_table,
    chain_table,
    cut_table,
    memory_table,
    place_rows,
    place_table,
    tensor_table,
)

MIN_WIDTH, MAX_WIDTH = 100, 160
MOST_CUTS, MOST_CHANGES = 24, 40
"""Rows that a table may have; the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLook:
    """One rank at one step.

    Attributes:
        live: What it held.
        plan: What the plan said; None if the run has none.
        faults: Where memory was not as layout or plan say.
        changes: What differs from the step it is compared with; None if it is compared with none.
    """

    live: Snapshot
    plan: Snapshot | None
    faults: tuple[SnapshotChange, ...]
    changes: tuple[SnapshotChange, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLook:
    """What is shown of a run.

    Attributes:
        run: Its folder.
        step: The step.
        compared: The step that it is compared with; None for none.
        ranks: Those that are shown.
        tensors: Parameters that are shown one by one; None shows the rank as a whole.
    """

    run: str
    step: int
    compared: int | None
    ranks: tuple[RankLook, ...]
    tensors: tuple[str, ...] | None = None

    @property
    def agrees(self) -> bool:
        """Whether all is as planned."""
        return not any(rank.faults for rank in self.ranks)

    def to_json(self) -> str:
        """The form for programs."""
        rows = [
            {
                "rank": rank.live.rank,
                "line": repr(rank.live),
                "snapshot": json.loads(rank.live.to_json()),
                "planned": rank.plan is not None,
                "faults": to_tree(rank.faults),
                "changes": None if rank.changes is None else to_tree(rank.changes),
            }
            for rank in self.ranks
        ]
        tree: dict[str, Any] = {"run": self.run, "step": self.step, "compared": self.compared}
        return json.dumps({**tree, "agrees": self.agrees, "tensors": self.tensors, "ranks": rows}, indent=2)


def render_look(look: RunLook, console: Console) -> None:
    """Print a look.

    Args:
        look: The values.
        console: Where to; its width counts between 100 and 160 columns.
    """
    _print(_sections(look), console)


def render_where(step: int, found: Sequence[tuple[int, Whereabouts]], console: Console) -> None:
    """Print where one parameter is.

    Args:
        step: The step.
        found: Rank, and where the parameter is by that rank's snapshot; at least one.
        console: Where to.
    """
    whole = found[0][1]
    numel = 1
    for size in whole.shape:
        numel *= size
    group = "frozen" if not whole.trainable else "in no group" if whole.group is None else f"group {whole.group}"
    shape = " × ".join(f"{size:,}" for size in whole.shape) or "0-d"
    title = f"{shape} = {numel:,} elements, {whole.dtype}, {group}; {whole.engine}, scheme {whole.scheme}, step {step}"
    rows = place_rows(found)
    buffers = ", ".join(dict.fromkeys(row.buffer for row in rows))
    _print([Text(whole.name, "bold"), Text(title), Text(f"buffer {buffers}\n"), place_table(rows)], console)


def _print(sections: Iterator[RenderableType] | Sequence[RenderableType], console: Console) -> None:
    """Print without blanks at line ends, so that pages can be compared and copied."""
    width = min(MAX_WIDTH, max(MIN_WIDTH, console.width))
    for segments in console.render_lines(Group(*sections), console.options.update(width=width, height=None), pad=False):
        line = Text.assemble(*((s.text, s.style or "") for s in segments if not s.control))
        line.rstrip()
        console.print(line, soft_wrap=True, highlight=False)


def _sections(look: RunLook) -> Iterator[RenderableType]:
    """The page from top to bottom."""
    first = look.ranks[0].live
    stage = "" if first.stage is None else f", ZeRO stage {first.stage}"
    yield Text(f"{look.run}: step {look.step}, {first.engine}{stage}, world size {first.world_size}", "bold")
    missing = sorted(set(range(first.world_size)) - {rank.live.rank for rank in look.ranks})
    if missing:
        yield Text(f"not shown: {_ranks(missing)}", "dim")
    if look.tensors is None:
        yield from _chains(look)
    for rank in look.ranks:
        yield from _rank(rank, look)
    yield from _cuts(first, look.tensors)
    yield Text("")
    yield _verdict(look)
    yield from _faults(look)


def _chains(look: RunLook) -> Iterator[RenderableType]:
    """The wrappers, once if all ranks have the same."""
    first = look.ranks[0].live
    for rank in look.ranks:
        live = rank.live
        chains = (live.model_chain, live.optimizer_chain, live.scheduler_chain)
        if rank is look.ranks[0] or chains != (first.model_chain, first.optimizer_chain, first.scheduler_chain):
            who = "" if rank is look.ranks[0] else f" of rank {live.rank}"
            yield Text(f"\nWrappers{who}, outermost first", "bold")
            yield chain_table(live)


def _rank(rank: RankLook, look: RunLook) -> Iterator[RenderableType]:
    yield Text(f"\n{rank.live!r}", "bold")
    if look.tensors is not None:
        yield tensor_table(rank.live, look.tensors)
    else:
        yield memory_table(rank.live, rank.plan)
        yield Text("")
        yield attribute_table(rank.live)
    if rank.changes is None:
        return
    yield Text(f"\nfrom step {look.compared} to step {look.step}", "bold")
    yield from _lines(rank.changes) if rank.changes else [Text("nothing differs")]


def _cuts(live: Snapshot, tensors: tuple[str, ...] | None) -> Iterator[RenderableType]:
    """What lies on two ranks, of all tensors or of those that are shown."""
    cuts = cuts_of(live, tensors)
    if not cuts:
        yield Text("\nNo tensor lies on two ranks")
        return
    yield Text("\nCut tensors: elements left and right of a boundary between two ranks", "bold")
    yield cut_table(cuts, MOST_CUTS)
    if len(cuts) > MOST_CUTS:
        yield Text(f"and {len(cuts) - MOST_CUTS} more, in the JSON's layouts", "dim")


def cuts_of(live: Snapshot, tensors: tuple[str, ...] | None) -> tuple[CutRow, ...]:
    """The cut tensors; none where the stage cuts nothing."""
    rules = None if live.stage is None else STAGES[live.stage]
    if rules is not None and not rules.shards_state:
        return ()
    keeps_frozen = rules is not None and not rules.shards_params
    cuts = (
        cut
        for cut in boundary_cuts(live.layout)
        if cut.name is not None
        and (tensors is None or cut.name in tensors)
        and (live.layout.buffers[cut.buffer].trainable or not keeps_frozen)
    )
    return rows_of_cuts(live.layout, cuts)


def _verdict(look: RunLook) -> Text:
    """The answer: whether what runs is what was planned."""
    num_faults = sum(len(rank.faults) for rank in look.ranks)
    ranks = _ranks([rank.live.rank for rank in look.ranks])
    if num_faults:
        return Text(f"{num_faults} difference{'s' * (num_faults != 1)}: what runs is not what was planned", "bold red")
    if any(rank.plan is None for rank in look.ranks):
        return Text(
            f"= {ranks}: every tensor is where the layout says; the run has no plan to be held against", "yellow"
        )
    has_bytes = all(rank.plan is not None and rank.plan.memory for rank in look.ranks)
    what = "layout, tensors and bytes" if has_bytes else "layout and tensors"
    return Text(f"= {ranks}: {what} as planned, and every tensor is where the layout says", "green")


def _faults(look: RunLook) -> Iterator[RenderableType]:
    for rank in look.ranks:
        if rank.faults:
            yield Text(f"rank {rank.live.rank}, as planned → as it is", "bold")
            yield from _lines(rank.faults, style="red")


def _lines(changes: Sequence[SnapshotChange], style: str = "") -> Iterator[RenderableType]:
    for change in changes[:MOST_CHANGES]:
        yield Text(f"  {change}", style)
    if len(changes) > MOST_CHANGES:
        yield Text(f"  and {len(changes) - MOST_CHANGES} more, in the JSON", "dim")


def _ranks(ranks: Sequence[int]) -> str:
    """Such as "rank 1" or "ranks 0 to 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks[:12])) + (f" and {len(ranks) - 12} more" if len(ranks) > 12 else "")

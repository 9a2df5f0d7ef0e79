"""The tables of a plan in a terminal: partition, cuts, memory by stage, what fits.

Owns their form. Leaves the page they stand on to ``plan_terminal``.
"""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardglass.plan.fit import Fit, count_of, gib
from shardglass.plan.partition import CutLine, Partition, PartRow
from shardglass.plan.plan import Plan
from shardglass.plan.simulation import Simulation
from shardglass.plan.stages import MOMENTS, StagePlan
from shardglass.report.cuts import stem_of, with_numbers

MOST_PART_ROWS, MOST_CUT_ROWS = 16, 24
"""Rows that these tables may have; the rest is counted, and in the JSON."""

MOMENT_NAMES = {
    "loading": "while loading",
    "loss": "at the loss",
    "backward": "inside backward",
    "step": "at the step",
}


# ---- the partition ----


def partition_tables(partition: Partition) -> Iterator[RenderableType]:
    """Which rank holds how much of each part, and what every boundary cuts."""
    table = _table("part", "rank", "elements", "padding", "tensors in partition", "not in partition", left=1)
    shown = partition.parts[:MOST_PART_ROWS]
    for row in shown:
        table.add_row(*_part_cells(row))
    yield table
    left_out = len(partition.parts) - len(shown)
    if left_out:
        yield Text(f"and {count_of(left_out, 'row')} more, in the JSON", "dim")
    if partition.num_ranks_left_out:
        yield Text(f"and {count_of(partition.num_ranks_left_out, 'rank')} between the last two rows of a part", "dim")
    groups = _grouped(partition.cuts)
    if not groups:
        yield Text("\nNo boundary between ranks: nothing is cut")
        return
    yield Text("\nCuts; an index counts from 0, in model order", "bold")
    cuts = _table("part", "ranks", "index", "left", "right", "% left", "row", "column", "tensor", left=1)
    cuts.columns[-1].justify = "left"
    for members in groups[:MOST_CUT_ROWS]:
        cuts.add_row(*_cut_cells(members))
    yield cuts
    if any(cut.tensor is None for cut in partition.cuts):
        yield Text("| the boundary falls between two tensors, and this one comes next; without a name, padding", "dim")
    hidden = sum(len(members) for members in groups[MOST_CUT_ROWS:])
    if hidden:
        yield Text(f"and {count_of(hidden, 'cut')} more, in the JSON", "dim")
    if partition.num_cuts_left_out:
        yield Text(f"and {count_of(partition.num_cuts_left_out, 'cut')} more, not listed", "dim")


def _part_cells(row: PartRow) -> tuple[str, ...]:
    numbers = (row.rank, row.numel, row.padding, row.num_in, row.num_not_in)
    return row.part, *(f"{number:,}" for number in numbers)


def _grouped(cuts: Sequence[CutLine]) -> list[list[CutLine]]:
    """Cuts that differ in the number of their block alone, together."""
    groups: dict[tuple[object, ...], list[CutLine]] = {}
    for cut in cuts:
        seen = cut.tensor if cut.tensor is not None else cut.after or ""
        key = (stem_of(cut.part)[0], cut.left_rank, cut.tensor is None, stem_of(seen)[0], cut.left, cut.right)
        groups.setdefault(key, []).append(cut)
    return list(groups.values())


def _cut_cells(members: Sequence[CutLine]) -> tuple[str, ...]:
    """A row for cuts that are alike."""
    cut = members[0]
    part = with_numbers(stem_of(cut.part)[0], [stem_of(m.part)[1] for m in members])
    ranks = f"{cut.left_rank} | {cut.right_rank}"
    if cut.tensor is None:
        return part, ranks, "-", "-", "-", "-", "-", "-", f"| {_names(members)}" if cut.after else "|"
    indices = [m.index for m in members if m.index is not None]
    index = "-" if not indices else f"{indices[0]:,}" if len(indices) == 1 else f"{indices[0]:,}, … {indices[-1]:,}"
    row, column = ("-" if value is None else f"{value:,}" for value in (cut.row, cut.column))
    tensor = _names(members)
    if tensor.startswith(f"{part}."):
        tensor = f"….{tensor.removeprefix(f'{part}.')}"
    return part, ranks, index, f"{cut.left:,}", f"{cut.right:,}", f"{cut.left_percent:.3f}", row, column, tensor


def _names(members: Sequence[CutLine]) -> str:
    """The tensor of each cut, or the one behind it, as one pattern."""
    names = [stem_of(m.tensor if m.tensor is not None else m.after or "") for m in members]
    return with_numbers(names[0][0], [number for _, number in names])


# ---- memory ----


def memory_table(plan: Plan) -> RenderableType:
    """A column for each stage: terms, sums of the moments, the reserve and the total."""
    table = _table("", *_stage_titles(plan), left=1)
    own = next(k for k, stage in enumerate(plan.stages) if stage.stage == plan.run.stage)
    table.columns[own + 1].style = "bold"
    # The last stage has every term that another one has, and gathered units.
    names = dict.fromkeys(t.name for stage in reversed(plan.stages) for t in stage.terms if _is_shown(t.bytes))
    for name in names:
        table.add_row(name, *(_term_cell(stage, name) for stage in plan.stages))
    for moment in MOMENTS:
        cells = [_gib(stage.at(moment)) + (" *" if stage.highest == moment else "  ") for stage in plan.stages]
        table.add_row(f"  sum {MOMENT_NAMES[moment]}", *cells)
    table.add_row("reserve", *(_gib(stage.reserve) + "  " for stage in plan.stages))
    table.add_row("needed", *(_gib(stage.total) + "  " for stage in plan.stages), style="bold")
    if plan.run.memory is not None:
        memory = plan.run.memory
        table.add_row(f"free of {gib(memory)}", *(_signed(memory - stage.total) for stage in plan.stages))
    legend = "* the highest moment   ◄ the largest term at it"
    if not plan.stage.activations_known:
        legend += "   activations and logits are NOT in these sums"
    return Group(table, Text(legend, "dim"))


def simulation_table(simulation: Simulation) -> RenderableType:
    """A column for each moment of the simulated step: what was alive at its highest point."""
    moments = simulation.moments
    table = _table("", *(f"in {moment.moment}" for moment in moments), left=1)
    names = dict.fromkeys(c.name for moment in moments for c in moment.categories if _is_shown(c.bytes))
    for name in names:
        cells = [sum(c.bytes for c in moment.categories if c.name == name) for moment in moments]
        shown = f"made in {name}" if name in {moment.moment for moment in moments} else name
        table.add_row(shown, *(_gib(size) + "  " if size else "-  " for size in cells))
    marks = [" *" if moment is simulation.highest else "  " for moment in moments]
    table.add_row("live", *(_gib(m.bytes) + mark for m, mark in zip(moments, marks, strict=True)), style="bold")
    legend = (
        f"* the highest, in {simulation.highest.module or 'no module'}   kernels of {simulation.kernels}, collectives "
        f"of {simulation.backend}; without the reserve"
    )
    return Group(table, Text(legend, "dim"))


def _is_shown(size: int) -> bool:
    """Whether a term shows in two digits of GiB."""
    return size >= (1 << 30) * 0.005


def _term_cell(stage: StagePlan, name: str) -> str:
    size = sum(term.bytes for term in stage.terms if term.name == name)
    if not size:
        return "-  "
    return _gib(size) + (" ◄" if stage.binding.name == name else "  ")


def fit_table(plan: Plan, fit: Fit) -> RenderableType:
    """The largest micro-batch by number of GPUs and stage."""
    table = _table("GPUs", *_stage_titles(plan))
    for row in fit.rows:
        cells = [f"{largest.micro_batch:,}" if largest.micro_batch else "-" for largest in row.largest]
        table.add_row(f"{row.world_size:,}", *cells, style="bold" if row.world_size == plan.run.world_size else "")
    return table


# ---- form ----


def _stage_titles(plan: Plan) -> list[str]:
    return [f"stage {stage.stage}" for stage in plan.stages]


def _gib(size: int) -> str:
    return f"{size / (1 << 30):,.2f}"


def _signed(size: int) -> Text:
    return Text(_gib(size) + "  ", "green" if size >= 0 else "red")


def _table(*titles: str, left: int = 0) -> Table:
    """A table without lines; the first ``left`` columns hold words, the others numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    for k, title in enumerate(titles):
        table.add_column(title, justify="left" if k < left else "right", overflow="fold")
    return table

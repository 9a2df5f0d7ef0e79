"""The run summary in a terminal: at most 40 lines, deviations first.

Owns the form. Every number is a value of ``summary``; nothing is computed here but totals and units.
"""

import shutil
from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from shardglass.report.cuts import CutRow
from shardglass.report.dtypes import DtypeRow
from shardglass.report.summary import Batch, DecayGroup, MemoryRow, Progress, RatePoint, RunSummary

MAX_LINES = 40
MIN_WIDTH, MAX_WIDTH = 100, 120
"""Narrower, and the memory table would have to break its numbers; a pipe has no width at all. Wider is hard to read."""

_T = TypeVar("_T")

MOST_GROUPS, MOST_CUTS = 3, 4
"""Rows these two lists may take if deviations leave room; each keeps one row in any case."""


WIDE = 200
"""Columns of what goes to a file or a pipe: names stay whole there for grep."""


def console() -> Console:
    """The console of a command's tables: as wide as the terminal or ``COLUMNS``, or ``WIDE`` where there is neither."""
    return Console(width=shutil.get_terminal_size((WIDE, 24)).columns)


def render_summary(summary: RunSummary, console: Console, *, max_lines: int = MAX_LINES) -> None:
    """Print a summary.

    Lists are cut to fit, with the number of what is left out; deviations have the first claim on the room. All is in
    ``to_json``.

    Args:
        summary: The values.
        console: Where to; its width counts between 100 and 120 columns.
        max_lines: Lines it may take, at least 34.
    """
    width = min(MAX_WIDTH, max(MIN_WIDTH, console.width))
    page = _Page(console, width)
    head = page.lines(_title(summary))
    memory = page.lines(_memory_table(summary))
    facts = page.lines(_facts(summary))
    dtypes = page.lines(_dtype_table(summary.dtypes)) if summary.dtypes else []
    end = page.lines(_environment(summary))
    room = max_lines - sum(map(len, (head, memory, facts, dtypes, end)))
    kept = int(bool(summary.groups)) + int(bool(summary.cuts))
    said = page.fit(_sentences(summary), room - kept)
    room -= len(said)
    groups = page.lines(_groups(summary.groups, min(MOST_GROUPS, room - int(bool(summary.cuts)))))
    room -= len(groups)
    cuts = page.lines(_cuts(summary.cuts, min(MOST_CUTS, room)))
    for line in (*head, *said, *memory, *facts, *groups, *dtypes, *cuts, *end):
        console.print(line, soft_wrap=True, highlight=False)


class _Page:
    """Turns renderables into lines of one width."""

    def __init__(self, console: Console, width: int) -> None:
        self._console, self._options = console, console.options.update(width=width, height=None)

    def lines(self, renderable: RenderableType | None) -> list[Text]:
        """The lines of one renderable, without trailing blanks."""
        if renderable is None:
            return []
        rendered = self._console.render_lines(renderable, self._options, pad=False)
        return [self._text(segments) for segments in rendered]

    def _text(self, segments: Iterable[Segment]) -> Text:
        line = Text.assemble(*((s.text, s.style or "") for s in segments if not s.control))
        line.rstrip()
        return line

    def fit(self, sentences: Sequence[tuple[str, str, str]], room: int) -> list[Text]:
        """As many sentences as fit in ``room`` lines, whole; then the number of those left out."""
        fitted: list[Text] = []
        for k, (sign, sentence, style) in enumerate(sentences):
            wrapped = self.lines(_labelled([(Text(sign, style), Text(sentence, style))], 2))
            last = k == len(sentences) - 1
            if len(fitted) + len(wrapped) > room - (0 if last else 1):
                space = room - 1 - len(fitted)
                if not fitted:
                    # One sentence longer than the room: its beginning is worth more than a count.
                    fitted, k = wrapped[: max(0, space)], k + int(space > 0)
                if len(sentences) > k:
                    fitted.append(Text(f"  and {len(sentences) - k} more, in the summary's JSON", "yellow"))
                return fitted
            fitted += wrapped
        return fitted


# ---- sections ----


def _title(summary: RunSummary) -> RenderableType:
    return Text(f"Run summary: {summary.model}, ZeRO stage {summary.stage}, {_ranks(summary.batch.ranks)}", "bold")


def _sentences(summary: RunSummary) -> list[tuple[str, str, str]]:
    """(sign, sentence, style): deviations, then notes."""
    deviations = [("!", text, "bold yellow") for text in summary.all_deviations]
    if not deviations:
        deviations = [("=", "no deviations: everything as planned and as asked for", "green")]
    return deviations + [("-", text, "") for text in summary.notes]


def _memory_table(summary: RunSummary) -> RenderableType:
    """Planned and measured MiB by category with exact bytes, this rank's and the largest rank's."""
    mine, largest = summary.memory, summary.largest
    one = mine.rank == largest.rank
    table = _table()
    table.add_column(f"MiB on rank {mine.rank}{' (largest)' if one else ''}")
    others = () if one else (f"max: rank {largest.rank}", "exact bytes")
    for title in ("planned", "measured", "exact bytes", *others):
        table.add_column(title, justify="right", overflow="fold")
    theirs = {row.category: row for row in largest.rows}
    rows = {row.category: row for row in mine.rows}
    for name in dict.fromkeys((*rows, *theirs)):
        blank = MemoryRow(category=name, planned=0, measured=0)
        table.add_row(name, *_memory_cells(rows.get(name, blank), theirs.get(name, blank), one=one))
    totals = [MemoryRow(category="", planned=a.planned, measured=a.measured) for a in (mine, largest)]
    table.add_row("engine in all", *_memory_cells(totals[0], totals[1], one=one), style="bold")
    for name, size, other in (
        (f"rest of process ({summary.process_kind})", mine.remainder, largest.remainder),
        (f"peak of process ({summary.process_kind})", mine.peak, largest.peak),
    ):
        table.add_row(name, "", _mib(size), "", *([] if one else [_mib(other)]))
    return table


def _memory_cells(mine: MemoryRow, largest: MemoryRow, *, one: bool) -> list[str | Text]:
    planned = "unknown" if mine.planned is None else _mib(mine.planned)
    cells: list[str | Text] = [planned, _mib(mine.measured), _exact(mine)]
    return cells if one else [*cells, _mib(largest.measured), _exact(largest)]


def _exact(row: MemoryRow) -> Text:
    """``= bytes`` if plan and measurement agree, else the signed difference with a mark."""
    if row.difference is None:
        return Text(f"{row.measured:,}", "yellow")
    if row.difference == 0:
        return Text(f"= {row.measured:,}", "green")
    return Text(f"{row.difference:+,} !", "bold yellow")


def _facts(summary: RunSummary) -> RenderableType:
    """Batch, data, loss and rate, a line each."""
    rows = [("batch", _batch(summary.batch)), ("data", _data(summary.batch)), ("loss", _progress(summary.progress))]
    if summary.rates:
        rows.append(("rate", "; ".join(_rate(point) for point in summary.rates)))
    return _labelled([(Text(label, "bold"), Text(text)) for label, text in rows], _LABEL)


def _batch(batch: Batch) -> str:
    return (
        f"{_ranks(batch.ranks)} × {batch.micro:,} micro × {batch.accumulation:,} accumulation = {batch.total:,} "
        f"sequences a step; {batch.steps_per_epoch:,} step{'' if batch.steps_per_epoch == 1 else 's'} an epoch"
    )


def _data(batch: Batch) -> str:
    limit = f" at {batch.max_length:,} tokens" if batch.max_length is not None else ""
    return (
        f"{batch.tokens_per_step:,.0f} tokens a step, {batch.label_share:.1%} of them labels; "
        f"{batch.cut_share:.1%} of the samples cut{limit}"
    )


def _progress(progress: Progress) -> str:
    first, last = (f"{x:.4f}" if x is not None else "not logged" for x in (progress.first_loss, progress.last_loss))
    text = f"{first} → {last} in {progress.steps:,} steps"
    if progress.held_out is not None:
        text += f"; held-out {progress.held_out[0]:.4f} → {progress.held_out[1]:.4f}"
    return f"{text}; {progress.tokens_per_s:,.0f} tokens/s"


def _rate(point: RatePoint) -> str:
    """One rate if all groups have the same, else the first ones."""
    different = len(set(point.rates)) > 1
    shown = [f"{rate:.4g}" for rate in (point.rates[:MOST_GROUPS] if different else point.rates[:1])]
    if different and len(point.rates) > MOST_GROUPS:
        shown.append(f"{len(point.rates) - MOST_GROUPS} more")
    return f"{', '.join(shown)} at step {point.step:,} ({point.what})"


def _groups(groups: Sequence[DecayGroup], room: int) -> RenderableType | None:
    """A line per group."""
    if not groups:
        return None
    shown, more = _limited(groups, room)
    rows = [
        f"{g.index}: weight decay {g.weight_decay:g}, {g.elements:,} elements in {g.tensors:,} tensors" for g in shown
    ]
    return _list("groups", rows, more)


def _dtype_table(rows: Sequence[DtypeRow]) -> RenderableType:
    table = _table()
    table.add_column("dtype of", no_wrap=True)
    for title in ("stored", "computed", "reduced", "accumulated", "updated", "saved"):
        table.add_column(title, overflow="fold")
    for row in rows:
        cells = (row.stored, row.computed, row.reduced, row.accumulated, row.updated, row.saved)
        table.add_row(row.kind, *(cell or "-" for cell in cells))
    return table


def _cuts(cuts: Sequence[CutRow], room: int) -> RenderableType | None:
    """A line per kind of cut: numbers first and in columns, so that only a name can be too long."""
    if not cuts:
        return None
    shown, more = _limited(cuts, room)
    left = max(len(f"{cut.left:,}") for cut in shown)
    right = max(len(f"{cut.right:,}") for cut in shown)
    rows = []
    for cut in shown:
        sides = f"{cut.left:>{left},} | {cut.right:>{right},}  of " if cut.is_tensor else "no tensor of "
        rows.append(f"rank {cut.left_rank} | {cut.left_rank + 1}: {sides}{cut.pattern}")
    return _list("cuts", rows, more)


def _environment(summary: RunSummary) -> RenderableType:
    env = summary.environment
    versions = ", ".join(f"{name} {version}" for name, version in env.versions)
    text = f"attention {env.attention}; backend {env.backend} on {env.device}; {versions}"
    return _labelled([(Text("on", "bold"), Text(text))], _LABEL)


# ---- form ----

_LABEL = 8
"""Columns of the labels on the left."""


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", show_edge=False)


def _labelled(rows: Sequence[tuple[Text, Text]], label_width: int) -> Table:
    """Label and wrapped text side by side."""
    grid = Table.grid(padding=0)
    grid.add_column(width=label_width, no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(label, text)
    return grid


def _list(label: str, rows: Sequence[str], more: int) -> Table:
    """A label before the first of several rows of one line each; the last one says how many are left out."""
    if more:
        rows = [*rows[:-1], f"{rows[-1]}; and {more:,} more"]
    grid = Table.grid(padding=0)
    grid.add_column(width=_LABEL, no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    for k, row in enumerate(rows):
        grid.add_row(Text("" if k else label, "bold"), Text(row))
    return grid


def _limited(items: Sequence[_T], room: int) -> tuple[Sequence[_T], int]:
    """At most ``room`` items but at least one, and how many are left out."""
    shown = items[: max(1, room)]
    return shown, len(items) - len(shown)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count:,} ranks"


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.2f}"

"""A plan in a terminal: the verdict first, then the partition, the memory and what they rest on.

Owns the page. Every number is a value of ``plan.Plan``; nothing is computed here but units. Leaves the tables to
``plan_tables``.
"""

from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardglass.plan.check import FitCheck
from shardglass.plan.fit import FitOption, count_of, gib
from shardglass.plan.plan import Plan
from shardglass.report.plan_tables import MOMENT_NAMES, fit_table, memory_table, partition_tables, simulation_table

MIN_WIDTH, MAX_WIDTH = 100, 132

KILLED = "more RAM than is free: the system would end a process without a word (exit code -9, SIGKILL)"


def render_plan(plan: Plan, console: Console) -> None:
    """Print a plan.

    Args:
        plan: The values.
        console: Where to; its width counts between 100 and 132 columns.
    """
    width = min(MAX_WIDTH, max(MIN_WIDTH, console.width))
    page = Group(*_sections(plan))
    for segments in console.render_lines(page, console.options.update(width=width, height=None), pad=False):
        line = Text.assemble(*((s.text, s.style or "") for s in segments if not s.control))
        line.rstrip()
        console.print(line, soft_wrap=True, highlight=False)


def render_check(plan: Plan, check: FitCheck, console: Console) -> None:
    """Print a plan in three lines, as before a run."""
    stage = plan.stage
    ranks = count_of(plan.run.world_size, "rank")
    lines = (
        _model(plan),
        f"stage {stage.stage} on {ranks}: the engine holds {gib(stage.engine_bytes)} on rank {stage.rank}, all in all "
        f"{gib(stage.total)} {MOMENT_NAMES[stage.highest]}; a checkpoint takes {gib(plan.checkpoint.total)}",
        check.sentence,
    )
    for line in lines:
        style = "" if check.fits or line != check.sentence else "yellow"
        console.print(f"plan: {line}", soft_wrap=True, highlight=False, markup=False, style=style)


def _sections(plan: Plan) -> Iterator[RenderableType]:
    """The page from top to bottom."""
    yield Text(plan.verdict, f"bold {_colour(plan.verdict)}")
    fit = plan.fit
    if fit is not None and (not fit.fits or len(fit.options) > 1):
        yield _labelled("smallest", "\n".join(_options(fit.options, plan.run.ranks_per_node)))
    yield _labelled("model", _model(plan))
    yield _labelled("run", _run(plan))
    yield _heading(f"Partition: scheme {plan.partition.scheme}, as used by {plan.partition.used_by}")
    yield from partition_tables(plan.partition)
    yield _heading(f"Memory of the heaviest rank in GiB, shardglass's engine with {plan.run.optimizer}")
    yield memory_table(plan)
    if plan.simulation is not None:
        yield _heading(f"A simulated step on rank {plan.simulation.rank} in GiB")
        yield simulation_table(plan.simulation)
    yield Text("")
    yield from _machine(plan)
    if fit is not None:
        yield _heading(f"Largest micro-batch that fits in {gib(fit.memory)}, {plan.run.length:,} tokens a sequence")
        yield fit_table(plan, fit)
    yield _heading("Notes")
    for text in (*plan.notes, *plan.assumptions):
        yield _labelled("-", text, width=2)


def _colour(verdict: str) -> str:
    """Of the first line, by its first word."""
    return next((c for word, c in (("fits", "green"), ("does not fit", "red")) if verdict.startswith(word)), "yellow")


def _model(plan: Plan) -> str:
    model = plan.model
    tied = f", {count_of(model.num_tied, 'tied name')}" if model.num_tied else ""
    frozen = "" if model.num_trainable == model.num_tensors else f", {model.trainable_numel:,} of them trained"
    return (
        f"{model.name} ({model.model_type}): {count_of(model.num_tensors, 'tensor')}{tied}, {model.numel:,} elements"
        f"{frozen}, {count_of(model.num_units, 'unit')}; {gib(model.compute_bytes)} in {plan.run.dtype}, stored as "
        f"{model.stored_dtype}"
    )


def _run(plan: Plan) -> str:
    run = plan.run
    checkpointing = "gradient checkpointing" if run.recomputes else "no gradient checkpointing"
    return (
        f"stage {run.stage}, {count_of(run.world_size, 'rank')} on {run.device}, {run.optimizer} with "
        f"{count_of(run.num_groups, 'optimizer group')}; micro-batch {run.micro_batch} × {run.length:,} tokens, "
        f"accumulation {run.accumulation}, {run.attention} attention, {checkpointing}; gradients reduced in "
        f"{run.reduce_dtype}, added in {run.accum_dtype}"
    )


def _options(options: Sequence[FitOption], ranks_per_node: int) -> list[str]:
    """The smallest runs that fit, a line each."""
    lines = []
    for option in options:
        nodes = "" if option.world_size <= ranks_per_node else f" on {option.world_size // ranks_per_node} machines"
        recomputing = " with --gradient-checkpointing" if option.recomputes else ""
        lines.append(f"{count_of(option.world_size, 'GPU')}{nodes} at stage {option.stage}{recomputing}")
    return lines or ["no number of GPUs helps"]


def _machine(plan: Plan) -> Iterator[RenderableType]:
    """RAM and disk."""
    host, disk = plan.host, plan.checkpoint
    free = "" if host.free is None else f"; {gib(host.free)} free"
    yield _labelled(
        "machine",
        f"{count_of(host.ranks, 'rank')} on one: RAM {gib(host.loading)} while loading, {gib(host.training)} in "
        f"training, {gib(host.saving)} while saving{free}",
    )
    if host.fits is False:
        yield _labelled("", KILLED, style="red")
    yield _labelled(
        "disk",
        f"{gib(disk.total)} a checkpoint: {gib(disk.weights)} weights, {gib(disk.master)} master weights, "
        f"{gib(disk.states)} optimizer states; twice that while one replaces another",
    )


def _heading(text: str) -> RenderableType:
    return Text(f"\n{text}", "bold")


def _labelled(label: str, text: str, *, width: int = 9, style: str = "") -> RenderableType:
    """A label and wrapped text side by side."""
    grid = Table.grid(padding=0)
    grid.add_column(width=width, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(label, "bold"), Text(text, style))
    return grid

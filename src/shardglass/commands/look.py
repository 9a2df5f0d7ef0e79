"""``shardglass look`` and ``shardglass where``: what a run wrote of itself.

Owns their flags and exit codes. Leaves the files to ``lens.store`` and the pages to ``report.look_terminal``. Loads no
torch: snapshots are plain values.
"""

import json as json_module
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer

from shardglass.errors import UsageError, suggestion
from shardglass.json_form import to_tree
from shardglass.lens.snapshot import Snapshot
from shardglass.lens.store import Moment, read_moments, step_to_show
from shardglass.plan.expected import against_plan
from shardglass.report.look_tables import place_rows
from shardglass.report.look_terminal import RankLook, RunLook, render_look, render_where
from shardglass.report.terminal import console

DIFFERS = 1
"""Exit code if what runs is not what was planned."""

RunDir = Annotated[Path, typer.Argument(help="The run's --output_dir.")]
Step = Annotated[int | None, typer.Option(help="The step to show. Default: the last one.")]
Json = Annotated[bool, typer.Option("--json", help="Write JSON instead of tables.")]


def look_command(
    run_dir: RunDir,
    rank: Annotated[int | None, typer.Option(help="Show one rank alone.")] = None,
    tensor: Annotated[
        str | None, typer.Option(help="Show the tensors of this name, or pattern such as '*mlp*'.")
    ] = None,
    step: Step = None,
    diff: Annotated[int | None, typer.Option(help="Show what changed since this step.")] = None,
    json: Json = False,
) -> None:
    """Show what each rank holds, from the snapshots of a run, and hold it against the plan: exit code 1 if it differs.

    A run writes snapshots with --look STEP, and when it gets SIGUSR1.
    """
    shown = step_to_show(run_dir, step)
    moments = read_moments(run_dir, shown, rank)
    earlier: dict[int, Snapshot] = {}
    if diff is not None:
        compared = read_moments(run_dir, step_to_show(run_dir, diff, flag="--diff"), rank)
        earlier = {moment.live.rank: moment.live for moment in compared}
    look = RunLook(
        run=str(run_dir),
        step=shown,
        compared=diff,
        ranks=tuple(_rank_look(moment, earlier, diff) for moment in moments),
        tensors=None if tensor is None else _matching(moments[0].live, tensor),
    )
    if json:
        typer.echo(look.to_json())
    else:
        render_look(look, console())
    if not look.agrees:
        raise typer.Exit(DIFFERS)


def where_command(
    run_dir: RunDir,
    tensor: Annotated[str, typer.Argument(help="The tensor's full dotted name.")],
    step: Step = None,
    json: Json = False,
) -> None:
    """Show where one tensor is, rank by rank: elements, offsets, dtypes, bytes, and where a debugger finds it."""
    shown = step_to_show(run_dir, step)
    found = [(moment.live.rank, moment.live.where(tensor)) for moment in read_moments(run_dir, shown)]
    if not json:
        render_where(shown, found, console())
        return
    tree = {**to_tree(found[0][1], without=("holdings",)), "shape": list(found[0][1].shape), "step": shown}
    typer.echo(json_module.dumps({**tree, "places": to_tree(place_rows(found))}, indent=2))


def _rank_look(moment: Moment, earlier: dict[int, Snapshot], diff: int | None) -> RankLook:
    """One rank, held against plan, layout and an earlier step.

    Raises:
        UsageError: It wrote nothing at that step.
    """
    live, plan = moment.live, moment.plan
    before = earlier.get(live.rank)
    if diff is not None and before is None:
        raise UsageError(f"--diff {diff}: rank {live.rank} wrote no snapshot of that step; give --rank for another one")
    return RankLook(
        live=live,
        plan=plan,
        faults=(*(() if plan is None else against_plan(plan, live)), *live.check()),
        changes=None if before is None else before.diff(live),
    )


def _matching(live: Snapshot, pattern: str) -> tuple[str, ...]:
    """Names of the tensors that a pattern means, in model order; a word without ``*`` also means those that have it.

    Raises:
        UsageError: There is none; the message has the nearest name.
    """
    aliases = {name: row.name for row in live.params for name in (row.name, *row.aliases)}
    names = {name: None for word, name in aliases.items() if fnmatchcase(word, pattern)}
    if not names and not set(pattern) & set("*?["):
        names = {name: None for word, name in aliases.items() if pattern in word}
    if not names:
        raise UsageError(f"--tensor {pattern}: no tensor has such a name{suggestion(pattern, aliases)}")
    return tuple(names)

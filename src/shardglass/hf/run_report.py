"""The interactive pages of a plan and of a run, as files.

Owns how the model and setup of a run are found again in its folder. Leaves the files of a run to ``report.html_run``,
and the page to ``report.html_page``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardglass.errors import ConfigError, ModelError, UsageError
from shardglass.hf.meta import facts_of
from shardglass.hf.model_config import find_config
from shardglass.hf.planning import Planned, optimizer_kind
from shardglass.plan.kinds import STATES, OptimizerKind
from shardglass.plan.plan import make_plan
from shardglass.plan.setup import DTYPES, Setup
from shardglass.report.html_page import Page, plan_page, write_page
from shardglass.report.html_run import REPORT, RunFiles, read_run, run_page


def write_plan_html(planned: Planned, path: Path) -> None:
    """Write the page of a plan.

    Raises:
        ConfigError: plotly is not installed, or the file cannot be written.
    """
    page = plan_page(planned.plan, planned.facts, planned.setup, scheme_options=planned.scheme_options)
    write_page(page, path)


def write_run_report(run_dir: Path, html: Path | None = None) -> Path:
    """Write the page of a run: what it measured, its curves, and the map of its model.

    Args:
        run_dir: The run's output folder, with the files that it wrote when it ended.
        html: The page; None is ``report.html`` in the folder.

    Returns:
        Where the page is.

    Raises:
        UsageError: The folder is no run's, or a file in it cannot be understood.
        ConfigError: plotly is not installed, or the file cannot be written.
    """
    files = read_run(run_dir)
    path = run_dir / REPORT if html is None else html
    write_page(_page_of(files), path)
    return path


def _page_of(files: RunFiles) -> Page:
    """The page with the model's map, or without it and why."""
    run = run_page(files)
    try:
        setup = setup_of_run(files)
        facts = facts_of(find_config(str(files.folder)), dtype=setup.dtype, num_groups=setup.num_groups)
    except (ModelError, KeyError) as error:
        note = f"no map and no plan of the model: {error}"
        return Page(title=f"{Path(run.model).name}: ZeRO run", model=None, layouts=(), run=run, notes=(note,))
    with_or_without = "with" if setup.recomputes else "without"
    note = (
        "the stages side by side are planned again from the files of this run, for sequences as long as it allowed "
        f"and {with_or_without} gradient checkpointing; what was planned and measured in the run itself stands under "
        "Run"
    )
    return plan_page(make_plan(facts, setup), facts, setup, run=run, notes=(note, *_said(files.summary)))


def _said(summary: Mapping[str, Any]) -> Sequence[str]:
    return [str(note) for note in summary.get("notes", ())]


def setup_of_run(files: RunFiles) -> Setup:
    """The run as it was, as far as its files say.

    Raises:
        UsageError: A value of the summary is of no run.
    """
    summary, values = files.summary, files.values
    batch = summary["batch"]
    dtypes = {row["kind"]: row for row in summary["dtypes"]}
    dtype, accumulated = dtypes["parameters"]["computed"], dtypes["gradients"]["accumulated"]
    if dtype not in DTYPES or accumulated not in DTYPES:
        raise UsageError(f"{files.folder}: the run computed in {dtype} and added gradients in {accumulated}")
    num_groups = len(summary["groups"])
    on_cpu = summary["environment"]["device"] == "cpu"
    return Setup(
        world_size=batch["ranks"],
        stage=summary["stage"],
        dtype=dtype,
        reduce_dtype=dtypes["gradients"]["reduced"],
        accum_dtype=accumulated,
        optimizer=_optimizer(str(values.get("optimizer.type", "AdamW")), num_groups),
        num_groups=num_groups,
        micro_batch=batch["micro"],
        accumulation=batch["accumulation"],
        **({} if batch["max_length"] is None else {"length": batch["max_length"]}),
        recomputes=bool(summary.get("recomputes")),
        attention="eager" if summary["environment"]["attention"] == "eager" else "sdpa",
        device="cpu" if on_cpu else "cuda",
        ranks_per_node=batch["ranks"],
    )


def _optimizer(name: str, num_groups: int) -> OptimizerKind:
    """The optimizer by the name that the resolved config has; one that is not known has no states in a plan."""
    if name in STATES:
        return OptimizerKind(name=name, groups=({"fused": name in ("Adam", "AdamW")},) * num_groups)
    try:
        return optimizer_kind(name, num_groups=num_groups)
    except ConfigError:
        return OptimizerKind(name=name)

"""What the page shows of a run, read from the files in its folder.

Owns which files are read, their checks, and the curves. Leaves the model of the run to ``hf.run_report``.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardglass.errors import UsageError
from shardglass.json_text import read_text
from shardglass.report.summary import SUMMARY_VERSION

SUMMARY, CONFIG, STATE = "shardglass_summary.json", "shardglass_config.json", "trainer_state.json"

REPORT = "report.html"
"""The page of a run, in its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A value by step; None where it is inf or nan, which a chart cannot draw."""

    steps: tuple[int, ...]
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountBars:
    """Planned against measured on one rank.

    Attributes:
        rank: Whose.
        categories: The engine's categories.
        planned: Planned bytes of each; None if the plan does not know it.
        measured: Measured bytes of each.
        process: Bytes of the whole process at the end.
        remainder: Those of them that are not the engine's: nobody planned them.
        peak: The process's peak.
    """

    rank: int
    categories: tuple[str, ...]
    planned: tuple[int | None, ...]
    measured: tuple[int, ...]
    process: int
    remainder: int
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """A run in charts.

    Attributes:
        model: Its model, as the run named it.
        facts: (what, value) of the run in words.
        deviations: What was not as planned or asked for.
        process_kind: What a process's bytes count, such as "RSS".
        accounts: Rank 0, and the rank with the most bytes if that is another one.
        loss: Training loss.
        eval_loss: Held-out loss.
        grad_norm: Norm of the gradient before clipping.
        rate: Learning rate.
        clip: The norm that gradients are clipped to; None if they are not.
        skipped: Steps by which more steps had been skipped than before.
        num_skipped: Skipped steps in all.
        source: The file that the curves are from; None if the run wrote none.
    """

    model: str
    facts: tuple[tuple[str, str], ...]
    deviations: tuple[str, ...]
    process_kind: str
    accounts: tuple[AccountBars, ...]
    loss: Curve
    eval_loss: Curve
    grad_norm: Curve
    rate: Curve
    clip: float | None
    skipped: tuple[int, ...]
    num_skipped: int
    source: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The parsed files of a run.

    Attributes:
        folder: The run's folder.
        summary: The summary.
        values: The resolved config, value by key; empty if there is no such file.
        history: The Trainer's log.
        source: The file of the log; None if there is none.
    """

    folder: Path
    summary: Mapping[str, Any]
    values: Mapping[str, Any]
    history: tuple[Mapping[str, Any], ...]
    source: str | None


def read_run(folder: Path) -> RunFiles:
    """Read the files of a run.

    Raises:
        UsageError: There is no such folder, it is no run's, or a file in it cannot be understood.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder; give the --output_dir of a run")
    if not (folder / SUMMARY).is_file():
        raise UsageError(
            f"{folder}: no {SUMMARY} in it, which a run writes when it ends; give the --output_dir of a run"
        )
    summary = _object(folder / SUMMARY)
    if summary.get("version") != SUMMARY_VERSION:
        raise UsageError(
            f"{folder / SUMMARY}: version {summary.get('version')!r}, and version {SUMMARY_VERSION} is understood; "
            "make the report with the shardglass that trained"
        )
    values: dict[str, Any] = {}
    if (folder / CONFIG).is_file():
        values = {row["key"]: row["value"] for row in _object(folder / CONFIG).get("values", ())}
    state = _state_file(folder)
    history = () if state is None else tuple(_object(state).get("log_history", ()))
    return RunFiles(
        folder=folder,
        summary=summary,
        values=values,
        history=history,
        source=None if state is None else str(state.relative_to(folder)),
    )


def _state_file(folder: Path) -> Path | None:
    """The Trainer's log: of the whole run, or as the last checkpoint has it."""
    if (folder / STATE).is_file():
        return folder / STATE
    numbered = [
        (int(path.parent.name.removeprefix("checkpoint-")), path)
        for path in folder.glob(f"checkpoint-*/{STATE}")
        if path.parent.name.removeprefix("checkpoint-").isdigit()
    ]
    return max(numbered)[1] if numbered else None


def _object(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object."""
    text = read_text(path, UsageError, missing="")
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    if not isinstance(tree, dict):
        raise UsageError(f"{path}: it must hold an object, not {type(tree).__name__}")
    return tree


def run_page(files: RunFiles) -> RunPage:
    """The run in charts.

    Raises:
        UsageError: The summary lacks something that every summary has.
    """
    summary = files.summary
    try:
        accounts = {row["rank"]: _account(row) for row in (summary["memory"], summary["largest"])}
        progress = summary["progress"]
        return RunPage(
            model=str(summary["model"]),
            facts=_facts(summary),
            deviations=tuple(summary["all_deviations"]),
            process_kind=str(summary["process_kind"]),
            accounts=tuple(accounts.values()),
            loss=_curve(files, "loss"),
            eval_loss=_curve(files, "eval_loss"),
            grad_norm=_curve(files, "grad_norm"),
            rate=_curve(files, "learning_rate"),
            clip=_clip(files.values),
            skipped=_skipped(files),
            num_skipped=int(progress["skipped"]),
            source=files.source,
        )
    except (KeyError, TypeError) as error:
        raise UsageError(f"{files.folder / SUMMARY}: it is damaged: {error!r}; a run writes it when it ends") from None


def _account(row: Mapping[str, Any]) -> AccountBars:
    rows = row["rows"]
    measured = tuple(int(r["measured"]) for r in rows)
    return AccountBars(
        rank=row["rank"],
        categories=tuple(str(r["category"]) for r in rows),
        planned=tuple(r["planned"] for r in rows),
        measured=measured,
        process=row["process"],
        remainder=row["process"] - sum(measured),
        peak=row["peak"],
    )


def _facts(summary: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    batch, progress, environment = summary["batch"], summary["progress"], summary["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"])
    return (
        ("stage", f"{summary['stage']}, {batch['ranks']} ranks"),
        (
            "batch",
            f"{batch['ranks']} ranks × {batch['micro']} micro × {batch['accumulation']} accumulation; "
            f"{batch['tokens_per_step']:,.0f} tokens a step, {batch['label_share']:.1%} of them labels",
        ),
        ("steps", f"{progress['steps']}, {progress['skipped']} skipped; {progress['tokens_per_s']:,.0f} tokens/s"),
        ("on", f"{environment['backend']} on {environment['device']}, {environment['attention']} attention"),
        ("with", versions),
    )


def _curve(files: RunFiles, key: str) -> Curve:
    """The values of one key of the log, by step."""
    rows = [row for row in files.history if key in row]
    return Curve(steps=tuple(int(row["step"]) for row in rows), values=tuple(_finite(row[key]) for row in rows))


def _finite(value: Any) -> float | None:
    """A number that a chart can draw."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _clip(values: Mapping[str, Any]) -> float | None:
    """The clip line; 0 is no clipping."""
    clip = _finite(values.get("gradient_clipping"))
    return clip or None


def _skipped(files: RunFiles) -> tuple[int, ...]:
    """The logged steps by which more steps had been skipped than at the one before."""
    found, before = [], 0
    for row in files.history:
        now = int(row.get("steps_skipped", before))
        if now > before:
            found.append(int(row["step"]))
        before = now
    return tuple(found)

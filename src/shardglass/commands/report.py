"""``shardglass report``: the interactive page of a run.

Owns its flags. Leaves the page to ``hf.run_report``.
"""

from pathlib import Path
from typing import Annotated

import typer


def report_command(
    run_dir: Annotated[Path, typer.Argument(help="The run's --output_dir.")],
    html: Annotated[Path | None, typer.Option(help="The page. Default: report.html in the run's folder.")] = None,
) -> None:
    """Write what a run left in its folder as one interactive page that opens offline: curves, memory, a map by rank."""
    from shardglass.report.html_page import check_page
    from shardglass.report.html_run import REPORT, read_run

    read_run(run_dir)  # these mistakes are told before transformers is loaded
    check_page(run_dir / REPORT if html is None else html)
    from shardglass.hf.run_report import write_run_report

    typer.echo(f"report: {write_run_report(run_dir, html)}")

"""What a run tells its user: summary and resolved config, as values, as JSON and in a terminal. Loads no torch."""

from shardglass.report.config_table import config_json, render_config
from shardglass.report.cuts import CutRow, cut_rows
from shardglass.report.dtypes import DtypeRow, dtype_rows
from shardglass.report.summary import (
    Batch,
    DecayGroup,
    Environment,
    MemoryAccount,
    MemoryRow,
    Progress,
    RatePoint,
    RunSummary,
    memory_account,
)
from shardglass.report.terminal import render_summary

__all__ = [
    "Batch",
    "CutRow",
    "DecayGroup",
    "DtypeRow",
    "Environment",
    "MemoryAccount",
    "MemoryRow",
    "Progress",
    "RatePoint",
    "RunSummary",
    "config_json",
    "cut_rows",
    "dtype_rows",
    "memory_account",
    "render_config",
    "render_summary",
]

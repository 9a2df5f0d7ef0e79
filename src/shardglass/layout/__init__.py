"""Which rank holds which slice of which tensor: plain arithmetic, no torch, no processes.

The one truth that planner, engine, lens and checkpoints read.
"""

from shardglass.layout.query import (
    BoundaryCut,
    GroupRun,
    Location,
    Slice,
    boundary_cuts,
    group_runs,
    locate,
    slices_in,
    slices_of_rank,
)
from shardglass.layout.schemes import units_layout
from shardglass.layout.spec import Buffer, Layout, ParamSpec

__all__ = [
    "BoundaryCut",
    "Buffer",
    "GroupRun",
    "Layout",
    "Location",
    "ParamSpec",
    "Slice",
    "boundary_cuts",
    "group_runs",
    "locate",
    "slices_in",
    "slices_of_rank",
    "units_layout",
]

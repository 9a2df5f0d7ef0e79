"""Which rank holds which slice of which tensor: plain arithmetic, no torch, no processes.

The one truth that planner, engine, lens and checkpoints read.
"""

from shardglass.layout.account import held_numel, rank_bytes
from shardglass.layout.buffer import Buffer, Holders, ParamSpec
from shardglass.layout.cuts import BoundaryCut, boundary_cuts, cuts_of, iter_boundary_cuts, num_boundary_cuts
from shardglass.layout.deepspeed import deepspeed_flat_layout, deepspeed_param_layout, secondary_layout
from shardglass.layout.differences import Change, Difference, Moved, difference
from shardglass.layout.moves import Transfer, received_by, sent_by, transfers
from shardglass.layout.partitions import (
    first_offset,
    groups_padding,
    has_bf16_optimizer,
    param_alignment_paddings,
    params_in_partition,
    params_not_in_partition,
    persistent_parameters,
    round_robin_indices,
    sub_group_paddings,
)
from shardglass.layout.query import (
    GroupRun,
    Location,
    Slice,
    element_at,
    group_runs,
    group_spans,
    locate,
    slices_in,
    slices_of,
    slices_of_rank,
)
from shardglass.layout.registry import SCHEMES, Scheme, find_scheme, make_layout
from shardglass.layout.scheme_options import SchemeOptions
from shardglass.layout.schemes import dim0_layout, replicated_layout, units_layout
from shardglass.layout.spec import Layout

__all__ = [
    "SCHEMES",
    "BoundaryCut",
    "Buffer",
    "Change",
    "Difference",
    "GroupRun",
    "Holders",
    "Layout",
    "Location",
    "Moved",
    "ParamSpec",
    "Scheme",
    "SchemeOptions",
    "Slice",
    "Transfer",
    "boundary_cuts",
    "cuts_of",
    "deepspeed_flat_layout",
    "deepspeed_param_layout",
    "difference",
    "dim0_layout",
    "element_at",
    "find_scheme",
    "first_offset",
    "group_runs",
    "group_spans",
    "groups_padding",
    "has_bf16_optimizer",
    "held_numel",
    "iter_boundary_cuts",
    "locate",
    "make_layout",
    "num_boundary_cuts",
    "param_alignment_paddings",
    "params_in_partition",
    "params_not_in_partition",
    "persistent_parameters",
    "rank_bytes",
    "received_by",
    "replicated_layout",
    "round_robin_indices",
    "secondary_layout",
    "sent_by",
    "slices_in",
    "slices_of",
    "slices_of_rank",
    "sub_group_paddings",
    "transfers",
    "units_layout",
]

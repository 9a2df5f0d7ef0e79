"""What a scheme can be told beside parameters and world size.

Owns the options; ``registry`` says which scheme reads which.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

SUB_GROUP_SIZE = 1_000_000_000
"""DeepSpeed's default of ``sub_group_size``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeOptions:
    """Options of the schemes, under the names that their frameworks use.

    Attributes:
        round_robin_gradients: deepspeed-flat: parameters 0, w, 2w, … lie first, then 1, w + 1, …, for w ranks.
        parameter_alignment: deepspeed-flat: each parameter but the first starts at a multiple of 16 bytes.
        expert_parallel: deepspeed-flat: optimizer groups of experts, with their expert parallel size.
        sub_group_size: deepspeed-param: elements of a rank's partitions after which a sub-group is closed.
        shard_dims: dim0: parameters that are cut along another dimension, by name (FSDP2's ``shard_placement_fn``).
    """

    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    expert_parallel: Mapping[int, int] = field(default_factory=dict)
    sub_group_size: int = SUB_GROUP_SIZE
    shard_dims: Mapping[str, int] = field(default_factory=dict)


DEFAULTS = SchemeOptions()

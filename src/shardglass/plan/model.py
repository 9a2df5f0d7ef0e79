"""What a plan must know of a model: its parameters, and the sizes that activations follow from.

Owns the values. Leaves to ``hf.meta`` how they are found out, and every formula to ``activations`` and ``memory``.
"""

import math
from dataclasses import dataclass

from shardglass.errors import InvariantError
from shardglass.layout import ParamSpec
from shardglass.options import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of a decoder of equal blocks: RMSNorm, attention, RMSNorm, gated feed-forward or experts.

    Attributes:
        num_layers: Number of blocks.
        hidden: Width of the residual stream.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        intermediate: Width of the feed-forward layer; with experts, that of one expert.
        vocabulary: Rows of the output layer.
        has_qk_norm: Queries and keys are normalized head by head.
        num_experts: Experts of a block; 0 for one feed-forward layer.
        num_active: Experts that a token goes through; 0 without experts.
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    has_qk_norm: bool = False
    num_experts: int = 0
    num_active: int = 0

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model without its weights.

    Attributes:
        name: What the user called it.
        model_type: Transformers' name of its kind, such as "qwen2".
        source: Where the config came from, such as "preset" or "folder".
        params: Its parameters in model order; the dtype is the one that the run computes in.
        tied: Second names of tied weights, each with the name it is stored under.
        stored_dtype: dtype of the checkpoint's weights.
        buffer_bytes: Bytes of the buffers of its modules.
        max_length: Tokens of the longest sequence it was made for; None if it does not say.
        geometry: Sizes that activations follow from; None for a model of another form.
    """

    name: str
    model_type: str
    source: str
    params: tuple[ParamSpec, ...]
    tied: tuple[tuple[str, str], ...]
    stored_dtype: str
    buffer_bytes: int
    max_length: int | None
    geometry: Geometry | None

    def __post_init__(self) -> None:
        """Check that there is something to plan.

        Raises:
            InvariantError: No parameters.
        """
        if not self.params:
            raise InvariantError(f"{self.name} has no parameters")

    @property
    def numel(self) -> int:
        """Elements of all parameters; tied ones count once."""
        return sum(p.numel for p in self.params)

    @property
    def compute_bytes(self) -> int:
        """Bytes of all parameters in the dtype that the run computes in."""
        return sum(p.numel * DTYPE_BYTES[p.dtype] for p in self.params)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all parameters in the checkpoint's dtype."""
        return self.numel * DTYPE_BYTES[self.stored_dtype]

    @property
    def largest_param_bytes(self) -> int:
        """Bytes of the largest trainable parameter in the compute dtype; 0 if all are frozen."""
        return max((math.prod(p.shape) * DTYPE_BYTES[p.dtype] for p in self.params if p.trainable), default=0)

"""What forward and backward need beside parameters and gradients, as closed forms.

Owns the formulas for decoders of the form that ``Geometry`` describes (Llama, Mistral, Qwen2, Qwen3, their experts).
They list what autograd saves, operation by operation, in the modules of transformers 5.24 under torch 2.13; the idea is
that of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4, whose own
terms are those of a GPT with dropout. ``tests/plan/test_activations.py`` holds them against the tensors that autograd
saves in real models, and the peaks against a count of live tensors.

Every number is in bytes for one micro-batch on one rank; e stands for the bytes of an element of the compute dtype.
"""

from dataclasses import dataclass
from typing import Literal

from shardglass.errors import InvariantError
from shardglass.options import DTYPE_BYTES
from shardglass.plan.model import Geometry

Attention = Literal["sdpa", "eager"]
"""The kernels told apart: fused ones (sdpa, flash) keep no scores, eager attention keeps them twice."""

ATTENTIONS: tuple[Attention, ...] = ("sdpa", "eager")

FP32, INT64 = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What goes through the model at once.

    Attributes:
        batch: Sequences.
        length: Tokens of each, padding included.
        dtype: The compute dtype.
        attention: Which kernel.
        recomputes: Gradient checkpointing: a block keeps its input alone and runs again in backward.
        is_padded: Sequences differ in length, so that attention is given a mask; a mask keeps fused kernels from
            sharing key heads among query heads (source: ``use_gqa_in_sdpa`` of transformers).
        on_cuda: Whether flash attention's backward runs, which sums the queries' gradient in fp32.
    """

    batch: int
    length: int
    dtype: str
    attention: Attention = "sdpa"
    recomputes: bool = False
    is_padded: bool = False
    on_cuda: bool = True

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            InvariantError: No tokens, or an unknown kernel.
        """
        if self.batch < 1 or self.length < 1:
            raise InvariantError(f"a micro-batch of {self.batch} × {self.length} tokens has none")
        if self.attention not in ATTENTIONS:
            raise InvariantError(f"attention is {self.attention!r}; the forms know {', '.join(ATTENTIONS)}")

    @property
    def tokens(self) -> int:
        """Tokens, padding included."""
        return self.batch * self.length

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the compute dtype."""
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes of a micro-batch's forward and backward on one rank.

    Attributes:
        kept: What all blocks keep for backward: all they saved, or their inputs under gradient checkpointing.
        head: What the last norm and the output layer's input take, the token ids and the rotary tables.
        logits: At the highest point of the loss, see ``logits_bytes``.
        recomputed: One block's activations, made again in backward; 0 without gradient checkpointing.
        backward: Gradients of activations at the highest point inside a block, see ``backward_bytes``.
    """

    kept: int
    head: int
    logits: int
    recomputed: int
    backward: int


def activations(geometry: Geometry, micro: MicroBatch) -> Activations:
    """All forms for one micro-batch."""
    block = block_bytes(geometry, micro)
    kept = block if not micro.recomputes else input_bytes(geometry, micro)
    return Activations(
        kept=geometry.num_layers * kept + mask_bytes(micro),
        head=head_bytes(geometry, micro),
        logits=logits_bytes(geometry, micro),
        recomputed=block if micro.recomputes else 0,
        backward=backward_bytes(geometry, micro),
    )


def norm_bytes(width: int, groups: int, itemsize: int) -> int:
    """RMSNorm of one token: its fp32 input (for x² and x · r), r = rsqrt(mean(x²)) per group, and x · r in e.

    Source: ``LlamaRMSNorm.forward``: ``x.to(fp32).pow(2)`` and ``x * rsqrt`` save the fp32 input once (in fp32 that is
    the residual stream itself), ``rsqrt`` its result, ``weight * x`` the normalized x.
    """
    return FP32 * width + FP32 * groups + itemsize * width


def attention_bytes(geometry: Geometry, micro: MicroBatch) -> int:
    """Attention of one token, behind its input: queries, keys and values as the kernel takes them, and its output.

    Fused: 2 e q + 2 e k, and the fp32 logarithm of the softmax's sum per head; with a mask keys and values are
    repeated for all heads and the mask is kept in e for every key (source: ``sdpa_attention_forward``). Eager: 4 e q,
    and per head and key the fp32 softmax and, in a narrower dtype, its cast (source: ``eager_attention_forward``).
    Korthikanti et al. count 5 a s for the latter, with one byte of dropout mask, which these models do not have.
    """
    e, g = micro.itemsize, geometry
    norms = norm_bytes(g.query, g.num_heads, e) + norm_bytes(g.key, g.num_kv_heads, e) if g.has_qk_norm else 0
    if micro.attention == "eager":
        per_score = FP32 + (e if e < FP32 else 0)
        return norms + 4 * e * g.query + per_score * g.num_heads * micro.length
    masked = micro.is_padded and g.num_kv_heads < g.num_heads
    keys = g.query if masked else g.key
    mask = e * micro.length if micro.is_padded else 0
    return norms + e * (2 * g.query + 2 * keys) + FP32 * g.num_heads + mask


def feed_forward_bytes(geometry: Geometry, micro: MicroBatch) -> int:
    """Feed-forward of one token, behind its input.

    Gated: gate, its activation, up and their product, 4 e f (source: ``LlamaMLP.forward``; down saves the product).
    Experts: per expert that the token goes through, its input and output, gate and up, the activation and the product,
    e (2 h + 4 f), its weight and three indices; the router's fp32 softmax, and the chosen indices (source:
    ``grouped_mm_experts_forward`` and ``Qwen3MoeTopKRouter``).
    """
    e, g = micro.itemsize, geometry
    if not g.num_experts:
        return 4 * e * g.intermediate
    per_expert = e * (2 * g.hidden + 4 * g.intermediate) + e + 3 * INT64
    return FP32 * g.num_experts + INT64 * g.num_active + g.num_active * per_expert


def block_bytes(geometry: Geometry, micro: MicroBatch) -> int:
    """All that one block saves: two norms, the input of the projections behind each, attention and feed-forward."""
    e, h = micro.itemsize, geometry.hidden
    norms = 2 * (norm_bytes(h, 1, e) + e * h)
    return micro.tokens * (norms + attention_bytes(geometry, micro) + feed_forward_bytes(geometry, micro))


def input_bytes(geometry: Geometry, micro: MicroBatch) -> int:
    """What a block keeps under gradient checkpointing: its input, e h a token (Chen et al. 2016, section 4)."""
    return micro.tokens * micro.itemsize * geometry.hidden


def mask_bytes(micro: MicroBatch) -> int:
    """The mask that all blocks share and that recomputation keeps: e per pair of tokens (eager), or a byte (fused)."""
    pairs = micro.batch * micro.length * micro.length
    if not micro.recomputes:
        return 0
    if micro.attention == "eager":
        return micro.itemsize * pairs
    return pairs if micro.is_padded else 0


def head_bytes(geometry: Geometry, micro: MicroBatch) -> int:
    """The last norm, the output layer's input, token ids and labels, and the rotary tables (once for all blocks)."""
    e, h = micro.itemsize, geometry.hidden
    per_token = norm_bytes(h, 1, e) + e * h + 2 * INT64
    return micro.tokens * per_token + 2 * e * micro.length * geometry.head_dim


def logits_bytes(geometry: Geometry, micro: MicroBatch) -> int:
    """The loss at its highest: three fp32 tensors of tokens × vocabulary, or the last norm's backward if that is more.

    Source: ``ForCausalLMLoss`` casts the logits to fp32; ``cross_entropy`` saves their log-softmax. In backward that
    one, its gradient and the gradient of the logits are alive together: 12 bytes a logit in any dtype. In forward there
    were at most e + 8.
    """
    of_norm = norm_backward_bytes(geometry.hidden, micro.itemsize)
    return micro.tokens * max(3 * FP32 * geometry.vocabulary, of_norm)


def norm_backward_bytes(width: int, itemsize: int) -> int:
    """Gradients of one token in the backward of RMSNorm: three in fp32, a fourth for the cast of a narrow dtype."""
    return (4 if itemsize < FP32 else 3) * FP32 * width


def backward_bytes(geometry: Geometry, micro: MicroBatch) -> int:
    """Gradients of activations at the highest point inside a block, above what the block had saved.

    Beside the residual stream's gradient and its new part, 2 e h, one of these. Feed-forward: while the product's
    gradient becomes those of its two factors, three of e f are alive and the product is freed: 2 e f; with experts per
    chosen one, and the gathered rows with their sum. Attention: gradients of its output, queries, keys and values (and
    on CUDA the fp32 sum of the queries'), or of the scores (eager: in fp32 the incoming one and the new one, the cast
    softmax is freed), less what feed-forward has freed by then. The norm of the queries: less what attention has freed
    too.
    """
    e, g = micro.itemsize, geometry
    feed_forward = feed_forward_bytes(g, micro)
    if g.num_experts:
        in_feed_forward = g.num_active * e * 2 * (g.intermediate + g.hidden) + e * g.hidden
    else:
        in_feed_forward = 2 * e * g.intermediate
    if micro.attention == "eager":
        wide = 2 * FP32 - (e if e < FP32 else 0)
        in_attention = wide * g.num_heads * micro.length + 2 * e * g.query
    else:
        in_attention = e * (2 * g.query + 2 * g.key) + (FP32 * g.query if micro.on_cuda else 0)
    before_attention = feed_forward + e * g.hidden
    highest = max(in_feed_forward, in_attention - before_attention)
    if g.has_qk_norm:
        before_norm = before_attention + norm_bytes(g.hidden, 1, e) + e * (2 * g.query + 2 * g.key)
        highest = max(highest, norm_backward_bytes(g.query, e) + e * g.query - before_norm)
    return micro.tokens * (2 * e * g.hidden + highest)

"""A model without its weights: what a plan must know of it.

Owns reading parameters, groups and sizes off a model on torch's meta device. Leaves finding its config to
``model_config``, and every number that follows to ``plan``.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Trainer

from shardglass.engine.units import build_units, dtype_name, param_specs
from shardglass.errors import ModelError
from shardglass.hf.model_config import FoundConfig, first_line
from shardglass.plan.model import Geometry, ModelFacts


def facts_of(found: FoundConfig, *, dtype: str, num_groups: int = 2, attention: str | None = None) -> ModelFacts:
    """What a plan must know of a model, read off one on the meta device: no weights, any machine.

    Args:
        found: Its config.
        dtype: torch's name of the dtype that the run computes in.
        num_groups: 1 group of all parameters, or 2 as the Trainer makes them.
        attention: The attention kernel, as transformers names it; None takes its default.

    Raises:
        ModelError: Transformers cannot make a causal language model of this config.
    """
    model = _on_meta(found, attention)
    specs = param_specs(build_units(model, None), group_parameters(model, num_groups), getattr(torch, dtype))
    return ModelFacts(
        name=found.name,
        model_type=str(found.config.model_type),
        source=found.source,
        params=tuple(specs),
        tied=_tied(model),
        stored_dtype=_stored_dtype(found.config),
        buffer_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        max_length=_whole(found.config, "max_position_embeddings"),
        geometry=geometry_of(model, found.config),
    )


def _on_meta(found: FoundConfig, attention: str | None) -> Any:
    given = {} if attention is None else {"attn_implementation": attention}
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(found.config, **given)
    except Exception as error:  # whatever the code of some model raises for its own config
        raise ModelError(
            f"{found.name}: transformers makes no causal language model of it: {first_line(error)}"
        ) from error


def group_parameters(model: nn.Module, num_groups: int) -> torch.optim.Optimizer:
    """An optimizer with the groups that a run will have; it takes no step.

    One group is what a config with an ``optimizer`` section means. Otherwise the Trainer puts matrices in the first
    group, and biases and norms, which do not decay, in the second (source: ``Trainer.create_optimizer``).
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if num_groups == 1:
        return torch.optim.SGD([p for _, p in named], lr=0.0)
    # The method reads nothing of the Trainer.
    decays = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    groups = [[p for name, p in named if name in decays], [p for name, p in named if name not in decays]]
    return torch.optim.SGD([{"params": params} for params in groups], lr=0.0)


def _tied(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """(second name, first name) of every tied parameter."""
    first: dict[int, str] = {}
    pairs = []
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) in first:
            pairs.append((name, first[id(p)]))
        else:
            first[id(p)] = name
    return tuple(pairs)


def _stored_dtype(config: Any) -> str:
    """The dtype of the checkpoint's weights; fp32 if the config does not say, as transformers takes it."""
    stored = getattr(config, "dtype", None)
    if isinstance(stored, torch.dtype):
        return dtype_name(stored)
    return str(stored) if stored else "float32"


def _whole(config: Any, key: str) -> int | None:
    value = getattr(config, key, None)
    return value if isinstance(value, int) else None


# ---- sizes that activations follow from ----

_ATTENTION = frozenset(f"self_attn.{p}_proj.weight" for p in "qkvo")
_BIASES = frozenset(f"self_attn.{p}_proj.bias" for p in "qkvo")
_QK_NORMS = frozenset({"self_attn.q_norm.weight", "self_attn.k_norm.weight"})
_NORMS = frozenset({"input_layernorm.weight", "post_attention_layernorm.weight"})
_GATED = frozenset({"mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"})
_EXPERTS = frozenset({"mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"})


def geometry_of(model: Any, config: Any) -> Geometry | None:
    """The sizes of a decoder whose blocks have the one form that ``plan.activations`` knows; None for any other.

    It is known by the parameters of its blocks, all alike, and by its norms being those of Llama.
    """
    blocks = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        return None
    shapes = [{name: tuple(p.shape) for name, p in block.named_parameters()} for block in blocks]
    first = shapes[0]
    feed_forward = _EXPERTS if "mlp.gate.weight" in first else _GATED
    needed = _ATTENTION | _NORMS | feed_forward
    if any(other != first for other in shapes) or not needed <= first.keys() <= needed | _BIASES | _QK_NORMS:
        return None
    heads, head_dim = _whole(config, "num_attention_heads"), None
    head = model.get_output_embeddings()
    if heads is not None and first["self_attn.q_proj.weight"][0] % heads == 0:
        head_dim = first["self_attn.q_proj.weight"][0] // heads
    if heads is None or head_dim is None or head is None or not _norms_like_llamas(blocks[0], first, head_dim):
        return None
    return Geometry(
        num_layers=len(blocks),
        hidden=first["self_attn.q_proj.weight"][1],
        num_heads=heads,
        num_kv_heads=first["self_attn.k_proj.weight"][0] // head_dim,
        head_dim=head_dim,
        intermediate=first["mlp.experts.down_proj"][2] if feed_forward is _EXPERTS else first["mlp.up_proj.weight"][0],
        vocabulary=head.weight.shape[0],
        has_qk_norm=first.keys() >= _QK_NORMS,
        num_experts=first["mlp.experts.down_proj"][0] if feed_forward is _EXPERTS else 0,
        num_active=(_whole(config, "num_experts_per_tok") or 1) if feed_forward is _EXPERTS else 0,
    )


def _norms_like_llamas(block: nn.Module, shapes: Mapping[str, tuple[int, ...]], head_dim: int) -> bool:
    """Whether norms are RMSNorms as Llama has them (Gemma's scale in fp32), those of queries and keys head by head."""
    names = [type(module).__name__ for module in block.modules() if type(module).__name__.endswith("Norm")]
    by_head = all(shapes[name] == (head_dim,) for name in _QK_NORMS if name in shapes)
    return by_head and all(name.endswith("RMSNorm") and not name.startswith("Gemma") for name in names)

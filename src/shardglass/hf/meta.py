"""A model without its weights: from a preset, a config file, a folder or the hub to what a plan must know.

Owns finding the config, its checks, and reading parameters, groups and sizes off a model on torch's meta device. Leaves
every number that follows from them to ``plan``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Trainer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shardglass.engine.units import build_units, dtype_name, param_specs
from shardglass.errors import ModelError, suggestion
from shardglass.json_text import likely_cause, read_text
from shardglass.plan.model import Geometry, ModelFacts
from shardglass.plan.presets import preset_config, preset_names

NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
"""Keys without which a config's class takes those of its smallest or first model, in silence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundConfig:
    """A model's config.

    Attributes:
        name: What the user called the model.
        source: "preset", "file", "folder" or "hub".
        config: The config, as transformers has it.
    """

    name: str
    source: str
    config: Any


def find_config(name: str, *, cache_dir: str | None = None, trust_remote_code: bool = False) -> FoundConfig:
    """The config of a model that is named as on the command line.

    Args:
        name: A preset, a ``config.json``, a folder that holds one, or a name on the hub.
        cache_dir: Where downloads are kept.
        trust_remote_code: Run code that comes with the model; only if the user asked.

    Raises:
        ModelError: There is none, it cannot be read, or its model type is unknown.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{name}: this folder has no config.json; give the folder of a Hugging Face model")
        return FoundConfig(
            name=name, source="folder", config=_config_of(path / "config.json", trust_remote_code=trust_remote_code)
        )
    if path.is_file():
        return FoundConfig(name=name, source="file", config=_config_of(path, trust_remote_code=trust_remote_code))
    preset = preset_config(name)
    if preset is not None:
        return FoundConfig(name=name.lower(), source="preset", config=_made(preset, name))
    if path.is_absolute() or name.startswith(("./", "../", "~")) or name.endswith(".json") or name.count("/") > 1:
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ModelError(f"{name}: there is no such file or folder{suggestion(path.name, beside)}")
    if "/" not in name:
        raise ModelError(
            f"{name}: no preset has this name{suggestion(name.lower(), preset_names())}; presets are "
            f"{', '.join(preset_names())}; a name on the hub is written owner/name"
        )
    try:
        config = AutoConfig.from_pretrained(name, cache_dir=cache_dir, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        hint = suggestion(name.rpartition("/")[2].lower(), preset_names())
        raise ModelError(f"{name}: its config cannot be read from the hub: {_first_line(error)}{hint}") from None
    return FoundConfig(name=name, source="hub", config=config)


def _config_of(path: Path, *, trust_remote_code: bool) -> Any:
    """The config of a file, checked."""
    text = read_text(path, ModelError, missing="")
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        cause = likely_cause(text, error, by_text=(), by_message=())
        raise ModelError(f"{path}:{error.lineno}:{error.colno}: not JSON: {cause}") from None
    if not isinstance(tree, dict):
        raise ModelError(f"{path}: not a model's config: it must be an object")
    if trust_remote_code and "auto_map" in tree:
        try:
            return AutoConfig.from_pretrained(path.parent, trust_remote_code=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelError(f"{path}: {_first_line(error)}") from None
    return _made(tree, str(path))


def _made(tree: Mapping[str, Any], where: str) -> Any:
    """The config object of a parsed ``config.json``.

    Raises:
        ModelError: No or an unknown model type, keys that are missing, or values that its class refuses.
    """
    kind = tree.get("model_type")
    if not isinstance(kind, str):
        raise ModelError(f'{where}: no "model_type"; it says which class of transformers the model is, such as "qwen2"')
    if kind not in CONFIG_MAPPING:
        remote = "; it brings its own code: --trust-remote-code runs it" if "auto_map" in tree else ""
        raise ModelError(
            f"{where}: transformers knows no model type {kind!r}{suggestion(kind, CONFIG_MAPPING)}{remote}"
        )
    cls = CONFIG_MAPPING[kind]
    missing = [key for key in NEEDED if _is_needed(cls, key) and not _gives(cls, tree, key)]
    if missing:
        raise ModelError(f"{where}: without {', '.join(missing)} the size of the model is not known; add them")
    try:
        return cls.from_dict(dict(tree))
    except Exception as error:  # a config class of transformers raises whatever its checks raise
        raise ModelError(f"{where}: {cls.__name__} refuses it: {_first_line(error)}") from error


def _is_needed(cls: Any, key: str) -> bool:
    """Whether a config class has a value of its own for a key, under any name; models inside it do not count."""
    return isinstance(getattr(cls(), key, None), int)


def _gives(cls: Any, tree: Mapping[str, Any], key: str) -> bool:
    """Whether a file gives a key under its general name or the class's own."""
    return tree.get(key) is not None or tree.get(cls.attribute_map.get(key, key)) is not None


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
            f"{found.name}: transformers makes no causal language model of it: {_first_line(error)}"
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


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

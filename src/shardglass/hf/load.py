"""Model and tokenizer from a folder or the hub.

Owns the checks that need no weights, and the load with the checkpoint's own numbers. Leaves casting to the engine.
"""

import logging
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from shardglass.errors import ModelError, suggestion
from shardglass.hf.mistakes import THEIRS, flag_meant, one_line

_ANY_TEXT = "The quick brown fox, 0123"
"""Some of it is in every vocabulary."""

log = logging.getLogger(__name__)


def check_model_path(name: str) -> None:
    """Refuse a local path that holds no model, before anything is loaded.

    Raises:
        ModelError: The folder does not exist (with the nearest name beside it), or has no config.json or no weights.
    """
    looks_local = os.path.sep in name.rstrip(os.path.sep) and (
        name.startswith((".", "~", os.path.sep)) or name.count(os.path.sep) > 1
    )
    path = Path(name).expanduser()
    if not path.exists():
        if looks_local or path.parent.is_dir() and path.parent != Path():
            beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            raise ModelError(f"--model_name_or_path: {name} does not exist{suggestion(path.name, beside)}")
        return
    if not path.is_dir():
        raise ModelError(f"--model_name_or_path: {name} is a file; give the folder that holds config.json")
    if not (path / "config.json").is_file():
        raise ModelError(f"--model_name_or_path: {name} has no config.json; give the folder of a Hugging Face model")
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise ModelError(f"--model_name_or_path: {name} has a config.json but no weights (*.safetensors)")


def load_config_of(name: str, *, cache_dir: str | None, trust_remote_code: bool, gguf_file: str | None = None) -> Any:
    """The model's config, no weights; from the head of a GGUF file if one is named.

    Raises:
        ModelError: It cannot be read, or its model type is unknown.
    """
    try:
        given = {} if gguf_file is None else {"gguf_file": gguf_file}
        return AutoConfig.from_pretrained(name, cache_dir=cache_dir, trust_remote_code=trust_remote_code, **given)
    except THEIRS as error:
        if not Path(name).expanduser().exists():
            raise ModelError(_nowhere(name, error)) from error
        raise ModelError(f"--model_name_or_path: the config of {name} cannot be read: {one_line(error)}") from error


def load_tokenizer(name: str, *, cache_dir: str | None, trust_remote_code: bool) -> Any:
    """The model's tokenizer.

    Raises:
        ModelError: There is none.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name, cache_dir=cache_dir, trust_remote_code=trust_remote_code)
    except THEIRS as error:
        raise ModelError(f"--model_name_or_path: the tokenizer of {name} cannot be read: {one_line(error)}") from error
    ids = tokenizer(_ANY_TEXT, add_special_tokens=False, verbose=False)["input_ids"]
    if not set(ids) - {tokenizer.unk_token_id}:
        # transformers makes a tokenizer without vocabulary where it finds no file of one.
        raise ModelError(
            f"--model_name_or_path: {name} has no tokenizer files ({_tokenizer_files(tokenizer)}); copy them there "
            "from the model that it was made from"
        )
    return tokenizer


def load_model(name: str, *, cache_dir: str | None, trust_remote_code: bool, **options: Any) -> Any:
    """The model on the CPU, by default in the dtype of its checkpoint, so that master weights keep every bit of it.

    Args:
        name: A folder or a hub id.
        cache_dir: Where downloads are kept.
        trust_remote_code: Run code that comes with the model; only if the user asked.
        options: Further arguments of ``from_pretrained``, such as ``attn_implementation``; None counts as absent.

    Raises:
        ModelError: It cannot be loaded, or tensors are missing or of another shape; all are named.
    """
    given = {"dtype": "auto"} | {key: value for key, value in options.items() if value is not None}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            cache_dir=cache_dir,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **given,
        )
    except THEIRS as error:
        flag = flag_meant(str(error), {key: value for key, value in options.items() if value is not None})
        raise ModelError(f"{flag or f'--model_name_or_path: {name} cannot be loaded'}: {one_line(error)}") from error
    model, info = loaded
    missing = sorted(info.get("missing_keys", ()))
    mismatched = [str(row) for row in info.get("mismatched_keys", ())]
    if missing or mismatched:
        raise ModelError(
            f"--model_name_or_path: {name} does not fill the model: missing {_listed(missing)}; of another shape "
            f"{_listed(mismatched)}. Training would start from random numbers there"
        )
    unexpected = sorted(info.get("unexpected_keys", ()))
    if unexpected:
        log.warning("%s has tensors the model does not use: %s", name, _listed(unexpected))
    return model


def prepare_for_training(model: Any, tokenizer: Any, *, recomputes: bool) -> None:
    """Check that tokens fit the embedding, and switch the cache off where checkpointing recomputes.

    Raises:
        ModelError: The tokenizer has ids that the embedding does not have.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens and the model's embedding {rows} rows; use the tokenizer of "
            "the model, or resize the embedding and save the model first"
        )
    if recomputes:
        model.config.use_cache = False  # a cache would be filled twice


def dtype_of(model: torch.nn.Module) -> str:
    """Name of the dtype of the most parameter elements."""
    count: dict[str, int] = {}
    for p in model.parameters():
        name = str(p.dtype).removeprefix("torch.")
        count[name] = count.get(name, 0) + p.numel()
    return max(count, key=lambda name: count[name])


def _nowhere(name: str, error: Exception) -> str:
    """What to say of a name that is no folder here and no model on the hub."""
    beside = [path.name for path in Path.cwd().iterdir() if path.is_dir()]
    here = f"--model_name_or_path: there is no folder {name}{suggestion(name, beside)} in {Path.cwd()}"
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if any(isinstance(cause, LocalEntryNotFoundError | OfflineModeIsEnabled) for cause in causes):
        return f"{here}, and the hub, where it could be a model's name, cannot be reached"
    return f"{here}, and the hub has no such model for you: {one_line(error)}"


def _tokenizer_files(tokenizer: Any) -> str:
    """The files that a tokenizer of this class is read from."""
    return " or ".join(dict.fromkeys(["tokenizer.json", *sorted(tokenizer.vocab_files_names.values())]))


def _listed(names: list[str], most: int = 5) -> str:
    if not names:
        return "nothing"
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

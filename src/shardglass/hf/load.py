"""Model and tokenizer from a folder or the hub.

Owns the checks that need no weights, and the load with the checkpoint's own numbers. Leaves casting to the engine.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from shardglass.checkpoint.weight_files import SAFETENSORS
from shardglass.errors import ModelError, suggestion
from shardglass.hf.mistakes import OF_A_FILE, THEIRS, flag_meant, one_line
from shardglass.hf.model_files import PICKLED, check_file, gguf_path, hub_options, weight_files
from shardglass.words import IN_PYTHON, Words

_ANY_TEXT = "The quick brown fox, 0123"
"""Some of it is in every vocabulary."""

log = logging.getLogger(__name__)


def check_model_path(
    name: str, *, words: Words = IN_PYTHON, subfolder: str | None = None, gguf_file: str | None = None
) -> None:
    """Refuse a local path that holds no model, before anything is loaded.

    Args:
        name: A folder or a hub id.
        words: How the message names arguments.
        subfolder: Where in it the model is.
        gguf_file: The file that holds config and weights.

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
            raise ModelError(f"{words.model}: {name} does not exist{suggestion(path.name, beside)}")
        return
    if not path.is_dir():
        if path.suffix == ".gguf" and words is IN_PYTHON:
            raise ModelError(f"{words.model}: {name} is a file; give its folder, and gguf_file={path.name!r}")
        raise ModelError(f"{words.model}: {name} is a file; give the folder that holds config.json")
    folder = path / (subfolder or "")
    if not folder.is_dir():
        raise ModelError(f"{words.model}: {name} has no folder {subfolder}{suggestion(str(subfolder), _names(path))}")
    if gguf_file is not None:
        if not (folder / gguf_file).is_file() and not Path(gguf_file).is_file():
            beside = [file for file in _names(folder) if file.endswith(".gguf")]
            raise ModelError(f"{words.model}: {folder} has no file {gguf_file}{suggestion(gguf_file, beside)}")
        return
    if not (folder / "config.json").is_file():
        raise ModelError(f"{words.model}: {folder} has no config.json; give the folder of a Hugging Face model")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ModelError(f"{words.model}: {folder} has a config.json but no weights (*.safetensors)")


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def load_config_of(
    name: str, *, words: Words = IN_PYTHON, trust_remote_code: bool, gguf_file: str | None = None, **hub: Any
) -> Any:
    """The model's config, no weights; from the head of a GGUF file if one is named.

    Args:
        name: A folder or a hub id.
        words: How the message names arguments.
        trust_remote_code: Run code that comes with the model; only if the user asked.
        gguf_file: The GGUF file.
        hub: Where to look: ``cache_dir``, ``revision`` and so on, as ``AutoConfig`` takes them.

    Raises:
        ModelError: It cannot be read, or its model type is unknown.
    """
    given: dict[str, Any] = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **hub, **given)
    except OF_A_FILE as error:
        if gguf_file is not None and (path := gguf_path(name, gguf_file, hub_options(hub))) is not None:
            check_file(path, thoroughly=True)
        if "trust_remote_code" in str(error):
            how = words.given("trust_remote_code", value=True)
            raise ModelError(f"{words.model}: {name} brings its own code: {how} runs it, if you trust it") from error
        if not Path(name).expanduser().exists():
            raise ModelError(_nowhere(name, error, words)) from error
        raise ModelError(f"{words.model}: the config of {name} cannot be read: {one_line(error)}") from error


def load_tokenizer(name: str, *, words: Words = IN_PYTHON, cache_dir: str | None, trust_remote_code: bool) -> Any:
    """The model's tokenizer.

    Raises:
        ModelError: There is none.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name, cache_dir=cache_dir, trust_remote_code=trust_remote_code)
    except THEIRS as error:
        raise ModelError(f"{words.model}: the tokenizer of {name} cannot be read: {one_line(error)}") from error
    ids = tokenizer(_ANY_TEXT, add_special_tokens=False, verbose=False)["input_ids"]
    if not set(ids) - {tokenizer.unk_token_id}:
        # transformers makes a tokenizer without vocabulary where it finds no file of one.
        raise ModelError(
            f"{words.model}: {name} has no tokenizer files ({_tokenizer_files(tokenizer)}); copy them there "
            "from the model that it was made from"
        )
    return tokenizer


def load_model(
    name: str,
    *,
    words: Words = IN_PYTHON,
    trust_remote_code: bool,
    **options: Any,
) -> Any:
    """The model on the CPU, by default in the dtype of its checkpoint, so that master weights keep every bit of it.

    Args:
        name: A folder or a hub id.
        words: How the message names arguments.
        trust_remote_code: Run code that comes with the model; only if the user asked.
        options: Further arguments of ``from_pretrained``, such as ``cache_dir`` and ``attn_implementation``; None
            counts as absent.

    Raises:
        ModelError: It cannot be loaded, or tensors are missing or of another shape; all are named.
    """
    options = {key: value for key, value in options.items() if value is not None}
    files = files_to_load(name, options)
    for file in files:
        check_file(file)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **{"dtype": "auto", **options},
        )
    except OF_A_FILE as error:
        for file in files:
            check_file(file, thoroughly=True)
        if not isinstance(error, THEIRS):
            raise
        meant = flag_meant(str(error), options, words)
        raise ModelError(f"{meant or f'{words.model}: {name} cannot be loaded'}: {one_line(error)}") from error
    model, info = loaded
    _check_filled(name, info, words)
    return model


def files_to_load(name: str, options: Mapping[str, Any]) -> list[Path]:
    """The files that ``from_pretrained`` reads the weights from; none where it says itself that there are none.

    Raises:
        ModelError: An index is broken.
    """
    hub, gguf_file = hub_options(options), options.get("gguf_file")
    if gguf_file is not None:
        path = gguf_path(name, gguf_file, hub)
        return [] if path is None else [path]
    return weight_files(name, SAFETENSORS + PICKLED, hub, options.get("variant")) or []


def _check_filled(name: str, info: Mapping[str, Any], words: Words) -> None:
    """See that the files filled the whole model, and say once what it does not use.

    Raises:
        ModelError: They did not.
    """
    missing = sorted(info.get("missing_keys", ()))
    mismatched = [str(row) for row in info.get("mismatched_keys", ())]
    if missing or mismatched:
        raise ModelError(
            f"{words.model}: {name} does not fill the model: missing {_listed(missing)}; of another shape "
            f"{_listed(mismatched)}. Training would start from random numbers there"
        )
    unexpected = sorted(info.get("unexpected_keys", ()))
    if unexpected:
        log.warning("%s has tensors the model does not use: %s", name, _listed(unexpected))


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


def _nowhere(name: str, error: Exception, words: Words) -> str:
    """What to say of a name that is no folder here and no model on the hub."""
    beside = [path.name for path in Path.cwd().iterdir() if path.is_dir()]
    here = f"{words.model}: there is no folder {name}{suggestion(name, beside)} in {Path.cwd()}"
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

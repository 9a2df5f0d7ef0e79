"""A model that no rank loads whole.

Owns the choice of how its values come, and the model without them. Leaves files to ``weight_files``, what a hollow
parameter is to ``engine.sources``, and the values' way into the shards to the engine.

[Note: two ways] Where the files have every parameter under the model's own name and shape, each rank reads its own
slices of them. Otherwise (transformers renames or fuses tensors of this model type, the weights are in pickled
``.bin`` files or a GGUF file, the model's heads are new) rank 0 loads the model as transformers does, the others have
it hollow, and the engine spreads it unit by unit: rank 0 needs the room for all of it, the others for their shards
and one unit.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from shardglass.checkpoint.weight_files import DTYPES, SAFETENSORS, FileWeights, StoredTensor, stored_tensors
from shardglass.engine.sources import hollow_out, note_source
from shardglass.errors import ModelError
from shardglass.hf.load import check_model_path, files_to_load, load_config_of, load_model
from shardglass.hf.mistakes import THEIRS, flag_meant, one_line
from shardglass.hf.model_files import check_file, hub_options, weight_files
from shardglass.hf.open_options import OF_FILES, check_device, check_name, check_options
from shardglass.words import IN_PYTHON, Words

log = logging.getLogger(__name__)


def open_model(
    name: str | os.PathLike[str],
    *,
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
    device: torch.device | str | int | None = None,
    is_main: bool | None = None,
    **options: Any,
) -> Any:
    """The model without values of its parameters; ``shard`` brings them. Every rank calls it.

    Args:
        name: A folder or a hub id.
        cache_dir: Where downloads are kept.
        trust_remote_code: Run code that comes with the model; only if the user asked.
        device: Where it is going to be; None is this rank's GPU, or the CPU where there is none.
        is_main: Whether this is rank 0; None asks torch.distributed, and is every process as long as that is not
            initialised.
        options: As ``from_pretrained`` takes them: ``revision``, ``token``, ``local_files_only``, ``subfolder``,
            ``variant``, ``gguf_file``, ``code_revision``, ``dtype`` and ``attn_implementation``; None counts as absent.

    Returns:
        The model; once it is sharded it has the numbers that ``from_pretrained`` gives.

    Raises:
        ModelError: It cannot be opened; says why.
        UsageError: An argument is none that can be used, or an option is not taken; says what to do instead.
    """
    own = ("cache_dir", "trust_remote_code", "device", "is_main")
    name = check_name("open_model", name)
    given = check_options("open_model", {"cache_dir": cache_dir, **options}, own, OF_FILES)
    place = check_device("open_model", device)
    check_model_path(name, subfolder=given.get("subfolder"), gguf_file=given.get("gguf_file"))
    if is_main is None:
        is_main = not dist.is_initialized() or dist.get_rank() == 0
    return open_hollow(name, IN_PYTHON, place, is_main=is_main, trust_remote_code=trust_remote_code, **given)


def open_hollow(
    name: str, words: Words, device: torch.device, *, is_main: bool, trust_remote_code: bool, **options: Any
) -> Any:
    """What ``open_model`` does once its arguments are checked.

    Args:
        name: A folder or a hub id.
        words: How messages name arguments.
        device: Where it is going to be.
        is_main: Whether this is rank 0.
        trust_remote_code: Run code that comes with the model.
        options: As ``open_model`` takes them.
    """
    given = {key: value for key, value in options.items() if value is not None}
    hub = hub_options(given)
    of_code = {"code_revision": given["code_revision"]} if "code_revision" in given else {}
    config = load_config_of(
        name, words=words, trust_remote_code=trust_remote_code, gguf_file=given.get("gguf_file"), **hub, **of_code
    )
    stored = _stored(name, config, given, is_main=is_main)
    dtype = dtype_of_parameters(given, config, stored or {})
    model = _hollow_model(name, config, dtype, words, trust_remote_code=trust_remote_code, given=given)
    reason = _NO_FILES if stored is None else _misfit(model, stored, words)
    dtypes = {key: p.dtype for key, p in model.named_parameters()}
    hollow_out(model, device)
    if reason is None and stored is not None:
        _fill_buffers(model, stored)
        note_source(model, FileWeights(stored, dtypes))
        if is_main:
            _tell_unused(name, model, stored)
    elif is_main:
        log.warning("%s: %s, so rank 0 loads it whole and spreads it", name, reason)
        loaded = load_model(name, words=words, trust_remote_code=trust_remote_code, **options)
        for key, buffer in _persistent_buffers(loaded).items():
            model.get_buffer(key).copy_(buffer)  # rank 0's are spread too
        note_source(model, _LoadedWeights(loaded))
    to_device(model, device)
    return model


_NO_FILES = "its weights are in no safetensors files of its own names"
"""Why rank 0 loads a model that ``_stored`` finds nothing for."""


def to_device(model: nn.Module, device: torch.device) -> None:
    """Move the buffers of a model whose parameters are hollow."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.to(device)


class _LoadedWeights:
    """Parameters of a model that rank 0 loaded, which are let go of one by one as they are read."""

    on_every_rank = False
    identity = "what rank 0 loaded"

    def __init__(self, model: Any) -> None:
        self._params = {name: param.detach() for name, param in model.named_parameters()}

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements ``start`` to ``stop`` of a flattened parameter, all of them in one call."""
        flat: torch.Tensor = self._params.pop(name).reshape(-1)
        return flat[start:stop]


def _stored(name: str, config: Any, given: Mapping[str, Any], *, is_main: bool) -> dict[str, StoredTensor] | None:
    """The tensors of safetensors files that have the model's own names; None if rank 0 has to load it.

    Raises:
        ModelError: A file is broken.
    """
    hub, variant = hub_options(given), given.get("variant")
    files = None if "gguf_file" in given else weight_files(name, SAFETENSORS, hub, variant)
    if files is None and (is_main or Path(name).is_dir()):  # what rank 0 alone reads is downloaded there alone
        for file in files_to_load(name, given):
            check_file(file)
    if files is None:
        return None
    for file in files:
        check_file(file)
    return None if get_checkpoint_conversion_mapping(config.model_type) else stored_tensors(files)


def dtype_of_parameters(options: dict[str, Any], config: Any, stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """The dtype of the parameters as ``from_pretrained`` chooses it: asked for, the config's, or the checkpoint's.

    Takes ``dtype`` out of the options.

    Raises:
        ModelError: There is no such dtype.
    """
    wanted = options.pop("dtype", "auto")
    if isinstance(wanted, torch.dtype):
        return wanted
    if wanted != "auto":
        found = getattr(torch, str(wanted), None)
        if not isinstance(found, torch.dtype):
            raise ModelError(f"dtype {wanted!r}: no dtype of torch")
        return found
    if isinstance(getattr(config, "dtype", None), torch.dtype):
        return config.dtype  # type: ignore[no-any-return]
    return next((DTYPES[t.dtype] for t in stored.values() if t.dtype in DTYPES), torch.float32)


def empty_model(what: str, config: Any, dtype: torch.dtype, words: Words = IN_PYTHON, **options: Any) -> Any:
    """The model with parameters on the meta device and buffers that are computed.

    Raises:
        ModelError: It cannot be made; says why.
    """
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    except THEIRS as error:
        meant = flag_meant(str(error), options, words)
        raise ModelError(f"{meant or f'{what} cannot be made'}: {one_line(error)}") from error
    model.tie_weights()  # that it was tied is lost where parameters were put on the meta device one by one
    return model


def _hollow_model(
    name: str, config: Any, dtype: torch.dtype, words: Words, *, trust_remote_code: bool, given: Mapping[str, Any]
) -> Any:
    """As ``from_pretrained`` gives it, but for the values."""
    options = {"trust_remote_code": trust_remote_code}
    options |= {key: given[key] for key in ("attn_implementation",) if key in given}
    options |= code_options(config, given, trust_remote_code=trust_remote_code)
    model = empty_model(f"{words.model}: {name}", config, dtype, words, **options)
    if model.can_generate():
        try:
            model.generation_config = GenerationConfig.from_pretrained(name, **hub_options(given))
        except OSError:
            log.debug("%s has no generation config", name)
    return model.eval()


def code_options(config: Any, given: Mapping[str, Any], *, trust_remote_code: bool) -> dict[str, Any]:
    """Which revision of a model's own code to run, as ``from_pretrained`` chooses it: that of the code, or the model's.

    Nothing for a model of transformers, whose class takes no such option.
    """
    own = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if own is None or not trust_remote_code:
        return {}
    elsewhere = "--" in str(own)  # the code is in another repository, which has revisions of its own
    revision = given.get("code_revision") or (None if elsewhere else given.get("revision"))
    return {} if revision is None else {"code_revision": revision}


def _misfit(model: Any, stored: Mapping[str, StoredTensor], words: Words) -> str | None:
    """Why the files do not give this model as they are: the first parameter or buffer that differs; None if they do.

    Raises:
        ModelError: Tensors have other shapes; names the first five, with both.
    """
    kept = {**dict(model.named_parameters()), **_persistent_buffers(model)}
    other = [
        f"{name} has shape {list(stored[name].shape)} in the files and {list(tensor.shape)} in the model"
        for name, tensor in kept.items()
        if name in stored and stored[name].shape != tuple(tensor.shape)
    ]
    if other:
        shown = "; ".join(other[:5]) + (f"; and {len(other) - 5} more" if len(other) > 5 else "")
        raise ModelError(f"{words.model}: config.json and weights are not of one model: {shown}")
    for name, tensor in kept.items():
        found = stored.get(name)
        if found is None:
            return f"{name} is not in its files"
        if found.dtype not in DTYPES or found.nbytes != tensor.numel() * DTYPES[found.dtype].itemsize:
            return f"{name} is stored as {found.dtype}"
    return None


def _persistent_buffers(model: Any) -> dict[str, torch.Tensor]:
    keys = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in keys}


def _fill_buffers(model: Any, stored: Mapping[str, StoredTensor]) -> None:
    """Read the buffers that a checkpoint keeps; the others were computed."""
    kept = _persistent_buffers(model)
    source = FileWeights(stored, {name: buffer.dtype for name, buffer in kept.items()})
    for name, buffer in kept.items():
        buffer.copy_(source.read(name, 0, buffer.numel()).view(buffer.shape))


def _tell_unused(name: str, model: Any, stored: Mapping[str, StoredTensor]) -> None:
    """Say once which tensors the model does not use."""
    used = model.state_dict(keep_vars=True).keys()
    unused = sorted(key for key in stored if key not in used and not key.endswith("rotary_emb.inv_freq"))
    if unused:
        shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
        log.warning("%s has tensors the model does not use: %s", name, shown)

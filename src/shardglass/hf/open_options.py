"""What ``open_model`` and ``new_model`` take of what transformers takes.

Owns the two lists and the refusal of everything else by name, before anything is loaded. Leaves what the options do to
transformers.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch

from shardglass.errors import UsageError, suggestion
from shardglass.hf.model_files import HUB

OF_FILES = (*HUB, "variant", "gguf_file", "code_revision", "dtype", "torch_dtype", "attn_implementation")
"""Options of ``open_model`` that go to transformers."""

OF_A_CONFIG = ("dtype", "torch_dtype", "attn_implementation", "trust_remote_code", "code_revision")
"""Options of ``new_model`` that do."""

_ONE_DEVICE = "each rank opens the model for one device: its GPU, or the one that device= names"
_SHARDED = "shard(model, optimizer, stage=3) divides the memory over the ranks; leave it out"
_QUANTIZED = "quantized weights cannot be trained here; leave it out, and take dtype= for the dtype of the parameters"
_TOLD = "a tensor that is missing or has another shape is an error, and one that is left over is logged; leave it out"

REFUSED: Mapping[str, str] = {
    "adapter_kwargs": "adapters cannot be trained here yet; open the model that they were made for",
    "config": "the model's own config.json is read: change that file, or model.config of the model that is returned",
    "device_map": _ONE_DEVICE,
    "disable_mmap": "no file is mapped; leave it out",
    "device_mesh": _SHARDED,
    "distributed_config": _SHARDED,
    "force_download": "every rank would download it: download it anew before, with `hf download`",
    "from_flax": "convert the weights to safetensors first",
    "from_tf": "convert the weights to safetensors first",
    "fusion_config": "the modules that the model's class makes are trained; leave it out",
    "generation_config": "assign model.generation_config of the model that is returned",
    "ignore_mismatched_sizes": "open the model as it is in the files, and replace the module before shard()",
    "key_mapping": "rename the tensors in the files, or load the model whole with from_pretrained",
    "load_in_4bit": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "low_cpu_mem_usage": "no rank has the model whole anyway; leave it out",
    "max_memory": _SHARDED,
    "offload_buffers": _SHARDED,
    "offload_folder": _SHARDED,
    "offload_state_dict": _SHARDED,
    "output_loading_info": _TOLD,
    "proxies": "set HTTPS_PROXY in the environment",
    "quantization_config": _QUANTIZED,
    "resume_download": "a download goes on where it ended anyway; leave it out",
    "state_dict": "the values come from the files: save these with model.save_pretrained(folder, state_dict=...) first",
    "tp_plan": _SHARDED,
    "tp_size": _SHARDED,
    "use_auth_token": "its name is token",
    "use_flash_attention_2": "write attn_implementation='flash_attention_2'",
    "use_safetensors": "safetensors files are read where there are any; leave it out",
    "weights_only": "pickled files are read for their tensors alone; leave it out",
}
"""Options of ``from_pretrained`` that are not taken, and what to do instead."""


def check_options(
    call: str, options: Mapping[str, Any], own: tuple[str, ...], taken: tuple[str, ...]
) -> dict[str, Any]:
    """The options that were given; None counts as absent.

    Args:
        call: Name of the function.
        options: What it got by keyword beside its own arguments.
        own: Names of those.
        taken: Names of the options that go to transformers.

    Raises:
        UsageError: Names every option that is not taken, with what to do, and those that are.
    """
    given = {key: value for key, value in options.items() if value is not None}
    known = (*own, *(name for name in taken if name not in own))
    faults = [f"{name}: {REFUSED[name]}" for name in given if name not in taken and name in REFUSED]
    faults += [f"{name}: unknown{suggestion(name, known)}" for name in given if name not in (*taken, *REFUSED)]
    if faults:
        listed = "; ".join(faults)
        raise UsageError(f"{call} does not take {listed}. Beside its first argument it takes {', '.join(known)}")
    if "torch_dtype" in given:
        older = given.pop("torch_dtype")
        given.setdefault("dtype", older)
    return given


def check_name(call: str, name: object) -> str:
    """The name of a model as text, with the user's folder for ``~``.

    Raises:
        UsageError: It is no name.
    """
    if not isinstance(name, str | os.PathLike):
        raise UsageError(f"{call}({name!r}): not the name of a model; give a folder or a hub id such as 'owner/name'")
    text = os.path.expanduser(os.fspath(name))
    if not text.strip():
        raise UsageError(f"{call}({name!r}): the name is empty; give a folder or a hub id such as 'owner/name'")
    return text


def check_device(call: str, device: torch.device | str | int | None) -> torch.device:
    """The device given, or this rank's GPU, or the CPU where there is none.

    Raises:
        UsageError: There is no such device here.
    """
    if device is None:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        device = "cuda"
    try:
        chosen = torch.device(device)
        if chosen == torch.device("cuda"):
            chosen = torch.device("cuda", torch.cuda.current_device())
        torch.empty(1, device=chosen)
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"{call}(device={device!r}): cannot be used here ({reason}); give 'cpu' or 'cuda', or leave it out for "
            "this rank's GPU"
        ) from error
    if chosen.type == "meta":
        raise UsageError(f"{call}(device={device!r}): has no memory; the model comes without values on any device")
    return chosen

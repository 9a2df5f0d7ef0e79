"""What Accelerate and ``accelerate launch`` ask for beside us, read from the environment and the arguments.

Owns the words for it: which of two engines to turn off, a precision that nobody would apply, and a launch that started
fewer processes than it was asked for. Leaves when they are said to ``arguments`` and ``trainer``.
"""

from typing import Any

from accelerate.utils import parse_choice_from_env
from accelerate.utils.environment import get_int_from_env

from shardglass.words import Words

_ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed plugin", "--use_deepspeed"),
    "ACCELERATE_USE_FSDP": ("FSDP plugin", "--use_fsdp"),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM plugin", "--use_megatron_lm"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("parallelism config", "--use_parallelism_config"),
}
"""Variable → what of Accelerate's it switches on, and the flag of ``accelerate launch`` that sets it."""

_YES = ("1", "true", "yes", "y", "t", "on")
_WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Where Accelerate looks for the number of processes."""

_DTYPES = {"bf16": "bfloat16"}
"""Accelerate's word for a precision → torch's, of those that shardglass trains in."""


def other_engines(args: Any) -> list[str]:
    """Say what would make Accelerate start another engine beside ours, and which of the two to turn off."""
    faults = []
    for name in ("fsdp", "parallelism_config"):
        if getattr(args, name, None):
            faults.append(f"{name} is set, but shardglass shards the model itself: leave it out")
    for variable, (what, flag) in _ENGINES.items():
        if parse_choice_from_env(variable, "").strip().lower() in _YES:
            faults.append(
                f"Accelerate's {what} is on ({variable} in the environment), and shardglass shards the model itself: "
                f"turn Accelerate's off. Leave {flag} out of `accelerate launch`, set distributed_type to MULTI_GPU in "
                "its config file, or unset the variable"
            )
    return faults


def precision_fault(param_dtype: str, words: Words) -> str | None:
    """Say that ``accelerate launch`` asks for another precision than the run has; None if not.

    Args:
        param_dtype: torch's name of the dtype the model computes in.
        words: How the message names arguments.
    """
    asked = parse_choice_from_env("ACCELERATE_MIXED_PRECISION", "no").strip().lower()
    if asked in ("", "no") or _DTYPES.get(asked) == param_dtype:
        return None
    return (
        f"`accelerate launch` asks for mixed precision {asked} (ACCELERATE_MIXED_PRECISION in the environment), and "
        f"{words.whole} for {param_dtype}, which counts: leave it out there, or give {words.given('bf16', value=True)} "
        "here and --mixed_precision bf16 there"
    )


def lonely_note() -> str | None:
    """Say that ``accelerate launch`` was asked for several processes and started one; None if not.

    It sets an address to meet at where the number is above 1, and starts them only where it takes the machine for one
    with several GPUs.
    """
    by_accelerate = parse_choice_from_env("ACCELERATE_USE_CPU", "") != ""
    meets = parse_choice_from_env("MASTER_ADDR", "") != ""
    if not (by_accelerate and meets) or get_int_from_env(_WORLD_SIZES, 0) > 0:
        return None
    return (
        "`accelerate launch` started one process, which trains alone. For several, also on the CPU, give it "
        "--multi_gpu --num_processes N and not --cpu, or start with torchrun --nproc_per_node N"
    )

"""What this machine is and has installed, for bug reports.

Owns the facts, and the list of hardware on which anything of shardglass was ever run. Leaves their form to the command.
"""

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

from shardglass import __version__
from shardglass.hf.machine import free_host_bytes
from shardglass.plan.fit import count_of, gib

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "safetensors",
    "tokenizers",
    "numpy",
    "pydantic",
    "peft",
    "trl",
    "deepspeed",
    "bitsandbytes",
)
"""What we need, and what people run beside us."""

TESTED = (
    ("Linux on CPU, gloo, 1 to 4 processes on one machine", "tested: the whole test suite, every stage that runs"),
    ("CUDA GPUs, NCCL", "never run: no GPU yet; the code is written and not tried"),
    ("several machines", "never run"),
    ("ROCm, XPU, MPS and other accelerators; macOS and Windows", "never run; nothing is written for them"),
)
"""(hardware, what of shardglass ever ran on it)."""


def environment_rows() -> Mapping[str, list[str]]:
    """Facts by heading, a line each."""
    return {
        "shardglass": [f"{__version__}, Python {platform.python_version()}, {platform.platform()}"],
        "packages": [f"{name} {_version_of(name)}" for name in PACKAGES],
        "machine": _machine(),
        "devices": _devices(),
        "backends": _backends(),
        "tested on": [f"{hardware}: {state}" for hardware, state in TESTED],
        "so here": [_here()],
    }


def _version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "is not installed"


def _machine() -> list[str]:
    memory = psutil.virtual_memory()
    return [
        f"{platform.machine()} {_cpu_model()}, {count_of(os.cpu_count() or 1, 'core')}, "
        f"{torch.get_num_threads()} torch threads, {torch.backends.cpu.get_cpu_capability()}",
        f"RAM {gib(int(memory.total))}, {gib(free_host_bytes())} of it free for processes",
    ]


def _cpu_model() -> str:
    """The processor's name as Linux has it; else what Python knows."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "unknown processor"


def _devices() -> list[str]:
    if not torch.cuda.is_available():
        return [f"no CUDA device; torch is built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU'}"]
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            f"cuda:{index} {properties.name}, capability {properties.major}.{properties.minor}, {gib(total)}, "
            f"{gib(free)} free; CUDA {torch.version.cuda}"
        )
    return found


def _backends() -> list[str]:
    dist = torch.distributed
    if not dist.is_available():
        return ["torch.distributed is missing in this build of torch"]
    has = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return [", ".join(f"{name} {'yes' if there else 'no'}" for name, there in has.items())]


def _here() -> str:
    """What was ever tried on hardware like this."""
    if torch.cuda.is_available():
        return "a run on this machine's GPUs is the first of its kind: please report how it went"
    return "runs on this machine's CPU over gloo, as the tests do"

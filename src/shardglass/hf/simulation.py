"""A training step of the real engine on tensors without memory: its peak, with what is alive then and where.

Owns building the model and stepping it under fake tensors. Leaves counting to ``lens.moments`` and the ranks that are
not there to ``engine.links.SimulatedLinks``.

[Note: kernels] What an operator keeps for backward and what it makes meanwhile is decided by the kernel of a device.
torch without CUDA cannot even pretend to have its kernels, so it models the CPU's; the engine's collectives are those
of the planned device all the same.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from shardglass.engine.handle import Handle
from shardglass.engine.links import SimulatedLinks
from shardglass.engine.shard import shard_over
from shardglass.errors import ConfigError, ModelError, ShardglassError, UsageError
from shardglass.hf.meta import group_parameters
from shardglass.hf.model_config import FoundConfig
from shardglass.lens.moments import MomentPeaks
from shardglass.options import EngineOptions
from shardglass.plan.setup import Setup
from shardglass.plan.simulation import SimulatedMoment, Simulation
from shardglass.plan.stages import Category

MOMENTS = ("forward", "backward", "step")

MAX_NORM = 1.0
"""Gradients are clipped in the simulated step, as the Trainer does by default."""


def simulate(found: FoundConfig, setup: Setup, *, rank: int) -> Simulation:
    """Take two training steps without memory; the second, when everything the engine keeps is there, is measured.

    Args:
        found: The model's config.
        setup: The run.
        rank: Which rank.

    Raises:
        ConfigError: The dtype cannot be run.
        ModelError: The model cannot be stepped without values.
    """
    if setup.dtype == "float16":
        raise ConfigError("--simulate runs the engine, which cannot run float16 yet; plan without it")
    device = "cuda" if setup.device == "cuda" and torch.backends.cuda.is_built() else "cpu"
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(device):
        try:
            return _simulated(found, setup, rank, device)
        except ShardglassError:
            raise
        except Exception as error:  # whatever the code of some model does with values that are not there
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ModelError(f"{found.name}: its step cannot be simulated without values: {line}") from error


def _simulated(found: FoundConfig, setup: Setup, rank: int, device: str) -> Simulation:
    model = _model(found, setup)
    handle = _sharded(model, setup, rank)
    batch = _batch(setup)
    _step(handle, batch, setup)
    with MomentPeaks({**handle.tensors_by_category(), "module buffers": list(model.buffers())}) as peaks:
        _step(handle, batch, setup, peaks)
    return Simulation(
        rank=rank,
        kernels=device,
        backend=handle.backend,
        engine=_categories(handle.memory()),
        moments=tuple(
            SimulatedMoment(
                moment=name,
                bytes=peaks.at[name].bytes,
                module=peaks.at[name].module,
                categories=_categories(peaks.at[name].categories),
            )
            for name in MOMENTS
        ),
    )


def _categories(sizes: dict[str, int]) -> tuple[Category, ...]:
    return tuple(Category(name=name, bytes=size) for name, size in sizes.items())


def _model(found: FoundConfig, setup: Setup) -> Any:
    """The model in training, in the dtype that it computes in."""
    attention = "eager" if setup.attention == "eager" else "sdpa"
    dtype = getattr(torch, setup.dtype)
    model = AutoModelForCausalLM.from_config(found.config, attn_implementation=attention, dtype=dtype)
    model.config.use_cache = False
    if setup.recomputes:
        # Releases of transformers before 6 know the second name.
        recompute = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        recompute()
    return model.train()


def _sharded(model: Any, setup: Setup, rank: int) -> Handle:
    groups = group_parameters(model, setup.num_groups).param_groups
    kind = getattr(torch.optim, setup.optimizer.name, None)
    if kind is None:
        raise UsageError(f"--simulate: torch.optim has no {setup.optimizer.name}; choose another with --optimizer")
    given = setup.optimizer.groups or ({},) * len(groups)
    made = [{"params": group["params"], **options} for group, options in zip(groups, given, strict=True)]
    options = EngineOptions(
        stage=setup.stage,
        param_dtype=setup.dtype,
        reduce_dtype=setup.reduce_dtype,
        accum_dtype=setup.accum_dtype,
        prefetch_units=setup.prefetch_units,
        max_live_numel=setup.max_live_numel,
    )
    links = SimulatedLinks(rank, setup.world_size, "nccl" if setup.device == "cuda" else "gloo")
    return shard_over(links, model, kind(made), options=options)


def _batch(setup: Setup) -> dict[str, Tensor]:
    """A micro-batch; sequences of several differ in length, so they have a mask."""
    ids = torch.zeros(setup.micro_batch, setup.length, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    return batch | ({"attention_mask": torch.ones_like(ids)} if setup.micro_batch > 1 else {})


def _step(handle: Handle, batch: dict[str, Tensor], setup: Setup, peaks: MomentPeaks | None = None) -> None:
    """One optimizer step as the Trainer takes it: micro-batches, clipping, step, clearing."""
    for k in range(setup.accumulation):
        keeps = not handle.options.rules.shards_grads and k + 1 < setup.accumulation
        with handle.no_sync() if keeps else nullcontext():
            with _moment(peaks, "forward"):
                loss = handle.model(**batch).loss
            with _moment(peaks, "backward"):
                loss.backward()
            del loss
    with _moment(peaks, "step"):
        handle.clip_grad_norm_(MAX_NORM)
        handle.optimizer.step()
        handle.model.zero_grad()


def _moment(peaks: MomentPeaks | None, name: str) -> Any:
    return nullcontext() if peaks is None else peaks.moment(name)

"""The engines of the comparison: each builds the same model and optimizer, and returns a function that takes one step.

bfloat16 is what each engine's users run: autocast over fp32 weights under DDP (as the Trainer does it), a mixed
precision policy under FSDP2, bf16 weights with fp32 master weights here.
"""

import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from shardglass import EngineOptions, shard

Step = Callable[[Tensor], Tensor]
"""Token ids [batch, length] → the loss, after forward, backward, step and clearing."""

RATE = 1e-5


def load(folder: str, device: torch.device) -> nn.Module:
    """The model in fp32, rounded to bfloat16 first so that every engine starts from the same numbers."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    return model.to(device).train()


def _stepper(model: nn.Module, optimizer: torch.optim.Optimizer, *, autocast: torch.device | None = None) -> Step:
    def step(ids: Tensor) -> Tensor:
        kind = autocast.type if autocast is not None else "cpu"
        with torch.autocast(kind, torch.bfloat16, enabled=autocast is not None):
            loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def replicas(folder: str, dtype: str, device: torch.device, *, ddp: bool, sharded_states: bool = False) -> Step:
    """DDP, DDP with ZeroRedundancyOptimizer, or without any communication: the floor."""
    model = load(folder, device)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if ddp else model
    optimizer: torch.optim.Optimizer
    if sharded_states:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=RATE, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    return _stepper(wrapped, optimizer, autocast=device if dtype == "bfloat16" else None)


def fsdp2(folder: str, dtype: str, device: torch.device, *, reshard: bool) -> Step:
    """FSDP2, a group a block; parameters freed after forward or kept until backward."""
    model = load(folder, device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if dtype == "bfloat16" else None)
    for block in model.model.layers:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return _stepper(model, torch.optim.AdamW(model.parameters(), lr=RATE, fused=True))


def ours(folder: str, dtype: str, device: torch.device, *, stage: int) -> Step:
    """One of our stages."""
    model = load(folder, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    shard(model, optimizer, options=EngineOptions(stage=stage, param_dtype=dtype))
    return _stepper(model, optimizer)


def deepspeed_zero3(folder: str, dtype: str, device: torch.device) -> Step:
    """DeepSpeed ZeRO-3 as its users start it: its own defaults, torch's AdamW."""
    warnings.simplefilter("ignore")  # it calls deprecated names of torch for every parameter
    import deepspeed

    model = load(folder, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == "bfloat16"},
    }
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


FLOOR = "floor"
ENGINES: dict[str, Callable[[str, str, torch.device], Step]] = {
    FLOOR: partial(replicas, ddp=False),
    "DDP": partial(replicas, ddp=True),
    "ZeroRedundancyOptimizer": partial(replicas, ddp=True, sharded_states=True),
    "FSDP2, kept until backward": partial(fsdp2, reshard=False),
    "FSDP2, freed after forward": partial(fsdp2, reshard=True),
    "shardglass stage 0": partial(ours, stage=0),
    "shardglass stage 1": partial(ours, stage=1),
    "shardglass stage 2": partial(ours, stage=2),
    "shardglass stage 3": partial(ours, stage=3),
}
if find_spec("deepspeed") is not None:  # `make with-deepspeed`
    ENGINES["DeepSpeed ZeRO-3"] = deepspeed_zero3

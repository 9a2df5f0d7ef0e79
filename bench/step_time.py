"""Step time and memory of our stages beside DDP, interleaved in one run.

    torchrun --nproc_per_node 2 bench/step_time.py --model FOLDER [--dtype bfloat16] [--steps 5]

Every engine trains the same model from the same weights on the same random tokens. Engines take turns step by step,
so a machine that changes speed changes it for all. The floor is the same model and optimizer without any
communication. Prints a table of median seconds a step, the ratio to the floor, and the loss of the last step; the
first two steps are not counted.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from shardglass import EngineOptions, shard

Step = Callable[[torch.Tensor], float]


def load(folder: str) -> torch.nn.Module:
    """The model in fp32, rounded to bfloat16 first so that every engine starts from the same numbers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    return model.train()


def ours(folder: str, stage: int, dtype: str) -> Step:
    """One of our stages."""
    model = load(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    shard(model, optimizer, options=EngineOptions(stage=stage, param_dtype=dtype))

    def step(ids: torch.Tensor) -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def plain(folder: str, dtype: str, *, ddp: bool) -> Step:
    """DDP, or the floor without communication; bfloat16 by autocast over fp32 weights, as the Trainer does it."""
    model = load(folder)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if ddp else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(ids: torch.Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = wrapped(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def main() -> None:
    """Run all engines in turn and print the table on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    engines: dict[str, Step] = {
        "floor (no communication)": plain(args.model, args.dtype, ddp=False),
        "DDP": plain(args.model, args.dtype, ddp=True),
        **{f"stage {stage}": ours(args.model, stage, args.dtype) for stage in (0, 1, 2)},
    }
    times: dict[str, list[float]] = {name: [] for name in engines}
    losses: dict[str, float] = {}
    for k in range(args.steps + 2):
        generator = torch.Generator().manual_seed(1000 * k + rank)
        ids = torch.randint(0, 49152, (1, args.tokens), generator=generator)
        for name, step in engines.items():
            dist.barrier()
            begin = time.perf_counter()
            losses[name] = step(ids)
            if k >= 2:
                times[name].append(time.perf_counter() - begin)
    if rank == 0:
        floor = statistics.median(times["floor (no communication)"])
        table = Table(
            title=f"{args.dtype}, batch 1 x {args.tokens} tokens, {dist.get_world_size()} processes x 1 thread, "
            f"gloo, {platform.processor() or platform.machine()}, torch {torch.__version__}"
        )
        for column in ("engine", "seconds a step", "÷ floor", "min", "max", "last loss"):
            table.add_column(column, justify="left" if column == "engine" else "right")
        for name, values in times.items():
            middle = statistics.median(values)
            numbers = (f"{middle:.2f}", f"{middle / floor:.2f}", f"{min(values):.2f}", f"{max(values):.2f}")
            table.add_row(name, *numbers, f"{losses[name]:.5f}")
        Console(width=110).print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

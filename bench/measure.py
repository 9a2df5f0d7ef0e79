"""Measures one engine on every rank; started by ``compare.py`` through torchrun, a fresh process a rank.

Writes what rank 0 measured as JSON to ``--out``: seconds of each counted step (the slowest rank's), losses (the mean
over ranks), peak bytes of live tensors in one more step, and the process's peak RSS before that.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist
from engines import ENGINES

from shardglass.lens.live import LivePeak

WARM_UP = 2


def main() -> None:
    """Run one engine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True, choices=list(ENGINES))
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True, choices=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    step = ENGINES[args.engine](args.model, args.dtype, device)
    seconds, losses = [], []
    for k in range(args.steps + WARM_UP):
        ids = _tokens(k, rank, args.tokens).to(device)
        dist.barrier()
        begin = time.perf_counter()
        loss = step(ids)
        if gpu:
            torch.cuda.synchronize()
        took = torch.tensor([time.perf_counter() - begin], device=device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        dist.all_reduce(loss)
        losses.append(float(loss) / dist.get_world_size())
        if k >= WARM_UP:
            seconds.append(float(took))
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with LivePeak() as live:
        step(_tokens(args.steps + WARM_UP, rank, args.tokens).to(device))
    if rank == 0:
        result = {"seconds": seconds, "losses": losses, "live_bytes": live.peak, "rss_bytes": rss}
        args.out.write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _tokens(k: int, rank: int, length: int) -> torch.Tensor:
    """The same random tokens for every engine, others for each step and rank; ids every vocabulary has."""
    generator = torch.Generator().manual_seed(1000 * k + rank)
    return torch.randint(0, 32000, (1, length), generator=generator)


if __name__ == "__main__":
    main()

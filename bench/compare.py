"""Our stages beside their peers: step time, memory and losses in one table that names its hardware.

    make bench                        SmolLM2-135M, fp32 and bf16, 2 processes
    python bench/compare.py --model FOLDER --dtype bfloat16 --rounds 3 --steps 6 --only "stage 2" --only DDP

Engines take turns, a round of fresh processes each, so a machine that changes speed changes it for all; the floor runs
first and last in every round. The ratio to the floor is taken round by round, and the table has its median.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from engines import ENGINES, FLOOR
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "demo"))
from prepare import cache_folder, prepare_model

MIB = 1 << 20


def run_one(engine: str, dtype: str, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one engine in fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.ranks)]
        command += [str(Path(__file__).with_name("measure.py")), "--engine", engine, "--dtype", dtype, "--model", model]
        command += ["--steps", str(args.steps), "--tokens", str(args.tokens), "--out", str(out)]
        ended = subprocess.run(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
        if ended.returncode != 0:
            raise SystemExit(f"{engine} in {dtype} failed:\n{ended.stderr[-4000:]}")
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return result


def measure(dtype: str, model: str, args: argparse.Namespace, console: Console) -> dict[str, list[dict[str, Any]]]:
    """Every engine in every round; progress on the console."""
    chosen = [name for name in ENGINES if name == FLOOR or not args.only or any(o in name for o in args.only)]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    for k in range(args.rounds):
        for name in [*chosen, FLOOR]:
            found = run_one(name, dtype, model, args)
            results[name].append(found)
            middle = statistics.median(found["seconds"])
            console.print(f"{dtype}, round {k + 1} of {args.rounds}: {name}: {middle:.2f} s a step", highlight=False)
    return results


def rows(results: dict[str, list[dict[str, Any]]], rounds: int) -> list[dict[str, Any]]:
    """A row an engine: medians over rounds, the ratio to the two floors around it taken round by round."""
    floors = [
        statistics.median(results[FLOOR][2 * k]["seconds"] + results[FLOOR][2 * k + 1]["seconds"])
        for k in range(rounds)
    ]
    made = []
    for name, found in results.items():
        per_round = [statistics.median(f["seconds"]) for f in found]
        ratios = [s / floors[k // 2 if name == FLOOR else k] for k, s in enumerate(per_round)]
        made.append(
            {
                "engine": name,
                "seconds": statistics.median(per_round),
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "live_mib": max(f["live_bytes"] for f in found) / MIB,
                "rss_mib": max(f["rss_bytes"] for f in found) / MIB,
                "loss": found[0]["losses"][-1],
            }
        )
    return made


def show(made: list[dict[str, Any]], title: str, console: Console) -> None:
    """Print the table."""
    table = Table(title=title, title_justify="left")
    for column in ("engine", "s a step", "÷ floor", "min", "max", "live MiB", "RSS MiB", "last loss"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for row in made:
        table.add_row(
            row["engine"],
            f"{row['seconds']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_min']:.2f}",
            f"{row['ratio_max']:.2f}",
            f"{row['live_mib']:,.0f}",
            f"{row['rss_mib']:,.0f}",
            f"{row['loss']:.5f}",
        )
    console.print(table)


def hardware() -> str:
    """What it ran on."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}, nccl"
    names = [line.split(":", 1)[1].strip() for line in _cpu_lines() if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores of {name}, {torch.backends.cpu.get_cpu_capability()}, gloo"


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; default: SmolLM2-135M-Instruct, as the demo prepares it")
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--only", action="append", default=[], help="engines whose name has this; the floor always runs"
    )
    parser.add_argument("--json", type=Path, help="write the rows there too")
    args = parser.parse_args()
    console = Console(width=118, soft_wrap=True)
    model = args.model or str(prepare_model(cache_folder()))
    everything = {}
    for dtype in args.dtype or ["float32", "bfloat16"]:
        made = rows(measure(dtype, model, args, console), args.rounds)
        title = (
            f"{Path(model).name}, {dtype}, batch 1 × {args.tokens} tokens, {args.ranks} processes × 1 thread; "
            f"{hardware()}; torch {torch.__version__}; {args.rounds} rounds × {args.steps} steps"
        )
        show(made, title, console)
        everything[dtype] = {"title": title, "rows": made}
    if args.json:
        args.json.write_text(json.dumps(everything, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

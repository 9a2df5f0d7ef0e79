"""The demo: fine-tunes a real model on 2 processes with ZeRO-2 and shows what it brought.

Owns the order: inputs, loss and answer before, ``shardglass train``, loss and answer after. Both measurements use plain
transformers on one process; the second one reads the saved folder as anybody would.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prepare import answer, cache_folder, prepare_data, prepare_model, say

from shardglass.errors import ShardglassError

QUESTION = "What is your favorite hobby?"
PROCESSES = 2
MAX_LENGTH = 256
EVAL_BATCH = 8
OUTPUT = Path("runs") / "demo"
CONFIG = Path(__file__).with_name("ds_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is trained on, and why so much.

    Attributes:
        samples: Dialogues of one epoch.
        micro_batch: Dialogues of one rank and micro-batch.
        accumulation: Micro-batches of one step.
        learning_rate: At the first step; it falls linearly to zero.
        reason: Said to the user.
    """

    samples: int
    micro_batch: int
    accumulation: int
    learning_rate: float
    reason: str


FAST = Size(samples=192, micro_batch=4, accumulation=4, learning_rate=2e-5, reason="this machine multiplies bf16 fast")
SLOW = Size(
    samples=8,
    micro_batch=1,
    accumulation=2,
    learning_rate=5e-5,
    # Measured with torch 2.13 on an AVX2 core: forward and backward of 256 tokens, 5.7 s in fp32 and 71 s in bf16.
    reason="this CPU has no AVX-512, and without it torch multiplies bf16 about twelve times slower than fp32",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a model does with the held-out dialogues.

    Attributes:
        loss: Mean over all assistant tokens.
        tokens: Their number.
        reply: The greedy answer to ``QUESTION``.
    """

    loss: float
    tokens: int
    reply: str


def enough_gpus() -> bool:
    """Say whether each process gets a GPU of its own; with fewer, both train on the CPU."""
    import torch

    return torch.cuda.device_count() >= PROCESSES


def choose_size() -> Size:
    """Return the size that this machine trains in about two minutes."""
    import torch

    fast = enough_gpus() or torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return FAST if fast else SLOW


def measure(folder: Path, held_out: Path) -> Measured:
    """Load a saved model with plain transformers and measure it in float32.

    Args:
        folder: A folder that ``from_pretrained`` reads.
        held_out: A ``conversations`` file that was not trained on.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    loss, tokens = held_out_loss(model, tokenizer, held_out)
    return Measured(loss=loss, tokens=tokens, reply=answer(model, tokenizer, QUESTION))


def held_out_loss(model: Any, tokenizer: Any, held_out: Path) -> tuple[float, int]:
    """Return the mean loss over every assistant token of a file, and the number of these tokens.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer.
        held_out: A ``conversations`` file.
    """
    import torch

    from shardglass.hf.data import DataOptions, build_collator, build_dataset
    from shardglass.hf.labels import IGNORED

    options = DataOptions(model_max_length=MAX_LENGTH)
    dataset = build_dataset(held_out, tokenizer, options)
    collate = build_collator(tokenizer, options)
    samples = sorted((dataset[i] for i in range(len(dataset))), key=lambda sample: len(sample["input_ids"]))
    total, tokens = 0.0, 0
    with torch.inference_mode():
        for start in range(0, len(samples), EVAL_BATCH):
            batch = collate(samples[start : start + EVAL_BATCH])
            labels = batch["labels"][:, 1:]
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
            total += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
            ).item()
            tokens += int((labels != IGNORED).sum())
    return total / tokens, tokens


def train_command(model: Path, data: Path, size: Size) -> list[str]:
    """Return the command that trains; it can be typed in a shell as it is."""
    flags = {
        "nproc_per_node": PROCESSES,
        "model_name_or_path": model,
        "data_path": data,
        "bf16": True,
        "output_dir": OUTPUT,
        "num_train_epochs": 1,
        "per_device_train_batch_size": size.micro_batch,
        "gradient_accumulation_steps": size.accumulation,
        "learning_rate": size.learning_rate,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "model_max_length": MAX_LENGTH,
        "deepspeed": CONFIG,
    }
    program = str(Path(sysconfig.get_path("scripts")) / "shardglass")
    return [program, "train", *(word for key, value in flags.items() for word in (f"--{key}", str(value)))]


def train(command: list[str]) -> int:
    """Run the command with the cores divided among its processes; return its exit code."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // PROCESSES))}
    if not enough_gpus():
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run(command, check=False, env=environment).returncode


def report(before: Measured, after: Measured, seconds: float) -> None:
    """Show what training brought."""
    change = after.loss - before.loss
    say("")
    say(f"held-out loss ({before.tokens} assistant tokens, float32, one process)")
    say(f"  before {before.loss:.4f}  ->  after {after.loss:.4f}   ({change:+.4f})")
    say(f"answer to {QUESTION!r}")
    say(f"  before: {before.reply}")
    say(f"  after:  {after.reply}")
    say(f"saved model: {OUTPUT.resolve()} (loads with AutoModelForCausalLM.from_pretrained)")
    say(f"the demo took {seconds:.0f} s")


def write_report() -> Path:
    """Write the run as an interactive page; return its path."""
    from shardglass.hf.run_report import write_run_report

    return write_run_report(OUTPUT)


def main() -> int:
    """Run the demo.

    Returns:
        0 when the held-out loss fell, 1 when it did not, 2 when an input or the report could not be made, and the exit
        code of the training command when that failed.
    """
    from transformers.utils import logging

    start = time.monotonic()
    logging.disable_progress_bar()
    try:
        model = prepare_model(cache_folder())
        size = choose_size()
        data, held_out = prepare_data(cache_folder(), train_samples=size.samples)
        say(f"Training on the first {size.samples} dialogues: {size.reason}")
        say("Measuring the model before training ...")
        before = measure(model, held_out)
    except ShardglassError as error:
        sys.stderr.write(f"demo: {error}\n")
        return 2
    say(f"held-out loss before training: {before.loss:.4f}")
    shutil.rmtree(OUTPUT, ignore_errors=True)
    command = train_command(model, data, size)
    say("\n$ " + " ".join(command) + "\n")
    code = train(command)
    if code != 0:
        sys.stderr.write(f"demo: training ended with exit code {code}; its message is above\n")
        return code
    say("\nMeasuring the saved model ...")
    after = measure(OUTPUT, held_out)
    report(before, after, time.monotonic() - start)
    try:
        say(f"report: {write_report().resolve()} (one file; opens in a browser, without a network)")
    except ShardglassError as error:
        sys.stderr.write(f"demo: {error}\n")
        return 2
    if not after.loss < before.loss:
        sys.stderr.write("demo: the held-out loss did not fall\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

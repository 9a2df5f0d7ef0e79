"""What a run tells at its end, collected while it trains.

Owns the collection: true rates, tokens, bytes, losses. Leaves the values' meaning to ``report.summary`` and their
form to ``report.terminal``.
"""

import platform
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import accelerate
import psutil
import torch
import transformers
from accelerate.utils import gather_object
from transformers import TrainerCallback

from shardglass import __version__
from shardglass.errors import UsageError
from shardglass.hf.trainer import ZeroMixin
from shardglass.plan import OptimizerKind, StepShape, planned_bytes
from shardglass.report.cuts import cut_rows
from shardglass.report.dtypes import dtype_rows
from shardglass.report.summary import (
    Batch,
    DecayGroup,
    Environment,
    MemoryAccount,
    Progress,
    RatePoint,
    RunSummary,
    memory_account,
)

STATE_FILE = "trainer_state.json"
"""The Trainer's state with its log, as its checkpoints have it; curves are drawn from it."""


class SummaryCallback(TrainerCallback):
    """Watches a ZeroTrainer's run; ``summary()`` then puts it in one value."""

    def __init__(self, trainer: ZeroMixin, notes: Sequence[str]) -> None:
        self._trainer: Any = trainer
        self._notes = tuple(notes)
        self._rates: list[tuple[float, ...]] = []  # of each optimizer step, as it was taken
        self._began = 0.0
        self._seconds = 0.0
        self._account: MemoryAccount | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The clock starts when the first batch is drawn."""
        self._began = time.perf_counter()
        self._rates.clear()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The rates the optimizer is about to use."""
        self._rates.append(tuple(float(group["lr"]) for group in self._trainer.optimizer.param_groups))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock, measure this rank's bytes before anything else is allocated, and keep the Trainer's log."""
        self._seconds = time.perf_counter() - self._began
        self._account = self._measure()
        if state.is_world_process_zero:
            state.save_to_json(str(Path(str(args.output_dir), STATE_FILE)))

    def summary(self) -> RunSummary:
        """The run so far; collective.

        Raises:
            UsageError: Nothing was trained.
        """
        if self._account is None:
            raise UsageError("there is no summary before train() has ended")
        trainer = self._trainer
        layout, options = trainer.handle.layout, trainer.handle.options
        accounts: list[MemoryAccount] = gather_object([self._account])
        tokens = trainer.accelerator.reduce(trainer.token_counts, "sum").tolist()
        model = trainer.accelerator.unwrap_model(trainer.model)
        saved = str(next(p.dtype for p in model.parameters())).removeprefix("torch.")
        return RunSummary(
            model=str(getattr(model.config, "name_or_path", "") or type(model).__name__),
            stage=options.stage,
            notes=self._notes + ((told,) if (told := trainer.resume_note) else ()),
            memory=self._account,
            largest=max(accounts, key=lambda account: account.measured),
            process_kind=_process_bytes(trainer.handle.backend)[2],
            batch=self._batch(tokens),
            progress=self._progress(tokens[0]),
            rates=self._rate_points(),
            groups=self._groups(),
            dtypes=dtype_rows(layout, options, saved=saved, buffers=_dtypes_of(model.buffers())),
            cuts=cut_rows(layout, options),
            environment=_environment(trainer, model),
            recomputes=getattr(model, "is_gradient_checkpointing", None),
        )

    def _measure(self) -> MemoryAccount:
        """Planned and measured bytes of this rank."""
        handle = self._trainer.handle
        optimizer = getattr(self._trainer.optimizer, "optimizer", self._trainer.optimizer)
        kind = OptimizerKind(name=type(optimizer).__name__, groups=tuple(optimizer.param_groups))
        shape = StepShape(
            micro_batches=self._micro_batches(),
            accumulates_locally=not handle.options.rules.shards_grads,
            backend=handle.backend,
        )
        planned = planned_bytes(handle.layout, handle.options, handle.rank, optimizer=kind, shape=shape)
        now, peak, _ = _process_bytes(handle.backend)
        return memory_account(handle.rank, planned=planned, measured=handle.memory(), process=now, peak=peak)

    def _micro_batches(self) -> tuple[int, ...]:
        """Every number of micro-batches that a step of the run had."""
        accumulation = int(self._trainer.args.gradient_accumulation_steps)
        full, rest = divmod(self._batches(), accumulation)
        steps = self._trainer.state.global_step
        counts = [accumulation] if full else []
        if rest and steps > full:
            counts.append(rest)
        return tuple(counts) or (accumulation,)

    def _batches(self) -> int:
        """Micro-batches of one pass over the data on one rank."""
        return len(self._trainer.callback_handler.train_dataloader)

    def _batch(self, tokens: Sequence[int]) -> Batch:
        trainer = self._trainer
        numbers = trainer.resolved.batch
        statistics = getattr(trainer.train_dataset, "statistics", None)
        steps = max(1, trainer.state.global_step)
        return Batch(
            ranks=trainer.handle.world_size,
            micro=numbers.micro,
            accumulation=numbers.accumulation,
            steps_per_epoch=-(-self._batches() // numbers.accumulation),
            tokens_per_step=tokens[0] / steps,
            label_share=tokens[1] / max(1, tokens[0]),
            cut_share=statistics().cut_share if statistics is not None else 0.0,
            max_length=getattr(trainer.args, "model_max_length", None),
        )

    def _progress(self, tokens: int) -> Progress:
        trainer = self._trainer
        history = trainer.state.log_history
        losses = [row["loss"] for row in history if "loss" in row]
        held_out = [row["eval_loss"] for row in history if "eval_loss" in row]
        return Progress(
            steps=trainer.state.global_step,
            skipped=trainer.handle.steps_skipped,
            first_loss=losses[0] if losses else None,
            last_loss=losses[-1] if losses else None,
            tokens_per_s=tokens / self._seconds if self._seconds else 0.0,
            held_out=(held_out[0], held_out[-1]) if len(held_out) > 1 else None,
        )

    def _rate_points(self) -> tuple[RatePoint, ...]:
        """The rates of the first step, of the first at the highest rate, and of the last."""
        if not self._rates:
            return ()
        peak = max(range(len(self._rates)), key=lambda step: self._rates[step])
        named = [("start", 0), ("end of warmup", peak), ("end", len(self._rates) - 1)]
        return tuple(RatePoint(what=what, step=step, rates=self._rates[step]) for what, step in named)

    def _groups(self) -> tuple[DecayGroup, ...]:
        """The optimizer's groups with the tensors and elements of all ranks, from the layout."""
        tensors: dict[int, list[int]] = {}
        for buffer in self._trainer.handle.layout.buffers:
            for param in buffer.params:
                if param.group is not None:
                    tensors.setdefault(param.group, []).append(param.numel)
        return tuple(
            DecayGroup(
                index=g,
                weight_decay=float(group.get("weight_decay", 0.0)),
                tensors=len(tensors.get(g, ())),
                elements=sum(tensors.get(g, ())),
            )
            for g, group in enumerate(self._trainer.optimizer.param_groups)
        )


def _process_bytes(backend: str) -> tuple[int, int, str]:
    """Bytes of this process now and at its peak, and what they count: memory of the GPU if there is one, else RSS."""
    if backend == "nccl":
        return torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved(), "CUDA memory"
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, KiB elsewhere
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return int(psutil.Process().memory_info().rss), peak, "RSS"


def _dtypes_of(tensors: Any) -> list[str]:
    """Short dtype names of floating-point tensors."""
    return [str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point()]


def _environment(trainer: Any, model: Any) -> Environment:
    device = trainer.args.device
    return Environment(
        attention=str(getattr(model.config, "_attn_implementation", "unknown")),
        backend=trainer.handle.backend,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device.type),
        versions=(
            ("Python", platform.python_version()),
            ("torch", torch.__version__),
            ("transformers", transformers.__version__),
            ("accelerate", accelerate.__version__),
            ("shardglass", __version__),
        ),
    )

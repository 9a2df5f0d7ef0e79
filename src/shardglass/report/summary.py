"""The values of the run summary.

Owns what the summary says and which facts count as deviations. Leaves the measuring to whoever has the tensors, and the
form to ``terminal``.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardglass.report.cuts import CutRow
from shardglass.report.dtypes import DtypeRow

SUMMARY_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Bytes of one category of the engine's tensors.

    Attributes:
        category: As ``Handle.memory()`` names it.
        planned: Bytes by plan; None if the plan does not know the category.
        measured: Bytes the tensors really take.
    """

    category: str
    planned: int | None
    measured: int

    @property
    def difference(self) -> int | None:
        """Measured minus planned; None if there is no plan."""
        return None if self.planned is None else self.measured - self.planned


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAccount:
    """The memory of one rank.

    Attributes:
        rank: Whose.
        rows: The engine's tensors, by category.
        process: Bytes of the whole process when the run ended.
        peak: Largest number of bytes the process ever had.
    """

    rank: int
    rows: tuple[MemoryRow, ...]
    process: int
    peak: int

    @property
    def planned(self) -> int:
        """Planned bytes of all categories."""
        return sum(row.planned or 0 for row in self.rows)

    @property
    def measured(self) -> int:
        """Measured bytes of all categories."""
        return sum(row.measured for row in self.rows)

    @property
    def remainder(self) -> int:
        """Bytes of the process that are not the engine's: libraries, activations kept by the allocator, data."""
        return self.process - self.measured


def memory_account(
    rank: int, *, planned: Mapping[str, int], measured: Mapping[str, int], process: int, peak: int
) -> MemoryAccount:
    """Put a plan beside a measurement; a category that only one of them has is 0 planned, or 0 measured.

    Args:
        rank: Whose.
        planned: From ``plan.planned_bytes``.
        measured: From ``Handle.memory()``.
        process: Bytes of the process now.
        peak: Its peak.
    """
    unplanned = not any(key.startswith("optimizer ") for key in planned)
    rows = []
    for category in dict.fromkeys((*planned, *measured)):
        unknown = unplanned and category not in planned and category.startswith("optimizer ")
        plan = None if unknown else planned.get(category, 0)
        rows.append(MemoryRow(category=category, planned=plan, measured=measured.get(category, 0)))
    rows.sort(key=lambda row: row.category == "communication")
    return MemoryAccount(rank=rank, rows=tuple(rows), process=process, peak=peak)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """How much data a step takes.

    Attributes:
        ranks: Processes, one per GPU.
        micro: Sequences of a micro-batch on one rank.
        accumulation: Micro-batches of a step.
        steps_per_epoch: Optimizer steps of one pass over the data.
        tokens_per_step: Mean number of tokens of a step over all ranks, padding not counted.
        label_share: Share of these tokens that the loss counts, 0 to 1.
        cut_share: Share of the samples that were longer than the model's limit and cut, 0 to 1.
        max_length: That limit, in tokens.
    """

    ranks: int
    micro: int
    accumulation: int
    steps_per_epoch: int
    tokens_per_step: float
    label_share: float
    cut_share: float
    max_length: int | None = None

    @property
    def total(self) -> int:
        """Sequences of a step over all ranks."""
        return self.ranks * self.micro * self.accumulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What came of it.

    Attributes:
        steps: Optimizer steps, skipped ones included.
        skipped: Steps skipped because a gradient was inf or nan.
        first_loss: Training loss as first logged; None if none was.
        last_loss: Training loss as last logged.
        tokens_per_s: Tokens of all ranks per second of training.
        held_out: Held-out loss before and after; None if it was not measured.
    """

    steps: int
    skipped: int
    first_loss: float | None
    last_loss: float | None
    tokens_per_s: float
    held_out: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePoint:
    """The true learning rate at one step, as the optimizer had it.

    Attributes:
        what: "start", "end of warmup" or "end".
        step: Number of steps taken before it.
        rates: Rate of each param_group.
    """

    what: str
    step: int
    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecayGroup:
    """One param_group of the optimizer: its index, weight decay, and the tensors and elements of all ranks in it."""

    index: int
    weight_decay: float
    tensors: int
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What it ran on.

    Attributes:
        attention: Attention kernel of the model, e.g. "sdpa".
        backend: What carried tensors between ranks: "gloo" or "nccl".
        device: Type or name of the device.
        versions: (package, version), Python first.
    """

    attention: str
    backend: str
    device: str
    versions: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run, told at its end.

    Attributes:
        model: Name or path of the model.
        stage: ZeRO stage.
        deviations: Sentences on what was not as asked for or as planned, worst first; ``all_deviations`` adds those
            that follow from the values.
        notes: Sentences a user should read once.
        memory: This rank's account.
        largest: The account of the rank with the most bytes; may be the same rank.
        process_kind: What ``process`` and ``peak`` count, e.g. "RSS".
        batch: Data of a step.
        progress: Loss and speed.
        rates: True learning rates.
        groups: The optimizer's groups.
        dtypes: dtype of each kind of tensor on its way.
        cuts: What the shard boundaries cut.
        environment: Kernel, backend and versions.
        recomputes: Whether the model recomputed activations in backward; None if it cannot say.
    """

    model: str
    stage: int
    memory: MemoryAccount
    largest: MemoryAccount
    batch: Batch
    progress: Progress
    rates: tuple[RatePoint, ...]
    groups: tuple[DecayGroup, ...]
    dtypes: tuple[DtypeRow, ...]
    cuts: tuple[CutRow, ...]
    environment: Environment
    deviations: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    process_kind: str = "RSS"
    recomputes: bool | None = None

    @property
    def all_deviations(self) -> tuple[str, ...]:
        """The given deviations, then what the values show: no rate, skipped steps, a loss that rose, other bytes."""
        return (
            *self.deviations,
            *self._rate_deviations(),
            *_progress_deviations(self.progress),
            *self._memory_deviations(),
        )

    def _rate_deviations(self) -> list[str]:
        """A run may end before its warm-up has left 0."""
        if not self.rates or any(rate for point in self.rates for rate in point.rates):
            return []
        return ["every step ran at learning rate 0, so nothing was learned: train longer, or with a shorter warm-up"]

    def _memory_deviations(self) -> list[str]:
        accounts = {account.rank: account for account in (self.memory, self.largest)}
        found = []
        for rank, account in accounts.items():
            off = [
                f"{row.category} {row.difference:+,}" if row.difference is not None else f"{row.category} not planned"
                for row in account.rows
                if row.difference != 0
            ]
            if off:
                found.append(f"rank {rank} holds other bytes than planned: {', '.join(off)}")
        return found

    def to_json(self) -> str:
        """Every value, versioned; what JSON has no number for (nan, inf) is a string."""
        body = _plain(asdict(self)) | {"all_deviations": list(self.all_deviations)}
        return json.dumps({"version": SUMMARY_VERSION, **body}, indent=1, ensure_ascii=False, allow_nan=False)


def _progress_deviations(progress: Progress) -> list[str]:
    """What the numbers of a training tell by themselves."""
    found = []
    if progress.skipped:
        found.append(f"{progress.skipped} of {progress.steps} steps were skipped: their gradient was inf or nan")
    first, last = progress.first_loss, progress.last_loss
    if last is not None and not math.isfinite(last):
        found.append(f"the last training loss is {last}")
    elif first is not None and last is not None and round(last, 4) > round(first, 4):
        found.append(f"the training loss rose from {first:.4f} to {last:.4f}")
    if progress.held_out is not None and not progress.held_out[1] <= progress.held_out[0]:
        found.append(f"the held-out loss went from {progress.held_out[0]:.4f} to {progress.held_out[1]:.4f}")
    return found


def _plain(value: Any) -> Any:
    """A value that strict JSON can hold."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value

"""RAM of a machine while a run loads and saves, and bytes of a checkpoint on disk.

Owns the formulas. Leaves to the caller what is free.
"""

from dataclasses import dataclass

from shardglass.options import DTYPE_BYTES, STAGES
from shardglass.plan.kinds import SCALAR_BYTES
from shardglass.plan.memory import master_dtype
from shardglass.plan.model import ModelFacts
from shardglass.plan.setup import Setup
from shardglass.plan.stages import PROCESS_BYTES, StagePlan

FILE_BYTES = 1 << 30
"""A rank's tensors are put together in memory file by file (source: ``checkpoint.save.FILE_BYTES``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """RAM of the machine with the most ranks.

    Attributes:
        ranks: Ranks on it.
        processes: Assumed for the processes themselves, see ``PROCESS_BYTES``.
        loading: Bytes while the model is loaded, ``processes`` included.
        training: Bytes at the highest moment of a step: what all ranks need if they train on the CPU.
        saving: Bytes while a checkpoint is written.
        free: Bytes that are free; None if not known.
    """

    ranks: int
    processes: int
    loading: int
    training: int
    saving: int
    free: int | None

    @property
    def need(self) -> int:
        """The highest of the three."""
        return max(self.loading, self.training, self.saving)

    @property
    def fits(self) -> bool | None:
        """Whether ``need`` is free; None if that is not known."""
        return None if self.free is None else self.need <= self.free


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """Bytes of one ``checkpoint-N`` folder, without headers and the small files beside them.

    Attributes:
        weights: The model, in the dtype it computes in.
        master: fp32 weights of trainable parameters, and frozen ones as they are.
        states: States of the optimizer.
    """

    weights: int
    master: int
    states: int

    @property
    def total(self) -> int:
        """All of it. While a checkpoint is written the one it replaces is still there."""
        return self.weights + self.master + self.states


def host_plan(facts: ModelFacts, setup: Setup, stage: StagePlan) -> HostPlan:
    """RAM of the machine with the most ranks.

    Loading: each process reads the whole model in the checkpoint's dtype (source: ``hf.load.load_model``); at a stage
    that shards parameters one process at most, where tensors are renamed (source: ``hf.sharded_start``). Saving: the
    rank that writes the weights copies the whole model to the host (source: ``Handle.full_state_dict``), and each rank
    puts together one file of its part, on CUDA from a copy on the host. Training: nothing but the processes on CUDA;
    all of ``StagePlan.total`` on the CPU, where also what is loaded and saved comes on top of what is there.
    """
    ranks = setup.node_ranks
    processes = ranks * PROCESS_BYTES
    disk = checkpoint_plan(facts, setup)
    share = -(-(disk.master + disk.states) // setup.world_size)
    writing = facts.compute_bytes + ranks * min(share, FILE_BYTES) * (2 if setup.device == "cuda" else 1)
    is_cut = STAGES[stage.stage].shards_params
    if setup.device == "cuda":
        loading, training, resident = (1 if is_cut else ranks) * facts.stored_bytes, 0, 0
    else:
        loading = ranks * stage.at("loading") + (facts.stored_bytes if is_cut else 0)
        training = ranks * stage.total - processes
        resident = ranks * stage.engine_bytes
    return HostPlan(
        ranks=ranks,
        processes=processes,
        loading=processes + loading,
        training=processes + training,
        saving=processes + resident + writing,
        free=setup.host_free,
    )


def checkpoint_plan(facts: ModelFacts, setup: Setup) -> CheckpointPlan:
    """Bytes of a checkpoint: see [Note: names] of ``checkpoint.save`` for what it holds."""
    master = states = 0
    for p in facts.params:
        if not p.trainable:
            master += p.numel * DTYPE_BYTES[p.dtype]
            continue
        itemsize = DTYPE_BYTES[master_dtype(p.dtype)]
        kinds = setup.optimizer.states(p.group or 0)
        master += p.numel * itemsize
        states += len(kinds) * p.numel * itemsize + len(setup.optimizer.scalars) * SCALAR_BYTES
    return CheckpointPlan(weights=facts.compute_bytes, master=master, states=states)

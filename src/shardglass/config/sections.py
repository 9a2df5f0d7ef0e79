"""The DeepSpeed JSON as a whole: the keys at its top and its sections, with the status of each.

Owns the list of keys, as data: each field carries the rule of its key (see ``keys``). A field is None when the file
does not give the key. Leaves defaults to ``resolve``: what a missing key means depends on the flags.

Names and meanings: the DeepSpeed JSON configuration documentation, and DeepSpeed 0.19 where that is silent.
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import PrivateAttr

from shardglass.config.keys import Section, honoured, no_effect, not_yet, off
from shardglass.config.precision import Amp, Bf16, DataTypes, Fp16, TorchAutocast
from shardglass.config.readers import Auto, dtype, flag, real, whole, word
from shardglass.config.types import Optimizer, Scheduler
from shardglass.config.zero import Zero

_SPEED = "measures DeepSpeed's speed; the run summary has ours"
_MONITOR = "the Trainer logs: --report_to"
_COMMS = "logs DeepSpeed's collectives"
_COMPILE = "DeepSpeed's compiler is off; use --torch_compile"


class BatchKeys(Section):
    """Batch."""

    train_batch_size: Annotated[
        int | Auto | None,
        honoured("sequences of an optimizer step: micro-batch × accumulation × ranks", whole(low=1, auto=True)),
    ] = None
    train_micro_batch_size_per_gpu: Annotated[
        int | Auto | None, honoured("sequences of a micro-batch on one rank", whole(low=1, auto=True))
    ] = None
    gradient_accumulation_steps: Annotated[
        int | Auto | None, honoured("micro-batches of an optimizer step", whole(low=1, auto=True))
    ] = None
    managed_gradient_accumulation: Annotated[
        bool | None, not_yet("the program counts the micro-batches when false", flag(), fine=(True,))
    ] = None


class GradientKeys(Section):
    """Gradients."""

    gradient_clipping: Annotated[
        float | Auto | None, honoured("norm to clip at; 0 means no clipping", real(auto=True))
    ] = None
    communication_data_type: Annotated[
        str | None,
        honoured(
            "dtype in which gradients travel; the model's if missing",
            dtype,
            fine=("float32", "bfloat16"),
            say='float16 needs loss scaling; use "bf16" or "fp32"',
        ),
    ] = None
    seq_parallel_communication_data_type: Annotated[object, no_effect("there is no sequence parallelism yet")] = None
    gradient_allreduce_op: Annotated[
        str | None,
        honoured(
            "how the gradients of the ranks are put together",
            word("mean", "sum", "avg"),
            fine=("mean", "avg"),
            say='gradients are averaged; use "mean"',
        ),
    ] = None
    prescale_gradients: Annotated[bool | None, off("divide before the reduction")] = None
    gradient_predivide_factor: Annotated[float | None, not_yet("divide before the reduction", real(), fine=(1.0,))] = (
        None
    )
    sparse_gradients: Annotated[bool | None, off("sparse gradients of embeddings")] = None
    gradient_compression: Annotated[object, not_yet("compressed gradients")] = None
    zero_allow_untested_optimizer: Annotated[
        bool | None, honoured("take an optimizer class that is not known to update element by element", flag())
    ] = None
    zero_force_ds_cpu_optimizer: Annotated[bool | None, no_effect("there is no offload yet", flag())] = None


class Compile(Section):
    """``compile``."""

    disable: Annotated[bool | None, no_effect(_COMPILE, flag(), say="compile: use --torch_compile")] = None
    enabled: Annotated[bool | None, no_effect(_COMPILE, flag(), say="compile: use --torch_compile")] = None
    backend: Annotated[object, no_effect(_COMPILE)] = None
    kwargs: Annotated[object, no_effect(_COMPILE)] = None
    deepcompile: Annotated[bool | None, off("DeepSpeed's compiler")] = None


class Checkpoint(Section):
    """``checkpoint``."""

    tag_validation: Annotated[object, no_effect("checkpoints here have no tags")] = None
    checkpoint_serialization: Annotated[object, no_effect("for DeepSpeed's writer")] = None
    writer: Annotated[object, no_effect("for DeepSpeed's writer")] = None
    parallel_write: Annotated[object, no_effect("for DeepSpeed's writer")] = None
    load_universal: Annotated[bool | None, off("load a universal checkpoint")] = None
    use_node_local_storage: Annotated[bool | None, off("a checkpoint folder on each machine")] = None


_MONITOR_NAMES = [
    "enabled",
    "output_path",
    "job_name",
    "group",
    "team",
    "project",
    "samples_log_interval",
    "workspace",
    "api_key",
    "experiment_name",
    "experiment_key",
    "online",
    "mode",
]
_COMMS_NAMES = ["enabled", "prof_all", "prof_ops", "verbose", "debug"]
_FLOPS_NAMES = [
    "enabled",
    "profile_step",
    "module_depth",
    "top_modules",
    "detailed",
    "output_file",
    "recompute_fwd_factor",
]
_RECOMPUTE_NAMES = [
    "partition_activations",
    "cpu_checkpointing",
    "contiguous_memory_optimization",
    "number_checkpoints",
    "synchronize_checkpoint_boundary",
    "profile",
]
_AIO_NAMES = [
    "block_size",
    "queue_depth",
    "thread_count",
    "intra_op_parallelism",
    "single_submit",
    "overlap_events",
    "use_gds",
]


class MonitoringKeys(Section):
    """Monitoring and the like."""

    steps_per_print: Annotated[object, no_effect("--logging_steps decides")] = None
    wall_clock_breakdown: Annotated[bool | None, no_effect(_SPEED, flag())] = None
    memory_breakdown: Annotated[bool | None, no_effect(_SPEED, flag())] = None
    dump_state: Annotated[bool | None, no_effect("the resolved values lie beside the run", flag())] = None
    log_level: Annotated[object, no_effect("--log_level decides")] = None
    timers: Annotated[object, no_effect(_SPEED)] = None
    comms_logger: Annotated[object, no_effect(_COMMS, known=_COMMS_NAMES)] = None
    comms_config: Annotated[object, no_effect(_COMMS, known=("comms_logger", *_COMMS_NAMES))] = None
    monitor_config: Annotated[
        object, no_effect(_MONITOR, known=("enabled", "tensorboard", "wandb", "comet", "csv_monitor", "tag"))
    ] = None
    tensorboard: Annotated[object, no_effect(_MONITOR, known=_MONITOR_NAMES)] = None
    wandb: Annotated[object, no_effect(_MONITOR, known=_MONITOR_NAMES)] = None
    comet: Annotated[object, no_effect(_MONITOR, known=_MONITOR_NAMES)] = None
    csv_monitor: Annotated[object, no_effect(_MONITOR, known=_MONITOR_NAMES)] = None
    flops_profiler: Annotated[object, no_effect(_SPEED, known=_FLOPS_NAMES)] = None
    autotuning: Annotated[object, no_effect("DeepSpeed's launcher tunes, not a run")] = None
    activation_checkpointing: Annotated[
        object,
        no_effect(
            "for models that call DeepSpeed's own function; use --gradient_checkpointing",
            say="activation_checkpointing does nothing for Hugging Face models: use --gradient_checkpointing",
            known=_RECOMPUTE_NAMES,
        ),
    ] = None
    aio: Annotated[object, no_effect("for NVMe offload", known=_AIO_NAMES)] = None
    zero_state: Annotated[object, no_effect("nothing reads it")] = None
    dataloader_drop_last: Annotated[bool | None, no_effect("--dataloader_drop_last decides", flag())] = None
    disable_allgather: Annotated[bool | None, no_effect("nothing reads it, in DeepSpeed neither", flag())] = None
    disable_python_gc: Annotated[bool | None, no_effect("Python's collector stays as it is", flag())] = None
    graph_harvesting: Annotated[bool | None, no_effect("a speed-up by CUDA graphs", flag())] = None
    vocabulary_size: Annotated[object, no_effect("DeepSpeed only warns about odd sizes")] = None


class FutureKeys(Section):
    """Other ways to train."""

    tensor_parallel: Annotated[object, not_yet("tensor parallelism")] = None
    expert_parallel: Annotated[object, not_yet("expert parallelism")] = None
    use_data_before_expert_parallelism: Annotated[bool | None, off("order of the ranks of experts")] = None
    pipeline: Annotated[object, not_yet("pipeline parallelism")] = None
    sequence_parallel_size: Annotated[int | None, not_yet("sequence parallelism", whole(), fine=(0, 1))] = None
    fp8: Annotated[object, not_yet("training in 8 bits")] = None
    sparse_attention: Annotated[object, not_yet("sparse attention")] = None
    data_efficiency: Annotated[object, not_yet("sampling and dropping of data")] = None
    curriculum_learning: Annotated[object, not_yet("growing sequence lengths")] = None
    progressive_layer_drop: Annotated[object, not_yet("dropping layers")] = None
    compression_training: Annotated[object, not_yet("pruning and quantization")] = None
    quantize_training: Annotated[object, not_yet("quantization while training")] = None
    weight_quantization: Annotated[object, not_yet("quantized weights")] = None
    elasticity: Annotated[object, not_yet("batch sizes that follow the number of GPUs")] = None
    nebula: Annotated[object, not_yet("a checkpoint service")] = None
    datastates_ckpt: Annotated[object, not_yet("another checkpoint writer")] = None
    hybrid_engine: Annotated[object, not_yet("training and generation in turns")] = None


class PrecisionSections(Section):
    """Number formats."""

    fp16: Fp16 | None = None
    bf16: Bf16 | None = None
    bfloat16: Bf16 | None = None
    amp: Amp | None = None
    torch_autocast: TorchAutocast | None = None
    data_types: DataTypes | None = None


class OtherSections(Section):
    """What else is an object of its own."""

    compile: Compile | None = None
    checkpoint: Checkpoint | None = None


class TrainingSections(Section):
    """ZeRO, optimizer and scheduler."""

    zero_optimization: Zero | None = None
    optimizer: Optimizer | None = None
    scheduler: Scheduler | None = None


class DeepSpeedConfig(
    FutureKeys, OtherSections, MonitoringKeys, TrainingSections, PrecisionSections, GradientKeys, BatchKeys
):
    """A whole DeepSpeed JSON; made by ``load_config``.

    ``source`` is the file's name for messages; ``notes`` what was taken without being understood.
    """

    _source: str = PrivateAttr(default="the DeepSpeed config")
    _notes: tuple[str, ...] = PrivateAttr(default=())
    _left_out: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def source(self) -> str:
        """Where the config came from, for messages."""
        return self._source

    @property
    def notes(self) -> tuple[str, ...]:
        """What was taken without being understood."""
        return self._notes

    @property
    def left_out(self) -> Mapping[str, str]:
        """What cannot run yet, by key with a sentence; not in the config, which was loaded for planning alone."""
        return self._left_out

    @property
    def precision(self) -> Bf16 | None:
        """The ``bf16`` section, under its present or its old name ``bfloat16``; never are both given."""
        return self.bf16 or self.bfloat16

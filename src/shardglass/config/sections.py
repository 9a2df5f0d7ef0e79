"""The sections of the DeepSpeed JSON and the status of every key in them.

Owns the list of keys, as data: each field carries the rule of its key (see ``keys``). A field is None when the file
does not give the key. Leaves defaults to ``resolve``: what a missing key means depends on the flags.

Names and meanings: the DeepSpeed JSON configuration documentation, and DeepSpeed 0.19 where that is silent.
"""

from typing import Annotated

from pydantic import PrivateAttr

from shardglass.config.keys import (
    Auto,
    NoEffect,
    OffSwitch,
    Section,
    dtype,
    flag,
    honoured,
    no_effect,
    not_yet,
    real,
    stage_number,
    whole,
    word,
)
from shardglass.config.precision import Amp, Bf16, DataTypes, Fp16, TorchAutocast
from shardglass.config.types import Optimizer, Scheduler


class OffloadOptimizer(Section):
    """``zero_optimization.offload_optimizer``."""

    device: Annotated[
        str | None, not_yet(word("none", "cpu", "nvme"), fine=("none",), say='set it to "none" or drop the section')
    ] = None
    nvme_path: NoEffect = None
    pin_memory: NoEffect = None
    buffer_count: NoEffect = None
    fast_init: NoEffect = None
    ratio: NoEffect = None
    pipeline_read: NoEffect = None
    pipeline_write: NoEffect = None
    pipeline: NoEffect = None
    super_offload: OffSwitch = None
    cpuadam_cores_perc: NoEffect = None


class OffloadParam(Section):
    """``zero_optimization.offload_param``."""

    device: Annotated[
        str | None, not_yet(word("none", "cpu", "nvme"), fine=("none",), say='set it to "none" or drop the section')
    ] = None
    nvme_path: NoEffect = None
    pin_memory: NoEffect = None
    buffer_count: NoEffect = None
    buffer_size: NoEffect = None
    max_in_cpu: NoEffect = None


class Zero(Section):
    """``zero_optimization``. Keys of stage 3 may stand in files of other stages, and the reverse."""

    stage: Annotated[int | None, honoured(stage_number)] = None
    reduce_bucket_size: Annotated[int | Auto | None, no_effect(whole(low=1, auto=True))] = None
    allgather_bucket_size: Annotated[int | None, no_effect(whole())] = None
    allgather_partitions: Annotated[bool | None, no_effect(flag())] = None
    overlap_comm: Annotated[bool | None, no_effect(flag())] = None
    reduce_scatter: Annotated[bool | None, no_effect(flag())] = None
    contiguous_gradients: Annotated[bool | None, no_effect(flag())] = None
    round_robin_gradients: Annotated[bool | None, no_effect(flag())] = None
    parameter_alignment: Annotated[bool | None, no_effect(flag())] = None
    load_from_fp32_weights: Annotated[bool | None, no_effect(flag())] = None
    grad_hooks: Annotated[bool | None, no_effect(flag())] = None
    use_multi_rank_bucket_allreduce: Annotated[bool | None, no_effect(flag())] = None
    compute_grad_norm: Annotated[bool | None, no_effect(flag())] = None
    elastic_checkpoint: Annotated[bool | None, no_effect(flag())] = None
    legacy_stage1: Annotated[bool | None, no_effect(flag())] = None
    enable_sanity_checks: Annotated[bool | None, no_effect(flag())] = None
    ignore_unused_parameters: Annotated[
        bool | None, not_yet(flag(), fine=(True,), say="unused parameters are ignored, as with true")
    ] = None
    offload_optimizer: OffloadOptimizer | None = None
    offload_param: OffloadParam | None = None
    cpu_offload: OffSwitch = None
    cpu_offload_param: OffSwitch = None
    cpu_offload_params: OffSwitch = None
    cpu_offload_use_pin_memory: NoEffect = None
    sub_group_size: Annotated[int | None, no_effect(whole())] = None
    stage3_max_live_parameters: Annotated[int | None, no_effect(whole())] = None
    stage3_max_reuse_distance: Annotated[int | None, no_effect(whole())] = None
    stage3_prefetch_bucket_size: Annotated[int | Auto | None, no_effect(whole(auto=True))] = None
    stage3_param_persistence_threshold: Annotated[int | Auto | None, no_effect(whole(auto=True))] = None
    stage3_model_persistence_threshold: Annotated[int | None, no_effect(whole())] = None
    stage3_module_granularity_threshold: Annotated[int | None, no_effect(whole())] = None
    stage3_use_all_reduce_for_fetch_params: Annotated[bool | None, no_effect(flag())] = None
    stage3_allgather_sequential: Annotated[bool | None, no_effect(flag())] = None
    stage3_gather_16bit_weights_on_model_save: Annotated[bool | None, no_effect(flag())] = None
    stage3_gather_fp16_weights_on_model_save: Annotated[bool | None, no_effect(flag())] = None
    zero_hpz_partition_size: Annotated[int | None, not_yet(whole(), fine=(0, 1))] = None
    zero_quantized_weights: OffSwitch = None
    zero_quantized_gradients: OffSwitch = None
    zero_quantized_nontrainable_weights: OffSwitch = None
    mics_shard_size: Annotated[int | None, not_yet(whole(low=-1), fine=(-1, 0))] = None
    mics_hierarchical_params_gather: OffSwitch = None
    memory_efficient_linear: Annotated[bool | None, no_effect(flag())] = None
    pipeline_loading_checkpoint: Annotated[bool | None, no_effect(flag())] = None
    override_module_apply: Annotated[bool | None, no_effect(flag())] = None
    log_trace_cache_warnings: Annotated[bool | None, no_effect(flag())] = None
    leaf_module: Annotated[object, no_effect(known=("classes", "names", "name_suffixes"))] = None
    zenflow: Annotated[object, not_yet()] = None
    save_muon_momentum_buffer_in_memory: NoEffect = None


class Compile(Section):
    """``compile``: DeepSpeed compiles only when the program asks its engine to; the Trainer has its own flag."""

    disable: Annotated[bool | None, no_effect(flag(), say="compile: use --torch_compile")] = None
    enabled: Annotated[bool | None, no_effect(flag(), say="compile: use --torch_compile")] = None
    backend: NoEffect = None
    kwargs: NoEffect = None
    deepcompile: OffSwitch = None


class Checkpoint(Section):
    """``checkpoint``."""

    tag_validation: NoEffect = None
    load_universal: OffSwitch = None
    use_node_local_storage: OffSwitch = None
    parallel_write: NoEffect = None


_MONITOR = ("enabled", "output_path", "job_name", "group", "team", "project", "samples_log_interval", "workspace",
            "api_key", "experiment_name", "experiment_key", "online", "mode")  # fmt: skip


class DeepSpeedConfig(Section):
    """A whole DeepSpeed JSON; made by ``load_config``.

    ``source`` is the file's name for messages; ``notes`` what was taken without being understood.
    """

    train_batch_size: Annotated[int | Auto | None, honoured(whole(low=1, auto=True))] = None
    train_micro_batch_size_per_gpu: Annotated[int | Auto | None, honoured(whole(low=1, auto=True))] = None
    gradient_accumulation_steps: Annotated[int | Auto | None, honoured(whole(low=1, auto=True))] = None
    managed_gradient_accumulation: Annotated[bool | None, not_yet(flag(), fine=(True,))] = None
    optimizer: Optimizer | None = None
    scheduler: Scheduler | None = None
    zero_optimization: Zero | None = None
    zero_allow_untested_optimizer: Annotated[bool | None, honoured(flag())] = None
    zero_force_ds_cpu_optimizer: Annotated[bool | None, no_effect(flag())] = None
    fp16: Fp16 | None = None
    bf16: Bf16 | None = None
    bfloat16: Bf16 | None = None
    amp: Amp | None = None
    torch_autocast: TorchAutocast | None = None
    fp8: Annotated[object, not_yet()] = None
    data_types: DataTypes | None = None
    communication_data_type: Annotated[
        str | None,
        honoured(dtype, fine=("float32", "bfloat16"), say='float16 needs loss scaling; use "bf16" or "fp32"'),
    ] = None
    seq_parallel_communication_data_type: NoEffect = None
    gradient_clipping: Annotated[float | Auto | None, honoured(real(auto=True))] = None
    prescale_gradients: OffSwitch = None
    gradient_predivide_factor: Annotated[float | None, not_yet(real(), fine=(1.0,))] = None
    gradient_allreduce_op: Annotated[
        str | None, honoured(word("mean", "sum", "avg"), fine=("mean", "avg"), say='gradients are averaged; use "mean"')
    ] = None
    sparse_gradients: OffSwitch = None
    compile: Compile | None = None
    checkpoint: Checkpoint | None = None

    steps_per_print: NoEffect = None
    wall_clock_breakdown: Annotated[bool | None, no_effect(flag())] = None
    dump_state: Annotated[bool | None, no_effect(flag())] = None
    memory_breakdown: Annotated[bool | None, no_effect(flag())] = None
    log_level: NoEffect = None
    timers: NoEffect = None
    dataloader_drop_last: Annotated[bool | None, no_effect(flag())] = None
    disable_allgather: Annotated[bool | None, no_effect(flag())] = None
    disable_python_gc: Annotated[bool | None, no_effect(flag())] = None
    vocabulary_size: NoEffect = None
    comms_logger: Annotated[object, no_effect(known=("enabled", "prof_all", "prof_ops", "verbose", "debug"))] = None
    comms_config: Annotated[object, no_effect(known=("comms_logger",))] = None
    monitor_config: Annotated[
        object, no_effect(known=("enabled", "tensorboard", "wandb", "comet", "csv_monitor", "tag"))
    ] = None
    tensorboard: Annotated[object, no_effect(known=_MONITOR)] = None
    wandb: Annotated[object, no_effect(known=_MONITOR)] = None
    comet: Annotated[object, no_effect(known=_MONITOR)] = None
    csv_monitor: Annotated[object, no_effect(known=_MONITOR)] = None
    flops_profiler: Annotated[
        object,
        no_effect(
            known=(
                "enabled",
                "profile_step",
                "module_depth",
                "top_modules",
                "detailed",
                "output_file",
                "recompute_fwd_factor",
            )  # fmt: skip
        ),
    ] = None
    autotuning: NoEffect = None
    activation_checkpointing: Annotated[
        object,
        no_effect(
            say="activation_checkpointing does nothing for Hugging Face models: use --gradient_checkpointing",
            known=(
                "partition_activations",
                "cpu_checkpointing",
                "contiguous_memory_optimization",
                "number_checkpoints",
                "synchronize_checkpoint_boundary",
                "profile",
            ),  # fmt: skip
        ),
    ] = None
    aio: Annotated[
        object,
        no_effect(
            known=(
                "block_size",
                "queue_depth",
                "thread_count",
                "intra_op_parallelism",
                "single_submit",
                "overlap_events",
                "use_gds",
            )  # fmt: skip
        ),
    ] = None
    zero_state: NoEffect = None

    tensor_parallel: Annotated[object, not_yet()] = None
    expert_parallel: Annotated[object, not_yet()] = None
    use_data_before_expert_parallelism: OffSwitch = None
    pipeline: Annotated[object, not_yet()] = None
    sequence_parallel_size: Annotated[int | None, not_yet(whole(), fine=(0, 1))] = None
    sparse_attention: Annotated[object, not_yet()] = None
    data_efficiency: Annotated[object, not_yet()] = None
    curriculum_learning: Annotated[object, not_yet()] = None
    compression_training: Annotated[object, not_yet()] = None
    weight_quantization: Annotated[object, not_yet()] = None
    elasticity: Annotated[object, not_yet()] = None
    nebula: Annotated[object, not_yet()] = None
    hybrid_engine: Annotated[object, not_yet()] = None
    gradient_compression: Annotated[object, not_yet()] = None

    _source: str = PrivateAttr(default="the DeepSpeed config")
    _notes: tuple[str, ...] = PrivateAttr(default=())

    @property
    def source(self) -> str:
        """Where the config came from, for messages."""
        return self._source

    @property
    def notes(self) -> tuple[str, ...]:
        """What was taken without being understood."""
        return self._notes

    @property
    def precision(self) -> Bf16 | None:
        """The ``bf16`` section, under its present or its old name ``bfloat16``."""
        return self.bf16 or self.bfloat16

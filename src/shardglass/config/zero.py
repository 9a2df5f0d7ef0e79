"""The ``zero_optimization`` section with its two offload sections.

Keys of stage 3 may stand in files of other stages, and the reverse. DeepSpeed takes the keys of stage 3 also without
their prefix; see ``TWINS``.
"""

from typing import Annotated

from shardglass.config.keys import Section, honoured, no_effect, not_yet, off
from shardglass.config.readers import Auto, flag, real, stage_number, whole, word
from shardglass.options import STAGES

_NO_OFFLOAD = 'set it to "none" or drop the section'
_OFFLOAD = "there is no offload yet"
_GATHERED_AS_ONE = "a unit's parameters are gathered as one; a block of the model is a unit"
_SMALL_ONES = "small parameters travel with their unit: keeping them whole would save no collective"
_LOADING = "for loading DeepSpeed's own checkpoints"
_MAX_LIVE = honoured("at stage 3: elements of whole parameters beyond which no unit is gathered ahead", whole())
_PREFETCH = honoured("at stage 3: 0 gathers no unit ahead of its use, any other number and `auto` one", real(auto=True))
_REUSE = no_effect("a unit is dropped when another one is needed", whole())
_ALL_GATHER = no_effect("the parts of a unit arrive where they belong", flag())
_UNREAD = no_effect("nothing reads it, in DeepSpeed neither", whole())
_WHOLE_MODEL = no_effect("a saved model is always whole", flag())

TWINS = {
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "model_persistence_threshold": "stage3_model_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "module_granularity_threshold": "stage3_module_granularity_threshold",
    "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
    "allgather_sequential": "stage3_allgather_sequential",
    "partition_stream_chunk_size": "stage3_partition_stream_chunk_size",
    "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
"""Second and old names of keys → the name that a file should use; only one of the two may be given."""

MAX_LIVE = ("stage3_max_live_parameters", "max_live_parameters")
PREFETCH = ("stage3_prefetch_bucket_size", "prefetch_bucket_size")

OF_STAGE_3 = (*MAX_LIVE, *PREFETCH)
"""Names of the keys that decide something where parameters are sharded, and nothing elsewhere."""


class OffloadOptimizer(Section):
    """``zero_optimization.offload_optimizer``."""

    device: Annotated[
        str | None,
        not_yet("where optimizer states live", word("none", "cpu", "nvme"), fine=("none",), say=_NO_OFFLOAD),
    ] = None
    nvme_path: Annotated[object, no_effect(_OFFLOAD)] = None
    pin_memory: Annotated[object, no_effect(_OFFLOAD)] = None
    buffer_count: Annotated[object, no_effect(_OFFLOAD)] = None
    fast_init: Annotated[object, no_effect(_OFFLOAD)] = None
    ratio: Annotated[object, no_effect(_OFFLOAD)] = None
    pipeline_read: Annotated[object, no_effect(_OFFLOAD)] = None
    pipeline_write: Annotated[object, no_effect(_OFFLOAD)] = None
    pipeline: Annotated[object, no_effect(_OFFLOAD)] = None
    super_offload: Annotated[bool | None, off("offload for superchips")] = None
    cpuadam_cores_perc: Annotated[object, no_effect(_OFFLOAD)] = None


class OffloadParam(Section):
    """``zero_optimization.offload_param``."""

    device: Annotated[
        str | None,
        not_yet("where parameters live", word("none", "cpu", "nvme"), fine=("none",), say=_NO_OFFLOAD),
    ] = None
    nvme_path: Annotated[object, no_effect(_OFFLOAD)] = None
    pin_memory: Annotated[object, no_effect(_OFFLOAD)] = None
    buffer_count: Annotated[object, no_effect(_OFFLOAD)] = None
    buffer_size: Annotated[object, no_effect(_OFFLOAD)] = None
    max_in_cpu: Annotated[object, no_effect(_OFFLOAD)] = None


class AllStages(Section):
    """``zero_optimization``."""

    stage: Annotated[int | None, honoured(f"the ZeRO stage: {', '.join(map(str, STAGES))}", stage_number)] = None
    reduce_bucket_size: Annotated[
        int | Auto | None, no_effect("gradients are reduced unit by unit", whole(low=1, auto=True))
    ] = None
    allgather_bucket_size: Annotated[int | None, no_effect("parameters are gathered unit by unit", whole())] = None
    allgather_partitions: Annotated[bool | None, no_effect("the backend decides the collective", flag())] = None
    overlap_comm: Annotated[bool | None, no_effect("reductions always overlap the backward pass", flag())] = None
    reduce_scatter: Annotated[bool | None, no_effect("the stage decides the collective", flag())] = None
    contiguous_gradients: Annotated[bool | None, no_effect("gradients always lie in flat buffers", flag())] = None
    round_robin_gradients: Annotated[bool | None, no_effect("for the copies of CPU offload", flag())] = None
    parameter_alignment: Annotated[bool | None, no_effect("the layout aligns parameters itself", flag())] = None
    load_from_fp32_weights: Annotated[bool | None, no_effect(_LOADING, flag())] = None
    grad_hooks: Annotated[bool | None, no_effect("gradients are always collected by hooks", flag())] = None
    use_multi_rank_bucket_allreduce: Annotated[bool | None, no_effect("gradients are reduced unit by unit", flag())] = (
        None
    )
    compute_grad_norm: Annotated[bool | None, no_effect("the norm is always known: it is logged", flag())] = None
    elastic_checkpoint: Annotated[bool | None, no_effect(_LOADING, flag())] = None
    legacy_stage1: Annotated[bool | None, no_effect("there is one stage 1", flag())] = None
    enable_sanity_checks: Annotated[bool | None, no_effect("the engine's checks are always on", flag())] = None
    ignore_unused_parameters: Annotated[
        bool | None,
        not_yet(
            "stop at parameters without gradient when false",
            flag(),
            fine=(True,),
            say="unused parameters are ignored, as with true",
        ),
    ] = None
    offload_optimizer: OffloadOptimizer | None = None
    offload_param: OffloadParam | None = None
    cpu_offload: Annotated[bool | None, off("the old switch of offload_optimizer")] = None
    cpu_offload_param: Annotated[bool | None, off("the old switch of offload_param")] = None
    cpu_offload_params: Annotated[bool | None, off("the old switch of offload_param")] = None
    cpu_offload_use_pin_memory: Annotated[object, no_effect(_OFFLOAD)] = None
    sub_group_size: Annotated[
        int | None, no_effect("the optimizer has the shard of each unit as a tensor of its own", whole())
    ] = None
    zero_hpz_partition_size: Annotated[int | None, not_yet("ranks of a second partition", whole(), fine=(0, 1))] = None
    zero_quantized_weights: Annotated[bool | None, off("quantize parameters for the gather")] = None
    zero_quantized_gradients: Annotated[bool | None, off("quantize gradients for the reduction")] = None
    zero_quantized_nontrainable_weights: Annotated[bool | None, off("keep frozen parameters quantized")] = None
    zeropp_loco_param: Annotated[object, not_yet("error feedback of quantized gradients")] = None
    mics_shard_size: Annotated[int | None, not_yet("ranks of a MiCS group", whole(low=-1), fine=(-1, 0))] = None
    mics_hierarchical_params_gather: Annotated[bool | None, off("gather in two levels")] = None
    memory_efficient_linear: Annotated[
        bool | None, no_effect("a weight that autograd saved has no memory between its uses", flag())
    ] = None
    pipeline_loading_checkpoint: Annotated[bool | None, no_effect(_LOADING, flag())] = None
    override_module_apply: Annotated[
        bool | None, no_effect("model.apply() stays torch's; it can run inside handle.gathered()", flag())
    ] = None
    log_trace_cache_warnings: Annotated[
        bool | None, no_effect("an order of units that changed is followed from the next step on", flag())
    ] = None
    leaf_module: Annotated[object, no_effect(_GATHERED_AS_ONE, known=("classes", "names", "name_suffixes"))] = None
    zenflow: Annotated[object, not_yet("asynchronous updates with offload")] = None
    save_muon_momentum_buffer_in_memory: Annotated[object, no_effect(_OFFLOAD)] = None


class StageThree(Section):
    """``zero_optimization``: stage 3.

    What is honoured there has no effect at other stages, see ``OF_STAGE_3``.
    """

    stage3_max_live_parameters: Annotated[int | None, _MAX_LIVE] = None
    stage3_max_reuse_distance: Annotated[int | None, _REUSE] = None
    stage3_prefetch_bucket_size: Annotated[float | Auto | None, _PREFETCH] = None
    stage3_param_persistence_threshold: Annotated[int | Auto | None, no_effect(_SMALL_ONES, whole(auto=True))] = None
    stage3_model_persistence_threshold: Annotated[int | None, no_effect(_SMALL_ONES, whole())] = None
    stage3_module_granularity_threshold: Annotated[int | None, no_effect(_GATHERED_AS_ONE, whole())] = None
    stage3_use_all_reduce_for_fetch_params: Annotated[bool | None, _ALL_GATHER] = None
    stage3_allgather_sequential: Annotated[bool | None, no_effect(_GATHERED_AS_ONE, flag())] = None
    stage3_partition_stream_chunk_size: Annotated[int | None, _UNREAD] = None
    stage3_gather_16bit_weights_on_model_save: Annotated[bool | None, _WHOLE_MODEL] = None


class SecondNames(Section):
    """``zero_optimization``: second and old names of keys of stage 3."""

    max_live_parameters: Annotated[int | None, _MAX_LIVE] = None
    max_reuse_distance: Annotated[int | None, _REUSE] = None
    prefetch_bucket_size: Annotated[float | Auto | None, _PREFETCH] = None
    param_persistence_threshold: Annotated[int | Auto | None, no_effect(_SMALL_ONES, whole(auto=True))] = None
    model_persistence_threshold: Annotated[int | None, no_effect(_SMALL_ONES, whole())] = None
    module_granularity_threshold: Annotated[int | None, no_effect(_GATHERED_AS_ONE, whole())] = None
    use_all_reduce_for_fetch_params: Annotated[bool | None, _ALL_GATHER] = None
    allgather_sequential: Annotated[bool | None, no_effect(_GATHERED_AS_ONE, flag())] = None
    partition_stream_chunk_size: Annotated[int | None, _UNREAD] = None
    gather_16bit_weights_on_model_save: Annotated[bool | None, _WHOLE_MODEL] = None
    stage3_gather_fp16_weights_on_model_save: Annotated[bool | None, _WHOLE_MODEL] = None


class Zero(SecondNames, StageThree, AllStages):
    """``zero_optimization`` in all its parts."""

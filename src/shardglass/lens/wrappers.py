"""The wrappers that training puts around a model, an optimizer and a scheduler, explained.

Owns the table of the known ones: how each is recognised, what it does, and when in ``Trainer.train()`` it is put on.
Leaves the walk through live objects to ``chains``.

[Note: order in train()] The Transformers Trainer (5.20 and 5.24 alike) keeps ``trainer.model_wrapped is trainer.model``
until ``train()``. There ``_prepare_for_training`` makes the optimizer (``create_optimizer``; before it, under
DeepSpeed, ``deepspeed_init``), calls ``_wrap_model``, which only knows DataParallel and SageMaker, then
``accelerator.prepare``, which puts on everything else, then ``create_scheduler``; ``model_wrapped`` is set at the end.
"""

from dataclasses import dataclass

_PREPARE = "in train(), by accelerator.prepare(), after create_optimizer and _wrap_model, before create_scheduler"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperKind:
    """One known wrapper.

    Attributes:
        kind: Short name.
        cls: Module and name of its class, as an object's classes have it.
        inner: The attribute that has what it wraps; None for what a chain ends in, and for changes in place.
        does: What it does.
        when: When it is put on.
    """

    kind: str
    cls: str
    inner: str | None
    does: str
    when: str


MODELS = (
    WrapperKind(
        kind="DDP",
        cls="torch.nn.parallel.distributed.DistributedDataParallel",
        inner="module",
        does="keeps a whole copy of the model on every rank and averages gradients over ranks in backward",
        when=f"{_PREPARE}, where there are several processes and neither DeepSpeed nor FSDP",
    ),
    WrapperKind(
        kind="DataParallel",
        cls="torch.nn.parallel.data_parallel.DataParallel",
        inner="module",
        does="splits a batch over the GPUs of one process; weights stay on the first",
        when="in train(), by _wrap_model, before accelerator.prepare(), where one process sees several GPUs",
    ),
    WrapperKind(
        kind="DeepSpeedEngine",
        cls="deepspeed.runtime.engine.DeepSpeedEngine",
        inner="module",
        does="runs forward, backward and step; its optimizer re-lays the parameters in flat buffers (ZeRO 1 and 2) or "
        "partitions each of them (ZeRO 3), so that the model inside shows its memory and no longer owns it",
        when=f"{_PREPARE}, by deepspeed.initialize()",
    ),
    WrapperKind(
        kind="FSDP1",
        cls="torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
        inner="module",
        does="flattens the parameters of each wrapped module in one tensor and cuts it over ranks",
        when=f"{_PREPARE}, where FSDP version 1 is asked for; trainer.model is then the wrapped one too",
    ),
    WrapperKind(
        kind="torch.compile",
        cls="torch._dynamo.eval_frame.OptimizedModule",
        inner="_orig_mod",
        does="compiles forward when it is first called; parameters are those of the module inside",
        when="in train(), by accelerator.prepare(), inside DDP, where torch_compile is asked for",
    ),
    WrapperKind(
        kind="PEFT",
        cls="peft.peft_model.PeftModel",
        inner="base_model",
        does="holds adapters (such as LoRA) and their configuration; what is not an adapter is frozen",
        when="before the Trainer is made, by get_peft_model()",
    ),
    WrapperKind(
        kind="PEFT tuner",
        cls="peft.tuners.tuners_utils.BaseTuner",
        inner="model",
        does="has put adapter layers in the place of the model's own, which are inside them as base_layer",
        when="before the Trainer is made, by get_peft_model()",
    ),
)
"""Objects around a model, and around each other in any order."""

MODEL_CHANGES = {
    "FSDP2": WrapperKind(
        kind="FSDP2",
        cls="torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule",
        inner=None,
        does="cuts each parameter along a dimension over ranks (a DTensor) and gathers a module's parameters around "
        "its forward and backward; it changes the module's class and makes no object of its own",
        when=f"{_PREPARE}, by fully_shard(), where FSDP version 2 is asked for; trainer.model is then the changed one",
    ),
    "shardglass": WrapperKind(
        kind="shardglass",
        cls="shardglass.engine.handle.Handle",
        inner=None,
        does="puts parameters in flat buffers, one per unit, reduces gradients to shards in hooks and gathers updated "
        "parameters, at stage 3 before each use; the model's class and attributes stay as they are",
        when="in train(), by ZeroTrainer.create_optimizer, before _wrap_model and accelerator.prepare(), which then "
        "leave the model alone",
    ),
    "autocast": WrapperKind(
        kind="autocast",
        cls="",
        inner=None,
        does="runs forward under torch.autocast and gives its outputs in fp32 (model.forward is replaced)",
        when="in train(), by accelerator.prepare(), inside every other wrapper it puts on, where mixed precision is on",
    ),
    "compiled in place": WrapperKind(
        kind="compiled in place",
        cls="",
        inner=None,
        does="calls go to a compiled form of the module (module.compile()); parameters stay as they are",
        when="by whoever called module.compile()",
    ),
    "blocks compiled": WrapperKind(
        kind="blocks compiled",
        cls="",
        inner=None,
        does="single modules inside are compiled, not the model as a whole",
        when="in train(), by ZeroTrainer.create_optimizer or accelerator.prepare() (regional compilation)",
    ),
}
"""Changes of a model that make no new object."""

OPTIMIZERS = (
    WrapperKind(
        kind="Accelerate for DeepSpeed",
        cls="accelerate.utils.deepspeed.DeepSpeedOptimizerWrapper",
        inner="optimizer",
        does="stands for DeepSpeed's optimizer: step() and zero_grad() do nothing, as the DeepSpeedEngine does both",
        when=_PREPARE,
    ),
    WrapperKind(
        kind="Accelerate",
        cls="accelerate.optimizer.AcceleratedOptimizer",
        inner="optimizer",
        does="steps and clears only at the end of gradient accumulation, and notes a skipped step",
        when=_PREPARE,
    ),
    WrapperKind(
        kind="DeepSpeed ZeRO-1/2",
        cls="deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer",
        inner="optimizer",
        does="flattens each group's parameters, keeps this rank's run of it in fp32, and gives the optimizer inside "
        "that one tensor per group in place of the model's parameters",
        when=f"{_PREPARE}, by deepspeed.initialize()",
    ),
    WrapperKind(
        kind="DeepSpeed BF16 ZeRO-1",
        cls="deepspeed.runtime.bf16_optimizer.BF16_Optimizer",
        inner="optimizer",
        does="as ZeRO-1, and adds gradients up in fp32 over all parameters",
        when=f"{_PREPARE}, by deepspeed.initialize(), at stage 1 with grad_accum_dtype fp32",
    ),
    WrapperKind(
        kind="DeepSpeed ZeRO-3",
        cls="deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
        inner="optimizer",
        does="partitions every parameter, lays this rank's partitions behind each other in sub-groups, and gives the "
        "optimizer inside one fp32 tensor per sub-group, a sub-group at a time",
        when=f"{_PREPARE}, by deepspeed.initialize()",
    ),
    WrapperKind(
        kind="DeepSpeed fp16",
        cls="deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer",
        inner="optimizer",
        does="keeps whole fp32 copies of each group on every rank and scales the loss",
        when=f"{_PREPARE}, by deepspeed.initialize(), at stage 0",
    ),
    WrapperKind(
        kind="placeholder",
        cls="accelerate.utils.deepspeed.DummyOptim",
        inner=None,
        does="stands for the optimizer that the DeepSpeed config describes until DeepSpeed makes it",
        when="in train(), by deepspeed_init, before accelerator.prepare()",
    ),
)
"""Objects around an optimizer."""

SCHEDULERS = (
    WrapperKind(
        kind="Accelerate for DeepSpeed",
        cls="accelerate.utils.deepspeed.DeepSpeedSchedulerWrapper",
        inner="scheduler",
        does="stands for DeepSpeed's scheduler: its step() does nothing, as the DeepSpeedEngine steps it",
        when=_PREPARE,
    ),
    WrapperKind(
        kind="Accelerate",
        cls="accelerate.scheduler.AcceleratedScheduler",
        inner="scheduler",
        does="steps only where the optimizer stepped, and once per process where batches are not split",
        when="by accelerator.prepare(); the Trainer makes its scheduler afterwards and gives it none of these",
    ),
    WrapperKind(
        kind="placeholder",
        cls="accelerate.utils.deepspeed.DummyScheduler",
        inner=None,
        does="stands for the scheduler that the DeepSpeed config describes until DeepSpeed makes it",
        when="in train(), by deepspeed_init, before accelerator.prepare()",
    ),
)
"""Objects around a scheduler."""

OPTIMIZER_CHANGE = WrapperKind(
    kind="shardglass",
    cls="shardglass.engine.handle.Handle",
    inner=None,
    does="each group's params are this rank's runs of the master weights, one per buffer; groups, rates and schedulers "
    "stay as they are",
    when="in train(), by ZeroTrainer.create_optimizer, before accelerator.prepare()",
)

MODEL_END = "the model itself"
OPTIMIZER_END = "updates the tensors in its param_groups"
SCHEDULER_END = "sets the learning rate of the optimizer's groups"
MADE = {
    "model": "before the Trainer is made, or by its model_init at the start of train()",
    "optimizer": "in train(), by create_optimizer, before _wrap_model; or given to the Trainer",
    "scheduler": "in train(), by create_scheduler, after accelerator.prepare(); or given to the Trainer",
}
"""When what a chain ends in is made."""

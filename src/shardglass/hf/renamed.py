"""Names of flags that transformers has dropped, and what became of them.

The table covers what transformers 4.28 to 4.57 took and 5.24 does not. A row counts only while transformers does not
know the old name, so one that comes back is left to transformers.
"""

NEW_NAMES = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "torchdynamo": "torch_compile_backend",
    "xpu_backend": "ddp_backend",
}
"""Old name → the name it has now; the value is the same."""

NEW_VALUES: dict[str, tuple[str, str]] = {
    "adafactor": ("optim", "adafactor"),
    "group_by_length": ("train_sampling_strategy", "group_by_length"),
    "include_inputs_for_metrics": ("include_for_metrics", "inputs"),
    "tpu_metrics_debug": ("debug", "tpu_metrics_debug"),
}
"""Old switch → the flag and value that it stood for; a switch that is off stands for nothing."""

SWITCHES: dict[str, tuple[str, str, str]] = {
    "assistant_only_loss": ("label_policy", "assistant", "all"),
}
"""Switch of another tool → our flag, and its value when the switch is on and when it is off."""

ALIASES = {
    "collective_timeout": "collective_timeout_s",
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
    "hang_timeout": "collective_timeout_s",
    "nproc": "nproc_per_node",
    "stage": "zero_stage",
    "torch_dtype": "dtype",
    "zero_config": "deepspeed",
}
"""Second names that are right and need no remark, where the first name is known."""

_NO_FSDP = "the engine shards the model itself, without FSDP"
_NO_AUTOCAST = "the engine casts the parameters, and nothing is cast on the way"

NO_EFFECT = {
    "_n_gpu": "the number of GPUs is that of the processes",
    "dispatch_batches": "if you need it, give it as --accelerator_config '{\"dispatch_batches\": ...}'",
    "fp16_backend": _NO_AUTOCAST,
    "fp16_opt_level": "it was for apex, which transformers no longer uses",
    "fsdp_min_num_params": _NO_FSDP,
    "fsdp_transformer_layer_cls_to_wrap": _NO_FSDP,
    "half_precision_backend": _NO_AUTOCAST,
    "include_tokens_per_second": "the run summary always has tokens per second",
    "jit_mode_eval": "transformers no longer traces a model for evaluation",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR instead",
    "mp_parameters": "it was for SageMaker's own model parallelism",
    "past_index": "transformers no longer carries past states from batch to batch",
    "push_to_hub_organization": "write --hub_model_id organization/name instead",
    "ray_scope": "this command searches no hyperparameters",
    "save_safetensors": "weights are always saved as safetensors",
    "sharded_ddp": "the engine shards the model itself; choose with --zero_stage",
    "split_batches": "--per_device_train_batch_size is always what one process takes",
    "tpu_num_cores": "TPUs are not supported",
    "use_ipex": "transformers no longer uses Intel's extension",
    "use_legacy_prediction_loop": "transformers has one evaluation loop",
    "use_mps_device": "the device is found without it",
}
"""Old name → why it does nothing."""

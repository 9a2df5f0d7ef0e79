"""What a Trainer would refuse later, tried before anything is loaded.

Owns the checks that need transformers and neither model nor data. Leaves the ranges of single values to ``flags``, what
libraries raise in spite of these checks to ``mistakes``.
"""

from typing import Any

import torch
import torch._inductor
from huggingface_hub import is_offline_mode
from transformers import Trainer, get_scheduler
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)
from transformers.utils.import_utils import is_liger_kernel_available

from shardglass.errors import ConfigError, suggestion
from shardglass.hf.mistakes import THEIRS, one_line

_STEPS = 100
"""Length of the run that a scheduler is tried for."""


def training_faults(training: Any, *, evaluates: bool) -> list[str]:
    """Say what the Trainer cannot do as asked, one line each.

    Args:
        training: The training arguments.
        evaluates: Whether there is data to evaluate on.
    """
    faults = []
    strategy = str(getattr(training.eval_strategy, "value", training.eval_strategy))
    if strategy != "no" and not evaluates:
        faults.append(f"--eval_strategy {strategy}: there is nothing to evaluate on; give --eval_data_path")
    if training.use_liger_kernel and not is_liger_kernel_available():
        faults.append("--use_liger_kernel: liger-kernel is not installed; pip install liger-kernel")
    if training.push_to_hub and is_offline_mode():
        faults.append("--push_to_hub: the hub is switched off (HF_HUB_OFFLINE); unset the variable, or leave it out")
    modes = torch._inductor.list_mode_options()
    if training.torch_compile_mode is not None and training.torch_compile_mode not in modes:
        hint = suggestion(training.torch_compile_mode, modes)
        faults.append(f"--torch_compile_mode {training.torch_compile_mode}: it must be one of {', '.join(modes)}{hint}")
    return faults + _report_faults(training.report_to)


def _report_faults(report_to: list[str]) -> list[str]:
    """Say which reporters do not exist or cannot run here; what else one of them misses, the Trainer finds."""
    here = {*get_available_reporting_integrations(), "azure_ml", "flyte", "kubeflow"}  # the three are not told apart
    faults = []
    for name in report_to:
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(["none", "all", *INTEGRATION_TO_CALLBACK])
            faults.append(f"--report_to {name}: it must be one of {known}{suggestion(name, INTEGRATION_TO_CALLBACK)}")
        elif name not in here:
            faults.append(f"--report_to {name}: its package is not installed; install it, or give --report_to none")
    return faults


def check_optimizer(training: Any) -> None:
    """Read what the Trainer makes its optimizer from.

    Raises:
        ConfigError: ``--optim_args`` are not as its kind takes them.
    """
    try:
        Trainer.get_optimizer_cls_and_kwargs(training)
    except THEIRS as error:
        raise ConfigError(
            f"--optim_args {training.optim_args}: {one_line(error)}; write them as name=value,name=value"
        ) from error


def check_schedule(training: Any) -> None:
    """Make the Trainer's scheduler for a parameter that nobody trains.

    Raises:
        ConfigError: Its kind needs ``--lr_scheduler_kwargs``, or cannot take them.
    """
    rate = training.learning_rate or 1.0  # some kinds divide by it
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    kind = str(getattr(training.lr_scheduler_type, "value", training.lr_scheduler_type))
    try:
        get_scheduler(
            training.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=training.get_warmup_steps(_STEPS),
            num_training_steps=_STEPS,
            scheduler_specific_kwargs=training.lr_scheduler_kwargs,
        )
    except THEIRS as error:
        raise ConfigError(
            f"--lr_scheduler_type {kind}: {one_line(error)}; write --lr_scheduler_kwargs '{{\"name\": value}}'"
        ) from error

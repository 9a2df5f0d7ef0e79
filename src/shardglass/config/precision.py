"""The sections on number formats: fp16, bf16, amp, torch_autocast, data_types."""

from typing import Annotated

from shardglass.config.keys import (
    AUTO,
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
    whole,
)


class Fp16(Section):
    """``fp16``: loss scaling is not there yet, so only ``enabled`` false, or auto without the flag, can run."""

    enabled: Annotated[
        bool | Auto | None, honoured(flag(auto=True), fine=(False, AUTO), say="use bf16, or float32 with both off")
    ] = None
    auto_cast: Annotated[bool | None, no_effect(flag())] = None
    loss_scale: Annotated[float | None, no_effect(real())] = None
    initial_scale_power: Annotated[int | None, no_effect(whole())] = None
    loss_scale_window: Annotated[int | None, no_effect(whole())] = None
    hysteresis: Annotated[int | None, no_effect(whole())] = None
    consecutive_hysteresis: Annotated[bool | None, no_effect(flag())] = None
    min_loss_scale: Annotated[float | None, no_effect(real())] = None
    fp16_master_weights_and_grads: OffSwitch = None
    fp16_opt_level: NoEffect = None


class Bf16(Section):
    """``bf16``; ``check_grad_overflow`` says whether a step with inf or nan gradients is skipped."""

    enabled: Annotated[bool | Auto | None, honoured(flag(auto=True))] = None
    check_grad_overflow: Annotated[bool | None, honoured(flag())] = None
    immediate_grad_update: Annotated[bool | None, no_effect(flag())] = None
    bf16_master_weights_and_grads: OffSwitch = None
    bf16_optimizer_states: OffSwitch = None


class Amp(Section):
    """``amp``: the apex back end, which is refused."""

    enabled: Annotated[
        bool | Auto | None, not_yet(flag(auto=True), fine=(False, AUTO), say="apex is not used here; use bf16")
    ] = None
    opt_level: Annotated[object, no_effect()] = None


class TorchAutocast(Section):
    """``torch_autocast``."""

    enabled: OffSwitch = None
    dtype: NoEffect = None
    lower_precision_safe_modules: NoEffect = None


class DataTypes(Section):
    """``data_types``."""

    grad_accum_dtype: Annotated[
        str | None, honoured(dtype, fine=("float32", "bfloat16"), say='float16 needs loss scaling; use "fp32"')
    ] = None
    param_dtype: Annotated[object, not_yet(fine=())] = None
    buffer_dtype: Annotated[object, not_yet(fine=())] = None
    keep_in_fp32_modules: Annotated[object, no_effect()] = None

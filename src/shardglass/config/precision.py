"""The sections on number formats: fp16, bf16, amp, torch_autocast, data_types."""

from typing import Annotated

from shardglass.config.keys import Section, honoured, no_effect, not_yet, off
from shardglass.config.readers import AUTO, Auto, anything, dtype, flag, real, whole

_SCALING = "there is no loss scaling yet"
_RANGE = "a key of fp16; bfloat16 needs no loss scaling"
_APEX = "apex is not used here; use bf16"
_CASTS = "only parameters are cast; nothing is cast on the way"


class Fp16(Section):
    """``fp16``."""

    enabled: Annotated[
        bool | Auto | None,
        honoured(
            "compute in float16, which needs loss scaling",
            flag(auto=True),
            fine=(False, AUTO),
            say="use bf16, or float32 with both off",
        ),
    ] = None
    auto_cast: Annotated[bool | None, no_effect(_CASTS, flag())] = None
    loss_scale: Annotated[float | None, no_effect(_SCALING, real())] = None
    initial_scale_power: Annotated[int | None, no_effect(_SCALING, whole())] = None
    loss_scale_window: Annotated[int | None, no_effect(_SCALING, whole())] = None
    hysteresis: Annotated[int | None, no_effect(_SCALING, whole())] = None
    consecutive_hysteresis: Annotated[bool | None, no_effect(_SCALING, flag())] = None
    min_loss_scale: Annotated[float | None, no_effect(_SCALING, real())] = None
    fp16_master_weights_and_grads: Annotated[bool | None, off("master weights in float16")] = None
    fp16_opt_level: Annotated[object, no_effect("a key of apex")] = None


class Bf16(Section):
    """``bf16``, or ``bfloat16`` as it was called.

    Only one of the two may be given.
    """

    enabled: Annotated[
        bool | Auto | None, honoured("compute in bfloat16, beside float32 master weights", flag(auto=True))
    ] = None
    check_grad_overflow: Annotated[
        bool | None, honoured("skip a step whose gradient is inf or nan on any rank, in float32 too", flag())
    ] = None
    immediate_grad_update: Annotated[
        bool | None, no_effect("a gradient is always taken up as soon as it is there", flag())
    ] = None
    auto_cast: Annotated[bool | None, no_effect(_CASTS, flag())] = None
    loss_scale: Annotated[float | None, no_effect(_RANGE, real())] = None
    initial_scale_power: Annotated[int | None, no_effect(_RANGE, whole())] = None
    loss_scale_window: Annotated[int | None, no_effect(_RANGE, whole())] = None
    hysteresis: Annotated[int | None, no_effect(_RANGE, whole())] = None
    min_loss_scale: Annotated[float | None, no_effect(_RANGE, real())] = None
    bf16_master_weights_and_grads: Annotated[bool | None, off("master weights in bfloat16")] = None
    bf16_optimizer_states: Annotated[bool | None, off("optimizer states in bfloat16")] = None


class Amp(Section):
    """``amp``."""

    enabled: Annotated[
        bool | Auto | None,
        not_yet("mixed precision by apex", flag(auto=True), fine=(False, AUTO), say=_APEX),
    ] = None
    opt_level: Annotated[object, no_effect("a key of apex", anything)] = None


class TorchAutocast(Section):
    """``torch_autocast``."""

    enabled: Annotated[bool | None, off("compute under torch's autocast", say=_CASTS)] = None
    dtype: Annotated[object, no_effect(_CASTS)] = None
    lower_precision_safe_modules: Annotated[object, no_effect(_CASTS)] = None


class DataTypes(Section):
    """``data_types``."""

    grad_accum_dtype: Annotated[
        str | None,
        honoured(
            "dtype in which gradients are added up",
            dtype,
            fine=("float32", "bfloat16"),
            say='float16 needs loss scaling; use "fp32"',
        ),
    ] = None
    param_dtype: Annotated[object, not_yet("dtype of the parameters", fine=(), say="use bf16.enabled")] = None
    buffer_dtype: Annotated[object, not_yet("dtype of the buffers", fine=(), say="buffers keep theirs")] = None
    keep_in_fp32_modules: Annotated[object, no_effect("for buffer_dtype and param_dtype, which are refused")] = None

"""The optimizer section, filled.

[Note: missing params]
A missing key of ``params`` means the flag if the user gave it, and DeepSpeed's own default otherwise. (DeepSpeed takes
its default even beside a given flag, and so trains at a rate nobody asked for.)
"""

from dataclasses import dataclass
from typing import Literal

from shardglass.config import DeepSpeedConfig
from shardglass.config.types import Optimizer, OptimizerParams
from shardglass.resolve.filler import Filler
from shardglass.resolve.values import OptimizerSpec

_PARAMS = "optimizer.params."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Missing:
    """What a missing key means to the class that DeepSpeed builds for a type."""

    lr: float
    weight_decay: float = 0.0
    eps: float = 1e-8


_MISSING = {
    "Adam": _Missing(lr=1e-3),  # DeepSpeed's FusedAdam
    "AdamW": _Missing(lr=1e-3),
    "torch AdamW": _Missing(lr=1e-3, weight_decay=0.01),  # with torch_adam
    "SGD": _Missing(lr=1e-3),
    "Adagrad": _Missing(lr=1e-2, eps=1e-10),
}


_TRAINERS = {"adamw_torch": "AdamW", "adamw_torch_fused": "AdamW", "sgd": "SGD", "adagrad": "Adagrad"}
"""The Trainer's names of optimizers that a section can name too."""


def fill_optimizer(config: DeepSpeedConfig, filler: Filler) -> OptimizerSpec | None:
    """Decide the optimizer's values; None when the config leaves it to the Trainer."""
    section = config.optimizer
    if section is None or section.type is None:
        _put_trainers_own(filler)
        return None
    filler.put("optimizer.type", section.type, "json")
    params = section.params or OptimizerParams()
    if section.type == "SGD":
        spec = _sgd(params, filler)
    elif section.type == "Adagrad":
        spec = _adagrad(params, filler)
    else:
        spec = _adam(section, params, filler)
    _hold_against_the_trainers(spec, filler)
    if spec.json_type == "Adam" and spec.type == "AdamW" and spec.weight_decay > 0:
        filler.notes.append(
            "DeepSpeed's Adam decouples weight decay, so it runs as AdamW; set adam_w_mode to false for plain Adam"
        )
    if spec.weight_decay > 0:
        filler.notes.append(
            "weight decay reaches biases and norms: the optimizer section puts all parameters in one group"
        )
    return spec


def _put_trainers_own(filler: Filler) -> None:
    """Record what the Trainer makes its optimizer from."""
    args = filler.args
    optim = str.__str__(args.optim)  # an Enum of strings in transformers
    if _TRAINERS.get(optim) == "AdamW":
        filler.note_idle(f"{optim} takes none", "optim_args")
    else:
        filler.note_idle(f"{optim} takes none", "adam_beta1", "adam_beta2", "adam_epsilon")
    filler.put_flag("optimizer.type", optim, "optim")
    filler.put_flag(f"{_PARAMS}lr", args.learning_rate, "learning_rate")
    filler.put_flag(f"{_PARAMS}weight_decay", args.weight_decay, "weight_decay")
    if "adam" in optim:
        filler.put_flag(f"{_PARAMS}betas", (args.adam_beta1, args.adam_beta2), "adam_beta1", "adam_beta2")
        filler.put_flag(f"{_PARAMS}eps", args.adam_epsilon, "adam_epsilon")


def _hold_against_the_trainers(spec: OptimizerSpec, filler: Filler) -> None:
    """What the section overrules of the Trainer's optimizer: another one contradicts, its settings do nothing."""
    optim = str.__str__(filler.args.optim)
    if filler.gave("optim") and _TRAINERS.get(optim) != spec.type:
        remedy = f"{filler.words.drop}, or remove the optimizer section"
        filler.contradict("optimizer.type", spec.json_type, filler.named("optim"), optim, remedy)
    filler.note_idle("the optimizer section decides", "optim_args")
    if spec.betas is None:
        unused = ("adam_beta1", "adam_beta2", *(("adam_epsilon",) if spec.eps is None else ()))
        filler.note_idle(f"the optimizer section's {spec.json_type} takes none", *unused)


def _adam(section: Optimizer, params: OptimizerParams, filler: Filler) -> OptimizerSpec:
    """Adam and AdamW; DeepSpeed: the type AdamW is always decoupled, Adam unless ``adam_w_mode`` is false."""
    decoupled = filler.own(f"{_PARAMS}adam_w_mode", params.adam_w_mode, missing=True)
    if section.type == "AdamW" and not decoupled:
        decoupled = True
        filler.put(f"{_PARAMS}adam_w_mode", decoupled, "derived")
        filler.notes.append("adam_w_mode false does nothing to the type AdamW, as in DeepSpeed: write the type Adam")
    kind: Literal["AdamW", "Adam"] = "AdamW" if decoupled else "Adam"
    torch_adam = filler.own(f"{_PARAMS}torch_adam", params.torch_adam, missing=False)
    missing = _MISSING["torch AdamW" if torch_adam and decoupled else "Adam"]
    lr, weight_decay = _lr_and_decay(params, filler, missing)
    return OptimizerSpec(
        type=kind,
        json_type=str(section.type),
        lr=lr,
        weight_decay=weight_decay,
        betas=_betas(params, filler),
        eps=float(filler.take(f"{_PARAMS}eps", params.eps, "adam_epsilon", filler.args.adam_epsilon, missing.eps)),
        amsgrad=filler.own(f"{_PARAMS}amsgrad", params.amsgrad, missing=False),
    )


def _sgd(params: OptimizerParams, filler: Filler) -> OptimizerSpec:
    lr, weight_decay = _lr_and_decay(params, filler, _MISSING["SGD"])
    spec = OptimizerSpec(
        type="SGD",
        json_type="SGD",
        lr=lr,
        weight_decay=weight_decay,
        momentum=filler.own(f"{_PARAMS}momentum", params.momentum, 0.0),
        dampening=filler.own(f"{_PARAMS}dampening", params.dampening, 0.0),
        nesterov=filler.own(f"{_PARAMS}nesterov", params.nesterov, missing=False),
    )
    if spec.nesterov and (spec.momentum == 0.0 or spec.dampening != 0.0):
        filler.faults.append(f"{_PARAMS}nesterov needs a momentum above 0 and a dampening of 0")
    return spec


def _adagrad(params: OptimizerParams, filler: Filler) -> OptimizerSpec:
    missing = _MISSING["Adagrad"]
    lr, weight_decay = _lr_and_decay(params, filler, missing)
    return OptimizerSpec(
        type="Adagrad",
        json_type="Adagrad",
        lr=lr,
        weight_decay=weight_decay,
        eps=float(filler.take(f"{_PARAMS}eps", params.eps, "adam_epsilon", filler.args.adam_epsilon, missing.eps)),
        lr_decay=filler.own(f"{_PARAMS}lr_decay", params.lr_decay, 0.0),
        initial_accumulator_value=filler.own(
            f"{_PARAMS}initial_accumulator_value", params.initial_accumulator_value, 0.0
        ),
    )


def _lr_and_decay(params: OptimizerParams, filler: Filler, missing: _Missing) -> tuple[float, float]:
    args = filler.args
    lr = filler.take(f"{_PARAMS}lr", params.lr, "learning_rate", args.learning_rate, missing.lr)
    key = f"{_PARAMS}weight_decay"
    decay = filler.take(key, params.weight_decay, "weight_decay", args.weight_decay, missing.weight_decay)
    return float(lr), float(decay)


def _betas(params: OptimizerParams, filler: Filler) -> tuple[float, float]:
    """Decide both rates; each is held against its own flag, because each has one."""
    args, key = filler.args, f"{_PARAMS}betas"
    if params.betas is None or isinstance(params.betas, str):
        # the flags' defaults are DeepSpeed's too, so a missing key needs no table
        filler.put_flag(key, (args.adam_beta1, args.adam_beta2), "adam_beta1", "adam_beta2")
        return (args.adam_beta1, args.adam_beta2)
    flags = (("adam_beta1", args.adam_beta1), ("adam_beta2", args.adam_beta2))
    for index, (flag, value) in enumerate(flags):
        if filler.gave(flag) and params.betas[index] != value:
            filler.contradict(f"{key}[{index}]", params.betas[index], filler.named(flag), value)
    filler.put(key, params.betas, "json", flag="adam_beta1, --adam_beta2")
    return params.betas

"""docs/differences.md: each difference has its four parts, and every off switch it names exists and works."""

import re
from pathlib import Path

import pytest
import torch

from shardglass.config import known_keys, load_config
from shardglass.errors import ConfigError
from shardglass.hf.arguments import ZeroTrainingArguments, parse_command
from shardglass.hf.data_options import DataOptions
from shardglass.hf.flags import ModelArguments
from shardglass.hf.scan import kinds_of
from shardglass.resolve import RunArguments, lr_at, resolve
from shardglass.schedules import betas_at

PAGE = (Path(__file__).parents[2] / "docs" / "differences.md").read_text(encoding="utf-8")
ENTRIES = re.split(r"^### ", PAGE.partition("\n## The same")[0], flags=re.MULTILINE)[1:]
PARTS = ["DeepSpeed", "Here", "Why", "Off switch"]


def parts_of(entry):
    body = entry.partition("\n")[2].partition("\n## ")[0]
    return {name: text for name, text in re.findall(r"^- ([^:]+): ((?:.|\n(?!- |\n))+)", body, flags=re.MULTILINE)}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.partition("\n")[0])
def test_each_difference_says_what_deepspeed_does_what_we_do_why_and_how_to_turn_it_off(entry):
    assert list(parts_of(entry)) == PARTS


def test_every_key_and_flag_on_the_page_exists():
    switches = [parts_of(entry)["Off switch"] for entry in ENTRIES] + PAGE.partition("\n## The same")[2].splitlines()
    named = {name for text in switches for name in re.findall(r"`([^`]+)`", text)}
    flags = {name.split()[0][2:] for name in re.findall(r"`(--[^`]+)`", PAGE)}
    keys = {name for name in named if re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)+|gradient_clipping", name)}
    assert flags <= set(kinds_of(ZeroTrainingArguments, ModelArguments))
    assert {"bf16.check_grad_overflow", "data_types.grad_accum_dtype", "scheduler.params.warmup_type"} <= keys
    assert keys <= {known.key for known in known_keys()}


def run(source, **flags):
    args = RunArguments(**{"total_steps": 100, **flags}, explicit=frozenset(flags))
    return resolve(load_config(source), args, world_size=2)


CYCLE = {"type": "OneCycle", "params": {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 10}}

SWITCHES = [
    # what, read from a run, config and flags as they are, the same with the switch
    ("skipping by key", lambda r: r.options.skip_nonfinite, ({}, {}), ({"bf16": {"check_grad_overflow": False}}, {})),
    ("skipping by flag", lambda r: r.options.skip_nonfinite, ({}, {}), ({}, {"skip_nonfinite": False})),
    ("limit", lambda r: r.options.max_skipped_steps == 20, ({}, {}), ({}, {"max_skipped_steps": 3})),
    (
        "accumulation",
        lambda r: r.options.accum_dtype == "float32",
        ({}, {}),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, {}),
    ),
    ("travel", lambda r: r.options.reduce_dtype is None, ({}, {}), ({"communication_data_type": "fp32"}, {})),
    (
        "missing rate",
        lambda r: r.optimizer.lr == 1e-5,
        ({"optimizer": {"type": "AdamW"}}, {"learning_rate": 1e-5}),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 2e-5}}}, {}),
    ),
    ("clipping by key", lambda r: r.gradient_clipping == 1.0, ({}, {}), ({"gradient_clipping": 0}, {})),
    ("clipping by flag", lambda r: r.gradient_clipping == 1.0, ({}, {}), ({}, {"max_grad_norm": 0.0})),
    (
        "decoupling",
        lambda r: r.optimizer.type == "AdamW",
        ({"optimizer": {"type": "Adam"}}, {}),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, {}),
    ),
    ("one group", lambda r: r.optimizer is not None, ({"optimizer": {"type": "Adam"}}, {}), ({}, {})),
    (
        "log warm-up",
        lambda r: lr_at(r.scheduler, 6) > 0.51,
        ({"scheduler": WARMUP}, {}),
        ({"scheduler": {**WARMUP, "params": {**WARMUP["params"], "warmup_type": "linear"}}}, {}),
    ),
    (
        "first steps at 0",
        lambda r: lr_at(r.scheduler, 0) == lr_at(r.scheduler, 1) == 0.0,
        ({"scheduler": WARMUP}, {}),
        ({"scheduler": {**WARMUP, "params": {**WARMUP["params"], "warmup_min_lr": 0.1}}}, {}),
    ),
    (
        "momentum cycles",
        lambda r: betas_at(r.scheduler, 0) == (0.8, 0.99),
        ({"scheduler": CYCLE}, {}),
        ({"scheduler": {**CYCLE, "params": {**CYCLE["params"], "cycle_momentum": False}}}, {}),
    ),
    (
        "scheduler wins",
        lambda r: r.scheduler is not None,
        ({"scheduler": WARMUP}, {"lr_scheduler_type": "cosine"}),
        ({}, {"lr_scheduler_type": "cosine"}),
    ),
    ("no stage", lambda r: r.stage == 0, ({}, {}), ({"zero_optimization": {"stage": 1}}, {})),
    (
        "torch_adam",
        lambda r: r.optimizer.weight_decay == 0.01,
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, {}),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "weight_decay": 0}}}, {}),
    ),
]


@pytest.mark.parametrize(("holds", "usual", "switched"), [row[1:] for row in SWITCHES], ids=[r[0] for r in SWITCHES])
def test_an_off_switch_turns_its_difference_off(holds, usual, switched):
    assert holds(run(usual[0], **usual[1]))
    assert not holds(run(switched[0], **switched[1]))


def test_switches_of_the_command_line_are_taken():
    flags = [
        "--dtype",
        "bfloat16",
        "--logging_nan_inf_filter",
        "True",
        "--allow_unknown_config",
        "True",
        "--skip_nonfinite",
        "False",
    ]
    command = parse_command(["--model_name_or_path", "m", "--data_path", "d", *flags])
    training = command.training
    assert command.model.dtype == "bfloat16"
    assert (training.logging_nan_inf_filter, training.allow_unknown_config, training.skip_nonfinite) == (
        True,
        True,
        False,
    )
    assert DataOptions(pad_to_multiple_of=8).pad_to_multiple_of == 8
    with pytest.raises(ConfigError):
        load_config({"gradient_clipp1ng": 1})
    assert "gradient_clipp1ng" in load_config({"gradient_clipp1ng": 1}, allow_unknown=True).notes[0]


def test_figures_of_the_page():
    rounded = torch.tensor(1.0039, dtype=torch.float64).to(torch.bfloat16).item()
    assert (rounded - 1.0039) / 1.0039 == pytest.approx(-0.0039, abs=1e-4)
    assert torch.tensor(257.0).to(torch.bfloat16).item() != 257.0
    assert torch.tensor(256.0).to(torch.bfloat16).item() == 256.0

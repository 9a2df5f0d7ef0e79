"""Checkpoints that the real DeepSpeed writes while the test runs, at world sizes 1 to 4.

What is read is held bit for bit against what lay in memory when the checkpoint was written, as ``state_of`` gives it;
that reads DeepSpeed's own tensors by address and is held against plain PyTorch in ``lens``.
"""

import contextlib
import importlib.util
import io
import logging
import math
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from shardglass import state_of
from shardglass.checkpoint.deepspeed import open_deepspeed

pytestmark = [
    pytest.mark.soak,  # recorded and written checkpoints are read in the short suite
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed; `pip install 'shardglass[deepspeed]'`, with g++ and ninja, runs these",
    ),
]


class Net(nn.Module):
    """Odd sizes, a scalar, a tied pair, buffers, a parameter without elements, and frozen parameters on request."""

    def __init__(self, *, frozen=(), tied=True, empty=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 7)
        self.up = nn.Linear(7, 13)
        self.down = nn.Linear(13, 7)
        self.norm = nn.LayerNorm(7)
        self.scale = nn.Parameter(torch.ones(1))  # DeepSpeed takes no 0-d ones
        self.head = nn.Linear(7, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if empty:
            self.none = nn.Parameter(torch.empty(0, 3))
            self.nothing = nn.Parameter(torch.empty(2, 0))
        self.register_buffer("steps", torch.tensor([3, 1, 4]))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        for name, param in self.named_parameters():
            if name.startswith(tuple(frozen)):
                param.requires_grad_(False)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        hidden = self.norm(hidden + self.down(torch.tanh(self.up(hidden)))) * self.scale
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.flatten())


def one(named):
    return [{"params": [p for _, p in named]}]


def two(named):
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def scalar_apart(named):
    """One group of a single element: at 3 and more ranks padding covers several of them."""
    return [
        {"params": [p for name, p in named if name == "scale"]},
        {"params": [p for name, p in named if name != "scale"], "lr": 3e-3},
    ]


def zero(stage, **options):
    return {"zero_optimization": {"stage": stage, **options}}


BF16 = {"bf16": {"enabled": True}}
SUMMED = {"data_types": {"grad_accum_dtype": "fp32"}}
SCHEDULER = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
SUBS = {"sub_group_size": 60, "stage3_param_persistence_threshold": 7}
BASE = ("up", "embed")
"""What a LoRA-like run freezes."""

CASES = {
    "zero-1": (zero(1), one, {}),
    "zero-1 bf16 frozen": ({**zero(1), **BF16}, two, {"frozen": BASE}),
    "zero-1 summed in fp32": ({**zero(1), **BF16, **SUMMED}, two, {"frozen": ("norm",)}),
    "zero-1 summed in fp32, scalar": ({**zero(1), **BF16, **SUMMED}, scalar_apart, {}),
    "zero-2 bf16 frozen": ({**zero(2), **BF16, **SCHEDULER}, two, {"frozen": BASE, "empty": True}),
    "zero-2 scalar": (zero(2), scalar_apart, {"tied": False}),
    "zero-2 round robin": (zero(2, round_robin_gradients=True), two, {}),
    "zero-2 aligned": ({**zero(2, parameter_alignment=True), **BF16}, two, {}),
    "zero-1 aligned round robin": (zero(1, parameter_alignment=True, round_robin_gradients=True), one, {}),
    "zero-2 elastic": (zero(2, elastic_checkpoint=True), scalar_apart, {"frozen": ("norm",)}),
    "zero-3": (zero(3, **SUBS), one, {}),
    "zero-3 bf16 frozen": ({**zero(3, **SUBS), **BF16, **SCHEDULER}, two, {"frozen": BASE}),
    "zero-3 scalar": ({**zero(3), **BF16}, scalar_apart, {"tied": False}),
}


def trained_engine(config, groups, kind, steps):
    os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.simplefilter("ignore")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo")
    model = Net(**kind)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(groups(named), lr=1e-2)
    base = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config={**base, **config})[0]
    torch.manual_seed(dist.get_rank())
    for _ in range(steps):
        engine.backward(engine(torch.randint(0, 11, (2, 5))))
        engine.step()
    return engine


def whole_frozen(engine, name):
    param = dict(engine.module.named_parameters())[name]
    if not hasattr(param, "ds_tensor"):
        return param.detach().clone()
    parts = [torch.empty_like(param.ds_tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, param.ds_tensor)
    return torch.cat(parts)[: param.ds_numel].view(param.ds_shape)


def saved(rank, world_size, folder, case, steps, options):
    """Train, save, and return what lay in memory."""
    config, groups, kind = CASES[case]
    with contextlib.redirect_stdout(io.StringIO()):
        engine = trained_engine(config, groups, kind, steps)
        engine.save_checkpoint(folder, **options)
    trained = {}
    frozen = {}
    for name, param in engine.module.named_parameters():
        numel = getattr(param, "ds_numel", param.numel())
        if param.requires_grad and numel:
            states = state_of(engine, name)
            trained[name] = {key: value.float() for key, value in states.items() if key not in ("grad", "param")}
            trained[name]["shape"] = tuple(getattr(param, "ds_shape", param.shape))
            trained[name]["weight"] = None if hasattr(param, "ds_id") else param.detach().clone()
        else:
            frozen[name] = whole_frozen(engine, name)
    return trained, frozen, {"samples": engine.global_samples, "stage": config["zero_optimization"]["stage"]}


def assert_read(found, trained, frozen, *, steps):
    assert list(found.params) != []
    assert {name: values["shape"] for name, values in trained.items()} == found.params
    for name, values in trained.items():
        wanted = {"master": values.get("master", values["weight"])}
        wanted |= {key: values[key] for key in ("exp_avg", "exp_avg_sq") if key in values}
        if values["weight"] is not None:
            wanted["weight"] = values["weight"]
        for kind, value in wanted.items():
            whole = found.run(kind, name, 0, value.numel())
            assert torch.equal(whole, value.flatten()), (kind, name)
        assert found.step_of[name] == (steps or None)
    assert {name: tuple(value.shape) for name, value in frozen.items()} == found.frozen
    for name, value in frozen.items():
        assert torch.equal(found.run("weight", name, 0, value.numel()), value.flatten()), name


def assert_as_deepspeed_itself(found):
    """Masters against what DeepSpeed's own zero_to_fp32 puts together."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        whole = get_fp32_state_dict_from_zero_checkpoint(str(found.folder.parent), tag=found.tag)
    for name, shape in found.params.items():
        assert torch.equal(found.run("master", name, 0, math.prod(shape)), whole[name].flatten()), name


@pytest.mark.parametrize("world_size", [1, 2, 3, 4], ids="ranks{}".format)
@pytest.mark.parametrize("case", CASES)
def test_what_deepspeed_writes_is_read_bit_for_bit(tmp_path, case, world_size):
    trained, frozen, said = run_ranks(world_size, saved, str(tmp_path), case, 3, {}, timeout_s=300)[0]
    found = open_deepspeed(tmp_path)
    assert found.warnings == ()
    assert (found.stage, found.world_size, found.global_steps) == (said["stage"], world_size, 3)
    assert (found.global_samples, found.tag, found.version) == (said["samples"], "global_step3", "0.19.8")
    assert list(found.buffers) == ["steps"]
    assert found.buffers["steps"].tolist() == [3, 1, 4]
    assert found.shared == ({} if CASES[case][2].get("tied") is False else {"head.weight": "embed.weight"})
    assert (found.lr_scheduler is not None) == ("scheduler" in CASES[case][0])
    assert_read(found, trained, frozen, steps=3)
    found.check_bytes()
    if "summed" not in case:  # zero_to_fp32 refuses those files: they say no stage
        assert_as_deepspeed_itself(found)


@pytest.mark.parametrize("case", ["zero-1 bf16 frozen", "zero-2 bf16 frozen", "zero-3 bf16 frozen"])
def test_frozen_parameters_that_the_save_left_out_are_absent(tmp_path, case):
    options = {"exclude_frozen_parameters": True, "tag": "mine"}
    trained, frozen, _ = run_ranks(2, saved, str(tmp_path), case, 2, options, timeout_s=300)[0]
    found = open_deepspeed(tmp_path / "mine")
    assert found.tag == "mine"
    assert_read(found, trained, {name: frozen[name] for name in found.frozen}, steps=2)
    assert set(found.frozen) <= {"none", "nothing"}
    assert found.shared == {}


@pytest.mark.parametrize("case", ["zero-1 summed in fp32", "zero-2 bf16 frozen", "zero-3"])
def test_a_save_before_the_first_step_has_no_states(tmp_path, case):
    trained, frozen, _ = run_ranks(2, saved, str(tmp_path), case, 0, {}, timeout_s=300)[0]
    found = open_deepspeed(tmp_path)
    assert_read(found, trained, frozen, steps=0)
    assert found.state_keys == ()

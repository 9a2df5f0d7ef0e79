"""shardglass.compat: DeepSpeed's names on sharded models, on models that are not, and what they refuse."""

import gc
import inspect

import pytest
import torch
from models import Perceptron, points, tiny_causal_lm
from oracle import Oracle
from ranks import run_alone, run_ranks
from sharded import assert_equal, gradients, make, squared, states
from tolerances import ORDER_FP32
from torch import nn

from shardglass import compat
from shardglass.compat import (
    GatheredParameters,
    HfDeepSpeedConfig,
    is_zero3_enabled,
    maybe_zero_3,
    zero3_consolidated_16bit_state_dict,
)
from shardglass.engine.freed import FreedParameter
from shardglass.errors import ConfigError, ShardglassError, UsageError

ZERO3 = {"zero_optimization": {"stage": 3}}
ZERO2 = {"zero_optimization": {"stage": 2}}


def test_the_names_are_these():
    assert compat.__all__ == [
        "GatheredParameters",
        "HfDeepSpeedConfig",
        "is_deepspeed_zero3_enabled",
        "is_zero3_enabled",
        "maybe_zero_3",
        "zero3_consolidated_16bit_state_dict",
    ]
    assert all(callable(getattr(compat, name)) for name in compat.__all__)


def test_the_arguments_have_the_names_and_the_order_of_deepspeed():
    assert list(inspect.signature(GatheredParameters).parameters) == [
        "params",
        "modifier_rank",
        "fwd_module",
        "enabled",
    ]
    assert list(inspect.signature(zero3_consolidated_16bit_state_dict).parameters)[1:] == ["exclude_frozen_parameters"]
    assert list(inspect.signature(maybe_zero_3).parameters) == ["param", "ignore_status", "name"]


# ---- GatheredParameters ----


def reading(rank, world_size, stage):
    model, plain = tiny_causal_lm(), tiny_causal_lm()
    handle, _ = make(model, stage=stage)
    expected = dict(plain.named_parameters())
    one = model.model.layers[1].mlp.up_proj.weight
    forms = {
        "a parameter": one,
        "a list": [one, model.lm_head.weight],
        "a generator": (p for p in model.parameters()),
        "a module": model.model.layers[0],
        "a module list": model.model.layers,
        "nothing": [],
    }
    for form, params in forms.items():
        tensors = {id(p) for p in ([params] if isinstance(params, torch.Tensor) else _of(params, model))}
        with GatheredParameters(params):
            found = {name: p.detach().clone() for name, p in model.named_parameters() if id(p) in tensors}
        assert bool(found) == (form != "nothing"), form
        assert_equal(found, {name: expected[name].detach() for name in found})
    again = GatheredParameters(one)
    for _ in range(2):  # one object used twice, and in itself
        with again, again, GatheredParameters(model):
            assert torch.equal(one, expected["model.layers.1.mlp.up_proj.weight"])
    assert isinstance(one, FreedParameter) == (stage == 3)
    with GatheredParameters(one, enabled=False):
        assert isinstance(one, FreedParameter) == (stage == 3)
    handle.close()


def _of(params, model):
    if isinstance(params, nn.Module):
        return list(params.parameters())
    return list(model.parameters()) if inspect.isgenerator(params) else params


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_are_found_in_every_form_that_scripts_give_them(stage):
    run_ranks(2, reading, stage)


def modifying(rank, world_size, stage, dtype, modifier_rank):
    model = Perceptron()
    handle, optimizer = make(model, stage=stage, param_dtype=dtype)
    weight = model.blocks[0][0].weight
    before = handle.state_of("blocks.0.0.weight")["master"]
    with GatheredParameters([weight, model.scale], modifier_rank=modifier_rank), torch.no_grad():
        if rank == modifier_rank:
            weight[3, 2:5] = 7.0
            model.scale.fill_(0.5)
    expected = before.clone()
    expected[3, 2:5] = 7.0
    found = handle.state_of("blocks.0.0.weight")
    assert torch.equal(found["master"], expected), "the optimizer's weights have the change and nothing else"
    assert torch.equal(found["param"], expected.to(found["param"].dtype))
    with GatheredParameters(weight):
        assert torch.equal(weight[3, 2:5].float(), torch.full((3,), 7.0)), "seen on every rank"
    if dtype is None:
        plain = Perceptron()
        with torch.no_grad():
            plain.blocks[0][0].weight[3, 2:5] = 7.0
            plain.scale.fill_(0.5)
        oracle = Oracle(plain, world_size)
        for step in range(2):
            squared(step, rank)(model).backward()
            oracle.backward([squared(step, r) for r in range(world_size)])
            optimizer.step()
            optimizer.zero_grad()
            oracle.step()
        assert_equal(states(handle, model), oracle.states(), 10 * ORDER_FP32)
    else:
        model(points(0, rank).to(torch.bfloat16)).square().mean().backward()
        optimizer.step()
        after = handle.state_of("blocks.0.0.weight")["master"]
        assert 0 < (after - expected).abs().max() < 0.1, "the step went on from the changed weights"
    handle.close()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(("dtype", "modifier_rank"), [(None, 0), (None, 1), ("bfloat16", 1)])
def test_changes_of_one_rank_reach_all_and_survive_steps_as_in_plain_training(stage, dtype, modifier_rank):
    run_ranks(2, modifying, stage, dtype, modifier_rank)


class ReadsOther(nn.Module):
    """Its forward reads a weight of another module, inside of GatheredParameters as DeepSpeed asks for it."""

    def __init__(self, *, gathers):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7)) for _ in range(3))
        self.gathers = gathers

    def forward(self, x):
        x = x + self.blocks[0](x)
        if self.gathers:
            with GatheredParameters(self.blocks[2][0].weight, fwd_module=self):
                x = x + torch.tanh(x @ self.blocks[2][0].weight.T) @ self.blocks[2][2].weight.T
        else:
            x = x + torch.tanh(x @ self.blocks[2][0].weight.T) @ self.blocks[2][2].weight.T
        for block in self.blocks[1:]:
            x = x + block(x)
        return x


def inside_forward(rank, world_size, stage):
    model, oracle = ReadsOther(gathers=True), Oracle(ReadsOther(gathers=False), world_size)
    handle, optimizer = make(model, stage=stage)
    for step in range(3):
        squared(step, rank)(model).backward()
        oracle.backward([squared(step, r) for r in range(world_size)])
        assert_equal(gradients(handle, model), oracle.gradients, ORDER_FP32)
        optimizer.step()
        optimizer.zero_grad()
        oracle.step()
    assert_equal(states(handle, model), oracle.states(), 10 * ORDER_FP32)
    assert not any(b.is_whole for b in handle.buffers) or stage != 3
    handle.close()


@pytest.mark.parametrize("stage", [2, 3])
def test_inside_forward_gradients_are_those_of_plain_training(stage):
    run_ranks(2, inside_forward, stage, timeout_s=30)


def of_two_models(rank, world_size):
    first, second, plain = Perceptron(seed=1), Perceptron(seed=2), Perceptron(seed=3)
    handles = [make(model, stage=3)[0] for model in (first, second)]
    mixed = [second.scale, plain.scale, first.blocks[0][0].bias, torch.ones(1)]
    with GatheredParameters(mixed, modifier_rank=1), torch.no_grad():
        for tensor in mixed:
            tensor.fill_(rank + 2.0)
    with GatheredParameters(mixed):
        assert [float(tensor.detach()[0]) for tensor in mixed] == [3.0, rank + 2.0, 3.0, rank + 2.0]
    with pytest.raises(UsageError, match="the ranks are 0 to 1"), GatheredParameters(mixed, modifier_rank=2):
        pass
    with pytest.raises(MemoryError):
        _fail_while_changing(mixed)
    for handle in handles:
        assert not any(buffer.is_whole for buffer in handle.buffers)
    assert float(handles[1].state_of("scale")["param"]) == 3.0
    for handle in handles:
        handle.close()
    with GatheredParameters(mixed, modifier_rank=0):
        assert float(first.blocks[0][0].bias.detach()[0]) == 3.0


def _fail_while_changing(params):
    """On all ranks, so nobody waits; nothing is taken over."""
    with GatheredParameters(params, modifier_rank=0), torch.no_grad():
        params[0].fill_(9.0)
        raise MemoryError


def test_parameters_of_several_models_and_of_none_may_stand_together():
    run_ranks(2, of_two_models)


@pytest.mark.parametrize(
    ("params", "given"),
    [("lm_head.weight", "str"), (["lm_head.weight"], "str"), (3, "int"), (Perceptron().named_parameters(), "tuple")],
)
def test_what_is_no_parameter_is_named_with_the_way_by_name(params, given):
    with pytest.raises(UsageError, match=rf"was given {given}; by name, use `with handle.gathered\("):
        GatheredParameters(params)


# ---- whole weights ----


class Holder:
    """Has a model, as a Trainer has."""

    def __init__(self, model):
        self.model = model


def consolidated(rank, world_size, stage, dtype):
    model, plain = tiny_causal_lm(tied=True), tiny_causal_lm(tied=True)
    model.model.layers[0].requires_grad_(False)
    handle, _ = make(model, stage=stage, param_dtype=dtype)
    expected = {name: t.to(getattr(torch, dtype)) if dtype else t for name, t in plain.state_dict().items()}
    for source in (model, Holder(model), handle, nn.ModuleDict({"wrapped": model})):
        found = zero3_consolidated_16bit_state_dict(source)
        assert (found is None) == (rank != 0)
        if found is not None:
            assert list(found) == list(expected)
            assert_equal(found, expected)
            assert found["lm_head.weight"] is found["model.embed_tokens.weight"]
    trained = zero3_consolidated_16bit_state_dict(model, exclude_frozen_parameters=True)
    if trained is not None:
        assert list(trained) == [name for name in expected if not name.startswith("model.layers.0.")]
    copies = {name: maybe_zero_3(p, ignore_status=True, name=name) for name, p in model.named_parameters()}
    assert_equal(copies, {name: expected[name] for name in copies})
    with GatheredParameters(model.lm_head.weight, modifier_rank=0), torch.no_grad():
        model.lm_head.weight.zero_()
    assert copies["model.embed_tokens.weight"].abs().sum() > 0, "a copy"
    handle.close()
    assert torch.equal(maybe_zero_3(model.lm_head.weight), torch.zeros_like(model.lm_head.weight))
    for source in (model, Holder(model), Holder(None), "model"):
        with pytest.raises(UsageError, match=f"this {type(source).__name__} has no sharded model.*state_dict"):
            zero3_consolidated_16bit_state_dict(source)


@pytest.mark.parametrize(("stage", "dtype"), [(2, None), (3, None), (3, "bfloat16")])
def test_the_consolidated_state_dict_is_that_of_the_model_before_it_was_sharded(stage, dtype):
    run_ranks(2, consolidated, stage, dtype)


# ---- is_zero3_enabled ----


def enabled_by_handle(rank, world_size):
    found = []
    for stage in (2, 3):
        handle, _ = make(Perceptron(), stage=stage)
        found.append(is_zero3_enabled())
        handle.close()
        found.append(compat.is_deepspeed_zero3_enabled())
    return found


def test_zero3_is_enabled_while_a_handle_shards_parameters():
    assert run_alone(enabled_by_handle) == [False, False, True, False]


def test_zero3_is_enabled_while_a_config_is_kept(tmp_path):
    gc.collect()
    assert not is_zero3_enabled()
    kept = HfDeepSpeedConfig(ZERO2)
    assert not is_zero3_enabled()
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}')
    kept = HfDeepSpeedConfig(str(path))
    assert is_zero3_enabled()
    del kept
    gc.collect()
    assert not is_zero3_enabled()


def test_a_kept_config_can_be_asked_for_its_values():
    given = {**ZERO3, "bf16": {"enabled": False}, "steps_per_print": 10, "_note": "mine"}
    kept = HfDeepSpeedConfig(given)
    assert kept.config == {key: value for key, value in given.items() if key != "_note"}
    kept.config["zero_optimization"]["stage"] = 2
    assert given["zero_optimization"]["stage"] == 3
    assert kept.is_zero2()
    assert not kept.is_zero3()
    assert kept.get_value("steps_per_print") == 10
    assert kept.get_value("bf16.loss_scale", 5) == 5
    assert kept.get_value("steps_per_print.more") is None
    assert (kept.is_true("bf16.enabled"), kept.is_false("bf16.enabled")) == (False, True)
    assert (kept.is_true("fp16.enabled"), kept.is_false("fp16.enabled")) == (False, False)
    assert not kept.is_offload()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"zero_optimization": {"stag": 3}}, r"zero_optimization.stag: unknown key \(did you mean 'stage'\?\)"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "offload_param.device"),
        ("no-such-file.json", "no-such-file.json"),
    ],
)
def test_a_config_that_cannot_run_is_refused_when_it_is_kept(source, says):
    with pytest.raises(ConfigError, match=says) as caught:
        HfDeepSpeedConfig(source)
    assert isinstance(caught.value, ShardglassError)
    gc.collect()
    assert not is_zero3_enabled()

"""Which optimizers are taken, against the oracle, and which are refused."""

import functools

import pytest
import torch
from models import Perceptron
from oracle import Oracle
from ranks import run_alone, run_ranks
from sharded import assert_equal, make, squared, states
from tolerances import FUSED_TAIL, ORDER_FP32

from shardglass.engine.shard import shard
from shardglass.errors import CollectiveError, ConfigError, ModelError, OptimizerError, UsageError
from shardglass.options import EngineOptions

TAKEN = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "sgd fused": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "adam fused": (torch.optim.Adam, {"lr": 1e-2, "fused": True}),
    "adamw foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "adamw fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5, "centered": True}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-3}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-3}),
    "radam": (torch.optim.RAdam, {"lr": 1e-3}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-3}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1e-1}),
    "asgd": (torch.optim.ASGD, {"lr": 1e-2}),
}


def trains(rank, world_size, key):
    kind, options = TAKEN[key]
    optimizers = functools.partial(kind, **options)
    model, oracle = Perceptron(), Oracle(Perceptron(), world_size, optimizers=optimizers)
    handle, optimizer = make(model, optimizers=optimizers)
    for step in range(3):
        squared(step, rank)(model).backward()
        oracle.backward([squared(step, r) for r in range(world_size)])
        optimizer.step()
        optimizer.zero_grad()
        oracle.step()
    found = states(handle, model)
    expected = oracle.states()
    scalars = [name for name, value in expected.items() if value.dim() == 0 and name.split("|")[1] != "master"]
    assert_equal(found, expected, FUSED_TAIL if "fused" in key else ORDER_FP32)
    handle.close()
    return scalars


@pytest.mark.parametrize("key", TAKEN)
def test_element_wise_optimizers_train_as_unsharded(key):
    run_ranks(3, trains, key)


def stepped_before(rank, world_size):
    """An optimizer that has taken steps keeps its state."""
    model, oracle = Perceptron(), Oracle(Perceptron(), world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, foreach=False)
    squared(0)(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    oracle.backward([squared(0)] * world_size)
    oracle.step()
    handle = shard(model, optimizer)
    squared(1, rank)(model).backward()
    oracle.backward([squared(1, r) for r in range(world_size)])
    optimizer.step()
    oracle.step()
    assert_equal(states(handle, model), oracle.states(), ORDER_FP32)
    assert handle.state_of("scale")["step"].item() == 2.0
    handle.close()


def test_state_from_before_sharding_is_kept():
    run_ranks(2, stepped_before)


def refused(rank, world_size, kind):
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3)
    with pytest.raises(OptimizerError, match=rf"{kind} cannot be sharded.*AdamW.*allow_any_optimizer"):
        shard(model, optimizer)


@pytest.mark.parametrize("kind", ["Muon", "LBFGS", "Adafactor"])
def test_optimizers_that_need_whole_matrices_are_refused(kind):
    run_alone(refused, kind)


class Signed(torch.optim.Optimizer):
    """An element-wise optimizer of the user's own."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


def own_optimizer(rank, world_size):
    optimizers = functools.partial(Signed, lr=1e-2)
    with pytest.raises(OptimizerError, match="Signed"):
        make(Perceptron(), optimizers=optimizers)
    model, oracle = Perceptron(), Oracle(Perceptron(), world_size, optimizers=optimizers)
    handle, optimizer = make(model, optimizers=optimizers, allow_any_optimizer=True)
    squared(rank)(model).backward()
    oracle.backward([squared(r) for r in range(world_size)])
    optimizer.step()
    oracle.step()
    assert_equal(states(handle, model), oracle.states())
    handle.close()


def test_an_own_optimizer_is_taken_when_the_user_vouches_for_it():
    run_ranks(2, own_optimizer)


def missing_and_foreign(rank, world_size):
    model = Perceptron()
    some = [p for name, p in model.named_parameters() if "bias" not in name]
    with pytest.raises(OptimizerError, match=r"4 trainable parameters .* blocks\.0\.0\.bias.*requires_grad_\(False\)"):
        shard(model, torch.optim.AdamW(some))
    stranger = torch.nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(OptimizerError, match=r"no parameters of this model.*param_groups\[0\].*\(2, 3\)"):
        shard(model, torch.optim.AdamW([*model.parameters(), stranger]))
    assert all(p.untyped_storage().nbytes() == p.numel() * 4 for p in model.parameters())


def test_parameters_the_optimizer_lacks_or_invents_are_named():
    run_alone(missing_and_foreign)


def bad_calls(rank, world_size):
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match="stage is 7"):
        shard(model, optimizer, stage=7)
    with pytest.raises(ModelError, match=r"'block\.0' is not a module.*did you mean 'blocks\.0'"):
        shard(model, optimizer, units=["block.0"])
    with pytest.raises(ModelError, match=r"'blocks\.0\.0' is in 'blocks\.0'"):
        shard(model, optimizer, units=["blocks.0", "blocks.0.0"])
    with pytest.raises(ModelError, match="no parameters"):
        shard(torch.nn.Tanh(), optimizer)
    model.blocks[1][0].weight.data = model.blocks[0][0].weight.data
    with pytest.raises(ModelError, match="two Parameters over the same memory"):
        shard(model, optimizer)


def test_wrong_arguments_are_refused_before_anything_changes():
    run_alone(bad_calls)


def step_with_closure(rank, world_size):
    model = Perceptron()
    handle, optimizer = make(model)
    squared(rank)(model).backward()
    with pytest.raises(UsageError, match="closure"):
        optimizer.step(lambda: 0.0)
    handle.close()


def test_a_step_with_a_closure_is_refused():
    run_ranks(2, step_with_closure)


def differing(rank, world_size, what):
    depth = 2 + (what == "model" and rank == 1)
    options = EngineOptions(stage=2 if what != "stage" or rank == 0 else 1)
    model = Perceptron(depth=depth)
    kind = torch.optim.SGD if what == "optimizer" and rank == 1 else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.5 if what == "lr" and rank == 1 else 0.1)
    with pytest.raises(CollectiveError) as caught:
        shard(model, optimizer, options=options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "named"), [("model", "blocks.2.0.weight"), ("stage", "stage"), ("optimizer", "SGD"), ("lr", "0.5")]
)
def test_ranks_that_differ_are_told_what_differs(what, named):
    for text in run_ranks(2, differing, what, timeout_s=20):
        assert named in text
        assert "rank 1" in text


def own_units(rank, world_size):
    model, oracle = Perceptron(), Oracle(Perceptron(), world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, foreach=False)
    handle = shard(model, optimizer, units=["blocks.0.0", model.blocks[1]])
    names = handle.layout.units
    for step in range(2):
        squared(step, rank)(model).backward()
        oracle.backward([squared(step, r) for r in range(world_size)])
        optimizer.step()
        oracle.step()
    assert_equal(states(handle, model), oracle.states(), ORDER_FP32)
    handle.close()
    return names


def test_units_of_the_user_s_choice_train_alike():
    for names in run_ranks(2, own_units):
        assert {"blocks.0.0", "blocks.1"} < set(names)

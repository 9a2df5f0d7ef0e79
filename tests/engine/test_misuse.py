"""What people try on a sharded model: it works, or is refused with a message that says what to do."""

import copy
import functools
import gc
import io

import pytest
import torch
import torch.distributed as dist
from models import Perceptron
from oracle import adamw, one_group
from ranks import RankError, run_ranks
from sharded import make, squared
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardglass import (
    ConfigError,
    EngineOptions,
    ModelError,
    OptimizerError,
    UsageError,
    load_checkpoint,
    save_checkpoint,
    shard,
)
from shardglass.engine.registry import live_handle
from shardglass.engine.units import build_units


class Scaled(nn.Module):
    """A 0-d parameter, as contrastive models have."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.linear = nn.Linear(7, 7)

    def forward(self, x):
        return self.linear(x) * self.scale


def scalar(rank, world_size, stage):
    model, plain = Scaled(), Scaled()
    handle, optimizer = make(model, stage=stage)
    reference = adamw(one_group(list(plain.named_parameters())))
    for step in range(3):
        squared(step, rank)(model).backward()
        assert model.scale.grad.shape == ()
        optimizer.step()
        optimizer.zero_grad()
        for r in range(world_size):
            (squared(step, r)(plain) / world_size).backward()
        reference.step()
        reference.zero_grad()
    found = {name: handle.state_of(name)["master"] for name, _ in model.named_parameters()}
    handle.close()
    for name, p in plain.named_parameters():
        assert found[name].shape == p.shape
        torch.testing.assert_close(found[name], p.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_without_dimensions_is_trained_like_any_other(stage):
    run_ranks(2, scalar, stage)


BY_HAND = {
    "removed": lambda model: setattr(model.scale, "grad", None),
    "set": lambda model: setattr(model.scale, "grad", torch.ones(1)),
    "zeroed": lambda model: model.scale.grad.zero_(),
}


def by_hand(rank, world_size, how, call):
    model = Perceptron()
    handle, optimizer = make(model)
    squared(0, rank)(model).backward()
    BY_HAND[how](model)
    with pytest.raises(UsageError) as caught:
        optimizer.step() if call == "step" else handle.clip_grad_norm_(1.0)
    model.zero_grad()  # all of them: that is a clear
    squared(0, rank)(model).backward()
    optimizer.step()
    moved = not torch.equal(handle.state_of("scale")["master"], torch.ones(1))
    handle.close()
    return str(caught.value), moved


@pytest.mark.parametrize("call", ["step", "clip"])
@pytest.mark.parametrize("how", BY_HAND)
def test_one_gradient_taken_away_or_set_by_hand_is_refused_and_named(how, call):
    for message, moved in run_ranks(2, by_hand, how, call):
        assert message.startswith("scale: the gradient was")
        assert "optimizer.zero_grad()" in message
        assert moved


def without_backward(rank, world_size):
    model = Perceptron()
    handle, optimizer = make(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(UsageError, match=r"\.grad was set by hand and not by backward"):
        optimizer.step()
    handle.close()


def test_gradients_without_a_backward_are_refused():
    run_ranks(2, without_backward)


READS = {
    "data": lambda grad: grad.data.norm(),
    "detach": lambda grad: grad.detach(),
    "numpy": lambda grad: grad.numpy(),
    "transposed": lambda grad: grad.T,
    "norm": lambda grad: grad.norm(),
    "scaled in place": lambda grad: grad.mul_(2),
    "item": lambda grad: grad.flatten()[0].item(),
    "list": lambda grad: grad.tolist(),
    "copied": lambda grad: torch.empty(7).copy_(grad),
}


def read(rank, world_size, how):
    model = Perceptron()
    handle, _ = make(model)
    squared(0, rank)(model).backward()
    grad = model.blocks[0][0].weight.grad
    assert (grad.shape, grad.dtype, grad.device.type) == ((13, 7), torch.float32, "cpu")
    with pytest.raises(UsageError, match="state_of"):
        READS[how](grad)
    handle.close()


@pytest.mark.parametrize("how", READS)
def test_no_value_is_read_from_a_gradient_that_is_elsewhere(how):
    run_ranks(2, read, how)


def copied(rank, world_size):
    model = Perceptron()
    handle, optimizer = make(model)
    squared(0, rank)(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    handle.wait()
    average = copy.deepcopy(model)
    before = {name: p.detach().clone() for name, p in average.named_parameters()}
    if rank == 0:
        squared(1, rank)(average).backward()  # one rank alone: no collective may follow from it
        assert all(isinstance(p.grad, torch.Tensor) and p.grad.norm() >= 0 for p in average.parameters())
    squared(1, rank)(model).backward()
    optimizer.step()
    handle.wait()
    assert all(torch.equal(before[name], p) for name, p in average.named_parameters())
    assert any(not torch.equal(before[name], p) for name, p in model.named_parameters())
    for saved in (lambda: torch.save(model, io.BytesIO()), lambda: torch.save(handle.model, io.BytesIO())):
        with pytest.raises(UsageError, match="full_state_dict"):
            saved()
    handle.close()
    torch.save(model, io.BytesIO())


def test_a_deep_copy_is_a_plain_model_and_a_pickle_is_refused():
    run_ranks(2, copied)


def refused(rank, world_size, what):
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if what == "ddp":
        model = DistributedDataParallel(model)
    elif what == "frozen":
        model.requires_grad_(False)
    elif what == "complex":
        model.extra = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    elif what == "half":
        model.half()
    elif what == "renormed":
        model.table = nn.Embedding(5, 3, max_norm=1.0)
    elif what == "no module":
        model = model.parameters()
    elif what == "no optimizer":
        optimizer = 0.1
    elif what == "other group":
        group = dist.new_group([0])
        if rank == 0:
            return "rank 0 is in it"
        with pytest.raises(UsageError) as caught:
            shard(model, optimizer, process_group=group)
        return str(caught.value)
    with pytest.raises((ModelError, OptimizerError, ConfigError)) as caught:
        shard(model, optimizer)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("ddp", "wrapped in DistributedDataParallel, which reduces gradients: give model.module"),
        ("frozen", "no parameter of the model is trainable"),
        ("complex", "extra has dtype complex64"),
        ("half", "trained in float16, which needs loss scaling; that is not supported yet"),
        ("renormed", "table has max_norm: its forward rewrites weights"),
        ("no module", "generator is no torch.nn.Module"),
        ("no optimizer", "float is no torch.optim.Optimizer"),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(what, told):
    for message in run_ranks(2, refused, what):
        assert told in message


def test_a_rank_outside_the_group_is_told_so():
    assert "rank 1, is not in the process_group" in run_ranks(2, refused, "other group")[1]


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 7, sparse=True)

    def forward(self, ids):
        return self.embedding(ids)


def sparse(rank, world_size):
    model = Sparse()
    handle, _ = make(model, optimizers=lambda groups: torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(UsageError, match=r"embedding.weight gets a sparse gradient; make its.*sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()
    return handle.rank


def test_sparse_gradients_are_refused_by_name():
    assert run_ranks(2, sparse) == [0, 1]


def twice(rank, world_size):
    model = Perceptron()
    optimizer = make(model)[1]  # the handle is dropped, the hooks are not
    gc.collect()
    for again in (optimizer, torch.optim.SGD(model.parameters(), lr=0.1)):
        with pytest.raises(UsageError, match=r"sharded already \(.*stage 2.*call handle.close\(\) first"):
            shard(model, again)
    live_handle(model).close()
    second, optimizer = make(model)
    squared(0, rank)(model).backward()
    optimizer.step()
    second.close()


def test_a_model_is_sharded_once_until_the_handle_is_closed():
    run_ranks(2, twice)


def grown(rank, world_size):
    model = Perceptron()
    handle, optimizer = make(model)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    squared(0, rank)(model).backward()
    with pytest.raises(OptimizerError, match=r"param_groups were changed after shard\(\)"):
        optimizer.step()
    handle.close()


def test_a_group_added_after_shard_is_refused():
    run_ranks(2, grown)


def odd_norms(rank, world_size):
    model = Perceptron()
    handle, _ = make(model)
    squared(0, rank)(model).backward()
    for norm in (-1.0, float("nan")):
        with pytest.raises(UsageError, match="must be 0 or above"):
            handle.clip_grad_norm_(norm)
    assert handle.clip_grad_norm_(float("inf")) == handle.clip_grad_norm_(1e9)
    handle.close()


def test_a_norm_that_makes_no_sense_is_refused():
    run_ranks(2, odd_norms)


def alone(rank, world_size):
    if rank == 1:
        raise ValueError("no data here")
    model = Perceptron()
    shard(model, torch.optim.SGD(model.parameters(), lr=0.1), options=EngineOptions(collective_timeout_s=5.0))


def test_a_rank_that_fails_before_shard_is_the_one_that_is_told():
    with pytest.raises(RankError, match=r"rank 1 failed first(.|\n)*no data here"):
        run_ranks(2, alone)


def scaled(rank, world_size, fused):
    model = Perceptron()
    handle, optimizer = make(model, optimizers=functools.partial(torch.optim.AdamW, lr=1e-2, fused=fused))
    scaler = torch.amp.GradScaler("cpu")
    loss = squared(0, rank)(model)
    scaler.scale(loss * (float("inf") if rank == 1 else 1.0)).backward()
    with pytest.raises(UsageError, match="GradScaler is not supported"):
        scaler.step(optimizer)
    handle.zero_grad()
    handle.close()
    assert fused or not hasattr(optimizer, "_step_supports_amp_scaling")


@pytest.mark.parametrize("fused", [True, False])
def test_a_grad_scaler_is_refused_on_every_rank_also_if_one_has_an_inf(fused):
    run_ranks(2, scaled, fused)


def carried_over(rank, world_size, kind, stage):
    model, plain = Scaled(), Scaled()
    optimizer, reference = (kind(m.parameters(), lr=0.05) for m in (model, plain))
    for step in range(2):
        for m, o in ((model, optimizer), (plain, reference)):
            sum(squared(step, r)(m) / world_size for r in range(world_size)).backward()
            o.step()
            o.zero_grad()
    handle = shard(model, optimizer, stage=stage)
    squared(2, rank)(model).backward()
    optimizer.step()
    handle.close()
    sum(squared(2, r)(plain) / world_size for r in range(world_size)).backward()
    reference.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.AdamW, torch.optim.NAdam, torch.optim.ASGD])
def test_state_of_a_parameter_without_dimensions_is_kept(kind, stage):
    run_ranks(2, carried_over, kind, stage)


@pytest.mark.parametrize(("units", "told"), [("scale", "'scale': give a list"), ([5], "'int' is not a module")])
def test_units_of_a_wrong_kind_are_one_clear_error(units, told):
    with pytest.raises(ModelError, match=told):
        build_units(Perceptron(), units)


# ---- other parameters than in shard() ----


class WithHead(nn.Module):
    """Blocks, a table of which the head is tied or not, and a head."""

    def __init__(self, *, tied=False):
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(7, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(7, 7)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x @ self.table.weight)


def set_data(model):
    model.head.weight.data = torch.ones(7, 7)


def grow_table(model):
    model.table.weight.data = torch.ones(9, 7)


CHANGES = {
    "head replaced": (lambda model: setattr(model, "head", nn.Linear(7, 7)), "head.weight, head.bias were replaced. "),
    "head without bias": (
        lambda model: setattr(model, "head", nn.Linear(7, 7, bias=False)),
        "head.weight was replaced; head.bias was taken away. ",
    ),
    "weight replaced": (
        lambda model: setattr(model.head, "weight", nn.Parameter(torch.ones(7, 7))),
        "head.weight was replaced. ",
    ),
    "adapter added": (
        lambda model: setattr(model, "adapter", nn.Linear(7, 2)),
        "adapter.weight, adapter.bias were added. ",
    ),
    "block added": (
        lambda model: model.blocks.append(nn.Linear(7, 7)),
        "blocks.2.weight, blocks.2.bias were added. ",
    ),
    "blocks taken away": (
        lambda model: delattr(model, "blocks"),
        "blocks.0.0.weight, blocks.0.0.bias, blocks.1.0.weight and 1 more were taken away. ",
    ),
    "tied anew": (lambda model: setattr(model.head, "weight", model.table.weight), "head.weight was replaced. "),
    "data replaced": (set_data, "head.weight does not lie in the engine's buffer any more: "),
    "table grown": (grow_table, "table.weight does not lie in the engine's buffer any more: "),
    "cast": (
        lambda model: model.double(),
        "table.weight, blocks.0.0.weight, blocks.0.0.bias and 4 more do not lie in ",
    ),
}


def calls(handle, model, optimizer, folder):
    def gather():
        with handle.gathered("head"):
            pass

    return {
        "forward": lambda: model(torch.ones(2, 7)),
        "clip_grad_norm_": lambda: handle.clip_grad_norm_(1.0),
        "step": optimizer.step,
        "gathered": gather,
        "full_state_dict": handle.full_state_dict,
        "full_state_dict on rank 0": lambda: handle.full_state_dict(rank0_only=True),
        "state_of": lambda: handle.state_of("table.weight"),
        "save_checkpoint": lambda: save_checkpoint(handle, folder / "checkpoint"),
        "load_checkpoint": lambda: load_checkpoint(handle, folder / "before"),
    }


def changed(rank, world_size, stage, folder):
    messages = {}
    for what, (change, _) in CHANGES.items():
        model = WithHead()
        handle, optimizer = make(model, stage=stage)
        if not (folder / "before").exists():
            save_checkpoint(handle, folder / "before")
        if what != "cast":  # which is refused already while there are gradients
            model(torch.ones(2, 7)).square().mean().backward()
        with handle.gathered():  # where parameters are sharded, .data cannot be set elsewhere
            change(model)
        for name, call in calls(handle, model, optimizer, folder).items():
            with pytest.raises(UsageError) as caught:
                call()
            messages[what, name] = str(caught.value)
        assert not (folder / "checkpoint").exists()
        handle.close()
    return messages


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_replaced_added_or_moved_after_shard_are_named_wherever_they_are_used(stage, tmp_path):
    for messages in run_ranks(2, changed, stage, tmp_path):
        assert len(messages) == 9 * len(CHANGES)
        for (what, _), message in messages.items():
            assert message.startswith(CHANGES[what][1])
            assert message.endswith("call handle.close(), change it then, make the optimizer anew and shard() again")


def changed_and_sharded_again(rank, world_size, stage):
    model = WithHead(tied=True)
    handle, _ = make(model, stage=stage)
    model.head.weight = model.table.weight  # as tie_weights() does: nothing changes
    model.register_buffer("mask", torch.ones(3))
    before = handle.full_state_dict()
    with pytest.raises(UsageError, match=r"^head\.weight was replaced\. "), handle.gathered("head", modifier_rank=0):
        model.head.weight = nn.Parameter(torch.zeros(7, 7))
    handle.close()
    model.head = nn.Linear(7, 3)
    handle, optimizer = make(model, stage=stage)
    model(torch.ones(2, 7)).square().mean().backward()
    optimizer.step()
    after = handle.full_state_dict()
    handle.close()
    assert after["head.weight"].shape == (3, 7)
    assert not torch.equal(before["table.weight"], after["table.weight"])


@pytest.mark.parametrize("stage", [1, 3])
def test_tying_anew_what_is_tied_is_no_change_and_a_closed_handle_lets_a_model_change(stage):
    run_ranks(2, changed_and_sharded_again, stage)

"""A state saved at one world size and stage is the same at another, and training goes on from it alike."""

import itertools

import pytest
import torch
from models import Specks, points, tiny_causal_lm, tokens
from oracle import adamw
from ranks import run_ranks
from sharded import assert_equal, make
from tolerances import ADAM_FP32, LOSS_FP32

from shardglass import load_checkpoint, save_checkpoint

PARTS = 12  # of a global batch, so that 1 to 4 ranks share it evenly


def model_of(kind):
    if kind == "specks":
        return Specks()
    model = tiny_causal_lm(tied=True)
    if kind == "frozen":
        model.model.layers[0].requires_grad_(False)
    return model


def groups_of(kind):
    def two(named):
        named = [p for _, p in named if p.requires_grad]
        return [{"params": named[::2], "weight_decay": 0.1}, {"params": named[1::2], "weight_decay": 0.0, "lr": 1e-2}]

    return two if kind != "specks" else lambda named: [{"params": [p for _, p in named]}]


def loss_of(model, kind, step, rank, world_size):
    """This rank's share of a global batch that is the same at every world size."""
    mine = range(rank * PARTS // world_size, (rank + 1) * PARTS // world_size)
    if kind == "specks":
        return model(torch.cat([points(step, part) for part in mine])).square().mean()
    ids = torch.cat([tokens(step, part, batch=1) for part in mine])
    return model(input_ids=ids, labels=ids).loss


def train(model, optimizer, handle, kind, steps, rank):
    losses = []
    for step in steps:
        loss = loss_of(model, kind, step, rank, handle.world_size)
        loss.backward()
        handle.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(handle.agree("loss", loss.item())) / handle.world_size)
    return losses


def bits(handle, model):
    """Every number a run goes on from, by name."""
    found = {}
    for name, _ in model.named_parameters():
        found |= {f"{name}|{key}": value.clone() for key, value in handle.state_of(name).items()}
    return found


def write(rank, world_size, folder, kind, stage):
    """Train two steps, save, train two more; the state when saved, and the losses behind it."""
    model = model_of(kind)
    handle, optimizer = make(model, optimizers=adamw, groups=groups_of(kind), stage=stage)
    train(model, optimizer, handle, kind, range(2), rank)
    save_checkpoint(handle, folder)
    saved = bits(handle, model)
    losses = train(model, optimizer, handle, kind, range(2, 4), rank)
    ended = bits(handle, model)
    handle.close()
    return (saved, losses, ended) if rank == 0 else None


def read(rank, world_size, folder, kind, stage, fresh):
    """Load in a model of other values, train two steps; the same three."""
    model = model_of(kind)
    for p in model.parameters():
        p.data.mul_(0.5)
    handle, optimizer = make(model, optimizers=adamw, groups=groups_of(kind), stage=stage)
    if not fresh:
        train(model, optimizer, handle, kind, range(1), rank)
    load_checkpoint(handle, folder)
    loaded = bits(handle, model)
    losses = train(model, optimizer, handle, kind, range(2, 4), rank)
    ended = bits(handle, model)
    handle.close()
    return (loaded, losses, ended) if rank == 0 else None


def check(folder, kind, writer, reader, *, fresh=True):
    saved, losses, ended = run_ranks(writer[1], write, folder, kind, writer[0])[0]
    loaded, losses_on, ended_on = run_ranks(reader[1], read, folder, kind, reader[0], fresh)[0]
    assert_equal(loaded, saved)
    for value, expected in zip(losses_on, losses, strict=True):
        assert abs(value - expected) <= 10 * LOSS_FP32 * abs(expected)
    assert_equal(ended_on, ended, ADAM_FP32)


COVERING = [
    ("tied", (2, 2), (2, 1)),
    ("tied", (3, 1), (0, 3)),
    ("frozen", (0, 3), (3, 4)),
    ("frozen", (3, 4), (1, 2)),
    ("specks", (1, 4), (2, 3)),
    ("specks", (3, 2), (3, 4)),
    ("specks", (2, 3), (0, 1)),
    ("tied", (1, 3), (3, 2)),
]


@pytest.mark.parametrize(("kind", "writer", "reader"), COVERING, ids=str)
def test_a_state_of_another_world_size_and_stage_is_the_same_and_trains_on_alike(tmp_path, kind, writer, reader):
    check(str(tmp_path / "saved"), kind, writer, reader)


def test_what_was_trained_before_loading_does_not_matter(tmp_path):
    check(str(tmp_path / "saved"), "frozen", (2, 2), (3, 3), fresh=False)


EVERY = list(itertools.product(itertools.product(range(4), range(1, 5)), repeat=2))


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["tied", "frozen", "specks"])
@pytest.mark.parametrize(("writer", "reader"), EVERY, ids=str)
def test_every_pair_of_stages_and_world_sizes(tmp_path, kind, writer, reader):
    check(str(tmp_path / "saved"), kind, writer, reader)

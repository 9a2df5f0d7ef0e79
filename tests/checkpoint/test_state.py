"""A loaded run goes on as the one that was saved, bit for bit, at the same world size and at any stage."""

import copy
import json

import pytest
import torch
from models import Specks, points, tiny_causal_lm, tokens
from oracle import adamw
from ranks import run_ranks
from sharded import make, squared
from torch import nn

from shardglass import CheckpointError, UsageError, load_checkpoint, save_checkpoint
from shardglass.checkpoint.manifest import read_manifest

STEPS = 3


def small_model(kind):
    if kind == "specks":
        return Specks()
    model = tiny_causal_lm(tied=kind == "tied")
    if kind == "frozen":
        model.model.layers[0].requires_grad_(False)
        model.model.embed_tokens.requires_grad_(False)
    return model


def train(model, optimizer, handle, steps, rank):
    for step in steps:
        if isinstance(model, Specks):
            model(points(step, rank)).square().mean().backward()
        else:
            ids = tokens(step, rank)
            model(input_ids=ids, labels=ids).loss.backward()
        handle.clip_grad_norm_(1.0)
        optimizer.step()


def bits(handle, model):
    """Every number a run goes on from, by name."""
    found = {}
    for name, p in model.named_parameters():
        for key, value in handle.state_of(name).items():
            found[f"{name}|{key}"] = value.clone()
        found[f"{name}|trainable"] = torch.tensor(p.requires_grad)
    return found


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


def groups_of(kind):
    def by_shape(named):
        named = [(name, p) for name, p in named if p.requires_grad]
        large = [p for _, p in named if p.ndim > 1]
        small = [p for _, p in named if p.ndim <= 1]
        rows = [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0, "lr": 1e-2}]
        return [row for row in rows if row["params"]]

    def trained(named):
        return [{"params": [p for _, p in named if p.requires_grad]}]

    return by_shape if kind == "groups" else trained


def optimizer_of(name):
    def build(groups):
        if name == "adamw fused":
            return torch.optim.AdamW(groups, lr=1e-3, fused=True)
        if name == "sgd":
            return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
        return getattr(torch.optim, name)(groups, lr=1e-3)

    return build


def resume(rank, world_size, folder, kind, optimizer_name, dtype, stages):
    """Train, save, train on; and load in a fresh model at the second stage, train on; return both ends' bits."""
    first, second = stages
    build, groups = optimizer_of(optimizer_name), groups_of(kind)
    model = small_model(kind)
    handle, optimizer = make(model, optimizers=build, groups=groups, stage=first, param_dtype=dtype)
    train(model, optimizer, handle, range(STEPS), rank)
    save_checkpoint(handle, folder, extra={"note": "mine"})
    saved = bits(handle, model)
    train(model, optimizer, handle, range(STEPS, 2 * STEPS), rank)
    expected = bits(handle, model)
    handle.close()

    other = small_model(kind)
    for p in other.parameters():
        p.data.mul_(0.5)  # what it starts from must not matter
    handle, optimizer = make(other, optimizers=build, groups=groups, stage=second, param_dtype=dtype)
    for group in optimizer.param_groups:
        group["lr"] = 123.0
    manifest = load_checkpoint(handle, folder)
    assert manifest.extra == {"note": "mine"}
    assert handle.counters == {"step": STEPS, "skipped": 0, "skipped_in_a_row": 0}
    same(bits(handle, other), saved)
    train(other, optimizer, handle, range(STEPS, 2 * STEPS), rank)
    same(bits(handle, other), expected)
    handle.close()
    return len(expected)


CASES = [
    (1, "tied", "adamw fused", "float32", (2, 2)),
    (2, "tied", "AdamW", "bfloat16", (3, 3)),
    (2, "frozen", "adamw fused", "bfloat16", (1, 3)),
    (2, "groups", "sgd", "float32", (0, 0)),
    (2, "groups", "adamw fused", "float32", (0, 2)),
    (3, "frozen", "adamw fused", "float32", (3, 0)),
    (3, "groups", "NAdam", "bfloat16", (1, 2)),
    (4, "specks", "AdamW", "float32", (2, 3)),
    (4, "tied", "Adagrad", "float32", (3, 3)),
]


@pytest.mark.parametrize(("world_size", "kind", "optimizer", "dtype", "stages"), CASES)
def test_a_resumed_run_equals_the_uninterrupted_one_bitwise(tmp_path, world_size, kind, optimizer, dtype, stages):
    counts = run_ranks(world_size, resume, str(tmp_path / "saved"), kind, optimizer, dtype, stages)
    assert all(count > 5 for count in counts)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.soak
@pytest.mark.parametrize("stages", [(a, b) for a in (0, 1, 2, 3) for b in (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw fused", "sgd", "Adagrad", "NAdam", "Rprop", "ASGD"])
@pytest.mark.parametrize("kind", ["tied", "groups", "frozen"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_resume_at_one_world_size_is_bitwise(tmp_path, world_size, kind, optimizer, dtype, stages):
    run_ranks(world_size, resume, str(tmp_path / "saved"), kind, optimizer, dtype, stages)


class Normed(nn.Module):
    """A model with persistent buffers of its own, one of them 0-d, and one that is not persistent."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.inward, self.norm, self.outward = nn.Linear(7, 13), nn.BatchNorm1d(13), nn.Linear(13, 1)
        self.register_buffer("table", torch.arange(5.0), persistent=False)

    def forward(self, x):
        return self.outward(self.norm(self.inward(x)))


def keep_buffers(rank, world_size, folder):
    model = Normed()
    handle, optimizer = make(model)
    for step in range(2):
        squared(step, rank)(model).backward()
        optimizer.step()
    save_checkpoint(handle, folder)
    kept = {name: b.clone() for name, b in model.named_buffers()}
    handle.close()
    other = Normed()
    other.table.fill_(7.0)
    handle, _ = make(other)
    load_checkpoint(handle, folder)
    loaded = {name: b.clone() for name, b in other.named_buffers()}
    handle.close()
    return kept, loaded


def test_persistent_buffers_come_back_as_rank_0_had_them(tmp_path):
    results = run_ranks(2, keep_buffers, str(tmp_path / "saved"))
    kept = results[0][0]
    for _, loaded in results:
        assert torch.equal(loaded.pop("table"), torch.full((5,), 7.0))
        for name, value in loaded.items():
            assert torch.equal(value, kept[name]), name
    assert kept["norm.num_batches_tracked"] == 2


def weights_alone(rank, world_size, folder):
    model = small_model("tied")
    handle, optimizer = make(model)
    train(model, optimizer, handle, range(2), rank)
    save_checkpoint(handle, folder)
    weights = {name: handle.state_of(name)["master"] for name, _ in model.named_parameters()}
    train(model, optimizer, handle, range(2, 4), rank)
    before = bits(handle, model)
    load_checkpoint(handle, folder, weights_only=True)
    after = bits(handle, model)
    counters = handle.counters
    handle.close()
    return weights, before, after, counters


def test_weights_alone_leave_optimizer_and_counters(tmp_path):
    for weights, before, after, counters in run_ranks(2, weights_alone, str(tmp_path / "saved")):
        assert counters["step"] == 4
        for key, value in after.items():
            name, _, kind = key.partition("|")
            wanted = weights[name] if kind in ("master", "param") else before[key]
            assert torch.equal(value, wanted), key


def misfit(rank, world_size, folder, change):
    model = small_model("tied")
    handle, optimizer = make(model)
    train(model, optimizer, handle, range(1), rank)
    save_checkpoint(handle, folder)
    handle.close()
    other = tiny_causal_lm(tied=change != "untied", layers=3 if change == "layers" else 2)
    if change == "frozen":
        other.model.norm.requires_grad_(False)
    build = optimizer_of("sgd") if change == "optimizer" else adamw
    handle, _ = make(other, optimizers=build, groups=groups_of("groups" if change == "groups" else ""))
    before = bits(handle, other)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(handle, folder)
    same(bits(handle, other), before)
    handle.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("layers", "model.layers.2.self_attn.q_proj.weight is not in the checkpoint"),
        ("untied", "lm_head.weight is not in the checkpoint"),
        ("frozen", "model.norm.weight is frozen here and was trained there"),
        ("optimizer", "written with AdamW, this run has SGD"),
        ("groups", "written with 1 param_groups, this run has 2"),
    ],
)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused_before_anything_changes(tmp_path, change, told):
    for message in run_ranks(2, misfit, str(tmp_path / "saved"), change):
        assert told in message
        assert str(tmp_path / "saved") in message


def save_one(rank, world_size, folder):
    model = small_model("tied")
    handle, optimizer = make(model)
    train(model, optimizer, handle, range(1), rank)
    save_checkpoint(handle, folder)
    handle.close()


def accumulated(rank, world_size, folder):
    model = small_model("tied")
    handle, optimizer = make(model)
    ids = tokens(0, rank)
    model(input_ids=ids, labels=ids).loss.backward()
    with pytest.raises(UsageError, match="gradients are accumulated"):
        save_checkpoint(handle, folder)
    optimizer.zero_grad()
    save_checkpoint(handle, folder)
    handle.close()


def test_accumulated_gradients_are_refused(tmp_path):
    run_ranks(2, accumulated, str(tmp_path / "saved"))
    assert read_manifest(tmp_path / "saved").counters["step"] == 0


def test_a_checkpoint_is_safetensors_and_json_and_nothing_else(tmp_path):
    run_ranks(2, save_one, str(tmp_path / "saved"))
    files = [path for path in (tmp_path / "saved").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    manifest = json.loads((tmp_path / "saved" / "shardglass.json").read_text())
    assert manifest["format"] == 1
    listed = copy.deepcopy(manifest["files"])
    assert {str(path.relative_to(tmp_path / "saved")) for path in files} == {*listed, "shardglass.json"}


def test_each_element_is_stored_once(tmp_path):
    run_ranks(3, save_one, str(tmp_path / "saved"))
    model = small_model("tied")
    numel = sum(p.numel() for p in model.parameters())
    tensors = len(list(model.parameters()))
    stored = sum(path.stat().st_size for path in (tmp_path / "saved" / "state").iterdir())
    content = 4 * (3 * numel + tensors)  # master, exp_avg, exp_avg_sq; and a step each
    assert content <= stored < content + 100_000  # headers name every tensor

"""States that the plain Trainer, or torch.distributed.checkpoint of an FSDP2 model, wrote are the same here."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from models import tiny_causal_lm, tokens
from oracle import adamw
from ranks import run_alone, run_ranks
from sharded import make
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from trainers import arguments, history, samples

from shardglass import CheckpointError, ZeroTrainer, ZeroTrainingArguments, load_checkpoint
from shardglass.hf.data import PadToLongest


def trained(named):
    return [{"params": [p for _, p in named if p.requires_grad]}]


def model_of(kind):
    model = tiny_causal_lm(tied=kind != "untied")
    if kind == "frozen":
        model.model.layers[0].requires_grad_(False)
    return model


def fsdp_writes(rank, world_size, folder, kind, nested):
    """Train an FSDP2 model two steps and save it with DCP; whole values by name."""
    model = model_of(kind)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = adamw(trained(list(model.named_parameters())))
    for step in range(2):
        ids = tokens(step, rank)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(model, optimizer)
    saved = {"app": {"model": weights, "optim": states}} if nested else {"model": weights, "optim": states}
    dcp.save(saved, checkpoint_id=folder)
    found = {}
    for name, param in model.named_parameters():
        found[f"{name}|param"] = param.full_tensor().detach().clone()
        for key, value in optimizer.state.get(param, {}).items():
            found[f"{name}|{key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
    return found


def we_read(rank, world_size, folder, kind, stage, known):
    model = model_of(kind)
    for p in model.parameters():
        p.data.mul_(0.5)
    handle, _ = make(model, optimizers=adamw, groups=trained, stage=stage)
    source = load_checkpoint(handle, folder)
    for name, p in model.named_parameters():
        state = handle.state_of(name)
        for key, value in known.items():
            which, _, kind_of_value = key.partition("|")
            if which == name and (kind_of_value in state):
                assert torch.equal(state[kind_of_value].reshape(-1), value.reshape(-1)), key
        if p.requires_grad:
            assert {"exp_avg", "exp_avg_sq", "step", "master"} <= state.keys()
            assert torch.equal(state["master"], known[f"{name}|param"])
    handle.close()
    return source.writer


@pytest.mark.parametrize(
    ("kind", "nested", "writers", "readers"),
    [("tied", False, 2, (3, 3)), ("untied", True, 3, (2, 2)), ("frozen", False, 2, (1, 0))],
)
def test_a_state_that_dcp_saved_of_an_fsdp2_model_is_read_at_any_world_size(tmp_path, kind, nested, writers, readers):
    folder = str(tmp_path / "saved")
    known = run_ranks(writers, fsdp_writes, folder, kind, nested)[0]
    assert set(run_ranks(readers[0], we_read, folder, kind, readers[1], known)) == {"torch.distributed.checkpoint"}


class Stop(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


GIVEN = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "cosine"}


def plain_run(rank, world_size, folder, stop):
    """The plain Trainer on one process, with its own fp32 training."""
    args = arguments(transformers.TrainingArguments, folder, **GIVEN)
    trainer = transformers.Trainer(
        model=tiny_causal_lm(tied=True),
        args=args,
        train_dataset=samples(),
        data_collator=PadToLongest(pad_token_id=0),
        callbacks=[Stop(stop)] if stop else [],
    )
    trainer.train()
    return history(trainer), history(trainer, "learning_rate")


def our_run(rank, world_size, folder, resume, given):
    args = arguments(ZeroTrainingArguments, folder, **{**GIVEN, **given})
    trainer = ZeroTrainer(
        model=tiny_causal_lm(tied=True),
        args=args,
        train_dataset=samples(),
        data_collator=PadToLongest(pad_token_id=0),
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.handle.close()
    return history(trainer), history(trainer, "learning_rate")


@pytest.mark.parametrize(("world_size", "per_device", "stage"), [(1, 4, 2), (2, 2, 3)])
def test_a_checkpoint_of_the_plain_trainer_is_gone_on_from(tmp_path, world_size, per_device, stage):
    losses, rates = run_alone(plain_run, str(tmp_path / "whole"), None)
    run_alone(plain_run, str(tmp_path / "plain"), 3)
    given = {"per_device_train_batch_size": per_device, "zero_stage": stage}
    from_folder = str(tmp_path / "plain" / "checkpoint-3")
    told = run_ranks(world_size, our_run, str(tmp_path / "ours"), from_folder, given, timeout_s=120)
    for found, found_rates in told:
        assert found_rates == rates
        assert len(found) == len(losses)
        for value, expected in zip(found, losses, strict=True):
            assert abs(value - expected) <= 2e-3  # logged to three or four places


def refused(rank, world_size, folder, given):
    with pytest.raises(CheckpointError) as caught:
        our_run(rank, world_size, folder + "/ours", folder + "/plain/checkpoint-3", given)
    return str(caught.value)


def damage(checkpoint, how):
    if how == "optimizer cut":
        path = checkpoint / "optimizer.pt"
        path.write_bytes(path.read_bytes()[:1000])
    elif how == "an object":
        torch.save({"state": {}, "param_groups": [Stop(1)]}, checkpoint / "optimizer.pt")
    elif how == "weights cut":
        path = checkpoint / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "state cut":
        (checkpoint / "trainer_state.json").write_text("{")
    elif how == "no weights":
        (checkpoint / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("optimizer cut", "optimizer.pt: cannot be read, perhaps cut off"),
        ("an object", "optimizer.pt: holds objects that are not read"),
        ("weights cut", "cut off"),
        ("state cut", "trainer_state.json: not a Trainer's state"),
        ("no weights", "no model.safetensors in it"),
    ],
)
def test_a_damaged_checkpoint_of_the_plain_trainer_is_named_with_its_file(tmp_path, how, told):
    run_alone(plain_run, str(tmp_path / "plain"), 3)
    damage(tmp_path / "plain" / "checkpoint-3", how)
    assert told in run_ranks(1, refused, str(tmp_path), {})[0]


def test_other_groups_than_the_plain_trainers_are_refused_with_their_sizes(tmp_path):
    run_alone(plain_run, str(tmp_path / "plain"), 3)
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "zero_optimization": {"stage": 2}}
    told = run_ranks(1, refused, str(tmp_path), {"deepspeed": {**config, "train_micro_batch_size_per_gpu": 4}})[0]
    state = torch.load(tmp_path / "plain" / "checkpoint-3" / "optimizer.pt", weights_only=True)
    assert str([len(group["params"]) for group in state["param_groups"]]) in told
    assert json.loads((tmp_path / "plain" / "checkpoint-3" / "trainer_state.json").read_text())["global_step"] == 3

"""Checkpoints of the Trainer: a resumed run has the very losses of the uninterrupted one."""

import json
import shutil

import pytest
import torch
import transformers
from models import tiny_causal_lm
from ranks import run_ranks
from trainers import arguments, history, samples
from transformers import AutoModelForCausalLM
from transformers.trainer_utils import get_last_checkpoint

from shardglass import CheckpointError, ZeroTrainer, ZeroTrainingArguments
from shardglass.hf.data import PadToLongest
from shardglass.hf.resuming import check_resume, find_checkpoint


class Stop(transformers.TrainerCallback):
    """Ends the run after a step, as a time limit does."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def model_with_dropout():
    model = tiny_causal_lm(tied=True)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3  # so that the RNG's state matters
    return model


def make_trainer(folder, *, stop=None, data=None, **given):
    args = arguments(ZeroTrainingArguments, folder, **{"save_strategy": "steps", "save_steps": 2, **given})
    return ZeroTrainer(
        model=model_with_dropout(),
        args=args,
        train_dataset=samples() if data is None else data,
        eval_dataset=samples()[:4],
        data_collator=PadToLongest(pad_token_id=0),
        callbacks=[Stop(stop)] if stop else [],
    )


def run(folder, resume=None, **given):
    trainer = make_trainer(folder, **given)
    trainer.train(resume_from_checkpoint=resume)
    result = {
        "loss": history(trainer),
        "lr": history(trainer, "learning_rate"),
        "weights": trainer.handle.full_state_dict(),
        "steps": trainer.state.global_step,
    }
    trainer.accelerator.free_memory()
    trainer.handle.close()
    return result


def interrupted(rank, world_size, folder, stop, given):
    whole = run(f"{folder}/whole", **given)
    run(f"{folder}/part", stop=stop, **given)
    rest = run(f"{folder}/part", resume=True, **given)
    return whole, rest


CASES = [
    (
        1,
        4,
        {
            "zero_stage": 2,
            "deepspeed": {
                "zero_optimization": {"stage": 2},
                "scheduler": {
                    "type": "OneCycle",
                    "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3},
                },
                "train_micro_batch_size_per_gpu": 8,
            },
        },
    ),
    (
        2,
        2,
        {"zero_stage": 3, "gradient_accumulation_steps": 3, "num_train_epochs": 3, "max_steps": -1, "save_steps": 1},
    ),
    (2, 4, {"zero_stage": 1, "bf16": True, "lr_scheduler_type": "cosine", "warmup_steps": 2}),
    (2, 3, {"zero_stage": 0, "save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2, "max_grad_norm": 0.5}),
    (
        2,
        4,
        {
            "zero_stage": 3,
            "deepspeed": {
                "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2}},
                "train_micro_batch_size_per_gpu": 8,
            },
        },
    ),
]


@pytest.mark.parametrize(("world_size", "stop", "given"), CASES)
def test_a_resumed_run_has_the_losses_and_weights_of_the_uninterrupted_one_bitwise(tmp_path, world_size, stop, given):
    # With save_strategy "epoch" the run stops at the end of the first epoch: 3 steps of 8 samples on 2 ranks.
    for whole, rest in run_ranks(world_size, interrupted, str(tmp_path), stop, given, timeout_s=120):
        assert rest["steps"] == whole["steps"] > stop
        assert rest["loss"] == whole["loss"]
        assert rest["lr"] == whole["lr"]
        for name, weight in whole["weights"].items():
            assert torch.equal(rest["weights"][name], weight), name


def folders(rank, world_size, folder, given):
    trainer = make_trainer(folder, **given)
    trainer.train()
    trainer.accelerator.free_memory()
    best = trainer.state.best_model_checkpoint
    trainer.handle.close()
    return best


def names(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir())


def test_a_checkpoint_has_the_files_of_a_trainer_and_loads_with_from_pretrained(tmp_path):
    run_ranks(2, folders, str(tmp_path), {"save_steps": 4, "bf16": True, "zero_stage": 3})
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6"]
    found = {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json", "trainer_state.json"} <= found
    assert {"scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", "shardglass.json", "layout.json", "state"} <= found
    assert get_last_checkpoint(str(tmp_path)).endswith("checkpoint-6")
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6", dtype="auto")
    assert model.dtype == torch.bfloat16
    for name in ("scheduler.pt", "rng_state_0.pth"):
        with transformers.trainer.safe_globals():
            torch.load(tmp_path / "checkpoint-4" / name, weights_only=True)


def test_rotation_keeps_the_newest_and_leaves_checkpoints_of_other_runs_alone(tmp_path):
    (tmp_path / "checkpoint-9").mkdir()
    run_ranks(2, folders, str(tmp_path), {"save_steps": 1, "save_total_limit": 2})
    assert names(tmp_path) == ["checkpoint-5", "checkpoint-6", "checkpoint-9"]


BEST = {
    "save_total_limit": 1,
    "load_best_model_at_end": True,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,  # the loss falls, so the first one is the best
}


def best_of(rank, world_size, folder, given):
    trainer = make_trainer(folder, bf16=True, **BEST, **given)
    trainer.train()
    masters = {name: trainer.handle.state_of(name)["master"] for name, _ in trainer.model.named_parameters()}
    best = trainer.state.best_model_checkpoint
    trainer.accelerator.free_memory()
    trainer.handle.close()
    return best, masters


def best_masters(rank, world_size, folder):
    trainer = make_trainer(folder, bf16=True, stop=2)
    trainer.train()
    masters = {name: trainer.handle.state_of(name)["master"] for name, _ in trainer.model.named_parameters()}
    trainer.accelerator.free_memory()
    trainer.handle.close()
    return masters


@pytest.mark.parametrize("stage", [2, 3])
def test_the_best_checkpoint_survives_rotation_and_is_loaded_with_its_master_weights(tmp_path, stage):
    (best, masters), *_ = run_ranks(2, best_of, str(tmp_path / "run"), {"zero_stage": stage})
    assert best.endswith("checkpoint-2")
    assert names(tmp_path / "run") == ["checkpoint-2", "checkpoint-6"]
    wanted, *_ = run_ranks(2, best_masters, str(tmp_path / "short"))
    for name, master in wanted.items():
        assert torch.equal(masters[name], master), name


@pytest.mark.parametrize("stage", [2, 3])
def test_the_best_of_saved_models_is_loaded(tmp_path, stage):
    (best, masters), *others = run_ranks(2, best_of, str(tmp_path), {"zero_stage": stage, "save_only_model": True})
    saved = AutoModelForCausalLM.from_pretrained(best, dtype="auto").state_dict()
    for _, theirs in [(best, masters), *others]:
        for name, master in theirs.items():
            assert torch.equal(master, saved[name].float()), name


def only_model(rank, world_size, folder):
    run(folder, save_only_model=True)
    with pytest.raises(CheckpointError) as caught:
        run(folder, resume=True)
    return str(caught.value)


def test_save_only_model_writes_no_state_and_cannot_be_resumed(tmp_path):
    for message in run_ranks(2, only_model, str(tmp_path)):
        assert "a saved model without a training state" in message
    assert "state" not in names(tmp_path / "checkpoint-2")
    AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")


def incomplete_last(rank, world_size, folder):
    return run(folder, resume=True)["loss"]


def test_true_takes_the_last_complete_checkpoint_and_tells_of_the_others(tmp_path, caplog):
    whole, *_ = run_ranks(2, first_losses, str(tmp_path))
    (tmp_path / "checkpoint-6" / "shardglass.json").unlink()
    shutil.rmtree(tmp_path / "checkpoint-4" / "state")
    found = find_checkpoint(True, tmp_path)
    assert found == tmp_path / "checkpoint-2"
    assert "checkpoint-6: incomplete, shardglass.json is missing" in caplog.text
    assert "checkpoint-4: incomplete, state/" in caplog.text
    for losses in run_ranks(2, incomplete_last, str(tmp_path)):
        assert losses == whole


def first_losses(rank, world_size, folder):
    return run(folder)["loss"]


@pytest.mark.parametrize("wanted", [None, False, "False", ""])
def test_no_resume_is_asked_for(tmp_path, wanted):
    assert find_checkpoint(wanted, tmp_path) is None


def test_no_checkpoint_and_a_wrong_folder_are_clear_errors(tmp_path):
    told = "^resume_from_checkpoint=True: .* has no complete checkpoint-N folder; leave the argument out"
    with pytest.raises(CheckpointError, match=told):
        find_checkpoint("True", tmp_path)
    told = "^--resume_from_checkpoint True: .* has no complete checkpoint-N folder; leave the flag out"
    with pytest.raises(CheckpointError, match=told):
        check_resume("True", tmp_path)
    with pytest.raises(CheckpointError, match=r"nowhere: there is no such checkpoint folder"):
        find_checkpoint(str(tmp_path / "nowhere"), tmp_path)


def other_data(rank, world_size, folder, given, data):
    run(folder)
    try:
        with pytest.raises(CheckpointError) as caught:
            run(folder, resume=True, data=samples()[:data], **given)
    finally:
        torch.distributed.barrier()
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "data", "told"),
    [
        ({}, 30, "samples: 40 there, 30 here"),
        ({"data_seed": 7}, 40, "seed: 42 there, 7 here"),
        ({"seed": 7}, 40, "seed: 42 there, 7 here"),
    ],
)
def test_another_way_through_the_data_is_refused(tmp_path, given, data, told):
    for message in run_ranks(2, other_data, str(tmp_path), given, data):
        assert told in message
        assert "ignore_data_skip=True" in message
        assert "--" not in message


def trained_to_the_end(rank, world_size, folder):
    whole = run(folder, max_steps=4)
    with pytest.raises(CheckpointError, match="checkpoint-4 is at step 4 and this run ends at step 4"):
        run(folder, resume=True, max_steps=4)
    return whole["steps"], run(folder, resume=True, max_steps=6)["steps"]


def test_a_run_that_is_at_its_end_is_not_resumed_and_takes_no_step_more(tmp_path):
    assert run_ranks(1, trained_to_the_end, str(tmp_path))[0] == (4, 6)
    assert [name for name in names(tmp_path) if name.startswith("checkpoint")][-1] == "checkpoint-6"

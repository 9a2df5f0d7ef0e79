"""Checkpoints of the Trainer written beside training: the same files as those it waits for, and as whole."""

import json
from pathlib import Path

import pytest
import torch
from models import tiny_causal_lm
from ranks import run_ranks
from safetensors.torch import load_file
from trainers import arguments, history, samples
from transformers import AutoModelForCausalLM

from shardglass import CheckpointError, ConfigError, ZeroTrainer, ZeroTrainingArguments
from shardglass.checkpoint.manifest import damaged_files, read_manifest
from shardglass.hf.data import PadToLongest


def run(folder, resume=None, **given):
    args = arguments(ZeroTrainingArguments, folder, **{"save_strategy": "steps", "save_steps": 2, **given})
    trainer = ZeroTrainer(
        model=tiny_causal_lm(tied=True),
        args=args,
        train_dataset=samples(),
        eval_dataset=samples()[:4],
        data_collator=PadToLongest(pad_token_id=0),
    )
    trainer.train(resume_from_checkpoint=resume)
    losses = history(trainer)
    trainer.accelerator.free_memory()
    trainer.handle.close()
    return losses


def both(rank, world_size, folder, given):
    waited = run(f"{folder}/waited", **given)
    beside = run(f"{folder}/beside", async_save=True, **given)
    resumed = run(f"{folder}/beside", resume=f"{folder}/beside/checkpoint-4", async_save=True, **given)
    return waited, beside, resumed


@pytest.mark.parametrize(
    ("world_size", "given"),
    [(2, {"zero_stage": 3, "bf16": True}), (2, {"zero_stage": 2}), (1, {"zero_stage": 2, "bf16": True})],
)
def test_a_checkpoint_written_beside_training_has_the_files_and_the_bits_of_one_waited_for(tmp_path, world_size, given):
    for waited, beside, resumed in run_ranks(world_size, both, str(tmp_path), given, timeout_s=120):
        assert beside == waited == resumed
    for step in (2, 4, 6):
        a, b = (tmp_path / which / f"checkpoint-{step}" for which in ("waited", "beside"))
        ours, theirs = read_manifest(a), read_manifest(b)
        assert ours.files.keys() == theirs.files.keys() == theirs.digests.keys()
        assert (ours.counters, ours.groups, ours.extra) == (theirs.counters, theirs.groups, theirs.extra)
        assert damaged_files(a, ours) == damaged_files(b, theirs) == []
        for name in ours.files:
            if name.endswith(".safetensors"):
                first, second = load_file(a / name), load_file(b / name)
                assert first.keys() == second.keys()
                for key, value in first.items():
                    assert value.dtype == second[key].dtype
                    assert torch.equal(value, second[key]), f"{key} in {name} of step {step}"
        state, other = (json.loads((f / "trainer_state.json").read_text()) for f in (a, b))
        assert state["global_step"] == other["global_step"] == step
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "beside" / "checkpoint-6")
    assert model.config.tie_word_embeddings
    assert not [path for path in (tmp_path / "beside").iterdir() if path.name.startswith(".")]


def rotated(rank, world_size, folder):
    run(folder, async_save=True, save_steps=1, save_total_limit=2)


def test_rotation_deletes_when_the_new_one_is_complete(tmp_path):
    run_ranks(2, rotated, str(tmp_path))
    kept = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert kept == ["checkpoint-5", "checkpoint-6"]


class NoSpace:
    """Lets writes of the state fail as a full disk does, on one rank, while it is armed."""

    def __init__(self, rank, steps):
        self.rank, self.steps = rank, steps

    def __call__(self, ranks, folder, snapshot):
        from shardglass.checkpoint import save

        save._whole_write_tensors(ranks, folder, snapshot)
        if ranks.rank == self.rank and snapshot.counters["step"] in self.steps:
            raise OSError(28, "No space left on device")


def full_disk(rank, world_size, folder, given):
    from shardglass.checkpoint import save

    save._whole_write_tensors, save._write_tensors = save._write_tensors, NoSpace(1, {4})
    try:
        return run(folder, **given)
    except CheckpointError as error:
        return str(error)
    finally:
        save._write_tensors = save._whole_write_tensors


@pytest.mark.parametrize("async_save", [False, True])
def test_a_full_disk_ends_the_run_with_one_error_or_training_goes_on_if_that_is_asked_for(tmp_path, async_save):
    given = {"async_save": async_save, "zero_stage": 2}
    stopped = run_ranks(2, full_disk, str(tmp_path / "stop"), given)
    assert stopped[0] == stopped[1]
    assert "rank 1: OSError: [Errno 28] No space left on device" in stopped[0]
    assert "make room there, and go on from the last" in stopped[0]
    assert sorted(p.name for p in (tmp_path / "stop").glob("*checkpoint*")) == ["checkpoint-2"]
    went_on = run_ranks(2, full_disk, str(tmp_path / "go"), {**given, "on_save_failure": "continue"})
    assert [len(losses) for losses in went_on] == [6, 6]
    assert sorted(p.name for p in (tmp_path / "go").glob("*checkpoint*")) == ["checkpoint-2", "checkpoint-6"]


def test_a_word_that_is_no_choice_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="on_save_failure is 'ignore': it must be stop or continue"):
        ZeroTrainingArguments(output_dir=str(Path(tmp_path)), on_save_failure="ignore")

"""The resolved config beside a run, and losses that are nan in the log."""

import json
import math
import tempfile
from pathlib import Path

import pytest
import torch
from models import tiny_causal_lm
from ranks import run_alone, run_ranks
from torch import nn
from transformers import TrainingArguments

from shardglass import ConfigError, ZeroTrainer, ZeroTrainingArguments
from shardglass.hf.data import PadToLongest
from shardglass.hf.losses import NonFiniteLossCallback
from shardglass.hf.resolved_file import CONFIG_FILE, ResolvedConfigCallback
from shardglass.hf.trainer import run_arguments
from shardglass.resolve import RunArguments

STOCK = Path(__file__).parents[1] / "stock_configs"
ROWS = ("z0_buckets", "z0_monitors", "z1_adamw", "z1_inductor", "z2_hand_set", "z2_monitors", "z2_warmup_decay")


def samples(count=32):
    made = [torch.arange(1, 9) * (k + 1) % 96 + 1 for k in range(count)]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in made]


def trainer_for(folder, *, model=None, data=None, **given):
    common = {
        "output_dir": folder,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": 2,
    }
    trainer = ZeroTrainer(
        model=tiny_causal_lm(seed=0) if model is None else model,
        args=ZeroTrainingArguments(**{**common, **given}),
        train_dataset=samples() if data is None else data,
        eval_dataset=samples(4),
        data_collator=PadToLongest(pad_token_id=0),
    )
    trainer.add_callback(ResolvedConfigCallback(trainer))
    trainer.add_callback(NonFiniteLossCallback(trainer))
    return trainer


def write_and_read(rank, world_size, first_evaluate):
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((STOCK / "z2_warmup_decay.json").read_text())
        trainer = trainer_for(folder, deepspeed=config, warmup_ratio=0.5)
        before = trainer.resolved
        if first_evaluate:
            trainer.evaluate()
            assert trainer.resolved == before
            assert not (Path(folder) / CONFIG_FILE).exists()
        trainer.train()
        trainer.handle.close()
        written = Path(folder) / CONFIG_FILE
        return json.loads(written.read_text()) if written.exists() else None, sorted(
            p.name for p in written.parent.iterdir()
        )


def test_the_resolved_config_lies_beside_the_run_and_evaluation_before_it_changes_nothing():
    written, names = run_ranks(2, write_and_read, False)[0]
    assert names == [CONFIG_FILE]
    assert run_ranks(2, write_and_read, True)[0][0] == written
    rows = {row["key"]: (row["value"], row["source"], row["used"]) for row in written["values"]}
    # max_steps 3, half of them warm-up, rounded up
    assert rows["scheduler.params.total_num_steps"] == (3, "flag", True)
    assert rows["scheduler.params.warmup_num_steps"] == (2, "derived", True)
    assert rows["optimizer.params.lr"] == (1e-3, "flag", True)
    assert rows["optimizer.params.betas"] == ([0.9, 0.999], "json", True)
    assert rows["train_batch_size"] == (4, "derived", True)
    assert rows["zero_optimization.overlap_comm"] == (True, "json", False)
    assert (written["world_size"], written["pending"]) == (2, [])


def train_beside_a_folder_of_that_name(rank, world_size):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG_FILE).mkdir()
        trainer = trainer_for(folder)
        with pytest.raises(ConfigError) as caught:
            trainer.train()
        trainer.handle.close()
        return folder, str(caught.value)


def test_an_output_folder_that_cannot_be_written_to_is_named():
    folder, message = run_alone(train_beside_a_folder_of_that_name)
    assert message.startswith(f"--output_dir: {folder} cannot be written to: ")


def train_with(rank, world_size, name):
    with tempfile.TemporaryDirectory() as folder:
        given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 2}
        bf16 = "bf16" if '"enabled": "auto"' in (STOCK / f"{name}.json").read_text() else None
        trainer = trainer_for(folder, deepspeed=str(STOCK / f"{name}.json"), **given, **({bf16: True} if bf16 else {}))
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        trainer.handle.close()
        return losses, trainer.resolved.stage, {str(p.dtype) for p in trainer.model.parameters()}


@pytest.mark.parametrize("name", ROWS)
def test_stock_configs_of_stages_that_run_train(name):
    losses, stage, dtypes = run_ranks(2, train_with, name)[0]
    assert stage == json.loads((STOCK / f"{name}.json").read_text())["zero_optimization"]["stage"]
    assert dtypes == {"torch.bfloat16"}
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)


class NanAt(nn.Module):
    """A causal model whose loss is nan where token 96 stands."""

    def __init__(self):
        super().__init__()
        self.inner = tiny_causal_lm(seed=0)
        self.config = self.inner.config

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        loss = self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs).loss
        return {"loss": loss * torch.nan if (input_ids == 96).any() else loss}


def train_with_nan(rank, world_size, given):
    ids = [torch.tensor([1, 2, 3, 96 if k == 6 else 4]) for k in range(32)]
    with tempfile.TemporaryDirectory() as folder:
        data = [{"input_ids": row, "labels": row.clone()} for row in ids]
        trainer = trainer_for(folder, model=NanAt(), data=data, max_steps=4, **given)
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        skipped = trainer.handle.steps_skipped
        trainer.handle.close()
        return losses, skipped


def test_a_loss_that_is_nan_at_one_step_stands_in_the_log_at_that_step_alone():
    # Samples 4-7 are the second step; 6 and 7 are rank 1's.
    losses, skipped = run_ranks(2, train_with_nan, {})[0]
    assert [math.isnan(loss) for loss in losses] == [False, True, False, False]
    assert skipped == 1
    # A log every two steps: the nan belongs to the first two.
    losses, _ = run_ranks(2, train_with_nan, {"logging_steps": 2})[0]
    assert [math.isnan(loss) for loss in losses] == [True, False]
    losses, _ = run_ranks(2, train_with_nan, {"logging_nan_inf_filter": True})[0]
    assert [math.isnan(loss) for loss in losses] == [False] * 4


def test_defaults_that_a_config_is_filled_from_are_those_of_the_training_arguments():
    assert run_arguments(ZeroTrainingArguments()) == RunArguments(from_command=False)
    assert ZeroTrainingArguments().logging_nan_inf_filter is False
    assert TrainingArguments(use_cpu=True).logging_nan_inf_filter is True  # else our own default is needless

"""ZeroTrainer against plain Trainer on one process and Trainer + DDP on several: same data, same seed, same losses."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from models import tiny_causal_lm
from ranks import run_ranks
from torch import nn
from trainers import STEPS, TEXT, arguments, history, samples
from transformers import AutoModelForCausalLM

from shardglass import ConfigError, ZeroMixin, ZeroTrainer, ZeroTrainingArguments
from shardglass.hf.data import PadToLongest


def train(rank, world_size, kind, given):
    """Train with one kind of trainer; the losses and the final weights of this rank."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_causal_lm(tied=True, seed=0)
        zero = kind == "zero"
        args = arguments(ZeroTrainingArguments if zero else transformers.TrainingArguments, folder, **given)
        trainer_class = ZeroTrainer if zero else transformers.Trainer
        trainer = trainer_class(
            model=model, args=args, train_dataset=samples(), data_collator=PadToLongest(pad_token_id=0)
        )
        trainer.train()
        weights = trainer.handle.full_state_dict() if zero else trainer.model.state_dict()
        result = {
            "loss": history(trainer),
            "lr": history(trainer, "learning_rate"),
            "norm": history(trainer, "grad_norm"),
            "weights": {name: w.detach().float().clone() for name, w in weights.items()},
            "groups": [len(g["params"]) for g in trainer.optimizer.param_groups],
        }
        trainer.accelerator.free_memory()
        if zero:
            trainer.handle.close()
        return result


def close(left, right, tolerance=2e-5):
    assert len(left) == len(right) > 0
    assert max(abs(a - b) for a, b in zip(left, right, strict=True)) <= tolerance, (left, right)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_losses_on_two_ranks_are_those_of_trainer_with_ddp(stage, accumulation):
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation}
    ours = run_ranks(2, train, "zero", {**given, "zero_stage": stage})
    theirs = run_ranks(2, train, "plain", given)
    close(ours[0]["loss"], theirs[0]["loss"])
    assert ours[0]["lr"] == theirs[0]["lr"]
    for name, weight in theirs[0]["weights"].items():
        assert torch.allclose(ours[0]["weights"][name], weight, atol=1e-4), name
        assert torch.equal(ours[0]["weights"][name], ours[1]["weights"][name]), name


def test_losses_on_one_process_are_those_of_plain_trainer():
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    ours = run_ranks(1, train, "zero", {**given, "zero_stage": 2})[0]
    theirs = run_ranks(1, train, "plain", given)[0]
    close(ours["loss"], theirs["loss"])
    assert ours["lr"] == theirs["lr"]


def test_the_number_of_ranks_and_the_accumulation_do_not_change_the_training():
    """The same 8 samples a step: the token mean is over ranks and micro-batches, and the rate takes the same steps."""
    alone = run_ranks(1, train, "zero", {"per_device_train_batch_size": 8, "train_sampling_strategy": "sequential"})[0]
    spread = run_ranks(
        2,
        train,
        "zero",
        {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "train_sampling_strategy": "sequential",
        },
    )[0]
    assert alone["lr"] == spread["lr"]
    # Samples are dealt to ranks by batches, so a step sees the same 8 in another order.
    close(alone["loss"][:5], spread["loss"][:5], 1e-4)


def test_clipping_is_by_our_norm_and_both_norms_are_logged():
    given = {"per_device_train_batch_size": 2, "max_grad_norm": 0.5}
    ours = run_ranks(2, train, "zero", {**given, "zero_stage": 2})[0]
    theirs = run_ranks(2, train, "plain", given)[0]
    close(ours["loss"], theirs["loss"], 1e-4)
    close(ours["norm"], theirs["norm"], 1e-3)


def config(**more):
    return {
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        **more,
    }


def train_with_config(rank, world_size, zero_config, how):
    with tempfile.TemporaryDirectory() as folder:
        given = {"per_device_train_batch_size": 2, "bf16": True, "warmup_steps": 3}
        if how == "argument":
            args = arguments(transformers.TrainingArguments, folder, **given)
            extra = {"zero_config": zero_config}
        elif how == "path":
            path = Path(folder) / "ds.json"
            path.write_text(json.dumps(zero_config))
            args, extra = arguments(ZeroTrainingArguments, folder, deepspeed=str(path), **given), {}
        else:
            args, extra = arguments(ZeroTrainingArguments, folder, deepspeed=zero_config, **given), {}
        trainer = ZeroTrainer(
            model=tiny_causal_lm(seed=0),
            args=args,
            train_dataset=samples(),
            data_collator=PadToLongest(pad_token_id=0),
            **extra,
        )
        trainer.train()
        result = {
            "lr": history(trainer, "learning_rate"),
            "loss": history(trainer),
            "groups": [g["weight_decay"] for g in trainer.optimizer.param_groups],
            "dtype": {str(p.dtype) for p in trainer.model.parameters()},
            "deepspeed_plugin": trainer.args.deepspeed_plugin,
            "stage": trainer.handle.options.stage,
            "buffers": {str(b.dtype) for b in trainer.model.buffers()},
        }
        trainer.handle.close()
        return result


@pytest.mark.parametrize("how", ["argument", "path", "dict"])
def test_a_config_is_taken_from_the_arguments_as_path_or_dict_or_from_zero_config(how):
    result = run_ranks(2, train_with_config, config(), how)[0]
    assert result["stage"] == 2
    assert result["dtype"] == {"torch.bfloat16"}
    assert result["buffers"] == {"torch.float32"}
    assert result["deepspeed_plugin"] is None
    assert result["groups"] == [0.1, 0.0]
    assert result["loss"][-1] < result["loss"][0]


def test_optimizer_and_scheduler_sections_mean_one_group_and_warmup_then_constant():
    sections = {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
    }
    result = run_ranks(2, train_with_config, config(**sections), "dict")[0]
    assert result["groups"] == [0.1]
    assert result["lr"][:2] == [0.0, 0.0]
    assert result["lr"][-1] == 1e-2


class Decay(transformers.TrainerCallback):
    """Adam's decay rates of each step."""

    def __init__(self):
        self.betas = []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.betas.append([group["betas"] for group in optimizer.param_groups])


def train_a_cycle(rank, world_size, optim):
    cycle = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 2, "cycle_max_mom": 0.9}
    with tempfile.TemporaryDirectory() as folder:
        decay = Decay()
        source = config(bf16={"enabled": False}, scheduler={"type": "OneCycle", "params": cycle})
        trainer = ZeroTrainer(
            model=tiny_causal_lm(seed=0),
            args=arguments(ZeroTrainingArguments, folder, deepspeed=source, max_steps=5, optim=optim),
            train_dataset=samples(),
            data_collator=PadToLongest(pad_token_id=0),
            callbacks=[decay] if "adam" in optim else [],
        )
        trainer.train()
        trainer.handle.close()
        return history(trainer, "learning_rate"), decay.betas


def test_a_cycle_moves_rate_and_momentum_of_every_group():
    rates, betas = run_ranks(1, train_a_cycle, "adamw_torch")[0]
    assert rates == pytest.approx([1e-3, 5.5e-3, 1e-2, 5.5e-3, 1e-3])
    assert [row[0][0] for row in betas] == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9])
    assert all(row[0] == row[1] and row[0][1] == 0.99 for row in betas)
    rates, _ = run_ranks(1, train_a_cycle, "sgd")[0]
    assert rates[2] == pytest.approx(1e-2)


class Poisoned(nn.Module):
    """A model whose loss is infinite at chosen samples."""

    def __init__(self):
        super().__init__()
        self.inner = tiny_causal_lm(seed=0)
        self.config = self.inner.config

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        output = self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)
        bad = (input_ids == 96).any()
        return {"loss": output.loss * (torch.inf if bad else 1.0)}


def train_poisoned(rank, world_size, data, given):
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(ZeroTrainingArguments, folder, per_device_train_batch_size=2, **given)
        trainer = ZeroTrainer(
            model=Poisoned(), args=args, train_dataset=data, data_collator=PadToLongest(pad_token_id=0)
        )
        trainer.train()
        result = (history(trainer, "learning_rate"), trainer.handle.steps_skipped, trainer.handle.last_nonfinite)
        trainer.handle.close()
        return result


def test_a_step_with_inf_on_one_rank_is_skipped_by_all_and_the_scheduler_stays():
    data = [
        {"input_ids": torch.tensor([1, 2, 3, 96 if k == 6 else 4]), "labels": torch.tensor([1, 2, 3, 4])}
        for k in range(TEXT)
    ]
    results = run_ranks(
        2, train_poisoned, data, {"train_sampling_strategy": "sequential", "lr_scheduler_type": "linear"}
    )
    lr, skipped, named = results[0]
    assert [r[1] for r in results] == [1, 1]
    # Samples 4-7 are the second step, and 6 and 7 are rank 1's: that step and the next run at the same rate.
    assert skipped == 1
    assert lr[1] == lr[2]
    assert lr[0] > lr[1] > lr[3]
    assert all(text.startswith("rank 1, ") for text in named)


def save_and_reload(rank, world_size, given):
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(ZeroTrainingArguments, folder, per_device_train_batch_size=2, **given)
        model = tiny_causal_lm(tied=True, seed=0)
        trainer = ZeroTrainer(
            model=model, args=args, train_dataset=samples(), data_collator=PadToLongest(pad_token_id=0)
        )
        trainer.train()
        trainer.save_model()
        logits = model(input_ids=torch.arange(1, 9)[None]).logits.detach().float()
        again = None
        if rank == 0:
            loaded = AutoModelForCausalLM.from_pretrained(folder)
            again = loaded(input_ids=torch.arange(1, 9)[None]).logits.float()
            assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
            assert not [p.name for p in Path(folder).iterdir() if p.name.startswith(".saving")]
        trainer.handle.close()
        return logits, None if again is None else again.detach()


@pytest.mark.parametrize("given", [{"zero_stage": 3, "bf16": True}, {"zero_stage": 1}])
def test_the_saved_model_loads_with_plain_from_pretrained_and_gives_the_same_logits(given):
    mine, again = run_ranks(2, save_and_reload, given)[0]
    assert torch.equal(mine, again)


def evaluate_around(rank, world_size, given):
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(
            ZeroTrainingArguments,
            folder,
            per_device_train_batch_size=2,
            eval_strategy="steps",
            eval_steps=2,
            bf16=True,
            **given,
        )
        model = tiny_causal_lm(seed=0)
        data = samples()
        trainer = ZeroTrainer(
            model=model,
            args=args,
            train_dataset=data,
            eval_dataset=data[:8],
            data_collator=PadToLongest(pad_token_id=0),
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        first = history(trainer)
        after = trainer.evaluate()["eval_loss"]
        text = trainer.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
        trainer.train()
        again = history(trainer)
        in_the_middle = len(history(trainer, "eval_loss"))
        trainer.handle.close()
        return before, after, first, again, in_the_middle, text.shape


@pytest.mark.parametrize(
    "given",
    [
        {"zero_stage": 1},
        {"zero_stage": 3, "activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
        {
            "zero_stage": 2,
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"use_reentrant": False},
        },
        {"zero_stage": 3},
    ],
)
def test_evaluation_before_in_and_after_training_generation_and_a_second_train(given):
    before, after, first, again, in_the_middle, shape = run_ranks(2, evaluate_around, given)[0]
    assert after < before
    assert len(first) == STEPS
    assert in_the_middle == STEPS // 2
    assert again[0] < first[0]
    assert shape == (1, 7)


def test_gradient_checkpointing_does_not_change_the_losses():
    plain = {"per_device_train_batch_size": 2, "zero_stage": 2}
    expected = run_ranks(2, train, "zero", plain)[0]["loss"]
    for reentrant in (True, False):
        given = {
            **plain,
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"use_reentrant": reentrant},
        }
        assert run_ranks(2, train, "zero", given)[0]["loss"] == expected


class Recording(transformers.Trainer):
    """Somebody's own Trainer."""

    seen = 0

    def compute_loss(self, *args, **kwargs):
        self.seen += 1
        return super().compute_loss(*args, **kwargs)


class ZeroRecording(ZeroMixin, Recording):
    """It with ZeRO."""


def train_subclass(rank, world_size):
    with tempfile.TemporaryDirectory() as folder:
        trainer = ZeroRecording(
            model=tiny_causal_lm(seed=0),
            args=arguments(transformers.TrainingArguments, folder, per_device_train_batch_size=2),
            train_dataset=samples(),
            data_collator=PadToLongest(pad_token_id=0),
            zero_config=config(bf16={"enabled": False}),
        )
        trainer.train()
        seen = trainer.seen
        trainer.handle.close()
        return seen


def test_the_mixin_goes_over_another_trainer_class():
    assert run_ranks(2, train_subclass) == [STEPS, STEPS]


def test_what_cannot_run_is_refused_before_any_step(tmp_path):
    def trainer(**given):
        return ZeroTrainer(
            model=tiny_causal_lm(seed=0),
            args=arguments(ZeroTrainingArguments, str(tmp_path), **given),
            train_dataset=samples(),
            eval_dataset=samples(),
            data_collator=PadToLongest(pad_token_id=0),
        )

    with pytest.raises(ConfigError, match="float16 needs loss scaling"):
        trainer(fp16=True)
    with pytest.raises(ConfigError, match="zero_stage is 4: it must be at least 0 and at most 3"):
        trainer(zero_stage=4)

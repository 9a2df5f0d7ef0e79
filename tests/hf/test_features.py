"""What people turn on in a Trainer works under the engine, at every stage: against the same under Trainer + DDP."""

import gc
import tempfile
import warnings

import pytest
import torch
import transformers
from models import tiny_causal_lm
from ranks import RankError, run_ranks
from tolerances import ADAM_FP32
from trainers import arguments, history, samples

import shardglass.hf.trainer
from shardglass import ConfigError, ZeroTrainer, ZeroTrainingArguments
from shardglass.hf.data import PadToLongest


class Hungry(torch.nn.Module):
    """A model that runs out of memory on more than ``most`` samples: in forward, or in backward behind a block."""

    def __init__(self, where, most, ranks=(0, 1)):
        super().__init__()
        self.inner = tiny_causal_lm(tied=True)
        self.config = self.inner.config
        self.where, self.most = where, most
        self.hungry = torch.distributed.get_rank() in ranks

    def forward(self, **inputs):
        too_many = inputs["input_ids"].shape[0] > self.most and self.hungry and self.training
        if too_many and self.where == "forward":
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        hook = None
        if too_many:
            # Another block on each rank: they break off at different places of backward.
            block = self.inner.model.layers[torch.distributed.get_rank() % 2]
            hook = block.register_forward_hook(lambda module, args, output: break_off(output))
        out = self.inner(**inputs)
        if hook is not None:
            hook.remove()
        return out


def break_off(output):
    def fail(grad):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    (output[0] if isinstance(output, tuple) else output).register_hook(fail)


MODELS = {
    "tied": lambda: tiny_causal_lm(tied=True),
    "hungry forward": lambda: Hungry("forward", 4),
    "hungry backward": lambda: Hungry("backward", 4),
    "hungry alone": lambda: Hungry("forward", 4, ranks=(1,)),
}


def run(rank, world_size, kind, model_of, given):
    with tempfile.TemporaryDirectory() as folder:
        zero = kind == "zero"
        torch.manual_seed(0)
        given = {"remove_unused_columns": False, **given}
        args = arguments(ZeroTrainingArguments if zero else transformers.TrainingArguments, folder, **given)
        trainer = (ZeroTrainer if zero else transformers.Trainer)(
            model=MODELS[model_of](), args=args, train_dataset=samples(), data_collator=PadToLongest(pad_token_id=0)
        )
        with warnings.catch_warnings():
            if given.get("torch_compile"):
                warnings.simplefilter("ignore")  # dynamo asks tensors for what warns
            trainer.train()
        result = {
            "loss": history(trainer),
            "batch": trainer._train_batch_size,
            "predicted": trainer.predict(samples()[:4]).metrics.get("test_loss"),
            "compiled": sum("forward" in vars(module) for module in trainer.model.modules()),
        }
        trainer.accelerator.free_memory()
        if zero:
            trainer.handle.close()
        return result


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_neftune_noise_and_predict_are_those_of_trainer_with_ddp(stage):
    given = {"neftune_noise_alpha": 5.0}
    zero = run_ranks(2, run, "zero", "tied", {**given, "zero_stage": stage})
    plain = run_ranks(2, run, "plain", "tied", given)
    for a, b in zip(zero, plain, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=ADAM_FP32)
        assert a["predicted"] == pytest.approx(b["predicted"], rel=ADAM_FP32)
    assert zero[0]["loss"] != run_ranks(2, run, "zero", "tied", {"zero_stage": stage})[0]["loss"]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_torch_compile_compiles_each_block_and_leaves_the_losses_alone(stage):
    given = {"zero_stage": stage, "max_steps": 3}
    eager = run_ranks(2, run, "zero", "tied", given)
    compiled = run_ranks(
        2, run, "zero", "tied", {**given, "torch_compile": True, "torch_compile_backend": "aot_eager"}, timeout_s=120
    )
    for a, b in zip(compiled, eager, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=ADAM_FP32)
        assert a["compiled"] == 2
        assert b["compiled"] == 0


@pytest.mark.parametrize(
    ("stage", "model"),
    [
        (3, "hungry backward"),
        pytest.param(3, "hungry forward", marks=pytest.mark.soak),
        pytest.param(2, "hungry backward", marks=pytest.mark.soak),
        pytest.param(2, "hungry forward", marks=pytest.mark.soak),
        pytest.param(0, "hungry forward", marks=pytest.mark.soak),
        pytest.param(0, "hungry backward", marks=pytest.mark.soak),
    ],
)
def test_auto_find_batch_size_halves_the_batch_when_every_rank_runs_out(stage, model):
    given = {"zero_stage": stage, "auto_find_batch_size": True, "per_device_train_batch_size": 16, "max_steps": 3}
    found = run_ranks(2, run, "zero", model, given, timeout_s=180)  # Accelerate collects garbage in between
    small = run_ranks(2, run, "zero", "tied", {"zero_stage": stage, "per_device_train_batch_size": 4, "max_steps": 3})
    for a, b in zip(found, small, strict=True):
        assert a["batch"] <= 4
        assert a["loss"] == pytest.approx(b["loss"], rel=ADAM_FP32)


def impatient(rank, world_size, given):
    shardglass.hf.trainer.ALL_RAN_OUT_S = 2.0
    return run(rank, world_size, "zero", "hungry alone", given)


def test_a_rank_that_runs_out_of_memory_alone_ends_the_run_and_says_so():
    given = {"auto_find_batch_size": True, "per_device_train_batch_size": 16, "max_steps": 3}
    with pytest.raises(RankError, match="rank 1 ran out of memory and other ranks did not"):
        run_ranks(2, impatient, given, timeout_s=90)


@pytest.mark.parametrize("optim", ["adafactor", "lion_32bit", "adamw_8bit"])
def test_an_optimizer_that_cannot_be_sharded_is_refused_by_name(tmp_path, optim):
    with pytest.raises(ConfigError, match=f"optim {optim} cannot be sharded"):
        ZeroTrainer(
            model=tiny_causal_lm(tied=True),
            args=arguments(ZeroTrainingArguments, str(tmp_path), optim=optim),
            train_dataset=samples(),
            data_collator=PadToLongest(pad_token_id=0),
        )


@pytest.mark.parametrize("optim", ["sgd", "adagrad", "rmsprop", "adamw_torch_fused"])
def test_optimizers_of_trainer_that_can_be_sharded_give_its_losses(optim):
    given = {"optim": optim, "learning_rate": 1e-3, "max_steps": 3}
    zero = run_ranks(2, run, "zero", "tied", given)
    plain = run_ranks(2, run, "plain", "tied", given)
    assert zero[0]["loss"] == pytest.approx(plain[0]["loss"], rel=ADAM_FP32)


def two_in_a_row(rank, world_size):
    model = tiny_causal_lm(tied=True)
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            trainer = ZeroTrainer(
                model=model,
                args=arguments(ZeroTrainingArguments, folder, max_steps=2),
                train_dataset=samples(),
                data_collator=PadToLongest(pad_token_id=0),
            )
            trainer.train()
            losses.append(history(trainer))
            trainer.accelerator.free_memory()
    trainer.handle.close()
    return losses


def test_a_second_trainer_goes_on_with_the_model_of_the_first():
    for first, second in run_ranks(2, two_in_a_row):
        assert len(first) == len(second) == 2
        assert second[0] < first[0]


class CountLive(transformers.TrainerCallback):
    """Bytes of all storages of this process before each step."""

    def __init__(self):
        self.bytes = []

    def on_step_begin(self, args, state, control, **kwargs):
        gc.collect()
        tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        self.bytes.append(sum(storages.values()))


def count_live(rank, world_size, given):
    with tempfile.TemporaryDirectory() as folder:
        counted = CountLive()
        args = arguments(ZeroTrainingArguments, folder, max_steps=8, eval_strategy="steps", eval_steps=2, **given)
        trainer = ZeroTrainer(
            model=tiny_causal_lm(tied=True),
            args=args,
            train_dataset=samples(),
            eval_dataset=samples()[:4],
            data_collator=PadToLongest(pad_token_id=0),
            callbacks=[counted],
        )
        trainer.train()
        trainer.accelerator.free_memory()
        trainer.handle.close()
        return counted.bytes


@pytest.mark.parametrize("more", [{}, {"activation_checkpointing": True}], ids=["", "recomputing"])
def test_nothing_stays_from_step_to_step_where_parameters_come_and_go(more):
    for counted in run_ranks(2, count_live, {"zero_stage": 3, "gradient_accumulation_steps": 2, **more}):
        assert len(counted) == 8
        assert max(counted[3:]) <= counted[2] + 1024, counted  # scalars that the Trainer logs

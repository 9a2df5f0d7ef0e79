"""Snapshots of a run: they are as planned on every rank, at given steps and when one rank is asked for them."""

import tempfile
from functools import partial
from pathlib import Path

import pytest
import transformers
from models import tiny_causal_lm
from ranks import run_ranks
from trainers import arguments, samples
from transformers import TrainerCallback

from shardglass import ZeroTrainer, ZeroTrainingArguments, look
from shardglass.errors import ConfigError, ModelError
from shardglass.hf.data import PadToLongest
from shardglass.hf.flags import look_steps
from shardglass.hf.look_signal import LookSignal
from shardglass.hf.looking import LookCallback, clear_snapshots
from shardglass.hf.model_config import FoundConfig
from shardglass.hf.run_planning import RunToPlan, planned_engine
from shardglass.lens.store import ranks_of, read_moments, steps_of
from shardglass.plan.expected import against_plan


class AskOneRank(TrainerCallback):
    """Stands for SIGUSR1 that reaches one rank in the middle of a step."""

    def __init__(self, signal, rank, step):
        self._signal, self._rank, self._step = signal, rank, step

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if (args.process_index, state.global_step + 1) == (self._rank, self._step):
            self._signal._on_signal(0, None)


def trainer_of(folder, **given):
    model = tiny_causal_lm(tied=True, seed=0)
    args = arguments(ZeroTrainingArguments, folder, **given)
    return ZeroTrainer(model=model, args=args, train_dataset=samples(), data_collator=PadToLongest(pad_token_id=0))


def run_of(trainer, **changes):
    given = {
        "config": FoundConfig(name="tiny", source="run", config=trainer.model.config),
        "resolved": trainer.resolved,
        "optim": str(trainer.args.optim.value),
        "dtype_as_loaded": None,
        "attention": None,
        "longest": 19,
        "model_max_length": 64,
        "recomputes": False,
        "device": "cpu",
        "ranks_per_node": 2,
    }
    return RunToPlan(**{**given, **changes})


def looked_at(rank, world_size, folder, steps, asked, given):
    trainer = trainer_of(folder, **given)
    signal = LookSignal()
    said = []
    engine = partial(planned_engine, run_of(trainer))
    looking = LookCallback(trainer, steps=steps, signal=signal, engine=engine, say=said.append)
    trainer.add_callback(looking)
    if asked is not None:
        trainer.add_callback(AskOneRank(signal, *asked))
    trainer.train()
    if max(steps, default=0) == trainer.state.global_step:
        assert looking.last == look(trainer)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    trainer.handle.close()
    return losses, said


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("dtype", [{}, {"bf16": True}])
def test_every_rank_is_as_planned_at_every_step(tmp_path, stage, dtype):
    given = {"zero_stage": stage, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 2, **dtype}
    run_ranks(2, looked_at, str(tmp_path), (0, 1, 3, 6), None, given)
    assert steps_of(tmp_path) == [0, 1, 3, 6]
    for step in steps_of(tmp_path):
        moments = read_moments(tmp_path, step)
        assert [m.live.rank for m in moments] == [0, 1]
        for moment in moments:
            assert moment.live.step == step
            assert moment.live.check() == ()
            assert [str(change) for change in against_plan(moment.plan, moment.live)] == []
            assert bool(moment.plan.memory) == (step > 0)


@pytest.mark.parametrize("asked", [(1, 2), (0, 1), (1, 6)])
def test_a_signal_to_one_rank_gives_snapshots_of_one_step_on_all(tmp_path, asked):
    rank, step = asked
    quiet, _ = run_ranks(2, looked_at, str(tmp_path / "quiet"), (6,), None, {"zero_stage": 1})[0]
    losses, said = run_ranks(2, looked_at, str(tmp_path / "asked"), (), asked, {"zero_stage": 1})[rank]
    assert losses == quiet
    written = [f"look: snapshots of step {min(step + 1, 6)} are in"]
    assert [line.partition(" in ")[0] + " in" for line in said] == written
    assert steps_of(tmp_path / "asked") == [min(step + 1, 6)]
    ranks = [0, 1] if step < 6 else [1]  # behind the last step there is none to agree on
    assert ranks_of(tmp_path / "asked", min(step + 1, 6)) == ranks


def other_than_planned(rank, world_size, folder):
    trainer = trainer_of(folder, zero_stage=2)
    wrong = run_of(trainer, optim="sgd", resolved=trainer_of(folder, zero_stage=1, bf16=True).resolved)
    trainer.add_callback(LookCallback(trainer, steps=(2,), engine=partial(planned_engine, wrong)))
    trainer.train()
    trainer.handle.close()


def test_a_run_that_is_not_as_planned_is_told_fact_by_fact(tmp_path):
    run_ranks(2, other_than_planned, str(tmp_path))
    moment = read_moments(tmp_path, 2)[1]
    lines = [str(change) for change in against_plan(moment.plan, moment.live)]
    assert lines[0] == "stage: 1 → 2"
    assert "layout.model.layers.0.self_attn.q_proj.weight.dtype: bfloat16 → float32" in lines
    assert "held.model.layers.1/float32/trainable.exp_avg: absent → present" in lines
    assert "memory.optimizer exp_avg: absent → present" in lines


def failing(rank, world_size, folder):
    trainer = trainer_of(folder)
    (Path(folder) / "snapshots").write_text("a file where a folder should be")

    def engine():
        raise ModelError("no such model")

    trainer.add_callback(LookCallback(trainer, steps=(1, 2, 99), engine=engine))
    trainer.train()
    (Path(folder) / "snapshots").unlink()
    trainer.add_callback(LookCallback(trainer, steps=(1,), engine=engine))
    trainer.train()
    trainer.handle.close()
    return trainer.state.global_step


def test_a_snapshot_that_cannot_be_written_ends_no_run_and_one_without_plan_is_written(tmp_path):
    assert run_ranks(1, failing, str(tmp_path)) == [6]
    (moment,) = read_moments(tmp_path, 1)
    assert moment.plan is None
    assert moment.live.check() == ()


def plain(rank, world_size, folder):
    model = tiny_causal_lm(seed=0)
    args = arguments(transformers.TrainingArguments, folder)
    trainer = transformers.Trainer(
        model=model, args=args, train_dataset=samples(), data_collator=PadToLongest(pad_token_id=0)
    )
    trainer.add_callback(LookCallback(trainer, steps=(1,)))
    trainer.train()
    trainer.accelerator.free_memory()


def test_a_plain_trainer_is_looked_at_too(tmp_path):
    run_ranks(2, plain, str(tmp_path))
    assert [m.live.engine for m in read_moments(tmp_path, 1)] == ["ddp", "ddp"]
    told = f"{tmp_path / 'snapshots'}: snapshots of an earlier run, of 1 step, are removed"
    assert clear_snapshots(tmp_path) == [told]
    assert clear_snapshots(tmp_path) == []


def test_steps_are_written_with_commas():
    assert look_steps(None) == ()
    assert look_steps("10, 3,3") == (3, 10)
    for text in ("", "3,", "-1", "a", "1.5", "²"):
        with pytest.raises(ConfigError, match="--look .*: it must be one step or several"):
            look_steps(text)


def test_a_file_of_the_user_beside_snapshots_stays(tmp_path):
    with tempfile.TemporaryDirectory() as elsewhere:
        run_ranks(1, looked_at, elsewhere, (1,), None, {"max_steps": 1})
        folder = Path(elsewhere, "snapshots", "step-000001")
        (folder / "mine.txt").write_text("keep")
        (folder / ".rank-3.json.writing").write_text("{")
        clear_snapshots(Path(elsewhere))
        assert [path.name for path in folder.iterdir()] == ["mine.txt"]

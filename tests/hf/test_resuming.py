"""A run resumed at another world size or batch goes on with the very next samples, and says what its steps mean now."""

import json
import math

import pytest
import transformers
from models import tiny_causal_lm
from ranks import run_ranks
from tolerances import LOSS_FP32
from trainers import TEXT, arguments, history, samples

from shardglass import ZeroTrainer, ZeroTrainingArguments
from shardglass.hf.data import PadToLongest


class Stop(transformers.TrainerCallback):
    """Ends the run after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


class Noting:
    """A collator that notes which samples it was given."""

    def __init__(self):
        self.pad, self.seen = PadToLongest(pad_token_id=0), []

    def __call__(self, rows):
        self.seen.append([row["index"] for row in rows])
        return self.pad([{key: row[key] for key in ("input_ids", "labels")} for row in rows])


def run(folder, *, stop=None, resume=None, **given):
    """Train; the rows of samples that this rank trained on, in order, and what the trainer says."""
    made = {"save_strategy": "steps", "save_steps": 1, "max_steps": -1, "num_train_epochs": 2, **given}
    made["remove_unused_columns"] = False
    noting = Noting()
    trainer = ZeroTrainer(
        model=tiny_causal_lm(tied=True),
        args=arguments(ZeroTrainingArguments, folder, **made),
        train_dataset=[{**row, "index": k} for k, row in enumerate(samples())],
        data_collator=noting,
        callbacks=[Stop(stop)] if stop else [],
    )
    trainer.train(resume_from_checkpoint=resume)
    told = {
        "seen": noting.seen,
        "loss": history(trainer),
        "lr": history(trainer, "learning_rate"),
        "epochs": history(trainer, "epoch"),
        "steps": trainer.state.global_step,
        "note": trainer.resume_note,
        "epoch": trainer.state.epoch,
    }
    trainer.accelerator.free_memory()
    trainer.handle.close()
    return told


def ranks(rank, world_size, folder, stop, resume, given):
    return run(folder, stop=stop, resume=resume, **given)


def in_order(told, micro_batches):
    """The samples of the first micro-batches of all ranks, as the epoch's order has them."""
    rows = zip(*(rank["seen"][:micro_batches] for rank in told), strict=True)
    return [index for row in rows for batch in row for index in batch]


@pytest.mark.parametrize("stages", [(2, 3), (3, 0)], ids=str)
@pytest.mark.parametrize(
    ("first", "then"),
    [((2, 2, 2), (4, 2, 1)), ((4, 1, 2), (1, 4, 2)), ((2, 4, 1), (1, 2, 4))],
    ids=str,
)
def test_another_world_size_of_the_same_global_batch_sees_the_same_samples_with_the_same_losses(
    tmp_path, first, then, stages
):
    def given(batch, stage):
        return {"per_device_train_batch_size": batch[1], "gradient_accumulation_steps": batch[2], "zero_stage": stage}

    whole = run_ranks(first[0], ranks, str(tmp_path / "whole"), None, None, given(first, stages[0]))
    run_ranks(first[0], ranks, str(tmp_path / "run"), 3, None, given(first, stages[0]))
    rest = run_ranks(then[0], ranks, str(tmp_path / "run"), None, True, given(then, stages[1]))
    # 40 samples, 8 a step: 5 steps an epoch, of which 3 are behind; the Trainer fetches the skipped batches too.
    order = in_order(whole, 10 * first[2])
    fetched = in_order(rest, len(rest[0]["seen"]))
    assert fetched[-56:] == order[24:]
    assert rest[0]["steps"] == 10
    assert rest[0]["note"] is None
    assert rest[0]["lr"] == whole[0]["lr"]
    assert rest[0]["epochs"] == whole[0]["epochs"]
    for value, expected in zip(rest[0]["loss"], whole[0]["loss"], strict=True):
        assert abs(value - expected) <= 1e-4 + 10 * LOSS_FP32 * expected  # the log rounds to four places


@pytest.mark.parametrize(
    ("then", "epochs"),
    [((3, 2, 1), 2), ((4, 2, 2), 2), ((1, 3, 1), 1.5), ((2, 1, 3), 2)],
    ids=str,
)
def test_a_changed_batch_goes_on_at_the_next_sample_and_the_run_says_so(tmp_path, then, epochs):
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "zero_stage": 2}
    whole = run_ranks(2, ranks, str(tmp_path / "whole"), None, None, given)
    run_ranks(2, ranks, str(tmp_path / "run"), 3, None, given)
    world_size, per_device, accumulation = then
    given |= {"per_device_train_batch_size": per_device, "gradient_accumulation_steps": accumulation}
    rest = run_ranks(
        world_size, ranks, str(tmp_path / "run"), None, True, {**given, "num_train_epochs": epochs, "zero_stage": 3}
    )
    order = in_order(whole, 20)  # two epochs
    micro = world_size * per_device
    in_first = math.ceil((TEXT - 24) / micro)
    fetched = in_order(rest, len(rest[0]["seen"]))
    assert fetched[: TEXT - 24] == order[24:TEXT]  # none twice, none skipped; then the last batch is filled up
    filled = in_first * micro if world_size > 1 else TEXT - 24  # one rank alone has a shorter last batch
    second = fetched[filled:][:TEXT]
    assert second == order[TEXT:][: len(second)]
    assert len(second) == TEXT or epochs < 2
    a_step = micro * accumulation
    first_steps, per_epoch = math.ceil(in_first / accumulation), math.ceil(math.ceil(TEXT / micro) / accumulation)
    assert rest[0]["steps"] == 3 + first_steps + math.ceil(per_epoch * (epochs - 1))
    note = rest[0]["note"]
    assert f"with {a_step} samples a step, where it had 8 samples a step" in note
    assert f"at sample 24 of {TEXT} of epoch 1" in note
    assert f"the run ends at step {rest[0]['steps']}" in note
    assert len(rest[0]["lr"]) == rest[0]["steps"]
    if epochs == 2:
        assert rest[0]["epoch"] == pytest.approx(2.0)
        written = json.loads((tmp_path / "run" / f"checkpoint-{3 + first_steps}" / "shardglass.json").read_text())
        assert (written["extra"]["position"]["epoch"], written["extra"]["position"]["used"]) == (1, 0)


def test_a_run_resumed_twice_with_other_batches_still_sees_each_sample_once(tmp_path):
    def given(per_device, accumulation):
        return {
            "per_device_train_batch_size": per_device,
            "gradient_accumulation_steps": accumulation,
            "num_train_epochs": 1,
            "zero_stage": 2,
        }

    folder = str(tmp_path / "run")
    first = run_ranks(2, ranks, folder, 2, None, given(2, 2))  # 16 samples
    second = run_ranks(3, ranks, folder, 4, True, given(2, 1))  # 12 more
    third = run_ranks(2, ranks, folder, None, True, given(3, 1))  # the last 12
    assert third[0]["steps"] == 6
    seen = in_order(first, 4) + in_order(second, 2) + in_order(third, 2)
    assert sorted(seen) == list(range(TEXT))

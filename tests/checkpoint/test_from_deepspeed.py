"""A DeepSpeed checkpoint of any stage is a training state of ours, at any world size and stage, and is gone on from."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from ranks import run_ranks
from safetensors.torch import load_file
from sharded import make
from torch import nn
from trainers import arguments, history

from shardglass import CheckpointError, ZeroTrainer, ZeroTrainingArguments, load_checkpoint
from shardglass.hf.data import PadToLongest

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
CASES = sorted(path.name for path in GOLDEN.iterdir())
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


class Recorded(nn.Module):
    """Modules and parameters of the names and shapes of a recorded model, with other values."""

    def __init__(self, info):
        super().__init__()
        for name, shape, trainable in info["named_parameters"]:
            *path, last = name.split(".")
            module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(torch.full(shape, 7.0), requires_grad=trainable))


def info_of(case):
    return json.loads((GOLDEN / case / "info.json").read_text(encoding="utf-8"))


def groups_of(info):
    """The param_groups of the recorded run, with other options."""
    names = [[row[0] for row in group] for group in info["input_groups"]]

    def groups(named):
        by_name = dict(named)
        return [{"params": [by_name[n] for n in group if by_name[n].requires_grad], "lr": 9.0} for group in names]

    return groups


def adamw(groups):
    return torch.optim.AdamW(groups, lr=9.0, betas=(0.1, 0.2))


def read(rank, world_size, case, folder, stage):
    info = info_of(case)
    model = Recorded(info)
    handle, optimizer = make(
        model, optimizers=adamw, groups=groups_of(info), stage=stage, param_dtype=DTYPES[info["dtype"]]
    )
    source = load_checkpoint(handle, folder)
    reference = load_file(GOLDEN / case / "reference.safetensors")
    checked = 0
    for name, param in model.named_parameters():
        state = handle.state_of(name)
        if param.requires_grad:
            for kind, key in (("fp32", "master"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
                assert torch.equal(state[key], reference[f"{kind}:{name}"].view(state[key].shape)), f"{kind} of {name}"
                checked += 1
            assert state["step"] == 3
        else:
            assert torch.equal(state["param"].float(), reference[f"fp32:{name}"].view(state["param"].shape)), name
            checked += 1
    assert checked == len(reference)
    rates = [group["lr"] for group in optimizer.param_groups]
    betas = [group["betas"] for group in optimizer.param_groups]
    counters = handle.counters
    handle.close()
    return source.writer, rates, betas, counters


@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), (2, 3), (3, 1), (4, 0)])
@pytest.mark.parametrize("case", CASES)
def test_a_recorded_state_is_the_same_in_the_engine(case, world_size, stage):
    info = info_of(case)
    for writer, rates, betas, counters in run_ranks(world_size, read, case, str(GOLDEN / case), stage):
        assert writer == f"DeepSpeed 0.19.8, ZeRO stage {info['stage']}, 2 ranks"
        assert all(rate < 1 for rate in rates)
        assert all(len(pair) == 2 and pair[0] > 0.5 for pair in betas)
        assert counters == {"step": 3, "skipped": 0, "skipped_in_a_row": 0}


def refused(rank, world_size, case, folder):
    with pytest.raises(CheckpointError) as caught:
        read(rank, world_size, case, folder, 2)
    return str(caught.value)


@pytest.mark.parametrize("victim", ["zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"])
def test_a_missing_file_is_named_on_every_rank(tmp_path, victim):
    case = "z2_fp32_untied_1g"
    shutil.copytree(GOLDEN / case, tmp_path / "saved")
    (tmp_path / "saved" / "global_step3" / victim).unlink()
    told = run_ranks(2, refused, case, str(tmp_path / "saved"))
    assert all(victim in text for text in told)


class Begins(transformers.TrainerCallback):
    """Notes the masters and the step that training begins with."""

    def __init__(self):
        self.trainer, self.step, self.found = None, None, {}

    def on_train_begin(self, args, state, control, **kwargs):
        self.step = state.global_step
        for name, _ in self.trainer.model.named_parameters():
            self.found[name] = self.trainer.handle.state_of(name)["master"]


def go_on(rank, world_size, folder, checkpoint, given):
    """Train on with the Trainer from a folder without a Trainer's state: a Qwen2 of the recorded shapes."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=101,
        hidden_size=21,
        intermediate_size=31,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=6,
        tie_word_embeddings=False,
    )
    rows = [{"input_ids": torch.arange(8) + k, "labels": torch.arange(8) + k} for k in range(24)]
    args = arguments(ZeroTrainingArguments, folder, **{"max_steps": 6, "learning_rate": 1e-3, **given})
    begins = Begins()
    trainer = begins.trainer = ZeroTrainer(
        model=Qwen2ForCausalLM(config),
        args=args,
        train_dataset=rows,
        data_collator=PadToLongest(pad_token_id=0),
        callbacks=[begins],
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    reference = load_file(Path(checkpoint) / "reference.safetensors")
    assert begins.step == 3
    assert len(begins.found) * 3 == len(reference)
    for name, value in begins.found.items():
        assert torch.equal(value, reference[f"fp32:{name}"].view(value.shape)), name
    trainer.handle.close()
    return trainer.state.global_step, history(trainer), history(trainer, "learning_rate"), trainer.resume_note


@pytest.mark.parametrize(("world_size", "stage"), [(2, 3), (3, 2)])
def test_the_trainer_goes_on_from_a_folder_that_deepspeed_wrote(tmp_path, world_size, stage):
    given = {
        "zero_stage": stage,
        "per_device_train_batch_size": 1,
        "deepspeed": {
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "train_micro_batch_size_per_gpu": 1,
        },
    }
    del given["zero_stage"]
    checkpoint = str(GOLDEN / "z2_fp32_untied_1g")
    for step, losses, rates, note in run_ranks(world_size, go_on, str(tmp_path), checkpoint, given, timeout_s=120):
        assert step == 6
        assert len(losses) == len(rates) == 3
        assert all(0 < loss < 6 for loss in losses)
        assert "the run ends at step 6" in note

"""The original Qwen command runs unchanged, end to end, on a tiny random Qwen2 with Qwen's own vocabulary."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import save_tiny_qwen
from pages import data_of
from qwen_tokenizer import load_qwen_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardglass.hf.run_report import write_run_report

ROOT = Path(__file__).resolve().parents[1]
QWEN = ROOT / "examples" / "qwen"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model folder and a data file."""
    folder = tmp_path_factory.mktemp("qwen")
    load_qwen_tokenizer(folder / "model")
    save_tiny_qwen(folder / "model", vocabulary=151936)
    records = [
        {
            "id": f"identity_{k}",
            "conversations": [
                {"from": "user", "value": f"What is {k} + {k}?"},
                {"from": "assistant", "value": f"It is {2 * k}." + " Really." * (k % 5)},
            ],
        }
        for k in range(24)
    ]
    (folder / "data.json").write_text(json.dumps(records))
    return folder


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def command(inputs, output, **changes):
    """Every flag of the original, in its order; only model, data, output and port are ours."""
    flags = {
        "model_name_or_path": str(inputs / "model"),
        "data_path": str(inputs / "data.json"),
        "bf16": "True",
        "output_dir": str(output),
        "num_train_epochs": "2",
        "per_device_train_batch_size": "2",
        "per_device_eval_batch_size": "1",
        "gradient_accumulation_steps": "4",
        "evaluation_strategy": "no",
        "save_strategy": "steps",
        "save_steps": "1000",
        "save_total_limit": "10",
        "learning_rate": "1e-5",
        "weight_decay": "0.1",
        "adam_beta2": "0.95",
        "warmup_ratio": "0.01",
        "lr_scheduler_type": "cosine",
        "logging_steps": "1",
        "report_to": "none",
        "model_max_length": "2048",
        "gradient_checkpointing": "True",
        "lazy_preprocess": "True",
        "deepspeed": "finetune/ds_config_zero2.json",
        **changes,
    }
    launcher = ["--nproc_per_node", "2", "--nnodes", "1", "--node_rank", "0", "--master_addr", "localhost"]
    return [
        *(sys.executable, "-m", "torch.distributed.run", *launcher, "--master_port", str(free_port()), "finetune.py"),
        *(part for flag, value in flags.items() for part in (f"--{flag}", value)),
    ]


def run(arguments, timeout=240):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0,1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(ROOT / "src")
    environment["CI"] = "true"  # here transformers hands its lines to the root logger too
    return subprocess.run(arguments, cwd=QWEN, env=environment, capture_output=True, text=True, timeout=timeout)


def test_the_qwen_command_trains_shows_its_summary_and_saves_a_plain_model(inputs, tmp_path):
    done = run(command(inputs, tmp_path / "out"))
    text = done.stdout
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    # 24 samples, 2 ranks x 2 x 4 = 16 a step, the last step of each of the 2 epochs is short.
    assert text.count("'grad_norm'") == 4
    assert "weight decay" in text
    assert (done.stdout + done.stderr).count("new PAD/BOS/EOS tokens") == 1, "rank 0 alone says it"
    assert (tmp_path / "out" / "checkpoint-4").is_dir()  # the Trainer also saves at the last step
    assert "WarmupLR" in text
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("<|im_start|>") == [151644]
    start = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    moved = (model.lm_head.weight.float() - start.lm_head.weight).abs().max()
    assert 0 < moved < 1e-3
    assert not (tmp_path / "out" / "checkpoint-1000").exists()
    rows = {row["key"]: row for row in json.loads((tmp_path / "out" / "shardglass_config.json").read_text())["values"]}
    assert (rows["scheduler.params.warmup_num_steps"]["value"], rows["optimizer.params.lr"]["value"]) == (1, 1e-5)
    assert (rows["train_batch_size"]["value"], rows["zero_optimization.stage"]["source"]) == (16, "json")
    assert json.loads((tmp_path / "out" / "shardglass_summary.json").read_text())["recomputes"] is True
    page = write_run_report(tmp_path / "out").read_text(encoding="utf-8")
    told = data_of(page, "page-data")
    assert (told["run"]["source"], told["run"]["loss"]["steps"]) == ("trainer_state.json", [1, 2, 3, 4])
    assert told["run"]["accounts"][0]["planned"] == told["run"]["accounts"][0]["measured"]
    assert told["model"]["plan"]["run"]["world_size"] == 2
    changes = {"resume_from_checkpoint": "True", "seed": "7"}
    refused = run(command(inputs, tmp_path / "out", **changes))
    assert refused.returncode != 0
    assert refused.stderr.count("was written by a run that drew its data otherwise") == 1, "one rank tells it for all"
    assert "src/shardglass" not in refused.stderr, "no traceback of ours"
    assert (tmp_path / "out" / "checkpoint-4").is_dir()


def test_with_the_config_of_zero3_it_trains_and_saves_a_plain_model_too(inputs, tmp_path):
    changes = {"deepspeed": "finetune/ds_config_zero3.json", "save_strategy": "no"}
    done = run(command(inputs, tmp_path / "out", **changes))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "ZeRO stage 3, 2 ranks" in done.stdout
    summary = json.loads((tmp_path / "out" / "shardglass_summary.json").read_text())
    assert summary["progress"]["steps"] == 4
    rows = {row["category"]: (row["planned"], row["measured"]) for row in summary["memory"]["rows"]}
    assert rows["parameters"] == (0, 0)  # between uses there are the master shards alone
    assert all(planned == measured for planned, measured in rows.values())
    start = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    moved = {
        name: (p.float() - q).abs().max()
        for (name, p), q in zip(model.named_parameters(), start.parameters(), strict=True)
    }
    assert all(distance < 1e-3 for distance in moved.values()), moved
    assert moved["lm_head.weight"] > 0
    values = json.loads((tmp_path / "out" / "shardglass_config.json").read_text())["values"]
    used = {row["key"]: row["used"] for row in values}
    assert used["zero_optimization.stage3_max_live_parameters"]
    assert not used["zero_optimization.stage3_max_reuse_distance"]


def test_lora_is_a_clear_not_yet_and_a_wrong_name_has_the_nearest(inputs, tmp_path):
    for changes, words in (
        ({"use_lora": "True"}, "--use_lora: not supported yet"),
        ({"model_name_or_path": str(inputs / "modle")}, "did you mean 'model'?"),
    ):
        done = run(command(inputs, tmp_path / "none", **changes))
        assert done.returncode != 0
        assert done.stderr.count(words) == 1, done.stderr
        assert 'Traceback (most recent call last):\n  File "finetune.py"' not in done.stderr
        assert not (tmp_path / "none").exists()
    shutil.rmtree(tmp_path)

"""A run that is told to go finishes its step and saves; the same command, started again, goes on as if nothing was."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from models import save_tiny_qwen
from qwen_tokenizer import load_qwen_tokenizer

STEPS = 12


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preempted")
    load_qwen_tokenizer(folder / "model")
    save_tiny_qwen(folder / "model", vocabulary=151936)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there, how are you?"}]
    (folder / "data.json").write_text(json.dumps([{"messages": turns} for _ in range(16)]))
    return folder


def train(inputs, output, **changes):
    flags = {
        "model_name_or_path": inputs / "model",
        "data_path": inputs / "data.json",
        "output_dir": output,
        "max_steps": STEPS,
        "per_device_train_batch_size": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "zero_stage": 2,
        "resume_from_checkpoint": "auto",
        "disable_tqdm": True,
        **changes,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "shardglass", "train", "--nproc_per_node", "2", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def ranks_of(launcher):
    """Processes of the ranks, by rank."""
    found = {}
    for child in psutil.Process(launcher.pid).children():
        rank = child.environ().get("RANK")
        if rank is not None:
            found[int(rank)] = child
    return found


def after_the_first_step(run):
    for line in run.stdout:
        if line.startswith("{'loss'"):
            return
    pytest.fail(run.communicate()[1])


def losses_of(output):
    state = json.loads((output / "trainer_state.json").read_text())
    return [row["loss"] for row in state["log_history"] if "loss" in row]


@pytest.fixture(scope="module")
def uninterrupted(inputs, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "out"
    run = train(inputs, output)
    _, said = run.communicate(timeout=120)
    assert run.returncode == 0, said
    return losses_of(output)


def tell(run, how):
    if how == "SIGTERM to the launcher":
        run.send_signal(signal.SIGTERM)
    else:
        ranks_of(run)[1].send_signal(signal.SIGUSR2)


@pytest.mark.parametrize("how", ["SIGTERM to the launcher", "SIGUSR2 to the launcher", "SIGUSR2 to rank 1 alone"])
def test_a_run_that_is_told_to_go_saves_and_the_same_command_goes_on(inputs, uninterrupted, tmp_path, how):
    asynchronous = how == "SIGTERM to the launcher"
    run = train(inputs, tmp_path / "out", async_save=asynchronous)
    after_the_first_step(run)
    tell(run, how)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 75, said
    told = re.search(r"stopped after step (\d+); it is saved as (\S+); go on with --resume_from_checkpoint True", said)
    assert told is not None, said
    step = int(told[1])
    assert 1 <= step < STEPS
    assert told[2] == str(tmp_path / "out" / f"checkpoint-{step}")
    assert not (tmp_path / "out" / "model.safetensors").exists()
    again = train(inputs, tmp_path / "out", async_save=asynchronous)
    _, said = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert losses_of(tmp_path / "out") == uninterrupted


def test_a_second_signal_ends_the_run_at_once(inputs, tmp_path):
    run = train(inputs, tmp_path / "out", max_steps=100000)
    after_the_first_step(run)
    ranks = ranks_of(run)
    ranks[1].suspend()  # so that the step cannot be finished
    time.sleep(0.5)
    run.send_signal(signal.SIGUSR2)  # the launcher passes it on
    time.sleep(2.5)
    ranks[0].send_signal(signal.SIGUSR2)
    ranks[0].wait(10)
    ranks[1].resume()
    _, said = run.communicate(timeout=60)
    assert "SIGUSR2: finishing the step, then saving; once more stops at once" in said
    assert run.returncode == 128 + signal.SIGUSR2
    assert "rank 0 was stopped by SIGUSR2" in said

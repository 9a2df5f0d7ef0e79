"""A run under debugpy, spoken to as VS Code does: one rank is held, the others wait, and continuing ends the run."""

import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from dap import DapClient
from models import save_tiny_qwen
from qwen_tokenizer import CHAT_TEMPLATE
from transformers import Qwen2Tokenizer
from typer.testing import CliRunner

import shardglass
from shardglass import cli
from shardglass.commands.debug_config import launch_entry, read_command
from shardglass.errors import ConfigError
from shardglass.hf import train
from shardglass.hf.arguments import parse_command
from shardglass.hf.debugging import DEBUG_TIMEOUT_S, patience
from shardglass.hf.flags import early_faults
from shardglass.lens.store import ranks_of, steps_of

SOURCE = Path(shardglass.__file__).parents[1]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model folder with a tokenizer of bytes, and a data file."""
    folder = tmp_path_factory.mktemp("inputs")
    from qwen_tokenizer import _byte_letters

    letters = {letter: k for k, letter in enumerate(_byte_letters().values())}
    vocab = letters | {word: len(letters) + k for k, word in enumerate(SPECIAL)}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], extra_special_tokens=SPECIAL[1:])
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    save_tiny_qwen(folder / "model", vocabulary=272)
    talk = [{"from": "user", "value": "What is it?"}, {"from": "assistant", "value": "It is it."}]
    (folder / "data.json").write_text(json.dumps([{"id": str(k), "conversations": talk} for k in range(16)]))
    return folder


def flags(inputs, output, **changes):
    given = {
        "model_name_or_path": inputs / "model",
        "data_path": inputs / "data.json",
        "output_dir": output,
        "max_steps": 3,
        "per_device_train_batch_size": 1,
        "model_max_length": 64,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **changes,
    }
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


QUICK = """
import os, sys, types
if "RANK" not in os.environ:
    module = types.ModuleType("shardglass.hf.arguments")
    module.parse_command = lambda *args, **kwargs: None
    sys.modules["shardglass.hf.arguments"] = module
"""
"""Spares a launcher the seconds in which it has transformers look at the flags."""


def environment(**more):
    return {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        **more,
    }


@contextmanager
def started(command, **more):
    """A process that is gone afterwards, whatever happens inside."""
    with subprocess.Popen(
        command, env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        try:
            yield run
        finally:
            run.kill()


def step_line():
    """File and line of one of the first statements of the optimizer's step."""
    step = inspect.unwrap(torch.optim.AdamW.step)
    lines, first = inspect.getsourcelines(step)
    offset = next(k for k, line in enumerate(lines) if line.strip() == "loss = None")
    return inspect.getsourcefile(step), first + offset


def test_a_breakpoint_holds_one_rank_and_continuing_ends_the_run(inputs, tmp_path):
    port, output = free_port(), tmp_path / "out"
    short = {"collective_timeout_s": 4, "ddp_timeout": 4, "look": 1, "debugpy_rank": 1, "debugpy_port": port}
    command = [sys.executable, "-m", "shardglass", "train", "--nproc_per_node", "2", *flags(inputs, output, **short)]
    (tmp_path / "sitecustomize.py").write_text(QUICK)
    paths = f"{tmp_path}{os.pathsep}{SOURCE}"
    with started(command, PYTHONPATH=paths) as run, closing(DapClient(port)) as client:
        attached = client.send("attach", justMyCode=False)
        path, line = step_line()
        client.configure({path: [line]})
        client.answer(attached)
        thread = client.event("stopped")["threadId"]
        assert client.thread_names()[thread] == "rank 1"
        frames = client.frames(thread)
        assert (frames[0]["name"], frames[0]["line"]) == ("step", line)
        _look_around(client, frames)
        time.sleep(4.5)  # longer than the timeouts that were asked for
        run.send_signal(signal.SIGUSR1)  # to the launcher, while one rank is held and the other waits for it
        time.sleep(0.5)
        assert run.poll() is None
        client.request("setBreakpoints", source={"path": path}, breakpoints=[])
        client.request("continue", threadId=thread)
        client.event("terminated", within_s=120)
        client.close()  # debugpy's own process keeps the run's output open until then
        text, _ = run.communicate(timeout=60)
    assert run.returncode == 0, text
    assert f"rank 1 waits for a debugger at 127.0.0.1:{port}" in text
    assert "note: --debugpy_rank 1: every rank waits for up to 24 hours in a collective, instead of failing" in text
    steps = steps_of(output)
    assert steps[0] == 1  # by --look
    assert len(steps) == 2  # and by the signal, which came in step 1
    assert all(ranks_of(output, step) == [0, 1] for step in steps)
    shown = CliRunner().invoke(cli.app, ["look", str(output)], env={"COLUMNS": "150"})
    assert shown.exit_code == 0
    assert "= ranks 0 to 1: layout, tensors and bytes as planned" in shown.output


def _look_around(client, frames):
    """The panes of a rank that is held in its first step."""
    frame, trainer = next(
        (frame["id"], row)
        for frame in frames
        for row in [client.local_variables(frame["id"]).get("self")]
        if row is not None and row["type"] == "ZeroTrainer"
    )
    line = (
        r"rank 1 of 2 · [\d.]+ of [\d.]+ kB fp32 · 19 of 27 tensors, last cut: lm_head.weight \([\d,]+ of 4,352 here\)"
    )
    handle = client.variables(trainer["variablesReference"])["handle"]
    assert re.fullmatch(rf"{line} · ZeRO stage 2, step 0", handle["value"])
    buffers = client.variables(handle["variablesReference"])["buffers"]
    first = client.variables(buffers["variablesReference"])["0"]
    assert first["value"].startswith("root:0/float32/trainable · rank 1 of 2 · ")
    snapshot = client.value("__import__('shardglass').look(self)", frame)
    assert re.fullmatch(line, snapshot)
    unit = client.value("__import__('shardglass').engine.units.build_units(self.model, None)[1]", frame)
    assert unit == "block model.layers.0 · 12 tensors · 2,640 elements fp32"


TRAINING = "from shardglass.cli import finetune\nfinetune()\n"

LOOP = """
import os
import torch
from shardglass import shard
from shardglass.hf.debugging import DEBUGGED, name_process, run_free
rank = int(os.environ["RANK"])
name_process(rank)
run_free(rank, os.environ[DEBUGGED])
torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(7, 3)
optimizer = torch.optim.AdamW(model.parameters())
handle = shard(model, optimizer)
for _ in range(2):
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
handle.close()
torch.distributed.destroy_process_group()
"""
"""What training does with a debugger, in a loop of its own that needs no transformers."""


@pytest.mark.soak
@pytest.mark.parametrize("script", [LOOP, TRAINING])
def test_the_entry_starts_the_run_and_stops_the_ranks_that_were_chosen(inputs, tmp_path, script):
    port, output = free_port(), tmp_path / "out"
    (tmp_path / "finetune.py").write_text(script)
    torchrun = ["torchrun", "--nproc_per_node", "2", str(tmp_path / "finetune.py"), *flags(inputs, output, max_steps=2)]
    entry = launch_entry(read_command(torchrun), ranks=(1,))
    path, line = step_line()
    with (
        started([sys.executable, "-m", "debugpy.adapter", "--port", str(port)]),
        closing(DapClient(port)) as launcher,
    ):
        env = {**environment(), **entry["env"]}
        launched = launcher.send("launch", **{**entry, "env": env, "console": "internalConsole"})
        launcher.configure({path: [line]})
        launcher.answer(launched)
        ranks = {}
        for _ in range(2):
            session = launcher.event("debugpyAttach")
            client = DapClient(session["connect"]["port"])
            attached = client.send("attach", **session)
            client.configure({path: [line]})
            client.answer(attached)
            ranks[named_rank(client)] = client
        assert sorted(ranks) == ["rank 0", "rank 1"]
        thread = ranks["rank 1"].event("stopped")["threadId"]
        assert ranks["rank 1"].frames(thread)[0]["name"] == "step"
        ranks["rank 1"].request("setBreakpoints", source={"path": path}, breakpoints=[])
        ranks["rank 1"].request("continue", threadId=thread)
        for client in ranks.values():
            assert client.event("stopped", "terminated")["event"] == "terminated"
            client.close()
        assert launcher.event("exited")["exitCode"] == 0
    assert (output / "shardglass_summary.json").exists() == (script == TRAINING)


def named_rank(client):
    """The name of the process, once it has one."""
    end = time.monotonic() + 150
    while time.monotonic() < end:
        names = [name for name in client.thread_names().values() if name.startswith("rank ")]
        if names:
            return names[0]
        time.sleep(0.2)
    raise AssertionError(client.thread_names())


def test_timeouts_outlast_a_breakpoint_and_longer_ones_stay():
    day = DEBUG_TIMEOUT_S
    assert patience({}) == patience({"ddp_timeout": 60}) == {"collective_timeout_s": day, "ddp_timeout": day}
    assert patience({"collective_timeout_s": 2.0 * day}) == {"ddp_timeout": day}


def test_debugpy_is_an_extra_that_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(shardglass.hf.flags, "find_spec", lambda name: None)
    (fault,) = [line for line in early_faults({"debugpy_rank": 1}) if "required" not in line]
    assert fault == "--debugpy_rank: debugpy is not installed: pip install 'shardglass[debug]'"
    assert not [line for line in early_faults({"debugpy_port": 7}) if "required" not in line]
    ranges = early_faults({"debugpy_rank": -1, "debugpy_port": 0})
    assert "--debugpy_rank is -1: it must be at least 0" in ranges
    assert "--debugpy_port is 0: it must be at least 1 and at most 65535" in ranges


def test_a_rank_that_does_not_exist_and_a_port_that_is_taken_are_one_line():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        code = f"from shardglass.hf.debugging import wait_for_debugger; wait_for_debugger(1, {port}, print)"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=False
        )
    assert f"ConfigError: --debugpy_port {port}: rank 1 cannot listen there: " in done.stderr
    assert done.stderr.strip().endswith("; give another port")
    command = parse_command(["--model_name_or_path", "m", "--data_path", "d", "--debugpy_rank", "2"])
    assert (command.training.ddp_timeout, command.training.collective_timeout_s) == (DEBUG_TIMEOUT_S, DEBUG_TIMEOUT_S)
    with pytest.raises(ConfigError, match="--debugpy_rank 2: there are ranks 0 to 0"):
        train._meet_debugger(command, None)

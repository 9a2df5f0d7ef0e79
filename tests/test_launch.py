"""Starting processes, and their end before its time: one line, an exit code, and nobody left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import shardglass
from shardglass import cli
from shardglass.hf.launch import _failed

REQUIRED = ["--model_name_or_path", "model", "--data_path", __file__]  # the launcher looks whether there is a file

SOURCE = Path(shardglass.__file__).parents[1]

WORKER = """
import os, sys, time, types
from pathlib import Path

def main(argv=None, *, defaults=None, lifeline=None, signal=None):
    argv = sys.argv[1:] if argv is None else argv
    rank = int(os.environ["RANK"])
    print("worker", rank, os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"], *argv, flush=True)
    if "mistake" in argv and rank == 1:
        print("shardglass: rank 1: no such thing", file=sys.stderr, flush=True)
        os._exit(2)
    if "sleepy" in argv:
        lifeline.output_dir = Path(argv[argv.index("--output_dir") + 1])
        if rank == 0:
            (lifeline.output_dir / "checkpoint-7").mkdir(parents=True)
        print("asleep", os.getpid(), flush=True)
        time.sleep(120)
    os._exit(0)

module = types.ModuleType("shardglass.hf.train")
module.main = main
sys.modules["shardglass.hf.train"] = module
"""
"""Stands for training in the processes that are started; all around it is as ever."""

QUICK = """
import sys, types
module = types.ModuleType("shardglass.hf.arguments")
module.parse_command = lambda *args, **kwargs: None
sys.modules["shardglass.hf.arguments"] = module
"""
"""Spares a launcher the seconds in which it has transformers look at the flags; one test below does without."""


@pytest.fixture(scope="module")
def with_worker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that puts a short worker in the place of ``shardglass.hf.train``, in started processes only."""
    folder = tmp_path_factory.mktemp("worker")
    (folder / "sitecustomize.py").write_text(
        f"import os\nif 'RANK' in os.environ:\n    exec({WORKER!r})\nelif 'QUICK' in os.environ:\n    exec({QUICK!r})\n"
    )
    return folder


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def environment_with(folder: Path) -> dict[str, str]:
    paths = os.pathsep.join([str(folder), str(SOURCE)])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def run(*argv: str, folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the command in a process of its own, as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "shardglass", *argv],
        env={**environment_with(folder), **environment},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_train_starts_its_own_processes(with_worker):
    done = run("train", "--nproc", "2", *REQUIRED, "--run-name=fine", folder=with_worker)
    assert (done.returncode, done.stderr) == (0, "")
    flags = " ".join([*REQUIRED, "--run_name", "fine"])
    assert sorted(done.stdout.splitlines()) == [f"worker {rank} 2 1 {flags}" for rank in (0, 1)]


def test_a_mistake_that_a_rank_finds_is_told_once_with_code_2(with_worker):
    done = run("train", "--nproc_per_node=2", *REQUIRED, "--run_name", "mistake", folder=with_worker, QUICK="1")
    assert (done.returncode, done.stderr) == (2, "shardglass: rank 1: no such thing\n")


def failure_of(exit_code: int, error_file: str = "") -> ProcessFailure:
    return ProcessFailure(local_rank=1, pid=1, exitcode=exit_code, error_file=error_file)


def test_a_failing_rank_is_named_with_its_error(tmp_path, capsys):
    record = tmp_path / "error.json"
    message = {"message": "RuntimeError: out of luck", "extraInfo": {"py_callstack": "", "timestamp": "1"}}
    record.write_text(json.dumps({"message": message}))
    assert _failed(3, failure_of(1, str(record)), cli._say) == 1
    assert capsys.readouterr().err == "shardglass: rank 3 failed with exit code 1: RuntimeError: out of luck\n"
    assert _failed(3, failure_of(7), cli._say) == 7
    assert capsys.readouterr().err == "shardglass: rank 3 failed with exit code 7\n"


def test_a_killed_rank_is_named_with_the_signal(capsys):
    assert _failed(1, failure_of(-9), cli._say) == 137
    assert capsys.readouterr().err == (
        "shardglass: rank 1 was ended by SIGKILL: the machine may have run out of memory\n"
    )
    assert _failed(1, failure_of(-11), cli._say) == 139
    assert capsys.readouterr().err == "shardglass: rank 1 was ended by SIGSEGV\n"
    assert _failed(1, failure_of(143), cli._say) == 143
    assert capsys.readouterr().err == "shardglass: rank 1 was stopped by SIGTERM\n"


# ---- ending before its time ----


def started(folder: Path, output: Path, launcher: list[str]) -> "tuple[subprocess.Popen[str], list[int]]":
    """Start two sleeping ranks; returns the launcher and their process ids."""
    flags = [*REQUIRED, "--run_name", "sleepy", "--output_dir", str(output)]
    done = subprocess.Popen(
        [*launcher, *flags],
        env={**environment_with(folder), "QUICK": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.stdout is not None
    ranks: list[int] = []
    for line in done.stdout:
        if line.startswith("asleep"):
            ranks.append(int(line.split()[1]))
        if len(ranks) == 2:
            break
    assert len(ranks) == 2, done.communicate()
    return done, ranks


def gone_within(ranks: list[int], seconds: float) -> bool:
    """Whether all processes have ended; one that only waits to be collected has."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(is_alive(pid) for pid in ranks):
            return True
        time.sleep(0.05)
    return False


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


OURS = [sys.executable, "-m", "shardglass", "train", "--nproc_per_node", "2"]
STOPS = [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")]


@pytest.mark.parametrize(("number", "code", "name"), STOPS)
def test_a_stop_is_one_line_with_what_was_saved(with_worker, tmp_path, number, code, name):
    done, ranks = started(with_worker, tmp_path / "out", OURS)
    done.send_signal(number)
    _, said = done.communicate(timeout=60)
    last = tmp_path / "out" / "checkpoint-7"
    assert said == f"\nshardglass: stopped by {name}; the last complete checkpoint is {last}\n"
    assert done.returncode == code
    assert gone_within(ranks, 5)


def test_ranks_end_when_their_launcher_is_killed(with_worker, tmp_path):
    done, ranks = started(with_worker, tmp_path / "out", OURS)
    done.kill()
    assert gone_within(ranks, 5)
    _, said = done.communicate(timeout=60)
    assert said.count("shardglass: stopped, as its launcher is gone; the last complete checkpoint is ") == 1


SCRIPT = "from shardglass.cli import finetune\nfinetune(defaults={'label_policy': 'qwen'})\n"


@pytest.mark.parametrize(("number", "says"), [(signal.SIGINT, "stopped by Ctrl-C"), (signal.SIGKILL, "is gone")])
def test_under_torchrun_rank_0_says_it_and_ranks_end_with_torchrun(with_worker, tmp_path, number, says):
    (tmp_path / "finetune.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done, ranks = started(with_worker, tmp_path / "out", [*torchrun, str(tmp_path / "finetune.py")])
    done.send_signal(number)
    assert gone_within(ranks, 20)
    _, said = done.communicate(timeout=60)
    assert said.count(f"{says}; the last complete checkpoint is ") == 1
    assert "KeyboardInterrupt" not in said


def test_a_stop_before_ranks_are_started_is_said_too(tmp_path):
    script = (
        "import os, signal, sys, time\nfrom pathlib import Path\nfrom shardglass import cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores it
        "from shardglass.hf.launch import stops_told\n"
        "with stops_told(cli._say, Path(sys.argv[1])):\n"
        "    os.kill(os.getpid(), int(sys.argv[2]))\n    time.sleep(20)\n"
    )
    for number, code, name in STOPS:
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path), str(int(number))],
            env=environment_with(tmp_path),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (code, f"\nshardglass: stopped by {name}; nothing was saved\n")

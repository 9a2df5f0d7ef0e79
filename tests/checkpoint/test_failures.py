"""A failure while saving loses nothing and ends every rank with the reason."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from models import tiny_causal_lm, tokens
from ranks import run_ranks
from sharded import make

from shardglass import CheckpointError, load_checkpoint, save_checkpoint
from shardglass.checkpoint.folder import tidy
from shardglass.checkpoint.manifest import read_manifest

ROOT = Path(__file__).resolve().parents[2]


def trained(rank):
    model = tiny_causal_lm()
    handle, optimizer = make(model)
    ids = tokens(0, rank)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return handle


def fail_in(rank, world_size, folder, bad_rank):
    handle = trained(rank)
    save_checkpoint(handle, folder, extra={"which": "first"})

    def write(path):
        (path / f"own_{rank}.txt").write_text("mine")
        if rank == bad_rank:
            raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(handle, folder, extra={"which": "second"}, write=write)
    assert read_manifest(Path(folder)).extra == {"which": "first"}
    load_checkpoint(handle, folder)
    handle.close()
    return str(caught.value)


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_rank_that_cannot_write_fails_all_and_leaves_the_old_checkpoint(tmp_path, bad_rank):
    for message in run_ranks(2, fail_in, str(tmp_path / "checkpoint-1"), bad_rank):
        assert f"rank {bad_rank}: OSError: [Errno 28] No space left on device" in message
        assert "checkpoint-1: not written" in message
        assert message.endswith("checkpoints written before it are whole: make room there, and go on from the last")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def in_a_file(rank, world_size, folder):
    handle = trained(rank)
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(handle, folder)
    handle.close()
    return str(caught.value)


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("the user's")
    for message in run_ranks(2, in_a_file, str(tmp_path / "file" / "checkpoint-1")):
        assert "not made: rank 0: NotADirectoryError" in message
    assert (tmp_path / "file").read_text() == "the user's"


def damage(tmp_path, what):
    saved = tmp_path / "checkpoint-1"
    some = sorted((saved / "state").iterdir())[0]
    if what == "a file is gone":
        some.unlink()
    elif what == "a file is cut":
        os.truncate(some, some.stat().st_size - 1)
    elif what == "manifest cut":
        os.truncate(saved / "shardglass.json", 40)
    elif what == "manifest gone":
        (saved / "shardglass.json").unlink()
    elif what == "a rank's file is not listed":
        manifest = json.loads((saved / "shardglass.json").read_text())
        del manifest["files"][str(some.relative_to(saved))]
        (saved / "shardglass.json").write_text(json.dumps(manifest))
        some.unlink()
    elif what == "newer format":
        manifest = json.loads((saved / "shardglass.json").read_text())
        (saved / "shardglass.json").write_text(json.dumps(manifest | {"format": 2}))
    elif what == "folder gone":
        saved.rename(tmp_path / "elsewhere")


def saved_one(rank, world_size, folder):
    handle = trained(rank)
    save_checkpoint(handle, folder)
    handle.close()


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("a file is gone", "is missing"),
        ("a file is cut", "bytes and had"),
        ("manifest cut", "cannot be read"),
        ("manifest gone", "incomplete, shardglass.json is missing"),
        ("a rank's file is not listed", "the checkpoint is not whole"),
        ("newer format", "format 2, and format 1 is understood"),
        ("folder gone", "no such checkpoint folder"),
    ],
)
def test_a_damaged_checkpoint_is_told_on_every_rank(tmp_path, what, told):
    run_ranks(2, saved_one, str(tmp_path / "checkpoint-1"))
    damage(tmp_path, what)
    for message in run_ranks(2, refused, str(tmp_path / "checkpoint-1")):
        assert told in message


def refused(rank, world_size, folder):
    handle = trained(rank)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(handle, folder)
    handle.close()
    return str(caught.value)


KILLED = """
import os, signal, sys
import torch.distributed as dist
sys.path[:0] = {path!r}
from test_failures import trained
from shardglass import save_checkpoint

dist.init_process_group("gloo")
rank = dist.get_rank()
handle = trained(rank)
save_checkpoint(handle, {folder!r} + "/checkpoint-1")

def write(path):
    if rank == {victim}:
        os.kill(os.getpid(), signal.SIGKILL)

save_checkpoint(handle, {folder!r} + "/checkpoint-2", write=write)
print("went on")
"""


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_a_rank_that_is_killed_while_saving_ends_the_run_and_leaves_the_previous_checkpoint(tmp_path, victim):
    script = tmp_path / "script.py"
    runs = tmp_path / "runs"
    runs.mkdir()
    path = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests" / "checkpoint")]
    script.write_text(KILLED.format(path=path, folder=str(runs), victim=victim))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    ended = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=90, check=False
    )
    assert ended.returncode != 0
    assert f"Signal {signal.SIGKILL.value}" in ended.stderr
    assert "went on" not in ended.stdout
    assert sorted(found.name for found in runs.iterdir() if not found.name.startswith(".")) == ["checkpoint-1"]
    read_manifest(runs / "checkpoint-1")
    assert any("unfinished checkpoint-2" in line for line in tidy(runs))
    assert [found.name for found in runs.iterdir()] == ["checkpoint-1"]

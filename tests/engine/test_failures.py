"""One rank's failure ends all ranks soon, with that rank's message."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from models import Perceptron
from ranks import run_ranks
from sharded import make, squared

from shardglass.errors import CollectiveError

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from models import Perceptron
from sharded import make, squared


@record
def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = Perceptron()
    handle, optimizer = make(model)
    for step in range(5):
        loss = squared(step, dist.get_rank())(model)
        if step == 2 and dist.get_rank() == 1:
            raise ValueError("the data of rank 1 ran out")
        loss.backward()
        optimizer.step()
    print("went on to the end")


main()
"""


def test_a_rank_that_raises_ends_torchrun_within_seconds_with_its_message(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    started = time.monotonic()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    ended = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ended.returncode != 0
    assert "ValueError: the data of rank 1 ran out" in ended.stderr
    assert re.search(r"Root Cause.*rank +: 1 ", ended.stderr, re.DOTALL)
    assert "went on to the end" not in ended.stdout
    assert time.monotonic() - started < 60


def one_stays_away(rank, world_size):
    """Rank 1 never calls backward: rank 0 says where it waits, in the time it was given."""
    model = Perceptron()
    handle, _ = make(model, collective_timeout_s=1.5)
    if rank == 1:
        time.sleep(3)
        return ""
    started = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        squared(rank)(model).backward()
    assert time.monotonic() - started < 10
    assert "step 0, micro-batch 0" in handle.where()
    return str(caught.value)


def test_a_collective_that_does_not_end_says_which_one_and_where():
    text, _ = run_ranks(2, one_stays_away)
    assert "rank 0" in text
    assert "blocks" in text or "root" in text
    assert "step 0, micro-batch 0, backward" in text


def one_ends_earlier(rank, world_size):
    """Rank 1's data ends a step before rank 0's."""
    model = Perceptron()
    handle, optimizer = make(model)
    squared(rank)(model).backward()
    optimizer.step()
    if rank == 1:
        handle.close()
        return ""
    started = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        squared(rank)(model).backward()
    assert time.monotonic() - started < 10
    return str(caught.value)


def test_a_rank_whose_loop_ends_earlier_is_an_error_on_the_others_at_once():
    text, _ = run_ranks(2, one_ends_earlier)
    assert "rank 0" in text
    assert "step 1, micro-batch 0, backward" in text
    assert "took another path" in text

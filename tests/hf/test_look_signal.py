"""SIGUSR1 ends neither the launcher nor a rank, whenever it comes, and a rank is told of it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import shardglass

RANK = """
import sys, time
time.sleep(0.3)  # what comes now waits
from shardglass.hf.look_signal import LookSignal
class Slow:
    def __del__(self):
        time.sleep(0.3)  # while the interpreter is taken apart
slow = Slow()
asked = LookSignal()
asked.arm()
print("told", asked.take(), flush=True)
end = time.monotonic() + 10
while not asked.take() and time.monotonic() < end:
    time.sleep(0.01)
print("told again", time.monotonic() < end, flush=True)
"""

LAUNCHER = """
import subprocess, sys, threading
from shardglass.hf.look_signal import signal_passed_on
with signal_passed_on(lambda text: None):
    print("ready", flush=True)
    done = subprocess.run([sys.executable, "-c", sys.argv[1], "shardglass", "train"])
print("rank ended with", done.returncode, flush=True)
"""


def test_signals_at_every_moment_reach_the_rank_and_end_nobody():
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK],
        env={**os.environ, "PYTHONPATH": str(Path(shardglass.__file__).parents[1])},
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout.readline() == "ready\n"
        end = time.monotonic() + 30
        while launcher.poll() is None and time.monotonic() < end:
            launcher.send_signal(signal.SIGUSR1)
            time.sleep(0.005)
        launcher.kill()
        said = launcher.stdout.read().splitlines()
    assert (launcher.returncode, said) == (0, ["told True", "told again True", "rank ended with 0"])

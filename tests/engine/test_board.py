"""Who waits for whom is said within seconds, by one rank, and nothing is said while ranks are together."""

import json
import logging
import threading
import time

import pytest
import torch
from heard import heard
from models import Perceptron
from ranks import run_ranks
from sharded import make, squared

from shardglass.engine import board
from shardglass.engine.board import Board, Pace, Position, waiting_line


def waits(what, since=12.0):
    return Position(waits_in=what, since_s=since, last="all-gather of blocks.0 at step 3")


AWAY = Position(waits_in=None, since_s=11.0, last="reduce-scatter of blocks.1 at step 2")


@pytest.mark.parametrize(
    ("rank", "others", "told"),
    [
        (
            0,
            {1: AWAY},
            ["rank 0 has waited for 12 s in the exchange", "rank 1 is in no collective since 11 s, its last"],
        ),
        (0, {1: waits("exchange"), 2: AWAY}, ["ranks 0, 1 have waited", "there: rank 2 is in no collective"]),
        (1, {0: waits("exchange"), 2: AWAY}, None),
        (0, {1: waits("exchange")}, None),
        (1, {0: waits("gather")}, ["rank 1 has waited for 12 s in the exchange", "rank 0 waits in the gather"]),
        (0, {1: None}, ["rank 1 has not come so far"]),
        (0, dict.fromkeys(range(1, 30), AWAY), ["rank 8 is in no", "and 21 ranks more"]),
    ],
)
def test_the_first_of_the_ranks_that_wait_alike_names_those_that_are_elsewhere(rank, others, told):
    line = waiting_line(rank, waits("exchange"), others)
    if told is None:
        assert line is None
    else:
        assert [part for part in told if part not in line] == []
        assert "\n" not in line


class Shelf(dict):
    """A store in this process."""

    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)


def lines_of(caplog, position, seconds):
    shelf = Shelf({"1": json.dumps({"waits_in": None, "since_s": 9.0, "last": "none"}).encode()})
    told = Board(shelf, 0, 2, position, pace=Pace(poll_s=0.01, patience_s=5.0), fail=shelf.clear)
    with caplog.at_level(logging.WARNING, logger="shardglass.engine.board"):
        time.sleep(seconds)
    told.close()
    assert json.loads(shelf["0"])["last"] == "all-gather of blocks.0 at step 3"
    return [record.getMessage() for record in caplog.records]


def test_a_long_wait_is_told_once_and_a_short_one_is_not(caplog):
    assert lines_of(caplog, lambda: waits("exchange", since=4.9), 0.2) == []
    told = lines_of(caplog, lambda: waits("exchange"), 0.3)
    assert len(told) == 1
    assert "rank 1 is in no collective since 9 s" in told[0]


def test_a_store_that_is_gone_ends_the_thread_and_nothing_else(caplog):
    class Gone(Shelf):
        def set(self, key, value):
            raise RuntimeError("Connection reset by peer")

    before = threading.active_count()
    gone = Board(Gone(), 0, 2, lambda: waits("exchange"), pace=Pace(poll_s=0.01, patience_s=0.0), fail=dict)
    time.sleep(0.2)
    assert threading.active_count() == before
    gone.close()
    assert caplog.records == []


def train_with_a_late_rank(rank, world_size, stage, late_s):
    board.POLL_S, board.PATIENCE_S = 0.1, 1.0
    try:
        with heard("shardglass.engine.board") as lines:
            model = Perceptron()
            handle, optimizer = make(model, stage=stage)
            for step in range(2):
                if rank == 1 and step == 1:
                    time.sleep(late_s)
                squared(step, rank)(model).backward()
                optimizer.step()
                optimizer.zero_grad()
            handle.close()
    finally:
        board.POLL_S, board.PATIENCE_S = 2.0, 10.0
    assert all(torch.isfinite(p).all() for p in model.parameters())
    return lines


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_rank_that_stays_away_is_named_while_the_others_wait_and_the_run_goes_on(stage):
    lines = run_ranks(3, train_with_a_late_rank, stage, 4.0)
    assert (lines[1], lines[2]) == ([], [])
    assert len(lines[0]) >= 1
    for line in lines[0]:
        assert line.startswith("ranks 0, 2 have waited for ")
        assert "at step 1" in line
        assert "not all ranks are there: rank 1 is in no collective since " in line
    assert run_ranks(3, train_with_a_late_rank, stage, 0.0) == [[], [], []]

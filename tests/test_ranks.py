"""The harness itself: what a rank returns, raises, or never ends with."""

import os
import time

import pytest
import ranks
import torch
import torch.distributed as dist


def sum_of_ranks(rank, world_size, start):
    value = torch.tensor([float(rank + start)])
    dist.all_reduce(value)
    return value.item(), os.getpid()


def raise_on(rank, world_size, culprit):
    if rank == culprit:
        raise ValueError(f"thrown by {rank}")
    dist.barrier()


def sleep_on(rank, world_size, culprit):
    if rank == culprit:
        time.sleep(600)


def die_on(rank, world_size, culprit):
    if rank == culprit:
        os._exit(7)


def test_every_rank_returns_and_the_processes_are_used_again():
    first = ranks.run_ranks(2, sum_of_ranks, 10)
    second = ranks.run_ranks(2, sum_of_ranks, 1)
    assert [value for value, _ in first] == [21.0, 21.0]
    assert [value for value, _ in second] == [3.0, 3.0]
    assert [pid for _, pid in first] == [pid for _, pid in second]


def test_one_process_alone_is_a_group_of_one():
    assert ranks.run_alone(sum_of_ranks, 5)[0] == 5.0


def test_the_failing_rank_s_traceback_is_raised_although_the_others_hang():
    started = time.monotonic()
    with pytest.raises(ranks.RankError, match=r"(?s)rank 1 failed first.*ValueError: thrown by 1"):
        ranks.run_ranks(2, raise_on, 1)
    assert time.monotonic() - started < 20
    assert [value for value, _ in ranks.run_ranks(2, sum_of_ranks, 0)] == [1.0, 1.0]


def test_a_hang_ends_in_time_and_says_where_the_rank_is():
    with pytest.raises(ranks.RankError, match=r"(?s)did not end within 1.0 s on ranks \[1\].*in sleep_on"):
        ranks.run_ranks(2, sleep_on, 1, timeout_s=1.0)
    assert [value for value, _ in ranks.run_ranks(2, sum_of_ranks, 0)] == [1.0, 1.0]


def test_a_rank_that_dies_is_named_with_its_exit_code():
    with pytest.raises(ranks.RankError, match=r"rank 0 failed first.*\n.*exit code 7"):
        ranks.run_ranks(2, die_on, 0)

"""The pool of ranks itself: results by rank, and failures that are told instead of waited for."""

import os
import time
from multiprocessing import Pipe

import pytest

pytest.importorskip("torch.distributed", reason="this torch has no distributed package")

import torch

from cumulo.errors import RanksFailed
from cumulo.ranks.collectives import all_reduce, barrier
from cumulo.ranks.groups import world_group
from cumulo.ranks.start import RankProcesses
from tests.train.pool import run_ranks


def ranks_summed(rank: int, factor: int) -> int:
    total = torch.tensor(rank * factor)
    all_reduce(total, world_group())
    return int(total)


def fail_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("what went wrong")
    barrier(world_group())


def die_on_rank_1(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    barrier(world_group())


def sleep_on_rank_1(rank: int) -> None:
    if rank == 1:
        time.sleep(60)
    barrier(world_group())


def test_every_rank_answers_and_the_next_case_finds_a_clean_group() -> None:
    assert run_ranks(ranks_summed, 3, 10) == [30, 30, 30]
    assert run_ranks(ranks_summed, 2, 1) == [1, 1]


def test_a_rank_that_raises_is_named_first() -> None:
    with pytest.raises(RanksFailed, match=r"\Arank 1: Traceback[\s\S]*?ValueError: what went wrong"):
        run_ranks(fail_on_rank_1, 2)


def test_a_rank_that_dies_is_named_and_replaced() -> None:
    with pytest.raises(RanksFailed, match="rank 1: died, exit code 7"):
        run_ranks(die_on_rank_1, 2)
    assert run_ranks(ranks_summed, 2, 1) == [1, 1]


def test_what_came_in_time_is_heard_though_it_is_late_when_we_look() -> None:
    ours, theirs = Pipe()
    theirs.send(("done", 5))
    ranks = RankProcesses(print, (), ())
    ranks.adopt(0, ours)
    assert ranks.collect(0.0) == [5]
    ranks.end()


def test_a_hang_ends_with_the_stacks_of_all_who_waited() -> None:
    for limit_s in (2, 10, 50):  # on a busy machine ranks do not come so far in two seconds
        with pytest.raises(RanksFailed, match=f"rank 1: not done after {limit_s} s") as caught:
            run_ranks(sleep_on_rank_1, 2, timeout_s=limit_s)
        if "in sleep_on_rank_1" in str(caught.value) and "in barrier" in str(caught.value):
            return
    pytest.fail(str(caught.value))

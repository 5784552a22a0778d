"""Schedules on real processes: bit-equal to the reference player, near torch.distributed; and what a rank says when
another is lost, late, or sends something else."""

import os

import pytest
import torch
import torch.distributed as dist

from cumulo.collectives.decide.catalog import CollectiveShape, algorithms, make_schedule
from cumulo.collectives.decide.ring import ring_all_reduce
from cumulo.collectives.decide.schedule import COLLECTIVES, CollectiveSchedule
from cumulo.collectives.play.groups import TRANSPORTS, make_player
from cumulo.collectives.play.messages import CollectiveFailed
from cumulo.collectives.play.reference import play_here
from cumulo.collectives.play.shared_memory import SharedMemoryExchange
from cumulo.errors import RanksFailed
from cumulo.ranks import start
from cumulo.ranks.start import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.float8_e4m3fn]


def _cases(ranks: int, thorough: bool) -> list[tuple[str, str, CollectiveShape]]:
    found = []
    for collective in COLLECTIVES:
        for name in algorithms(collective):
            node_size = 2 if name in ("two-level", "multi-ring") else 1
            if ranks % node_size:
                continue
            for elements in (1000, 3) if thorough else (101,):
                found.append(
                    (
                        collective,
                        name,
                        CollectiveShape(ranks, elements, node_size, 2, 2, root=ranks - 1, radix=3),
                    )
                )
    return found


def _inputs(schedule: CollectiveSchedule, dtype: torch.dtype, seed: int) -> tuple[list[torch.Tensor], ...]:
    generator = torch.Generator().manual_seed(seed)
    n, sizes = schedule.ranks, schedule.sizes
    if schedule.collective == "all_to_all":
        rows = [
            sum(sizes[rank * n * schedule.pieces + i] for i in range(n * schedule.pieces))
            for rank in range(n)
        ]
        columns = [
            sum(sizes[(s * n + rank) * schedule.pieces + i] for s in range(n) for i in range(schedule.pieces))
            for rank in range(n)
        ]
        sent = [_values(count, dtype, generator) for count in rows]
        return sent, [torch.zeros(count, dtype=dtype) for count in columns]
    return ([_values(schedule.offsets[-1], dtype, generator) for _ in range(n)],)


def _values(count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    return torch.randint(-1000, 1000, (count,), generator=generator, dtype=dtype)


def _right(schedule: CollectiveSchedule, rank: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a rank must have: of a reduce-scatter and a reduce, only its own."""
    if schedule.collective == "reduce_scatter":
        first, last = rank * schedule.pieces, (rank + 1) * schedule.pieces
        return [tensors[rank][schedule.offsets[first] : schedule.offsets[last]]]
    if schedule.collective == "reduce" and rank != schedule.root:
        return []
    return [tensors[rank]]


def _play_all(rank: int, ranks: int, transports: tuple[str, ...], thorough: bool) -> list[str]:
    """One process of the test: the names of cases that came out wrong."""
    wrong = []
    store = dist.distributed_c10d._get_default_store()
    players = {name: make_player(name, rank, ranks, store, timeout_s=120) for name in transports}
    for index, (collective, name, shape) in enumerate(_cases(ranks, thorough)):
        schedule = make_schedule(collective, name, shape)
        if schedule.switches:
            continue
        dtype = DTYPES[index % len(DTYPES)]
        expected = _inputs(schedule, dtype, index)
        sums = [tensor.clone() for tensor in expected[0]]
        play_here(schedule, expected[0], expected[1] if len(expected) > 1 else None)
        for transport, player in players.items():
            tensors = _inputs(schedule, dtype, index)
            own = tensors[0][rank]
            other = tensors[1][rank] if len(tensors) > 1 else None
            player.run(schedule, own, other)
            if other is not None:
                same = torch.equal(other.view(torch.uint8), expected[1][rank].view(torch.uint8))
            else:
                same = all(
                    torch.equal(a.view(torch.uint8), b.view(torch.uint8))
                    for a, b in zip(
                        _right(schedule, rank, expected[0]),
                        _right(schedule, rank, [own] * ranks),
                        strict=True,
                    )
                )
            if not same:
                wrong.append(f"{transport}: {schedule.name} of {dtype} on rank {rank}")
        if collective == "all_reduce" and dtype is torch.float32:
            peer = sums[rank].clone()
            dist.all_reduce(peer)
            if not torch.allclose(peer, expected[0][rank], rtol=1e-5, atol=1e-5):
                wrong.append(f"torch.distributed differs from {schedule.name}")
    for player in players.values():
        player.close()
    return wrong


@pytest.mark.long
def test_every_schedule_on_four_processes_equals_its_own_order_bit_by_bit() -> None:
    assert not any(run_ranks(_play_all, 4, 4, TRANSPORTS, False, timeout_s=300))


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 3, 6, 8, 16])
def test_every_schedule_on_more_processes_equals_its_own_order_bit_by_bit(ranks: int) -> None:
    assert not any(run_ranks(_play_all, ranks, ranks, TRANSPORTS, True, timeout_s=600))


def _with_switches(node: int, ranks: int) -> list[str]:
    wrong = []
    store = dist.distributed_c10d._get_default_store()
    nodes = dist.get_world_size()
    player = make_player("shm", node, nodes, store, timeout_s=60)
    schedule = make_schedule("all_reduce", "sharp", CollectiveShape(ranks, 50, channels=1, pieces=4, radix=8))
    (expected,) = _inputs(schedule, torch.bfloat16, 7)
    play_here(schedule, expected)
    (tensors,) = _inputs(schedule, torch.bfloat16, 7)
    own = tensors[node] if node < ranks else torch.empty(50, dtype=torch.bfloat16)
    player.run(schedule, own)
    if node < ranks and not torch.equal(own, expected[node]):
        wrong.append(schedule.name)
    player.close()
    return wrong


def test_switches_that_add_can_be_processes() -> None:
    assert not any(run_ranks(_with_switches, 4, 3))


def _one_misbehaves(rank: int, transport: str, how: str) -> str:
    store = dist.distributed_c10d._get_default_store()
    player = make_player(transport, rank, 3, store, timeout_s=60)
    schedule = ring_all_reduce(3, 300)
    warm = torch.ones(300)
    player.run(schedule, warm)
    store.set(f"warm {rank}", "yes")
    store.wait([f"warm {one}" for one in range(3)])
    if how == "late":  # from here on: a busy machine may take longer to meet
        exchange = player._exchange
        (exchange.boxes if isinstance(exchange, SharedMemoryExchange) else exchange)._timeout_s = 2.0
    if rank == 1 and how == "lost":
        os._exit(7)
    if rank == 1 and how == "late":
        store.wait(["0 gave up"])  # as late as it can be
        return "late"
    if rank == 0 and how == "late":
        store.wait(["2 gave up"])  # so that rank 2 waits for nobody else, however busy the machine is
    if rank == 1 and how == "truncated":
        schedule = ring_all_reduce(3, 150)
    if rank == 1 and how == "another schedule":  # whose messages are as long
        schedule = make_schedule("all_reduce", "two-shot", CollectiveShape(3, 300))
    try:
        player.run(schedule, torch.ones(schedule.offsets[-1]))
    except CollectiveFailed as error:
        if how == "lost":
            raise
        store.set(f"{rank} gave up", "yes")
        return str(error)
    finally:
        player.close()
    return "no error"


@pytest.mark.long
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_late_rank_is_named_with_its_step_and_collective(transport: str) -> None:
    said = run_ranks(_one_misbehaves, 3, transport, "late", timeout_s=600)
    assert "ring all_reduce: rank 2 could not receive from rank 1 in step 1 of 4" in said[2]
    assert "nothing came for 2 s" in said[2]
    assert "ring all_reduce: rank 0 could not" in said[0]


def test_a_truncated_message_is_named() -> None:
    with_error = run_ranks(_one_misbehaves, 3, "shm", "truncated", timeout_s=600)
    assert any(
        "could not receive from rank 1" in text and "200 bytes, and 400 were expected" in text
        for text in with_error
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_lost_rank_is_named_long_before_the_timeout(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "_GRACE_S", 300.0)  # the others see it soon, on a busy machine later
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_one_misbehaves, 3, transport, "lost", timeout_s=600)
    text = str(failed.value)
    assert "rank 1: died, exit code 7" in text
    assert "rank 2 could not receive from rank 1 in step 1 of 4" in text and "rank 1 is gone" in text


def test_a_rank_that_plays_another_schedule_is_named_and_adds_nothing_wrong() -> None:
    said = run_ranks(_one_misbehaves, 3, "shm", "another schedule", timeout_s=600)
    assert any("rank 1" in text and "plays another schedule" in text for text in said)
    assert "no error" not in said

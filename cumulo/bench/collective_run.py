"""Runs one collective on processes, and compares it with the reference player and with torch.distributed.
`cumulo collective run` calls it."""

import time

import torch
from torch import Tensor

from cumulo.base.report import Row
from cumulo.collectives.decide.catalog import CollectiveShape, make_schedule
from cumulo.collectives.decide.check import check_collective
from cumulo.collectives.decide.schedule import CollectiveSchedule
from cumulo.collectives.play.groups import make_player
from cumulo.collectives.play.reference import play_here
from cumulo.errors import ConfigError
from cumulo.ranks.collectives import all_reduce, barrier
from cumulo.ranks.groups import world_group, world_store
from cumulo.ranks.start import run_ranks

_RUNS = 5


def run_once(
    collective: str, algorithm: str, shape: CollectiveShape, dtype: str, transport: str, timeout_s: float
) -> list[Row]:
    schedule = make_schedule(collective, algorithm, shape)
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ConfigError(f"--dtype {dtype}: there is no such torch dtype; try float32, bfloat16 or int32")
    checked = check_collective(schedule)
    arguments = (collective, algorithm, shape, dtype, transport, timeout_s)
    found = run_ranks(_node, schedule.nodes, *arguments, timeout_s=max(60.0, 2 * timeout_s))
    ranks = found[: schedule.ranks]
    seconds = sorted(max(times) for times in zip(*(one[1] for one in ranks), strict=True))
    rows = [
        Row("bit-equal to the schedule's own order", all(one[0] for one in ranks), must=True),
        Row("steps", checked.steps, "", "lower"),
        Row("time", seconds[len(seconds) // 2] * 1e6, "µs", "lower", note=f"the middle of {_RUNS} runs"),
    ]
    if ranks[0][2] is not None:
        far = max(one[2] or 0.0 for one in ranks)
        rows.append(
            Row("difference to torch.distributed", far, "", "lower", note="largest, of the largest value")
        )
    return rows


def inputs(schedule: CollectiveSchedule, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor] | None]:
    """The same on every process: what each rank has first, and where an all-to-all's ranks receive."""
    chance = torch.Generator().manual_seed(0)
    n, pieces, sizes = schedule.ranks, schedule.pieces, schedule.sizes
    if schedule.collective != "all_to_all":
        return [_values(sum(sizes), dtype, chance) for _ in range(n)], None
    pair = [[sum(sizes[(s * n + d) * pieces + i] for i in range(pieces)) for d in range(n)] for s in range(n)]
    received = [torch.zeros(sum(row[rank] for row in pair), dtype=dtype) for rank in range(n)]
    return [_values(sum(row), dtype, chance) for row in pair], received


def _values(count: int, dtype: torch.dtype, chance: torch.Generator) -> Tensor:
    values = torch.randn(count, generator=chance)
    return values.to(dtype) if dtype.is_floating_point else (values * 100).to(dtype)


def own_part(schedule: CollectiveSchedule, rank: int, tensor: Tensor) -> Tensor:
    """What a rank must have afterwards: of a reduce-scatter its block, of a reduce only the root something."""
    if schedule.collective == "reduce_scatter":
        first, last = rank * schedule.pieces, (rank + 1) * schedule.pieces
        return tensor[schedule.offsets[first] : schedule.offsets[last]]
    return tensor[:0] if schedule.collective == "reduce" and rank != schedule.root else tensor


def _node(
    node: int,
    collective: str,
    algorithm: str,
    shape: CollectiveShape,
    dtype: str,
    transport: str,
    timeout_s: float,
) -> tuple[bool, list[float], float | None]:
    schedule = make_schedule(collective, algorithm, shape)
    kind: torch.dtype = getattr(torch, dtype)
    store = world_store()
    player = make_player(transport, node, schedule.nodes, store, timeout_s)
    expected, expected_received = inputs(schedule, kind)
    summed = [tensor.clone() for tensor in expected]
    play_here(schedule, expected, expected_received)
    times, same = [], True
    for _ in range(_RUNS):
        tensors, received = inputs(schedule, kind)
        is_rank = node < schedule.ranks
        own = tensors[node] if is_rank else tensors[0].clone()
        other = received[node] if received is not None and is_rank else None
        barrier(world_group())
        began = time.perf_counter()
        player.run(schedule, own, other)
        times.append(time.perf_counter() - began)
        if is_rank and other is not None and expected_received is not None:
            same &= torch.equal(other.view(torch.uint8), expected_received[node].view(torch.uint8))
        elif is_rank:
            ours, right = (own_part(schedule, node, one).view(torch.uint8) for one in (own, expected[node]))
            same &= torch.equal(ours, right)
    far = None
    if collective == "all_reduce" and not schedule.switches and kind.itemsize > 1:
        all_reduce(summed[node], world_group())
        largest = float(summed[node].abs().max()) if summed[node].numel() else 1.0
        difference = (summed[node].double() - expected[node].double()).abs()
        far = float(difference.max()) / max(largest, 1e-30) if difference.numel() else 0.0
    getattr(player, "close", lambda: None)()
    return same, times, far

"""Measures collective schedules on processes of this machine, in turns with gloo, and writes a profile for the
tuner. `cumulo bench collectives` calls it."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cumulo.base.report import Row, machine
from cumulo.collectives.decide.catalog import CollectiveShape, make_schedule
from cumulo.collectives.decide.check import check_collective
from cumulo.collectives.decide.schedule import CollectiveSchedule, busbw_factor
from cumulo.collectives.play.groups import make_player
from cumulo.collectives.play.reference import play_here
from cumulo.errors import ConfigError
from cumulo.ranks.collectives import all_gather, all_reduce, barrier, reduce_scatter
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
    return [
        Row("bit-equal to the schedule's own order", all(one[0] for one in ranks), must=True),
        Row("steps", checked.steps, "", "lower"),
        Row("time", seconds[len(seconds) // 2] * 1e6, "µs", "lower", note=f"the middle of {_RUNS} runs"),
    ]


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
) -> tuple[bool, list[float]]:
    schedule = make_schedule(collective, algorithm, shape)
    kind: torch.dtype = getattr(torch, dtype)
    store = world_store()
    player = make_player(transport, node, schedule.nodes, store, timeout_s)
    expected, expected_received = inputs(schedule, kind)
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
    player.close()
    return same, times


_OTHERS = {"all_gather": ("ring", "bruck", "direct"), "reduce_scatter": ("ring", "direct")}  # for a profile
# Of gloo's speed, what a ring over shared memory must reach.
_MUST = {64 << 10: 1.0, 64 << 20: 0.8}


def measure(
    ranks: int,
    sizes: Sequence[int],
    algorithms: Sequence[str],
    transport: str,
    rounds: int,
    profile: Path | None,
    tell: Callable[[str], None],
) -> list[Row]:
    found: list[dict[str, Any]] = []
    wanted = {"all_reduce": tuple(algorithms)} | (_OTHERS if profile is not None else {})
    for size in sizes:
        tell(f"{size >> 10} KiB on {ranks} processes")
        times = run_ranks(_rank, ranks, ranks, size, wanted, transport, rounds, timeout_s=600)
        for kind, name in times[0]:
            # A round ends with its last rank; the middle round counts.
            middle = zip(*(rank[kind, name] for rank in times), strict=True)
            seconds = statistics.median(max(one) for one in middle)
            row = {"collective": kind, "algorithm": name, "transport": transport, "ranks": ranks}
            found.append({**row, "bytes": size, "pieces": 1, "seconds": seconds})
    if profile is not None:
        profile.write_text(json.dumps({"machine": machine(), "rows": found}, indent=1) + "\n", "utf-8")
    return _rows(found, transport)


def _rows(found: list[dict[str, Any]], transport: str) -> list[Row]:
    gloo = {(row["collective"], row["bytes"]): row["seconds"] for row in found if row["algorithm"] == "gloo"}
    rows = []
    for row in found:
        size, n, kind = row["bytes"], row["ranks"], row["collective"]
        name = f"{row['algorithm']} {kind}, {_size(size)}"
        bus = size / row["seconds"] * busbw_factor(kind, n) / 1e9
        if row["algorithm"] == "gloo":
            rows.append(Row(name, row["seconds"] * 1e6, "µs", "lower", note=f"bus bandwidth {bus:.2f} GB/s"))
            continue
        ring = row["algorithm"] == "ring" and kind == "all_reduce" and transport == "shm"
        must = _MUST.get(size) if ring else None
        note = f"{row['seconds'] * 1e6:,.0f} µs over {transport}, bus bandwidth {bus:.2f} GB/s"
        rows.append(Row(name, gloo[kind, size] / row["seconds"], "× gloo", "higher", must=must, note=note))
    return rows


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _rank(
    rank: int, ranks: int, size: int, wanted: dict[str, tuple[str, ...]], transport: str, rounds: int
) -> dict[tuple[str, str], list[float]]:
    store = world_store()
    player = make_player(transport, rank, ranks, store)
    tensor = torch.ones(size // 4 // ranks * ranks)
    own = tensor[: len(tensor) // ranks].clone()
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    theirs: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: all_reduce(tensor, world_group()),
        "all_gather": lambda: all_gather(tensor, own, world_group()),
        "reduce_scatter": lambda: reduce_scatter(own, tensor, world_group()),
    }
    for kind, algorithms in wanted.items():
        calls[kind, "gloo"] = theirs[kind]
        for name in algorithms:
            schedule = make_schedule(kind, name, CollectiveShape(ranks, tensor.numel()))
            calls[kind, name] = lambda schedule=schedule: player.run(schedule, tensor)  # type: ignore[misc]
    times: dict[tuple[str, str], list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for key, call in calls.items():
            tensor.fill_(1.0)
            barrier(world_group())
            began = time.perf_counter()
            call()
            if number:  # the first one maps memory
                times[key].append(time.perf_counter() - began)
    player.close()
    return times

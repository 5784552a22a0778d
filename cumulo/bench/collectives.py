"""Measures collective schedules on processes of this machine, in turns with gloo, and writes a profile for the
tuner. `cumulo bench collectives` calls it."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cumulo.base.report import Row, machine
from cumulo.collectives.decide.catalog import CollectiveShape, make_schedule
from cumulo.collectives.decide.schedule import busbw_factor
from cumulo.collectives.play.groups import make_player
from cumulo.ranks.collectives import all_gather, all_reduce, barrier, reduce_scatter
from cumulo.ranks.groups import world_group, world_store
from cumulo.ranks.start import run_ranks

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
    getattr(player, "close", lambda: None)()
    return times

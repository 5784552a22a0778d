"""What `cumulo check node` measures: memory bandwidth, a matrix product that must be right to the last bit, and an
all-reduce with a neighbour. Nodes on which torchrun started it are each other's neighbours."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np

from cumulo.base.machine import available_memory, gpus_here
from cumulo.base.report import available_cores, machine
from cumulo.cluster.decide.health import NodeCheck
from cumulo.errors import ConfigError

_COPY_BYTES, _GPU_COPY_BYTES, _REDUCE_BYTES = 1 << 26, 1 << 30, 1 << 25
_OTHERS = 0.1  # of the CPUs: where other programs take more, rates say nothing of the node
_COPY_SHARE = 0.92  # of the memory bandwidth on a data sheet, that copies reach


def check_node(
    node: str, quick: bool, published: bool, again: Callable[[NodeCheck], bool], tell: Callable[[str], None]
) -> NodeCheck:
    """The best of up to three rounds, as long as `again` wants another one. `published`: with the catalogue's
    rates."""
    threads = f", OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}" if "OMP_NUM_THREADS" in os.environ else ""
    found = NodeCheck(node, f"{machine()['cpu']}, {available_cores()} cores{threads}")
    seconds = 0.3 if quick else 1.0
    for _ in range(3):
        with _alone(found):
            tell("memory bandwidth and matrix products")
            if gpus_here() and _has_cuda():
                _gpu_rates(found, seconds, published)
            else:
                _cpu_rates(found, seconds)
        if not quick and "RANK" not in os.environ:
            tell("all-reduce")
            _own_all_reduce(found, seconds)
        if found.wrong or found.disturbed or not again(found):
            break
    return found


def _has_cuda() -> bool:
    import torch

    return bool(torch.backends.cuda.is_built())


def _cpu_rates(found: NodeCheck, seconds: float) -> None:
    cores = available_cores()
    count = min(_COPY_BYTES, available_memory() // (8 * cores)) // 8
    pairs = [(np.empty(count), np.ones(count)) for _ in range(cores)]
    with ThreadPoolExecutor(cores) as pool:
        took_s = _fastest_s(lambda: list(pool.map(lambda pair: np.copyto(*pair), pairs)), seconds)
    _keep(found, "memory bandwidth", 16.0 * count * cores / took_s)
    # Small whole numbers, of which float32 has every sum: (A·B)·x = A·(B·x) to the last bit (Freivalds 1977).
    chance, side = np.random.default_rng(0), 1024
    left, right, thin = (chance.integers(0, 3, (side, size)).astype(np.float32) for size in (side, side, 1))
    _keep(found, "matrix product", 2.0 * side**3 / _fastest_s(lambda: left @ right, seconds))
    if not np.array_equal((left @ right) @ thin, left @ (right @ thin)):
        found.wrong.append("a matrix product on the CPU is wrong")


def _gpu_rates(found: NodeCheck, seconds: float, published: bool) -> None:
    import torch

    from cumulo.bench.device_timer import present_device
    from cumulo.plan.time.compute_profile import shipped

    present, listed = torch.cuda.device_count(), len(gpus_here())
    if present < listed:
        found.wrong.append(f"CUDA finds {present} of the {listed} GPUs")
    for number in range(present):
        name, of = torch.cuda.get_device_name(number), f", GPU {number}"
        found.device = f"{present} × {name}"
        free, total = torch.cuda.mem_get_info(number)
        if total - free > 4 * _GPU_COPY_BYTES:
            found.disturbed = f"another program uses GPU {number}"
        with torch.device("cuda", number), torch.cuda.device(number):
            source, side = torch.ones(_GPU_COPY_BYTES // 4), 8192
            target = torch.empty_like(source)
            took_s = _fastest_s(partial(target.copy_, source), seconds, torch.cuda.synchronize)
            _keep(found, f"memory bandwidth{of}", 2.0 * _GPU_COPY_BYTES / took_s)
            left, right = (torch.randn(side, side, dtype=torch.bfloat16) for _ in range(2))
            took_s = _fastest_s(partial(torch.matmul, left, right), seconds, torch.cuda.synchronize)
            _keep(found, f"matrix product{of}", 2.0 * side**3 / took_s)
            left, right, thin = (torch.randint(0, 3, (1024, size)).float() for size in (1024, 1024, 1))
            if not torch.equal((left @ right) @ thin, left @ (right @ thin)):
                found.wrong.append(f"a matrix product on GPU {number} is wrong")
        with suppress(ConfigError):  # a device that the catalogue does not know is compared with other nodes
            known = present_device(name)
            share = shipped().find(known, "bfloat16")[0].matmul_efficiency
            reached = (_COPY_SHARE * known.memory_bytes_per_s, share * known.flops("bfloat16"))
            names = (f"memory bandwidth{of}", f"matrix product{of}") if published else ()
            found.published |= dict(zip(names, reached, strict=False))


def _own_all_reduce(found: NodeCheck, seconds: float) -> None:
    """Between all GPUs of the node, or two processes of it."""
    import torch

    if (gpus := torch.cuda.device_count()) > 1:
        parts = [torch.ones(_REDUCE_BYTES, device=f"cuda:{number}") for number in range(gpus)]
        took_s = _fastest_s(
            lambda: torch.cuda.nccl.all_reduce(parts), seconds, lambda: [float(one[0]) for one in parts]
        )
        _keep(found, f"all-reduce of {gpus} GPUs", parts[0].nbytes / took_s)
    else:
        from cumulo.ranks.start import run_ranks

        _keep(found, "all-reduce of 2 processes", min(run_ranks(neighbour_rate, 2, 2, False, seconds)))


def neighbour_rate(rank: int, world: int, gpu: bool, seconds: float) -> float:
    """Bytes/s with the better of this rank's two neighbours in a ring, so that a bad node is slow, and not those
    next to it."""
    import torch

    from cumulo.ranks.collectives import all_reduce, barrier
    from cumulo.ranks.groups import new_group, world_group

    tensor, best = torch.zeros(_REDUCE_BYTES // 4, device="cuda" if gpu else "cpu"), 0.0
    pairs = [(first, (first + 1) % world) for first in range(world if world > 2 else 1)]
    turns = [2 if world % 2 and first == world - 1 else first % 2 for first, _ in pairs]
    for turn in range(3):  # no rank has two pairs in a turn, and all make a group
        mine = [pair for pair, when in zip(pairs, turns, strict=True) if when == turn and rank in pair]
        group = new_group(tuple(sorted(mine[0])) if mine else (rank,))
        barrier(world_group())
        for _ in range(max(2, int(20 * seconds)) if mine else 0):
            barrier(group)
            began = time.perf_counter()
            all_reduce(tensor, group)
            float(tensor[0])  # waits for a GPU
            best = max(best, tensor.nbytes / (time.perf_counter() - began))
    return best


def among_nodes(own: NodeCheck) -> list[NodeCheck]:
    """On rank 0 of the nodes that torchrun started: what each has found; on the others nothing."""
    import torch

    from cumulo.ranks.collectives import barrier
    from cumulo.ranks.groups import world_group, world_store
    from cumulo.ranks.start import join_ranks

    rank, world, gpu = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.cuda.is_available()
    with join_ranks(rank, world, timedelta(seconds=300), gpu=gpu):
        own.rates["all-reduce with a neighbour"] = neighbour_rate(rank, world, gpu, 1.0)
        store = world_store()
        store.set(f"check-{rank}", json.dumps(asdict(own)))
        found = [
            NodeCheck(**json.loads(store.get(f"check-{one}"))) for one in range(world if rank == 0 else 0)
        ]
        barrier(world_group())
    return found


def _keep(found: NodeCheck, name: str, rate: float) -> None:
    found.rates[name] = max(found.rates.get(name, 0.0), rate)


def _fastest_s(run: Callable[[], object], seconds: float, wait: Callable[[], object] = lambda: None) -> float:
    """What other programs disturb least."""
    run()
    wait()
    end, fastest = time.perf_counter() + seconds, math.inf
    while (began := time.perf_counter()) < end:
        run()
        wait()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest


@contextmanager
def _alone(found: NodeCheck) -> Iterator[None]:
    """Notes where other programs took much of the CPUs meanwhile; the hypervisor's other guests count, too."""
    before, own_s = _cpu_s(), sum(os.times()[:4])
    yield
    busy_s, all_s = (after - was for after, was in zip(_cpu_s(), before, strict=True))
    share = (busy_s - (sum(os.times()[:4]) - own_s)) / all_s if all_s else 0.0
    if share > _OTHERS:
        found.disturbed = f"other programs took {share:.0%} of the CPUs meanwhile"


def _cpu_s() -> tuple[float, float]:
    """Seconds in which CPUs were busy, and all seconds of all CPUs."""
    path = Path("/proc/stat")
    times = [int(one) for one in path.read_text().splitlines()[0].split()[1:9]] if path.exists() else [0] * 8
    tick = os.sysconf("SC_CLK_TCK")
    return (sum(times) - times[3] - times[4]) / tick, sum(times) / tick

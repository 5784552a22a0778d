"""timing: device time of a piece of work, as it will run in the engine: inside a CUDA graph. Used by benchmark
rows.

A graph hides the cost of launching from Python, which the engine does not pay either. Inputs that fit in the L2
cache are rotated, or a repeated run would measure the cache.
"""

from collections.abc import Callable, Sequence
from statistics import median

import torch

L2_BYTES = 64 << 20  # of the largest devices we time on, rounded up


def graph_us(work: Callable[[int], object], copies: int = 1, repeats: int = 20, rounds: int = 7) -> float:
    """Median microseconds of one `work(i)`, where i cycles through `copies` sets of inputs.

    One graph holds `repeats` runs, at least one of each set; it is replayed `rounds` times.
    """
    repeats = max(repeats, copies)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(min(3, repeats)):
            work(index % copies)  # compiles, and lets libraries make their workspaces
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(repeats):
            work(index % copies)
    graph.replay()
    torch.cuda.synchronize()
    return median(_replay_us(graph) for _ in range(rounds)) / repeats


def eager_us(work: Callable[[], object], rounds: int = 15) -> float:
    """Median microseconds of work that cannot be captured or runs long enough not to need it."""
    work()
    work()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(1e3 * float(start.elapsed_time(end)))
    return float(median(times))


def copies_past_cache(bytes_each: int, limit: int = 64) -> int:
    """How many sets of inputs it takes so that none is still in the cache when its turn comes again."""
    return max(1, min(limit, -(-3 * L2_BYTES // max(1, bytes_each))))


def fastest(candidates: Sequence[tuple[str, Callable[[int], object]]], copies: int = 1) -> tuple[str, float]:
    """The quickest of several ways to do the same; one that the device refuses is passed over."""
    best, best_us, refused = "", float("inf"), []
    for name, work in candidates:
        try:
            us = graph_us(work, copies)
        except Exception as error:  # too much shared memory, registers, an unsupported shape
            refused.append(f"{name}: {type(error).__name__}")
            torch.cuda.synchronize()
            continue
        if us < best_us:
            best, best_us = name, us
    if not best:
        raise RuntimeError(f"no candidate runs here: {'; '.join(refused)}")
    return best, best_us


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end))

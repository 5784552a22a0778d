"""CapturedGraphs: CUDA graphs of a runner's steps, by the shape of the step. `CudaRunner` keeps one.

All graphs work in the same memory: steps run one after the other. `compiling_ahead` compiles many kernels at once:
one takes Triton half a second or more, most of it outside Python's lock; a model needs about fifty.
"""

import os
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

import torch
import triton
from triton.runtime.jit import JITFunction

Shape = TypeVar("Shape", bound=Hashable)


class CapturedGraphs(Generic[Shape]):
    def __init__(self) -> None:
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, shape: Shape) -> torch.cuda.CUDAGraph | None:
        return self._graphs.get(shape)

    def capture(self, shape: Shape, launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """What `launch` launches, as a graph that was not played yet."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        if not self._graphs:  # PyTorch takes back memory that no graph uses any more, and its name with it
            self._pool = torch.cuda.graph_pool_handle()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch()
            except BaseException:
                with suppress(Exception):  # it would say only that the capture was broken off
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        self._graphs[shape] = graph
        return graph

    def forget(self, which: Callable[[Shape], bool] = lambda _: True) -> None:
        """No step may be playing them."""
        for shape in [shape for shape in self._graphs if which(shape)]:
            del self._graphs[shape]


_MOST_THREADS = 16


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """On leaving, everything that was launched inside can be launched without waiting for a compiler."""
    launch = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *arguments, grid=grid, warmup=True, **options)

    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as executor, triton.AsyncCompileMode(executor):
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = launch

"""Compile many kernels at once: launches inside `compiling_ahead` run nothing; their compilers run side by side.

One kernel takes Triton half a second or more, most of it outside Python's lock; a model needs about fifty.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITFunction

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

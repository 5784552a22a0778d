"""The driver that Triton launches kernels with on a machine without a GPU. Found by Triton's entry point.

`import triton` imports this file, so it imports nothing but Triton until a kernel is launched.
"""

import ctypes
import os
import re
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from cumulo.compile.backend.compiler import TARGET

_C_TYPES: dict[str, Any] = {"bool": ctypes.c_bool, "float": ctypes.c_float, "double": ctypes.c_double}
_C_TYPES |= {f"int{bits}_t": getattr(ctypes, f"c_int{bits}") for bits in (8, 16, 32, 64)}


class CpuUtils:
    """What Triton asks of a device: how large it is, and to load a kernel."""

    def __init__(self) -> None:
        self._libraries: dict[int, ctypes.CDLL] = {}

    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 30, "multiprocessor_count": os.cpu_count() or 1, "warpSize": 1,
                "max_num_regs": 1 << 16, "sm_clock_rate": 0, "mem_clock_rate": 0, "mem_bus_width": 0}  # fmt: skip

    def load_binary(
        self, name: str, binary: bytes, shared: int, device: int
    ) -> tuple[Any, Any, int, int, int]:
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(binary)
            file.flush()
            library = ctypes.CDLL(file.name)
        return library, library.launch, 0, 0, 1 << 20

    def unload_module(self, module: Any) -> None:
        """The library stays: another thread may be inside."""

    def set_printf_fifo_size(self, size: int) -> None:
        """printf here has no buffer of its own."""


@cache
def _parallel() -> int | None:
    """The parallel region of the OpenMP library that torch has loaded: one pool of threads, not two."""
    import torch

    torch.get_num_threads()  # makes sure that it is loaded
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    for name in sorted(set(re.findall(r"\S*/lib(?:gomp|iomp5|omp)[-.\w]*\.so[.\d]*", maps))):
        if function := getattr(ctypes.CDLL(name), "GOMP_parallel", None):
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def _flat(signature: Any, name: str) -> list[tuple[str, str]]:
    """(type, Python expression) of all arguments in a signature; tuples are taken apart."""
    if isinstance(signature, tuple):
        return [item for place, inner in enumerate(signature) for item in _flat(inner, f"{name}[{place}]")]
    return [] if signature == "constexpr" else [(signature, name)]


def address(argument: Any) -> int:
    """Of a tensor, or a number that is one."""
    if hasattr(argument, "data_ptr"):
        if (kind := argument.device.type) != "cpu":
            from cumulo.compile.backend.ttir import KernelRefused

            raise KernelRefused(f"a kernel on the CPU cannot read a tensor on {kind!r}: pass tensor.cpu()")
        return int(argument.data_ptr())
    return int(argument)


def described(argument: Any) -> list[Any]:
    """A tensor descriptor made on the host, as the arguments that Triton's rewrite to pointers makes of it."""
    place = [*argument.shape, *argument.strides]
    flags = [argument.padding == "nan"] if hasattr(argument, "padding") else []
    if hasattr(argument, "round_f32_to_tf32"):
        flags.append(argument.round_f32_to_tf32)
    return [address(argument.base), *place, *flags, *place]


class CpuLauncher:
    """Calls a loaded kernel. The function is written for its signature: a launch costs a few microseconds."""

    def __init__(self, source: Any, metadata: Any) -> None:
        parameters = [f"p{place}" for place in range(len(source.signature))]
        flat = [item for kind, name in zip(source.signature.values(), parameters, strict=True)
                for item in _flat(kind, name)]  # fmt: skip
        self._types = [ctypes.c_int] * 4 + [ctypes.c_void_p]
        self._types += [_C_TYPES.get(kind, ctypes.c_void_p) for kind in metadata.arguments]
        near = "{0}.data_ptr() if {0}.__class__ is tensor and {0}.is_cpu else address({0})"
        read = {"*": near, "t": "*described({})"}  # a pointer, a tensordesc<...>
        values = ", ".join(read.get(kind[0], "{}").format(name) for kind, name in flat)
        scope: dict[str, Any] = {
            "address": address,
            "described": described,
            "prepare": self._prepare,
            "failed": self._failed,
        }
        import torch

        scope |= {"threads": torch.get_num_threads, "tensor": torch.Tensor}
        exec(  # one call of a C function with the arguments of this signature
            "def call(x, y, z, stream, function, packed, meta, enter, leave, *args):\n"
            f"    ({''.join(f'{name}, ' for name in parameters)}) = args\n"
            "    if enter is not None: enter(meta)\n"
            f"    if function.argtypes is None: prepare(function)\n"
            f"    problem = function(x, y, z, threads(), parallel, {values})\n"
            "    if problem: failed(problem)\n"
            "    if leave is not None: leave(meta)\n",
            scope,
        )
        scope["parallel"] = _parallel()
        self.__call: Callable[..., None] = scope["call"]

    def _prepare(self, function: Any) -> None:
        function.argtypes, function.restype = self._types, ctypes.c_char_p

    @staticmethod
    def _failed(problem: bytes) -> None:
        from cumulo.errors import CumuloError

        raise CumuloError(f"a kernel's tl.device_assert failed: {problem.decode()}")

    def __call__(self, *arguments: Any) -> None:
        self.__call(*arguments)


class CpuDriver(DriverBase):  # type: ignore[misc]
    launcher_cls = CpuLauncher

    def __init__(self) -> None:
        super().__init__()
        self.utils = CpuUtils()

    @classmethod
    def is_active(cls) -> bool:
        """Where no other back end finds its device: Triton wants exactly one."""
        from triton.backends import backends

        return not any(b.driver.is_active() for b in backends.values() if not issubclass(b.driver, cls))

    def map_python_to_cpp_type(self, ty: str) -> str:
        return "void*" if ty.startswith("*") else ty

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        import torch

        return torch.cpu

    def get_empty_cache_for_benchmark(self) -> Any:
        import torch

        return torch.empty(1 << 24, dtype=torch.int32)

    def clear_cache(self, cache: Any) -> None:
        cache.zero_()

    def get_benchmarker(self) -> Callable[..., Any]:
        return _benchmark


def _benchmark(call: Callable[[], Any], *, quantiles: list[float] | None = None, **_: Any) -> Any:
    """Milliseconds of a call, for tl.autotune: at least 5 calls and 50 ms of them."""
    call()
    times: list[float] = []
    while len(times) < 5 or (sum(times) < 50 and len(times) < 100):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    times.sort()
    if quantiles is None:
        return sum(times) / len(times)
    return [times[min(len(times) - 1, int(q * len(times)))] for q in quantiles]

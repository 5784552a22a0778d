"""The compiled kernels as Python sees them: one library, its structures, a function that plays programs.

`native()` gives the library or None; every operation then has its torch reference to fall back to.
The structures mirror native/program.h field by field; their sizes are compared when the library is loaded.
`build` compiles the C++ source once per machine: it needs a C++17 compiler alone, and the result is cached under a
name that hashes the source, the flags, the compiler and the CPU.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

import torch

SOURCE_FOLDER = Path(__file__).parents[1] / "native"
COMPILERS = ("g++", "c++", "clang++")


class BuildFailed(Exception):
    """The kernels could not be compiled; the message says why. Callers fall back to torch."""


def flags() -> list[str]:
    """-ffp-contract=off: every fused operation is written out, so all tile sizes round alike."""
    tune = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    return ["-O3", tune, "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-pthread"]


@lru_cache(maxsize=1)
def cpu_identity() -> str:
    """The lines of /proc/cpuinfo that decide what -march=native means."""
    wanted = ("flags", "Features", "model name", "CPU part", "CPU implementer", "CPU variant")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def find_compiler() -> str | None:
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def default_cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cumulo" / "native"


def source_files() -> list[Path]:
    return sorted(path for path in SOURCE_FOLDER.iterdir() if path.suffix in (".h", ".cpp"))


def library_name(compiler_version: str) -> str:
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update("\0".join([*flags(), compiler_version, cpu_identity(), platform.machine()]).encode())
    return f"kernels-{digest.hexdigest()[:20]}.so"


def build(cache_folder: Path | None = None, announce: bool = True) -> Path:
    """The path of the compiled kernels, compiling them first if this machine has not yet."""
    compiler = find_compiler()
    if compiler is None:
        raise BuildFailed(f"no C++ compiler found (looked for {', '.join(COMPILERS)})")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    folder = cache_folder or default_cache_folder()
    target = folder / library_name(version)
    if target.exists():
        return target
    if announce:
        print(
            "cumulo: compiling CPU kernels for this machine (once, about 20 s) ...",
            file=sys.stderr,
            flush=True,
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            if not target.exists():  # another process may have compiled it meanwhile
                _compile(compiler, target)
    except OSError as error:
        raise BuildFailed(f"cannot write to the cache folder {folder}: {error}") from error
    return target


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time: ranks, engines and servers of a first start all want the kernels at once."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: then each compiles for itself
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _compile(compiler: str, target: Path) -> None:
    # Compiled beside its final place, then renamed: another process sees all of it or nothing.
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        command = [compiler, *flags(), str(SOURCE_FOLDER / "library.cpp"), "-o", temporary]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise BuildFailed(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
        Path(temporary).chmod(0o755)
        Path(temporary).replace(target)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _fields(*lines: tuple[type, str]) -> tuple[tuple[str, type], ...]:
    """Lines as the headers have them: a type and the names of that type."""
    return tuple((name, kind) for kind, names in lines for name in names.split())


class PackedPartStruct(Structure):
    _fields_ = _fields(
        (c_void_p, "data"),
        (c_int64, "rows"),
        (c_int32, "bits halves has_minimum half_floats span unused"),
        (c_int64, "block_bytes"),
    )


class QuantizedRowsStruct(Structure):
    _fields_ = _fields((c_void_p, "codes notes"), (c_int32, "groups wide"))


class GroupsStruct(Structure):
    _fields_ = _fields((c_void_p, "rows starts slots"), (c_int64, "count"))


class StepStruct(Structure):
    _fields_ = _fields(
        (c_int64, "tokens sequences outputs table_stride"),
        (c_int64, "vocabulary position_limit blocks block_size"),
        (c_void_p, "token_ids positions slots output_rows"),
        (c_void_p, "query_starts context_lengths block_tables"),
        (GroupsStruct, "token_groups output_groups"),
    )


class OpStruct(Structure):
    _fields_ = _fields(
        (c_int32, "kind over_outputs columns out_columns"),
        (c_void_p, "x out weight bias"),
        (c_int32, "accumulate parts"),
        (c_void_p, "packed"),
        (QuantizedRowsStruct, "quantized"),
        (c_void_p, "keys values query_norm key_norm cosine sine"),
        (c_int64, "key_block key_head key_position value_block value_head value_position"),
        (c_int32, "heads kv_heads head_dim value_dim block_size window interleaved kv_format"),
        (c_float, "scale eps"),
        (c_void_p, "bounds ranks"),
        (c_int32, "rank_max scale_columns"),
        (c_void_p, "scales"),
    )


# Kind in program.h
EMBED, NORM, QUANTIZE, LINEAR, FLOAT_LINEAR, ROTATE, ATTEND, SILU_MUL, GATHER, EMBED_FLOAT = range(10)
SHRINK, EXPAND, FLOAT8_LINEAR, KEEP, LIKELIEST = range(10, 15)
MAX_PARTS = 8
# check() in program.h
PROBLEMS = (
    "",
    "a token id is",
    "a position is",
    "a slot is",
    "a wanted row is",
    "the sequences' lengths are",
    "a block is",
    "a row with an adapter is",
)


class NativeLibrary:
    """The loaded kernels. Calls release the GIL; threads are torch's own where it uses an OpenMP library."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = library = ctypes.CDLL(str(path))
        library.cumulo_struct_sizes.restype = c_int64
        expected = (
            ctypes.sizeof(OpStruct) | ctypes.sizeof(StepStruct) << 16 | ctypes.sizeof(PackedPartStruct) << 32
        )
        if library.cumulo_struct_sizes() != expected:
            raise BuildFailed(f"{path} was compiled from another version of the structures; delete it")
        library.cumulo_dot_name.restype = c_char_p
        self.lanes: int = library.cumulo_lanes()
        self.has_half = bool(library.cumulo_has_half())
        self.weight_offset: int = library.cumulo_weight_offset()
        self.notes: int = library.cumulo_notes()
        self.dot_name: str = library.cumulo_dot_name().decode()
        self._play = library.cumulo_play
        self._play.argtypes = (c_void_p, c_int32, POINTER(StepStruct), c_int32)
        self._play.restype = c_int32
        self._dequantize_rows = library.cumulo_dequantize_rows
        self._dequantize_rows.argtypes = (c_void_p, c_int32, c_void_p, c_int64, c_int32, c_void_p)
        self._dequantize_rows.restype = None
        library.cumulo_read_bytes.argtypes = (c_void_p, c_int64, c_int32)
        library.cumulo_read_bytes.restype = c_float
        library.cumulo_dot_peak.argtypes = (c_int64, c_int32)
        self.shares_torch_threads = self._adopt_openmp_threads()

    def _adopt_openmp_threads(self) -> bool:
        """Hand the library the parallel region of the OpenMP runtime torch has loaded: one pool, not two."""
        torch.get_num_threads()  # makes sure torch has loaded it
        try:
            maps = Path("/proc/self/maps").read_text()
        except OSError:
            return False
        for name in sorted(set(re.findall(r"\S*/lib(?:gomp|iomp5|omp)[-.\w]*\.so[.\d]*", maps))):
            openmp = ctypes.CDLL(name)
            functions = [
                getattr(openmp, symbol, None)
                for symbol in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
            ]
            if all(functions):
                pointers = [ctypes.cast(function, c_void_p) for function in functions if function]
                self._library.cumulo_use_threads_of.argtypes = (c_void_p, c_void_p, c_void_p)
                self._library.cumulo_use_threads_of(*pointers)
                return True
        return False

    def play(
        self, ops: "Sequence[OpStruct] | ctypes.Array[OpStruct]", step: StepStruct, threads: int | None = None
    ) -> None:
        """Run the operations one after another; all threads take part in each."""
        array = ops if isinstance(ops, ctypes.Array) else (OpStruct * len(ops))(*ops)
        problem = self._play(
            ctypes.addressof(array), len(array), ctypes.byref(step), threads or torch.get_num_threads()
        )
        if problem:
            raise IndexError(f"{PROBLEMS[problem]} out of range; nothing was computed")

    def dequantize_rows(
        self, parts: "ctypes.Array[PackedPartStruct]", indices: torch.Tensor, columns: int, out: torch.Tensor
    ) -> None:
        self._dequantize_rows(parts, len(parts), indices.data_ptr(), len(indices), columns, out.data_ptr())

    def read_bytes(self, data: torch.Tensor, threads: int) -> None:
        """Read a float tensor once (the benchmark's bandwidth ceiling)."""
        self._library.cumulo_read_bytes(data.data_ptr(), data.numel(), threads)

    def dot_peak(self, repeats: int, threads: int) -> int:
        """Run dot instructions on registers; returns the multiply-adds done."""
        self._library.cumulo_dot_peak(repeats, threads)
        return repeats * 8 * 4 * self.lanes * threads


@lru_cache(maxsize=1)
def native() -> NativeLibrary | None:
    """The library, compiled on first use; None (after one visible line) where that is impossible."""
    try:
        return NativeLibrary(build())
    except (BuildFailed, OSError) as error:
        print(f"cumulo: CPU kernels unavailable, using plain torch (slower): {error}", file=sys.stderr)
        return None

"""From C++ to a shared library, with the compiler and flags of the package's own CPU kernels. Triton calls it.

Nothing is cached here: Triton keeps the library with the other stages of the kernel, under its own cache rules.
"""

import platform
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from cumulo.errors import CumuloError
from cumulo.kernels.cpu.library import COMPILERS, cpu_identity, find_compiler, flags

_FLAGS = ["-fopenmp-simd", "-fwrapv", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing",
          "-fno-exceptions", "-fno-rtti", "-w", f"-I{Path(__file__).parent}"]  # fmt: skip


class CompilerMissing(CumuloError):
    """There is no C++ compiler, or it does not take what was generated."""


def _all_flags(fuse: bool = True) -> list[str]:
    wide = ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []
    return [*flags(), *wide, *_FLAGS, f"-ffp-contract={'fast' if fuse else 'off'}"]


@cache
def toolchain() -> str:
    """What decides the machine code besides the source."""
    compiler = find_compiler()
    version = (
        subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout if compiler else ""
    )
    return "\n".join([version, *_all_flags(), cpu_identity()])


def compile_source(source: str, fuse: bool) -> bytes:
    compiler = find_compiler()
    if compiler is None:
        raise CompilerMissing(
            "Triton kernels run on a CPU as C++, and there is no C++ compiler "
            f"(looked for {', '.join(COMPILERS)}). "
            "Install one (Debian, Ubuntu: apt install g++), or set TRITON_INTERPRET=1 to interpret kernels slowly."
        )
    with tempfile.TemporaryDirectory(prefix="cumulo-triton-") as folder:
        path, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        path.write_text(source)
        command = [compiler, *_all_flags(fuse), str(path), "-o", str(library)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            kept = Path(tempfile.gettempdir()) / "cumulo-triton-refused.cpp"
            kept.write_text(source)
            raise CompilerMissing(
                f"{compiler} refused a generated kernel, kept as {kept}:\n{result.stderr[-2000:]}"
            )
        return library.read_bytes()

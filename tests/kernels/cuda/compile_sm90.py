"""Compile Triton kernels for a Hopper GPU on a machine without one, and read what the compiler made of them.

Tests call `compile_for_sm90(cases)`; it works in a process of its own, because the tests' process plays kernels
with the interpreter.
From a shell, `python -m tests.kernels.cuda.compile_sm90 CASES.json` prints a table: registers, spilled bytes,
shared memory and the instructions that matter.
"""

import atexit
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any

SHARED_BYTES_PER_BLOCK = 227 << 10
ROOT = Path(__file__).resolve().parents[3]
TELLING = ("HGMMA", "QGMMA", "HMMA", "UTMALDG", "LDGSTS", "LDG", "LDL", "STL", "BAR", "SHFL", "I2F", "F2F")


@dataclass(frozen=True)
class Case:
    """One kernel with the types of its arguments and its constants, as a launch would give them."""

    kernel: str  # "cumulo.kernels.cuda.linear.small_linear:_kernel"
    types: Mapping[str, str]  # "*bf16", "i32", "fp32"; "i32:16" is an integer known to be a multiple of 16
    constants: Mapping[str, Any] = field(default_factory=dict)  # constexpr, and arguments given as None or 1
    num_warps: int = 4
    num_stages: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)  # launch_pdl, maxnreg, ...


@dataclass(frozen=True)
class Compiled:
    registers: int
    spilled_bytes: int
    shared_bytes: int
    sass: str
    ptx: str

    def count(self, instruction: str) -> int:
        """How often the machine code has an instruction whose name starts with this."""
        return len(re.findall(rf"\s{re.escape(instruction)}\b", self.sass))

    def loads(self, bits: int) -> int:
        """Global loads of this width, whatever their cache hints."""
        return len(re.findall(rf"\sLDG\.E(?:\.[A-Z]\w*)*\.{bits}\b", self.sass))

    def check_fits(self, spilled_bytes: int = 0) -> None:
        """What a configuration worth proposing must satisfy."""
        assert self.spilled_bytes <= spilled_bytes, f"{self.spilled_bytes} bytes of registers spilled"
        assert self.shared_bytes <= SHARED_BYTES_PER_BLOCK, f"{self.shared_bytes} bytes of shared memory"


def compile_for_sm90(cases: Sequence[Case]) -> list[Compiled]:
    """Compile each case in the compiler's process; an error there is raised here with its text."""
    questions, answers = _compiler()
    questions.write(json.dumps([asdict(case) for case in cases]) + "\n")
    questions.flush()
    answer = json.loads(answers.readline() or '{"error": "the compiler ended"}')
    if "error" in answer:
        raise RuntimeError(f"compiling for sm_90 failed:\n{answer['error'][-6000:]}")
    return [Compiled(**found) for found in answer["made"]]


@cache
def _compiler() -> tuple[IO[str], IO[str]]:
    """What it is asked and what it answers; one for all tests of this process: it takes seconds to import torch."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kernels.cuda.compile_sm90"],
        cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    atexit.register(process.communicate)  # which closes its input: it ends
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


def serve(questions: IO[str], answers: IO[str]) -> None:
    """Answer a line of cases with a line of what was made of them, until there are no more."""
    for line in questions:
        try:
            answer: dict[str, Any] = {
                "made": [asdict(compile_here(Case(**case))) for case in json.loads(line)]
            }
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


def compile_here(case: Case) -> Compiled:
    """Compile in this process, which must not have asked for the interpreter."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    module, _, name = case.kernel.partition(":")
    kernel = getattr(import_module(module), name)
    signature, attributes, constants = {}, {}, dict(case.constants)
    for index, argument in enumerate(kernel.arg_names):
        if argument not in case.types and kernel.params[index].has_default:
            constants.setdefault(argument, kernel.params[index].default)
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        kind, _, divisor = case.types[argument].partition(":")
        signature[argument] = kind
        if kind.startswith("*") or divisor:
            attributes[(index,)] = [["tt.divisibility", int(divisor or 16)]]
    kind_of_source = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind_of_source(kernel, signature, constants, attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    usage = _tool("cuobjdump", "-res-usage", made.asm["cubin"])
    registers = re.search(r"REG:(\d+)", usage)
    local = re.search(r"LOCAL:(\d+)", usage)
    stack = re.search(r"STACK:(\d+)", usage)
    assert registers and local and stack, usage
    return Compiled(
        registers=int(registers[1]),
        spilled_bytes=int(local[1]) + int(stack[1]),
        shared_bytes=made.metadata.shared,
        sass=_tool("nvdisasm", "-c", made.asm["cubin"]),
        ptx=made.asm["ptx"],
    )


def _tool(name: str, option: str, cubin: bytes) -> str:
    """Output of one of the CUDA tools that come with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [str(tool), option, file.name], capture_output=True, text=True, check=True
        ).stdout


def main(given: str) -> None:
    for case in (Case(**case) for case in json.loads(Path(given).read_text())):
        found = compile_here(case)
        counts = {name: count for name in TELLING if (count := found.count(name))}
        counts["16-byte loads"] = found.loads(128)
        print(
            f"{case.kernel.partition(':')[2]} {dict(case.constants)} warps {case.num_warps} stages "
            f"{case.num_stages}: {found.registers} registers, {found.spilled_bytes} spilled, "
            f"{found.shared_bytes} shared; {counts}",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:]:
        main(*sys.argv[1:])
    else:
        told = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what compilers print is no answer
        serve(sys.stdin, told)

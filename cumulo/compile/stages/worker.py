"""Compiles one kernel in a process of its own: a compiler that aborts ends this process and no other, and what each
pass says on stderr is caught there. Started by `record`; reads a request on stdin and writes an answer into a file.

    python -m cumulo.compile.stages.worker ANSWER < REQUEST
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cumulo.compile.stages.launch import KernelLaunch, kernel_of, launch_of_json, unplain


def compiled(launch: KernelLaunch, backend: str, arch: int | str, warp: int) -> dict[str, Any]:
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    knobs.runtime.add_stages_inspection_hook = _own_lines
    kernel = kernel_of(launch)
    answer: dict[str, Any] = {
        "source": "".join(kernel.raw_src),
        "file": kernel.fn.__code__.co_filename,
        "first_line": kernel.starting_line_number,
        "triton": triton.__version__,
    }
    decorators = next(at for at, line in enumerate(kernel.raw_src) if line.lstrip().startswith("def "))
    try:
        # A cubin is only text and bytes here: nothing is loaded, so no device is needed.
        done = triton.compile(
            _source(kernel, launch), GPUTarget(backend, arch, warp), _options(launch, backend)
        )
    except Exception as error:
        return answer | {"error": _reason(error, kernel.starting_line_number + decorators)}
    stages = {name: text for name, text in done.asm.items() if isinstance(text, str) and name != "source"}
    machine = next((text for text in done.asm.values() if isinstance(text, bytes)), b"")
    metadata = done.metadata
    answer["resources"] = {
        "shared_bytes": metadata.shared,
        "warps": metadata.num_warps,
        "ctas": metadata.num_ctas,
    }
    if backend == "cuda":
        stages["sass"] = _disassembled(machine)
    answer["stages"] = stages
    answer["layouts"] = list(_layouts(stages["ttgir"], backend, int(arch) if backend == "cuda" else 0))
    return answer


def _own_lines(*stages_of: Any) -> Any:
    """Triton's hook for who looks at its stages. PTX says that the second line of an inline assembly comes from the
    next source line; without that, all of it belongs to where it begins, in the machine code as well."""
    if not stages_of:
        return "cumulo", "cumulo"  # part of the cache's key
    stages = stages_of[1]
    if "ptx" in stages:
        made = stages["ptx"]
        stages["ptx"] = lambda source, metadata: _ASSEMBLY.sub(_without_places, made(source, metadata))
    return None


_ASSEMBLY = re.compile(r"// begin inline asm.*?// end inline asm", re.DOTALL)


def _without_places(found: re.Match[str]) -> str:
    return re.sub(r"\n\s*\.loc[^\n]*", "", found[0])


def _source(kernel: Any, launch: KernelLaunch) -> Any:
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kind = GluonASTSource if type(kernel).__name__ == "GluonJITFunction" else ASTSource
    constants = {_key(name): unplain(value) for name, value in launch.constants.items()}
    signature = {name: _typed(told) for name, told in launch.signature.items()}
    attributes = {_key(name): value for name, value in launch.attributes.items()}
    return kind(kernel, signature, constants, attributes)


def _key(path: str) -> Any:
    return tuple(int(one) for one in path.split(".")) if path[0].isdigit() else path


def _typed(told: Any) -> Any:
    return tuple(map(_typed, told)) if isinstance(told, list) else told


def _options(launch: KernelLaunch, backend: str) -> dict[str, Any]:
    options = {name: value for name, value in launch.options.items() if value is not None}
    if backend != "cuda":
        options.pop("launch_pdl", None)
        options.pop("num_ctas", None)
    return options


def _reason(error: Exception, first_line: int) -> dict[str, Any]:
    """What is wrong and in which line of the kernel, where the compiler says it."""
    node = getattr(error, "node", None)
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__  # the innermost says what, the outermost where
    line = first_line + node.lineno - 1 if node is not None else 0
    text = str(getattr(cause, "error_message", "") or cause).strip() or type(error).__name__
    return {"text": text, "line": line, "kind": type(error).__name__}


def _disassembled(cubin: bytes) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        show = [knobs.nvidia.nvdisasm.path, "-gi", "-c", file.name]
        return subprocess.run(show, capture_output=True, text=True, check=True).stdout


def _layouts(ttgir: str, backend: str, capability: int) -> Iterator[dict[str, Any]]:
    """Each layout that a load, a store or a matrix product has, as Triton itself computes it: which bits of
    register, lane and warp reach which element."""
    from triton._C.libtriton import gluon_ir, ir
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget

    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        context = ir.context()
        ir.load_dialects(context)
        target = GPUTarget(backend, capability or "gfx942", 32 if backend == "cuda" else 64)
        kind = next(one.compiler for one in backends.values() if one.compiler.supports_target(target))
        kind(target).load_dialects(context)
        module = ir.parse_mlir_module(file.name, context)
    builder = gluon_ir.GluonOpBuilder(context)
    found: list[tuple[str, Any]] = []

    def visit(op: Any) -> None:
        name = op.get_name()
        if name in (
            "tt.load",
            "tt.store",
            "tt.dot",
            "ttng.warp_group_dot",
            "ttg.convert_layout",
            "ttg.local_load",
        ):
            values = [op.get_operand(index) for index in range(op.get_num_operands())]
            values += [op.get_result(index) for index in range(op.get_num_results())]
            found.extend((name, value) for value in values[:1] + values[-1:])

    module.walk(visit)
    seen = set()
    for name, value in found:
        kind_of_value = str(value.get_type())
        if not (found_shape := re.match(r"tensor<((?:\d+x)+)", kind_of_value)):
            continue
        layout = builder.get_gluon_layout_from_tensor(value)
        shape = [int(one) for one in found_shape[1].split("x")[:-1]]
        if (str(layout), tuple(shape)) in seen:
            continue
        seen.add((str(layout), tuple(shape)))
        linear = builder.to_linear_layout(layout._to_ir(builder), shape)
        yield {
            "used_by": name,
            "layout": str(layout),
            "shape": shape,
            "register": linear.reg_bases,
            "lane": linear.lane_bases,
            "warp": linear.warp_bases,
        }


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    sys.path[:0] = asked["path"]
    result = compiled(launch_of_json(asked["launch"]), asked["backend"], asked["arch"], asked["warp"])
    Path(sys.argv[1]).write_text(json.dumps(result))

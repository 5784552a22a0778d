"""TTIR as one C++ file: a function that computes one program of the grid, and the entry that plays the whole grid.

Called by the compiler's last stage. Scalars are C++ variables of the same id; block tensors are arrays in scratch
memory or exist lane by lane (fusion.py, lanes.py). Whatever has no rule here is refused with its line.
"""

import re
from pathlib import Path

from cumulo.compile.backend.control import Control
from cumulo.compile.backend.operations import lane_type, literal
from cumulo.compile.backend.ttir import KernelRefused, TtirFunction, TtirOperation, functions

PRELUDE = Path(__file__).with_name("prelude.h")
_STACK_BYTES = 256 << 10  # scratch memory up to this lies on the stack of the thread
_ALONE = 40_000  # lanes of a launch below which one thread is sooner done than a second one is awake


class Lowering(Control):
    """One kernel. Its rules are in control.py (loops, branches), memory.py, blocks.py."""

    def rule(self, op: TtirOperation) -> None:
        method = getattr(self, "do_" + op.name.replace(".", "_"), None)
        if method is not None:
            method(op)
        elif op.name in self.ELEMENTWISE and op.results and not op.results[0].shape:
            self.set_scalar(op.results[0], self.scalar_expression(op))
        elif op.name in self.INLINE:
            for value in op.results:
                if value in self.arrays or value in self.slots:
                    self.make_array(value)
        else:
            raise op.refused()


def _constants(lowering: Lowering, text: str, found: dict[str, TtirFunction]) -> None:
    def visit(op: TtirOperation) -> None:
        if op.name == "arith.constant":
            value = op.results[0]
            number = re.search(r"(?:dense<)?([^<>\s:]+)>?(?: : |\s*$)", op.text)
            if number is None or "[" in op.text:
                raise op.refused("a constant with unlike elements")
            lowering.scalars[value] = literal(number[1], value.type)
        for region in op.regions:
            for block in region:
                for inner in block.ops:
                    visit(inner)

    for function in found.values():
        for block in function.blocks:
            for op in block.ops:
                visit(op)


def lower(text: str) -> tuple[str, list[str]]:
    """The C++ of a module, and the C++ types of the entry's arguments."""
    found = functions(text)
    public = [function for function in found.values() if function.public]
    if len(public) != 1:
        raise KernelRefused(f"a module with {len(public)} kernels; one was expected")
    kernel = public[0]
    lowering = Lowering(found)
    _constants(lowering, text, found)
    lowering.function(kernel)
    types = [lane_type(argument.type) for argument in kernel.blocks[0].args]
    names = [f"v{argument.id}" for argument in kernel.blocks[0].args]
    fields = "".join(f"    {kind} {name};\n" for kind, name in zip(types, names, strict=True))
    on_stack = lowering.scratch_bytes <= _STACK_BYTES
    scratch = (
        f"    alignas(64) char scratch[{lowering.scratch_bytes + 64}];\n"
        if on_stack
        else "    static thread_local char* kept = nullptr;\n"
        f"    if (!kept) kept = (char*)aligned_alloc(64, {lowering.scratch_bytes + 64});\n"
        "    char* scratch = kept;\n"
    )
    declared = "".join(f"    {line}\n" for line in lowering.declarations)
    parameters = "".join(f", {kind} {name}" for kind, name in zip(types, names, strict=True))
    source = f"""#include "{PRELUDE.name}"

struct Arguments {{
{fields}}};

static void program(const Arguments& arguments, const int* program_id, const int* programs, char* scratch) {{
{
        "".join(
            f"    {kind} const {name} = arguments.{name};{chr(10)}"
            for kind, name in zip(types, names, strict=True)
        )
    }{declared}{lowering.text()}}}

static void body(void* pointer) {{
    Grid& grid = *(Grid*)pointer;
{scratch}    for (;;) {{
        int64_t begin = __atomic_fetch_add(&grid.next, grid.chunk, __ATOMIC_RELAXED);
        if (begin >= grid.programs || problem) return;
        int64_t end = begin + grid.chunk < grid.programs ? begin + grid.chunk : grid.programs;
        for (int64_t at = begin; at < end; ++at) {{
            int64_t row = at / grid.size[0];
            const int id[3] = {{(int)(at % grid.size[0]), (int)(row % grid.size[1]), (int)(row / grid.size[1])}};
            program(*(const Arguments*)grid.arguments, id, grid.size, scratch);
        }}
    }}
}}

extern "C" const char* launch(int x, int y, int z, int threads, void* parallel{parameters}) {{
    Arguments arguments = {{{", ".join(names)}}};
    Grid grid = {{{{x, y, z}}, (int64_t)x * y * z, 1, &arguments, 0}};
    if (grid.programs * {max(1, lowering.lanes_of_program)} < {_ALONE}) threads = 1;
    grid.chunk = threads <= 1 ? grid.programs : grid.programs / (threads * 8);
    if (grid.chunk < 1) grid.chunk = 1;
    problem = nullptr;
    if (grid.programs > 0) play(grid, threads, (Parallel)parallel, body);
    return problem;
}}
"""
    return source, types

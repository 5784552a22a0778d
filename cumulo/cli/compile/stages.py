"""`cumulo compile stages`: every stage of a Triton kernel for a GPU that need not be here."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from cumulo.base.nearest import did_you_mean
from cumulo.base.report import Row, grid
from cumulo.cli.shared.options import JsonOption
from cumulo.cli.shared.terminal import dim, present, read_text, save, unwrapped, working
from cumulo.errors import ConfigError

if TYPE_CHECKING:
    from cumulo.compile.stages.record import StagesRecord

EXAMPLE = "Example: [bold]cumulo compile stages rms_norm.forward --target sm_90a --out norm.html[/bold]"

Named = Annotated[
    str, typer.Argument(help="A kernel of Cumulo's (`cumulo compile kernels`) or FILE.py:FUNCTION.")
]
Target = Annotated[
    str, typer.Option(help="GPU to compile for: sm_80, sm_86, sm_89, sm_90a, sm_100, gfx90a, gfx942, gfx950.")
]
Types = Annotated[
    list[str] | None,
    typer.Option(
        "--arg",
        metavar="NAME=TYPE",
        help="Type of an argument, for example x=*bf16 or n=i64; repeatable.",
    ),
]
Values = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Value of a constant, or the number to assume for an argument where addresses are read; repeatable.",
    ),
]
Page = Annotated[
    Path | None, typer.Option("--out", help="Write the page with all stages into this HTML file.")
]
Other = Annotated[
    str | None,
    typer.Option(
        "--diff",
        metavar="KERNEL|FILE.json",
        help="Compare with another kernel, or with a record of --json, for example from another version of Triton.",
    ),
]


def stages(
    kernel: Named,
    target: Target = "sm_90a",
    out: Page = None,
    arg: Types = None,
    set_: Values = None,
    warps: Annotated[int | None, typer.Option(min=1, max=32, help="Warps per block.")] = None,
    num_stages: Annotated[
        int | None, typer.Option("--stages", min=1, help="Stages of the software pipeline.")
    ] = None,
    registers: Annotated[
        int | None, typer.Option(min=16, max=255, help="Maximum number of registers per thread.")
    ] = None,
    diff: Other = None,
    json_file: JsonOption = None,
) -> None:
    """Show a Triton or Gluon kernel from Python to machine code, and what limits it. This needs no GPU.

    The page links the lines of all stages: Python, TTIR, TTGIR, LLVM IR, PTX and SASS. It shows what each pass
    changed, which thread holds which element, how each load and store is coalesced, bank conflicts, registers,
    spills and occupancy.
    """
    from cumulo.compile.stages.launch import find_launch
    from cumulo.compile.stages.page import differences, stages_page
    from cumulo.compile.stages.record import record
    from cumulo.compile.stages.verdict import judge

    types, values = pairs(arg, "--arg"), pairs(set_, "--set")
    chosen = {"num_warps": warps, "num_stages": num_stages, "maxnreg": registers}
    options = {name: value for name, value in chosen.items() if value is not None}
    with working(f"compiling {kernel} for {target}"):
        with_kernel = diff is not None and not diff.endswith(".json")  # then a name may be meant for either
        launch = find_launch(kernel, types, values, options, if_there=with_kernel)
        other = None
        if with_kernel:
            second = find_launch(str(diff), types, values, options, if_there=True)
            both = {**launch.signature, **second.signature}
            for name in (*types, *values):
                if name not in both:
                    raise ConfigError(f"neither kernel has an argument {name}{did_you_mean(name, both)}")
            other = record(second, target)
        elif diff is not None:
            other = _kept(Path(diff))
        one = record(launch, target)
        verdict = judge(one)
    rows = [
        Row(f"{finding.kind} in line {finding.line}", finding.cost, note=finding.text)
        for finding in verdict.findings
    ]
    shown: list[Any] = [
        unwrapped(f"{one.launch.name} for {target}, Triton {one.triton}", "bold"),
        Text(verdict.summary),
    ]
    used = one.resources
    told = [
        ("registers per thread", used.registers),
        ("spills", f"{used.spill_store_bytes + used.spill_load_bytes} bytes"),
        ("shared memory", f"{used.shared_bytes:,} bytes"),
    ]
    if verdict.occupancy is not None:
        told.append(("occupancy", f"{verdict.occupancy.share:.0%}, limited by {verdict.occupancy.limit}"))
    told += [(name, f"{count} instructions") for name, count in verdict.matrix_instructions.items()]
    shown.append(grid(("", ""), [(name, str(value)) for name, value in told]))
    for finding in verdict.findings:
        where = f"Line {finding.line}: " if finding.line else "Everywhere: "
        shown.append(Text(where + finding.text, "yellow"))
    if one.launch.guessed:
        guessed = ", ".join(f"{name}={one.launch.signature[name]}" for name in one.launch.guessed)
        shown.append(dim(f"Argument types were guessed; --arg changes one: {guessed}"))
    if other is not None:
        shown.append(grid(("", "before", "after"), differences(other, one)))
    present(rows, json_file, *shown, record=one.to_json())
    save(out, lambda: stages_page(one, verdict, other), "the stages")


def pairs(told: list[str] | None, option: str) -> dict[str, str]:
    pairs = {}
    for one in told or ():
        name, equals, value = one.partition("=")
        if not equals or not name or not value:
            raise ConfigError(
                f"{option} {one}: write {option} NAME={'TYPE' if option == '--arg' else 'VALUE'}"
            )
        pairs[name] = value
    return pairs


def _kept(path: Path) -> "StagesRecord":
    from cumulo.compile.stages.record import record_of_json

    try:
        return record_of_json(json.loads(read_text(path))["record"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is no record of `cumulo compile stages --json`") from None

"""`cumulo compile model`: a model through torch.compile(backend="cumulo"), and why each operation fused or not."""

from pathlib import Path
from typing import Annotated

import typer

from cumulo.base.report import Row
from cumulo.cli.compile.onnx import onnx as export
from cumulo.cli.shared.options import JsonOption
from cumulo.cli.shared.terminal import present, save, unwrapped, working

EXAMPLE = "Example: [bold]cumulo compile model --tokens 64 --report smollm2.html[/bold]"


def model(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model as for `cumulo serve`, or FILE.py:NAME, a function or class of yours next to a function "
            "example_inputs(). Default: the built-in model."
        ),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the page into this HTML file.")] = None,
    training: Annotated[bool, typer.Option("--training", help="Forward and backward.")] = False,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the sequence a model is run with.")] = 128,
    code: Annotated[
        str, typer.Option(help="What runs groups of operations: auto, triton, inductor or eager.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    onnx: Annotated[
        Path | None,
        typer.Option(help="Export the model to ONNX into this folder instead: `cumulo compile onnx`."),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Compile a model with backend="cumulo": what fused, what could not and why, traffic, memory, time.

    The figures compare the compiled model with eager PyTorch in the same run. The page shows the graph before and
    after as pictures, and the text of every generated kernel.
    """
    if onnx is not None:
        export(model, onnx, json_file=json_file)
        return
    from cumulo.compile.passes.model import compile_model
    from cumulo.compile.passes.page import report_page

    with working("compiling"):
        done = compile_model(model, training=training, tokens=tokens, device=device, code=code)
    rows = []
    for graph in done.graphs:
        saved = graph.before.traffic_bytes - graph.after.traffic_bytes
        rows += [
            Row(f"{graph.stage}: operations before", graph.operations_before, better="lower"),
            Row(f"{graph.stage}: kernels after", graph.kernels_after, better="lower"),
            Row(f"{graph.stage}: traffic saved", saved, "B"),
        ]
    rows += [
        Row("eager", done.speed.eager_s, "s", "lower"),
        Row("compiled", done.speed.compiled_s, "s", "lower"),
        Row("difference from eager", done.difference, better="lower"),
    ]
    present(rows, json_file, unwrapped(done.to_text()))
    save(report, lambda: report_page(done), "page")

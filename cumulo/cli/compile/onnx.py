"""`cumulo compile onnx`: a decoder as an ONNX file, checked against torch, and any ONNX file taken apart."""

from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from cumulo.base.quantities import quantity
from cumulo.base.report import Row, grid
from cumulo.cli.compile.stages import pairs
from cumulo.cli.shared.options import JsonOption
from cumulo.cli.shared.terminal import present, working
from cumulo.errors import ConfigError

EXAMPLE = "Example: [bold]cumulo compile onnx --out smollm2-onnx --tokens 20[/bold]"
_SIZES = {"batch": 1, "new": 128, "past": 0}
_SHOWN = 8


def onnx(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model as for `cumulo serve`, or FILE.onnx to inspect. Default: the built-in model."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for model.onnx and its weights.")] = Path("onnx"),
    tokens: Annotated[
        int,
        typer.Option(
            min=0, help="Number of greedy tokens to compare between onnxruntime and torch; 0: none."
        ),
    ] = 50,
    prompt: Annotated[str, typer.Option(help="Prompt of that comparison.")] = "The capital of France is",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=NUMBER",
            help="Size of an input dimension, for example new=512; repeatable.",
        ),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Export a decoder to ONNX, compare its answer with torch, and show where its FLOPs, bytes and memory go.

    One graph computes a prompt and every token after it: keys and values go in and come out. The file is checked
    by onnx, and onnxruntime must say the same greedy tokens as torch in float32. The tables are for the sizes of
    --set (batch, new tokens, past tokens).
    """
    from cumulo.compile.onnx.inspect import inspect

    sizes = dict(_SIZES)
    for name, told in pairs(set_, "--set").items():
        if not told.isdigit():
            raise ConfigError(f"--set {name}={told}: a size is a whole number")
        sizes[name] = int(told)
    rows: list[Row] = []
    if model is not None and model.endswith(".onnx"):
        path = Path(model)
        if not path.is_file():
            raise ConfigError(f"there is no file {path}")
    else:
        path, rows = _exported(model, out, prompt, tokens)
    with working("reading the graph"):
        found = inspect(path, sizes)
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0])
    for one in found.operators:
        entry = totals[one.kind]
        entry[0] += 1
        entry[1] += one.flops
        entry[2] += one.read_bytes + one.written_bytes
    by_bytes = sorted(totals.items(), key=lambda item: -item[1][2])
    told_sizes = ", ".join(f"{name} {number}" for name, number in sizes.items())
    peak = found.peak
    rows += [
        Row("operators", len(found.operators)),
        Row("weights", found.weight_bytes, "B"),
        Row("FLOPs", sum(one.flops for one in found.operators)),
        Row("bytes moved", sum(entry[2] for entry in totals.values()), "B"),
        Row("peak of activations", peak.alive_bytes, "B", note=peak.name),
    ]
    shown: list[Any] = [Text(str(path), "bold")]
    shown += [Text(f"{row.name}: {row.note}") for row in rows if row.name in ("equal tokens", "speed")]
    shown.append(
        Text(
            f"{len(found.operators)} operators, {quantity(found.weight_bytes, 'B')} of weights. With {told_sizes}: "
            f"at most {quantity(peak.alive_bytes, 'B')} of activations at once, in {peak.name}."
        )
    )
    table = [
        (kind, f"{count:.0f}", quantity(flops, "FLOP"), quantity(moved, "B"))
        for kind, (count, flops, moved) in by_bytes[:_SHOWN]
    ]
    shown.append(grid(("operator", "count", "FLOPs", "bytes moved"), table))
    chains = [
        (" → ".join(one.kinds), str(one.count), quantity(one.saved_bytes, "B"))
        for one in found.candidates[:_SHOWN]
    ]
    if chains:
        shown.append(grid(("could be one kernel", "count", "bytes saved"), chains))
    if found.unknown_shapes:
        shown.append(
            Text(f"{found.unknown_shapes} values have no known shape; they count as nothing.", "yellow")
        )
    details = {
        "operators": [{name: getattr(one, name) for name in type(one).__slots__} for one in found.operators],
        "candidates": [
            {name: getattr(one, name) for name in type(one).__slots__} for one in found.candidates
        ],
    }
    present(rows, json_file, *shown, **details)


def _exported(model: str | None, out: Path, prompt: str, tokens: int) -> tuple[Path, list[Row]]:
    from cumulo.compile.onnx.decoder import export_decoder
    from cumulo.compile.onnx.play import compare
    from cumulo.engine.llm import LLM
    from cumulo.models.files.load import load_model

    with working("exporting") as tell:
        tell("loading")
        loaded = load_model(model, keep_quantised=False, with_tokenizer=False)
        path = export_decoder(loaded.decoder, out, tell)
        del loaded
        if not tokens:
            return path, []
        tell(f"comparing {tokens} tokens")
        with LLM(model, keep_quantised=False, max_running=1) as llm:
            same = compare(path, llm, prompt, tokens)
    ratio = same.onnx_tok_s / same.torch_tok_s
    equal = f"{same.equal} of {same.tokens} greedy tokens of onnxruntime are torch's"
    speed = f"onnxruntime {same.onnx_tok_s:.1f} tok/s, torch {same.torch_tok_s:.1f} tok/s"
    return path, [
        Row("equal tokens", same.equal, better="higher", must=tokens, note=equal),
        Row("speed", ratio, "x", "higher", note=speed),
    ]

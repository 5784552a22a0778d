"""`cumulo pull`, `cumulo list`, `cumulo show` and `cumulo remove`: the models on this machine."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from cumulo.cli.shared import options
from cumulo.cli.shared.declare import takes_options
from cumulo.cli.shared.options import HubOption, JsonOption
from cumulo.cli.shared.terminal import err, note, present, show_report, text_column, warn_if_busy, working
from cumulo.errors import CumuloError, OutOfMemory
from cumulo.models.files.pull import DEFAULT_HUB

if TYPE_CHECKING:
    from cumulo.models.files.load import ModelFiles

PULL_EXAMPLE = "Example: cumulo pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M"  # not bold: tests reach no hub
LIST_EXAMPLE = "Example: [bold]cumulo list[/bold]"
SHOW_EXAMPLE = "Example: [bold]cumulo show --max-context 4096[/bold]"
REMOVE_EXAMPLE = "Example: cumulo remove Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M"
NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Name on the hub: owner/name, owner/name:Q4_K_M or owner/name/file.gguf."
    ),
]
_TELL_S = 5.0  # between two lines of progress, where there is no terminal


def pull(model: NameArgument, hub: HubOption = DEFAULT_HUB) -> None:
    """Download a model, or complete a download that was interrupted; every file's checksum is verified."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from cumulo.base.quantities import quantity
    from cumulo.models.files.pull import pull as download
    from cumulo.models.files.pulled import find_pulled

    columns = (BarColumn(bar_width=30), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
               text_column("{task.description}", "dim"))  # fmt: skip
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("", total=None)
        for now in download(model, hub, 0.1 if err.is_terminal else _TELL_S):
            progress.update(task, completed=now.done_bytes, total=now.total_bytes, description=now.file.path)
            if not err.is_terminal:
                note(f"{quantity(now.done_bytes, 'B')} of {quantity(now.total_bytes, 'B')}: {now.file.path}")
    pulled = find_pulled(model)
    assert pulled is not None
    license_told = f", license {pulled.license}" if pulled.license else ""
    note(
        f"{pulled.name} is here ({quantity(pulled.size_bytes, 'B')}{license_told}): cumulo chat {pulled.name}"
    )


def list_(json_file: JsonOption = None) -> None:
    """List the models on this machine: the built-in one, and those that were pulled."""
    from cumulo.base.quantities import quantity
    from cumulo.base.report import Row, grid
    from cumulo.models.files.hub import BUILT_IN_NAME, built_in_model
    from cumulo.models.files.pulled import pulled_models

    found = [
        (one.name, one.size_bytes, one.license or "not stated",
         time.strftime("%Y-%m-%d", time.localtime(one.pulled_s)))
        for one in pulled_models()
    ]  # fmt: skip
    try:
        found.insert(0, (BUILT_IN_NAME, built_in_model().stat().st_size, "apache-2.0", "installed"))
    except CumuloError:
        note("the built-in model is not installed")
    rows = [Row(name, size, "B", note=f"license {license}; {when}") for name, size, license, when in found]
    shown = [(name, quantity(size, "B"), license, when) for name, size, license, when in found]
    present(rows, json_file, grid(("model", "size", "license", "pulled"), shown, left=(0, 2, 3)))


def remove(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name, as cumulo list shows it.")],
) -> None:
    """Delete a pulled model, or what an interrupted download has left."""
    from cumulo.base.quantities import quantity
    from cumulo.models.files.pulled import remove_pulled

    removed = remove_pulled(model)
    note(f"{removed.name} is deleted ({quantity(removed.size_bytes, 'B')})")


@dataclass(frozen=True, kw_only=True)
class ShowModelOptions:
    model: options.ModelArgument = None
    json_file: options.JsonOption = None
    engine: options.EngineOptions = options.EngineOptions()


@takes_options
def show(chosen: ShowModelOptions) -> None:
    """Show a model: size, quantization, context, license, whether it fits, and its predicted speed here."""
    with working("reading the model's headers"):
        from cumulo.base.report import Row
        from cumulo.engine.assembly import predict_memory
        from cumulo.engine.memory.ledger import format_bytes
        from cumulo.models.files.hub import files_and_license
        from cumulo.models.files.load import inspect_model

        files = inspect_model(chosen.model)
        config = chosen.engine.config()
        _, license_told = files_and_license(chosen.model)
    types = ", ".join(f"{count} {name}" for name, count in files.tensor_types.items())
    stored = files.quantisation.in_words if files.quantisation is not None else types
    rows = [
        Row("family", files.spec.family, note=str(files.path)),
        Row("parameters", round(files.parameters / 1e6, 1), "M"),
        Row("size", files.weight_bytes, "B"),
        Row("quantization", files.number_format or "none", note=stored),
        Row("license", license_told or "not stated"),
    ]
    try:
        memory = predict_memory(files, config)
    except OutOfMemory as error:
        show_report(files.name, [*rows, Row("fits", False, note=str(error))], chosen.json_file)
        raise typer.Exit(1) from None
    ledger = memory.ledger
    parts = ", ".join(f"{one.name} {format_bytes(one.predicted)}" for one in ledger.rows)
    warn_if_busy()
    with working("measuring this machine"):
        weight_bytes = ledger["weights"].predicted / files.parameters
        prompt, answer, why = _speed(files, weight_bytes, chosen.engine.weights)
    rows += [
        Row("fits", True, note="with the options of cumulo serve"),
        Row("memory", ledger.predicted_bytes, "B", note=parts),
        Row("context", memory.max_context, "tokens", note=f"of the model's {files.spec.max_context:,}"),
        Row("prompt throughput", round(prompt, 1), "tok/s", note=why),
        Row(
            "decode throughput, 1 sequence", round(answer, 1), "tok/s", note="cumulo bench engine measures it"
        ),
    ]
    show_report(files.name, rows, chosen.json_file)


def _speed(files: "ModelFiles", weight_bytes: float, weights: str | None) -> tuple[float, float, str]:
    """Predicted tokens per second of a prompt and of an answer, for one request at a time."""
    from cumulo.bench.device_timer import device_here
    from cumulo.plan.serve.profile import confidence_of
    from cumulo.plan.serve.step_cost import alone_tok_s

    device = device_here()
    if device.generation == "cpu":
        measured = "q4_1" if files.quantised_parameters else "float32"
    else:
        measured = {"fp8": "float8", "int4": "int4"}.get(weights or "", "bfloat16")
    slowest = confidence_of(device, 1, True).slowest
    why = f"predicted for {device.name}, to within a factor of {slowest:.1f}"
    return *alone_tok_s(files.spec, device, measured, weight_bytes), why

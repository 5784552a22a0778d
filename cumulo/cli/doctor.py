"""`cumulo doctor`: checks the machine, the packages and a model, and measures the memory it uses."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from cumulo.base import report
from cumulo.base.report import Row
from cumulo.cli.shared import options
from cumulo.cli.shared.declare import flag, takes_options
from cumulo.cli.shared.terminal import err, load_llm, marked, only_json, out, working
from cumulo.errors import CumuloError

if TYPE_CHECKING:
    from cumulo.engine.config import EngineConfig
    from cumulo.engine.llm import LLM
    from cumulo.engine.memory.ledger import Ledger

EXAMPLE = "Example: [bold]cumulo doctor --json report.json[/bold]"


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    model: options.ModelArgument = None
    quick: bool = flag("Skip the checks that load the model.")
    json_file: options.JsonOption = None
    engine: options.EngineOptions = options.EngineOptions()


@takes_options
def doctor(chosen: DoctorOptions) -> None:
    """Check the machine, the packages and the model, and show predicted next to measured memory."""
    if not examine(chosen.model, chosen.engine.config(), chosen.quick, chosen.json_file):
        raise typer.Exit(1)


QUESTION = "What is the capital of France?"
# What the float32 model answers; the built-in file's margin over a wrong city is small, so this is a test.
EXPECTED_OF_BUILT_IN = "Paris"


def examine(model: str | None, config: "EngineConfig", quick: bool, json_file: Path | None) -> bool:
    """Print every section as it is known; True if no check failed."""
    console = err if only_json(json_file) else out
    rows: list[Row] = []

    def section(title: str, found: list[Row]) -> None:
        rows.extend(found)
        console.print(report.table(title, found))
        console.print()

    extra: dict[str, Any] = {}
    section("Machine", _machine())
    with working("packages"):
        software = _software()
    section("Software", software)
    section("Model", found := _model(model))
    if not quick and all(row.ok for row in found):
        try:
            with load_llm(model, config) as llm:
                ledger = llm.measure_ledger()
                console.print(ledger)
                console.print()
                extra["ledger"] = ledger.to_dict()
                rows += _ledger_rows(ledger)
                section("Self-test", _self_test(llm, built_in=model is None))
        except CumuloError as error:
            section("Loading", [Row("loads", False, must=True, note=str(error))])
    report.write_json(json_file, rows, **extra)
    failed = [row for row in rows if not row.ok]
    if failed:
        count = f"{len(failed)} check{'s' if len(failed) > 1 else ''} failed"
        console.print(marked("[bold red]{}:[/bold red] {}", count, "; ".join(row.name for row in failed)))
    else:
        console.print("all checks passed", style="bold green")
    return not failed


def _machine() -> list[Row]:
    from cumulo.base.machine import available_memory

    facts = report.machine()
    return [
        Row("system", f"{facts['platform']}, {facts['architecture']}"),
        Row("processor", facts["cpu"]),
        Row("available cores", facts["cores"]),
        Row("instruction sets", " ".join(facts["cpu_features"]) or "unknown"),
        Row("memory", facts["memory_gib"], "GiB"),
        Row("available memory", round(available_memory() / 2**30, 1), "GiB"),
    ]


def _software() -> list[Row]:
    import torch

    rows = [
        Row("python", report.machine()["python"]),
        Row("torch", torch.__version__, note=f"threads by default: {torch.get_num_threads()}"),
    ]
    return rows + _kernels()


def _kernels() -> list[Row]:
    """Compiled on first use, so this is also where a missing compiler shows."""
    from cumulo.kernels.cpu.library import native

    library = native()
    if library is None:
        missing = "optional: without a C++ compiler, torch's kernels are used, which are slower"
        return [Row("native kernels", "none", note=missing)]
    return [
        Row("native kernels", library.dot_name, note=str(library.path)),
        Row("kernel threads", "shared with torch" if library.shares_torch_threads else "a separate pool"),
    ]


def _model(model: str | None) -> list[Row]:
    from cumulo.models.files.load import inspect_model

    try:
        files = inspect_model(model)
    except CumuloError as error:
        return [Row("found", False, must=True, note=str(error))]
    types = ", ".join(f"{count} {name}" for name, count in files.tensor_types.items())
    return [
        Row("found", True, must=True, note=str(files.path)),
        Row("name", files.name),
        Row("family", files.spec.family),
        Row("parameters", round(files.parameters / 1e6, 1), "M"),
        Row("weights", round(files.weight_bytes / 2**20, 1), "MiB", note=types),
        Row("maximum context", files.spec.max_context, "tokens"),
    ]


def _ledger_rows(ledger: "Ledger") -> list[Row]:
    rows = []
    for entry in ledger.rows:
        rows.append(Row(f"memory, {entry.name}: predicted", entry.predicted, "bytes", "lower"))
        if entry.measured is not None:
            rows.append(Row(f"memory, {entry.name}: measured", entry.measured, "bytes", "lower"))
    return rows


def _self_test(llm: "LLM", built_in: bool) -> list[Row]:
    """A short greedy answer; the built-in model must name the city its float32 reference names."""
    from cumulo.engine.decide.params import SamplingParams

    messages = [{"role": "user", "content": QUESTION}]
    began_s = time.perf_counter()
    output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=32))[0]
    elapsed_s = time.perf_counter() - began_s
    text = output.samples[0].text.strip() if output.samples else ""
    right = not output.error and (EXPECTED_OF_BUILT_IN in text if built_in else bool(text))
    speed = output.story.decode_tok_s
    return [
        Row("runs on", llm.runs_on),
        Row("answer", right, must=True, note=output.error or f"{QUESTION} {text}"),
        Row("TTFT", output.story.ttft_s, "s", "lower"),
        Row("decode throughput, 1 sequence", speed, "tok/s"),
        Row("total time", elapsed_s, "s", "lower"),
    ]

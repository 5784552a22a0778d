"""`cumulo bench VERB`: measurements next to the values they must reach, as a table and as JSON."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cumulo.base.chart import chart_file
from cumulo.base.figures import RunFigure, figure_rows, figure_table
from cumulo.base.nearest import names_in
from cumulo.base.report import available_cores
from cumulo.cli.bench import serve as bench_serve
from cumulo.cli.shared import options
from cumulo.cli.shared.declare import option, takes_options
from cumulo.cli.shared.terminal import finish, loading, note, present, save, warn_if_busy, working
from cumulo.errors import CumuloError
from cumulo.load.prompts import parse_lengths

if TYPE_CHECKING:
    from cumulo.bench.quantised import Figures

app = typer.Typer()
Rounds = Annotated[int, typer.Option(min=1, help="Number of measurements.")]
app.command("serve", epilog=bench_serve.EXAMPLE)(bench_serve.serve)


def measure(module: str, title: str, json_file: Path | None, *arguments: Any, progress: Any = None) -> None:
    """What most benchmarks do: measure with progress on stderr, then show the rows next to what they must reach."""
    warn_if_busy()
    with progress or working(module) as tell:
        rows = importlib.import_module(f"cumulo.bench.{module}").measure(*arguments, tell)
    finish(title, rows, json_file)


@app.command(epilog="Example: [bold]cumulo bench engine --json engine.json[/bold]")
def engine(
    model: options.ModelArgument = None,
    against: str = typer.Option(
        "", help="Also measure these in turns with Cumulo: transformers, llama.cpp or both."
    ),
    threads: options.Threads = None,
    rounds: Rounds = 5,
    json_file: options.JsonOption = None,
) -> None:
    """Measure decode and prefill speed, also against other engines."""
    from cumulo.bench.engine import RIVALS

    threads = options.engine_config(threads=threads).threads or available_cores()
    figures = model, names_in(against, "--against", RIVALS), threads, rounds
    measure("engine", f"engine, {threads} threads", json_file, *figures, progress=loading(lines=True))


@app.command(epilog="Example: [bold]cumulo bench scheduler[/bold]")
def scheduler(
    repeats: Rounds = 5,
    json_file: options.JsonOption = None,
) -> None:
    """Measure the time the scheduler needs per step on one core, also with a long queue."""
    measure("scheduler", "scheduler, one core", json_file, repeats)


@app.command(epilog="Example: [bold]cumulo bench overhead --json serving.json[/bold]")
def overhead(
    model: options.ModelArgument = None,
    threads: options.Threads = None,
    rounds: Rounds = 5,
    requests: int = typer.Option(32, min=16, help="Requests per round; 16 run at the same time."),
    output_tokens: str = typer.Option(
        "uniform:64-128", "--output", help="Answer length in tokens, for example 64 or uniform:64-128."
    ),
    first_tokens: int = typer.Option(40, min=1, help="Number of single requests for measuring TTFT."),
    json_file: options.JsonOption = None,
) -> None:
    """Measure what the HTTP server adds to the engine: share of throughput kept, and time added to TTFT."""
    lengths = parse_lengths(output_tokens, "--output")
    threads = options.engine_config(threads=threads).threads or available_cores()
    figures = model, threads, rounds, requests, lengths, first_tokens
    measure("overhead", f"serving, {threads} threads", json_file, *figures, progress=loading(lines=True))


@app.command(epilog="Example: [bold]cumulo bench kernels[/bold]")
def kernels(
    only: str = typer.Option(
        "", help="GPU only: measure operations whose names contain one of these, for example moe,sample."
    ),
    tune: bool = typer.Option(
        False,
        "--tune",
        help="GPU only: time the candidates for each shape instead, and keep the table of winners that the "
        "decoder loads on such a GPU. This takes many minutes.",
    ),
    json_file: options.JsonOption = None,
) -> None:
    """Measure each kernel against the limits of the device (the GPU if there is one) and against other kernels."""
    with working("kernels") as tell:
        import torch

        if torch.cuda.is_available():
            words = names_in(only)
            if tune:
                from cumulo.bench.gpu.tune import tune_all

                tune_all(tell, words)
            from cumulo.bench.gpu import report as gpu_report

            rows = gpu_report.rows(words, tell)
            title = f"kernels, {torch.cuda.get_device_name()}"
        else:
            from cumulo.bench import cpu_kernels as kernel_bench

            rows, title = kernel_bench.rows(), "kernels"
    finish(title, rows, json_file)


@app.command(epilog="Example: [bold]cumulo bench guided --steps 60[/bold]")
def guided(
    model: options.ModelArgument = None,
    steps: int = typer.Option(200, min=20, help="Number of steps to time with guides, and as many without."),
    threads: options.Threads = None,
    json_file: options.JsonOption = None,
) -> None:
    """Measure what the masks of guides add to a step of 16 sequences."""
    config = options.engine_config(threads=threads, max_running=16, kv_memory_gib=0.5)
    title = "guided decoding, 16 sequences"
    measure("guided", title, json_file, model, config, steps, progress=loading(lines=True))


@app.command(epilog="Example: [bold]cumulo bench speculate --prompts 16 --new-tokens 64[/bold]")
def speculate(
    model: options.ModelArgument = None,
    speculate: str = typer.Option("ngram", help="What drafts, as in `cumulo serve --speculate`."),
    threads: options.Threads = None,
    prompts: int = typer.Option(48, min=1, help="Number of prompts of each workload."),
    new_tokens: int = typer.Option(128, min=2, help="Maximum number of tokens per answer."),
    batches: str = typer.Option("1,16", help="Requests at the same time, separated by commas."),
    json_file: options.JsonOption = None,
) -> None:
    """Measure speculation: tokens per second with and without drafts, acceptance, and that answers are equal."""
    sizes = _numbers(batches)
    measure("speculate", "speculation", json_file, model, speculate, threads, prompts, new_tokens, sizes)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise CumuloError(f"expected whole numbers separated by commas, got {text!r}") from None


@app.command(
    epilog="Example: [bold]cumulo bench collectives --ranks 2 --sizes 65536 --rounds 5 --profile profile.json"
    "[/bold]"
)
def collectives(
    ranks: int = typer.Option(2, min=2, help="Number of processes."),
    sizes: str = typer.Option("65536,1048576,67108864", help="Message sizes in bytes, separated by commas."),
    algorithms: str = typer.Option(
        "ring,recursive-doubling,halving-doubling,two-shot,one-shot,tree",
        help="All-reduce algorithms to measure, separated by commas.",
    ),
    transport: str = typer.Option("shm", help="shm or torch."),
    rounds: Rounds = 9,
    profile: Path | None = typer.Option(
        None, help="Also write a profile for `cumulo collective tune --profile`."
    ),
    json_file: options.JsonOption = None,
) -> None:
    """Measure all-reduce schedules on processes of this machine, in turns with gloo."""
    title, names = f"collectives, {ranks} ranks over {transport}", names_in(algorithms)
    figures = ranks, _numbers(sizes), names, transport, rounds, profile
    measure("collectives", title, json_file, *figures)


@dataclass(frozen=True, kw_only=True)
class QualityOptions:
    """Names that QualityConfig has, too, are its fields."""

    model: options.ModelArgument = None
    methods: str = option(
        "Methods to quantize with: rtn, awq, gptq, int8, fp8; separated by commas.", "rtn,awq,gptq,int8,fp8"
    )
    folder: list[Path] = option(
        "Also measure this quantized folder. Can be given more than once.", (), metavar="DIR"
    )
    bits: int = option("Bits per weight for rtn, awq and gptq.", 4)
    group: int | None = option("Columns that share a scale. Default: as for `cumulo quantize`.", None)
    calibration: Path | None = option(
        "Calibration text of awq and gptq. Default: as for `cumulo quantize`.", None
    )
    calibration_sequences: int = option("Number of calibration sequences.", 64, min=1)
    text: Path | None = option(
        "Held-out text. Default: the part of the Python reference that is not calibrated with.", None
    )
    sequences: int = option("Number of sequences of the text to read.", 16, min=1)
    length: int = option("Tokens per sequence.", 256, min=16)
    rounds: int = option("Number of measurements of speed.", 3, min=1)
    plot: Path | None = option("Also draw KL over size as SVG.", None)
    threads: options.Threads = None
    json_file: options.JsonOption = None


@app.command(epilog="Example: [bold]cumulo bench quality --methods rtn --sequences 2 --length 64[/bold]")
@takes_options
def quality(chosen: QualityOptions) -> None:
    """Quantize a model by every method and compare perplexity, KL, top-1, speed and memory with 16 bits."""
    options.engine_config(threads=chosen.threads)
    with loading(lines=True) as show:
        from cumulo.bench.quantised import QualityConfig, measure
        from cumulo.quant.decide.recipe import METHODS
        from cumulo.quant.play.run import Calibration

        told = vars(chosen) | {
            "methods": tuple(names_in(chosen.methods, "--methods", METHODS)),
            "folders": tuple(chosen.folder),
            "calibration": Calibration(chosen.calibration, chosen.calibration_sequences),
        }
        config = QualityConfig(**{one.name: told[one.name] for one in fields(QualityConfig)})
        found = measure(chosen.model, config, show)
    print_figures(found, chosen.plot, chosen.json_file)


_QUALITY = (
    RunFigure("perplexity", lambda one: one.perplexity, "", "lower", "perplexity"),
    RunFigure("mean KL", lambda one: one.kl, "nats", "lower", "KL, nats", "{:.3g}"),
    RunFigure("top-1 agreement", lambda one: 100 * one.agreement, "%", heading="top-1", shown="{:.1f}%"),
    RunFigure("weights", lambda one: one.weight_bytes, "B", "lower", "weights"),
    RunFigure("decode", lambda one: one.decode_tok_s, "tok/s", heading="decode"),
    RunFigure(
        "decode, relative to 16 bits",
        lambda one: one.relative_speed,
        "",
        heading="over 16 bits",
        shown="{:.2f}x",
    ),
)


def print_figures(found: "Sequence[Figures]", plot: Path | None, json_file: Path | None) -> None:
    """Exit code 1 where a calibrated method is worse than rounding to nearest."""
    from cumulo.bench.quantised import chart, growth_rows

    named, judged = [(one.name, one) for one in found], growth_rows(found)
    rows = [row for name, one in named for row in figure_rows(name, one, _QUALITY)]
    present([*rows, *judged], json_file, figure_table("", named, _QUALITY, "quality against 16 bits"))
    save(plot, lambda: chart_file(chart(found)), "chart")
    for row in judged:
        if not row.ok:
            note(f"{row.name}: {row.value:.2f}, must be at most {row.must:g}")
    if not all(row.ok for row in judged):
        raise typer.Exit(1)

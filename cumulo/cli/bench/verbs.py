"""`cumulo bench VERB`: measurements next to the values they must reach, as a table and as JSON."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from cumulo.base import report
from cumulo.base.chart import chart_file
from cumulo.base.report import available_cores
from cumulo.cli.bench import serve as bench_serve
from cumulo.cli.shared import options
from cumulo.cli.shared.figures import RunFigure, figure_table
from cumulo.cli.shared.terminal import err, finish, loading, note, only_json, out, save, warn_if_busy, working
from cumulo.errors import CumuloError
from cumulo.load.prompts import parse_lengths

if TYPE_CHECKING:
    from cumulo.bench.quantised import Figures

app = typer.Typer()
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
    rounds: int = typer.Option(5, min=1, help="Number of measurements."),
    quality: bool = typer.Option(
        True, help="Also compare the outputs with the model dequantized to float32."
    ),
    json_file: options.JsonOption = None,
) -> None:
    """Measure decode and prefill speed, also against other engines, and the accuracy of the fast path."""
    from cumulo.bench import engine as bench_engine

    config = options.engine_config(threads=threads)
    threads = config.threads or available_cores()
    rivals = bench_engine.parse_rivals(against)
    warn_if_busy()
    with loading(lines=True) as show:
        rows = bench_engine.measure(model, rivals, threads, rounds, show)
        if quality:
            from cumulo.bench import quality as bench_quality

            rows += bench_quality.measure(model, threads, show)
    finish(f"engine, {threads} threads", rows, json_file)


@app.command(epilog="Example: [bold]cumulo bench scheduler[/bold]")
def scheduler(
    repeats: int = typer.Option(5, min=1, help="Number of measurements."),
    json_file: options.JsonOption = None,
) -> None:
    """Measure the time the scheduler needs per step on one core, also with a long queue."""
    measure("scheduler", "scheduler, one core", json_file, repeats)


@app.command(epilog="Example: [bold]cumulo bench checkpoint --mebibytes 512[/bold]")
def checkpoint(
    mebibytes: int = typer.Option(1024, min=16, help="Size of the training state, in MiB."),
    repeats: int = typer.Option(3, min=1, help="Number of measurements."),
    folder: Path | None = typer.Option(
        None, help="Folder on the disk to measure. Default: the folder for temporary files."
    ),
    json_file: options.JsonOption = None,
) -> None:
    """Measure how long an asynchronous checkpoint stops training, next to a synchronous one."""
    measure("checkpoint", "checkpoints, one process", json_file, mebibytes, repeats, folder)


@app.command(epilog="Example: [bold]cumulo bench overhead --json serving.json[/bold]")
def overhead(
    model: options.ModelArgument = None,
    threads: options.Threads = None,
    rounds: int = typer.Option(5, min=1, help="Number of measurements of both sides."),
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
            words = [word for word in only.split(",") if word]
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


@app.command(epilog="Example: [bold]cumulo bench quality --methods rtn --sequences 2 --length 64[/bold]")
def quality(
    model: options.ModelArgument = None,
    methods: str = typer.Option(
        "rtn,awq,gptq,int8,fp8",
        help="Methods to quantize with: rtn, awq, gptq, int8, fp8; separated by commas.",
    ),
    folder: list[Path] | None = typer.Option(
        None, help="Also measure this quantized folder. Can be given more than once."
    ),
    bits: int = typer.Option(4, help="Bits per weight for rtn, awq and gptq."),
    group: int | None = typer.Option(
        None, help="Columns that share a scale. Default: as for `cumulo quantize`."
    ),
    calibration: Path | None = typer.Option(
        None, help="Calibration text of awq and gptq. Default: as for `cumulo quantize`."
    ),
    calibration_sequences: int = typer.Option(64, min=1, help="Number of calibration sequences."),
    text: Path | None = typer.Option(
        None, help="Held-out text. Default: the part of the Python reference that is not calibrated with."
    ),
    sequences: int = typer.Option(16, min=1, help="Number of sequences of the text to read."),
    length: int = typer.Option(256, min=16, help="Tokens per sequence."),
    rounds: int = typer.Option(3, min=1, help="Number of measurements of speed."),
    plot: Path | None = typer.Option(None, help="Also draw KL over size as SVG."),
    threads: options.Threads = None,
    json_file: options.JsonOption = None,
) -> None:
    """Quantize a model by every method and compare perplexity, KL, top-1, speed and memory with 16 bits."""
    options.engine_config(threads=threads)
    with loading(lines=True) as show:
        from cumulo.bench import quantised as bench_quantised
        from cumulo.quant.play.run import Calibration

        config = bench_quantised.QualityConfig(
            bench_quantised.parse_methods(methods),
            tuple(folder or ()),
            bits,
            group,
            Calibration(calibration, calibration_sequences),
            text,
            sequences,
            length,
            rounds,
            threads,
        )
        found = bench_quantised.measure(model, config, show)
    print_figures(found, plot, json_file)


_QUALITY = (
    RunFigure("", lambda one: one.perplexity, heading="perplexity"),
    RunFigure("", lambda one: one.kl, heading="mean KL, nats"),
    RunFigure("", lambda one: 100 * one.agreement, heading="top-1", shown="{:.1f}%"),
    RunFigure("", lambda one: one.weight_bytes, "B", heading="weights"),
    RunFigure("", lambda one: one.decode_tok_s, "tok/s", heading="decode"),
    RunFigure("", lambda one: one.relative_speed, heading="over 16 bits", shown="{:.2f}x"),
)


def print_figures(found: "Sequence[Figures]", plot: Path | None, json_file: Path | None) -> None:
    """Exit code 1 where a calibrated method is worse than rounding to nearest."""
    from cumulo.bench.quantised import chart, rows

    console = err if only_json(json_file) else out
    console.print(figure_table("", [(one.name, one) for one in found], _QUALITY, "quality against 16 bits"))
    result = rows(found)
    failed = [row for row in result if not row.ok]
    for row in failed:
        note(f"{row.name}: {row.value:.2f}, must be at most {row.must:g}")
    save(plot, lambda: chart_file(chart(found)), "chart")
    report.write_json(json_file, result)
    if failed:
        raise typer.Exit(1)

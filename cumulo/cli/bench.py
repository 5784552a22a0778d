"""`cumulo bench VERB`: figures beside what they must reach, as table and as JSON."""

from pathlib import Path
from typing import Annotated

import typer

from cumulo.cli import bench_serve, options

app = typer.Typer(
    help="Measure: every figure beside what it must reach.", no_args_is_help=True, rich_markup_mode="rich"
)
app.command("serve", epilog=bench_serve.EXAMPLE)(bench_serve.serve)


@app.command(epilog="Example: [bold]cumulo bench engine --against transformers,llama.cpp[/bold]")
def engine(
    model: options.ModelArgument = None,
    against: Annotated[
        str, typer.Option(help="Rivals measured in turns with Cumulo: transformers, llama.cpp or both.")
    ] = "",
    threads: options.Threads = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 5,
    quality: Annotated[bool, typer.Option(help="Also compare with the file dequantised to float32.")] = True,
    json_file: options.JsonOption = None,
) -> None:
    """Decode and prefill speed, alone or against rivals, and how true the fast path is to the file."""
    from cumulo.cli import bench_engine
    from cumulo.cli.report import available_cores
    from cumulo.cli.terminal import loading

    config = options.engine_config(threads=threads)
    threads = config.threads or available_cores()
    rivals = bench_engine.parse_rivals(against)
    _warn_if_busy()
    with loading(lines=True) as show:
        rows = bench_engine.measure(model, rivals, threads, rounds, show)
        if quality:
            from cumulo.cli import bench_quality

            rows += bench_quality.measure(model, threads, show)
    _finish(f"engine, {threads} threads", rows, json_file)


@app.command(epilog="Example: [bold]cumulo bench scheduler[/bold]")
def scheduler(
    repeats: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 5,
    json_file: options.JsonOption = None,
) -> None:
    """What planning a step costs on one core, and what a long queue adds."""
    from cumulo.cli import bench_scheduler
    from cumulo.cli.terminal import working

    with working("scheduler") as tell:
        rows = bench_scheduler.measure(repeats, tell)
    _finish("scheduler, one core", rows, json_file)


@app.command(epilog="Example: [bold]cumulo bench checkpoint --mebibytes 512[/bold]")
def checkpoint(
    mebibytes: Annotated[int, typer.Option(min=16, help="Size of the state.")] = 1024,
    repeats: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 3,
    folder: Annotated[Path | None, typer.Option(help="On which disk; none: that of temporary files.")] = None,
    json_file: options.JsonOption = None,
) -> None:
    """How long an asynchronous checkpoint holds training up, beside one that is waited for."""
    from cumulo.cli import bench_checkpoint
    from cumulo.cli.terminal import working

    with working("checkpoints") as tell:
        rows = bench_checkpoint.measure(mebibytes, repeats, folder, tell)
    _finish("checkpoints, one process", rows, json_file)


@app.command(epilog="Example: [bold]cumulo bench data[/bold]")
def data(
    repeats: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 3,
    json_file: options.JsonOption = None,
) -> None:
    """How fast training batches are read from a memory-mapped dataset, on one core."""
    from cumulo.cli import bench_data
    from cumulo.cli.terminal import working

    with working("data") as tell:
        rows = bench_data.measure(repeats, tell)
    _finish("data, one core", rows, json_file)


@app.command(epilog="Example: [bold]cumulo bench ddp[/bold]")
def ddp(
    processes: Annotated[int, typer.Option(min=2, help="How many train together.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="How often both sides are measured.")] = 7,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a side's turn.")] = 4,
    json_file: options.JsonOption = None,
) -> None:
    """Data-parallel training steps of several processes over gloo, against torch's DistributedDataParallel."""
    from cumulo.cli import bench_ddp
    from cumulo.cli.terminal import working

    _warn_if_busy()
    with working("ddp") as tell:
        rows = bench_ddp.measure(processes, rounds, steps, tell)
    _finish(f"data parallel, {processes} processes", rows, json_file)


@app.command(epilog="Example: [bold]cumulo bench overhead --json serving.json[/bold]")
def overhead(
    model: options.ModelArgument = None,
    threads: options.Threads = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often both sides are measured.")] = 5,
    requests: Annotated[int, typer.Option(min=16, help="Conversations per round, 16 at once.")] = 32,
    output_tokens: Annotated[
        str, typer.Option("--output", help="Tokens of an answer: 64, uniform:64-128, ...")
    ] = "uniform:64-128",
    first_tokens: Annotated[
        int, typer.Option(min=1, help="Requests made one at a time, for their first token.")
    ] = 40,
    json_file: options.JsonOption = None,
) -> None:
    """What the server costs over the engine alone: throughput kept, and time added to the first token."""
    from cumulo.cli import bench_overhead
    from cumulo.cli.report import available_cores
    from cumulo.cli.terminal import loading
    from cumulo.serve.load.lengths import parse_lengths

    lengths = parse_lengths(output_tokens, "--output")
    threads = options.engine_config(threads=threads).threads or available_cores()
    _warn_if_busy()
    with loading(lines=True) as show:
        rows = bench_overhead.measure(model, threads, rounds, requests, lengths, first_tokens, show)
    _finish(f"serving, {threads} threads", rows, json_file)


@app.command(epilog="Example: [bold]cumulo bench kernels[/bold]")
def kernels(
    only: Annotated[
        str, typer.Option(help="On a GPU: parts of operations' names, separated by commas: moe,sample.")
    ] = "",
    json_file: options.JsonOption = None,
) -> None:
    """Each operation's kernels against the machine's ceilings and their rivals: a GPU's where there is one."""
    from cumulo.cli.report import Row
    from cumulo.cli.terminal import working

    with working("kernels") as tell:
        import torch

        if torch.cuda.is_available():
            from cumulo.kernels.cuda import bench as gpu_bench

            words = [word for word in only.split(",") if word]
            rows = [Row(**row) for row in gpu_bench.rows(words, tell)]
            title = f"kernels, {torch.cuda.get_device_name()}"
        else:
            from cumulo.kernels import bench as kernel_bench

            rows, title = [Row(**row) for row in kernel_bench.rows()], "kernels"
    _finish(title, rows, json_file)


@app.command(epilog="Example: [bold]cumulo bench guided --schemas 24 --steps 60[/bold]")
def guided(
    model: options.ModelArgument = None,
    schemas: Annotated[
        int, typer.Option(min=1, help="How many of the JSON Schema Test Suite's schemas are asked for.")
    ] = 200,
    steps: Annotated[int, typer.Option(min=20, help="Steps with guides and without, in turn.")] = 200,
    seed: Annotated[int, typer.Option(help="Which schemas are drawn.")] = 1,
    threads: options.Threads = None,
    json_file: options.JsonOption = None,
) -> None:
    """Whether every guided answer fits its schema, and what the masks add to a step of 16 sequences."""
    from cumulo.cli.terminal import loading

    config = options.engine_config(threads=threads, max_running=16, kv_memory_gib=0.5)
    with loading(lines=True) as show:
        from cumulo.cli import bench_guided

        rows = bench_guided.measure(model, config, schemas, steps, seed, show)
    _finish("guided decoding, 16 sequences", rows, json_file)


def _warn_if_busy() -> None:
    """Other programs make every figure worse, and not every side's alike: say so before measuring."""
    import os

    from cumulo.cli.report import available_cores
    from cumulo.cli.terminal import note

    load = os.getloadavg()[0]
    if load > 0.5 * available_cores():
        note(
            f"the machine is busy (load {load:.1f}): figures and ratios will be off; measure when it is idle"
        )


def _finish(title: str, rows: list, json_file: options.JsonOption) -> None:  # type: ignore[type-arg]
    """Show and write the rows; a missed `must` is exit code 1, so that scripts notice."""
    from cumulo.cli import report
    from cumulo.cli.terminal import err, out

    facts = report.machine()
    console = err if str(json_file) == "-" else out
    console.print(report.table(title, rows))
    console.print(f"{facts['cpu']}, {facts['cores']} cores, torch {facts['torch']}", style="dim")
    report.write_json(json_file, rows)
    if not all(row.ok for row in rows):
        raise typer.Exit(1)

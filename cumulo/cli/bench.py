"""`cumulo bench VERB`: measurements next to the values they must reach, as a table and as JSON."""

from pathlib import Path
from typing import Annotated

import typer

from cumulo.cli import bench_serve
from cumulo.cli.shared import options
from cumulo.cli.shared.measured import finish, warn_if_busy

app = typer.Typer(
    help="Measure performance. Reports show every figure next to the value it must reach.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.command("serve", epilog=bench_serve.EXAMPLE)(bench_serve.serve)


@app.command(epilog="Example: [bold]cumulo bench engine --json engine.json[/bold]")
def engine(
    model: options.ModelArgument = None,
    against: Annotated[
        str, typer.Option(help="Also measure these in turns with Cumulo: transformers, llama.cpp or both.")
    ] = "",
    threads: options.Threads = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of measurements.")] = 5,
    quality: Annotated[
        bool, typer.Option(help="Also compare the outputs with the model dequantized to float32.")
    ] = True,
    json_file: options.JsonOption = None,
) -> None:
    """Measure decode and prefill speed, also against other engines, and the accuracy of the fast path."""
    from cumulo.base.report import available_cores
    from cumulo.bench import engine as bench_engine
    from cumulo.cli.shared.terminal import loading

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
    repeats: Annotated[int, typer.Option(min=1, help="Number of measurements.")] = 5,
    json_file: options.JsonOption = None,
) -> None:
    """Measure the time the scheduler needs per step on one core, also with a long queue."""
    from cumulo.bench import scheduler as bench_scheduler
    from cumulo.cli.shared.terminal import working

    with working("scheduler") as tell:
        rows = bench_scheduler.measure(repeats, tell)
    finish("scheduler, one core", rows, json_file)


@app.command(
    epilog="Example: [bold]cumulo bench cluster --nodes 200 --jobs 1000 --loads 0.9 --policy backfill[/bold]"
)
def cluster(
    policy: Annotated[
        str, typer.Option(help="Policies, separated by commas, as for `cumulo simulate cluster`.")
    ] = "fifo,backfill,conservative,shortest,fair,priority,las,elastic,goodput,attained,backfill+topology",
    loads: Annotated[
        str, typer.Option(help="Loads of the trace: GPU time asked for over GPU time there is.")
    ] = "0.5,0.9,1.2,2",
    workload: Annotated[
        str,
        typer.Option(
            help="Shapes of the trace, separated by commas: usual, shares (of GPUs), cores (and memory), devices "
            "(of eight kinds), tenants (a thousand, with quotas), priorities (a hundred), burst (all jobs wait at "
            "once), wide (gangs on a twentieth of all nodes), unpredicted (durations), failures (of nodes); "
            "several together, such as tenants+burst; or all, one by one."
        ),
    ] = "usual",
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 10_000,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of each node.")] = 8,
    jobs: Annotated[int, typer.Option(min=1, help="Number of jobs.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Random seed of the trace.")] = 0,
    json_file: options.JsonOption = None,
) -> None:
    """Measure what scheduling decisions cost on a large cluster: the whole trace and the slowest decision."""
    from cumulo.base.quantities import parse_number
    from cumulo.cli.shared.terminal import err, loading, out
    from cumulo.cluster.simulate import decision_cost
    from cumulo.cluster.simulate.workloads import WORKLOADS, WorkloadSize

    wanted = [parse_number(part, "--loads", more_than=True) for part in loads.split(",")]
    names = [name.strip() for name in policy.split(",")]
    shapes = [*WORKLOADS] if workload == "all" else [name.strip() for name in workload.split(",")]
    size = WorkloadSize(nodes=nodes, jobs=jobs, load=1.0, gpus_per_node=gpus_per_node, seed=seed)
    console = err if str(json_file) == "-" else out

    def found(one: decision_cost.PolicyCost) -> None:
        """Measuring everything takes an hour: who stops it keeps what was found."""
        console.print(one.line, markup=False, soft_wrap=True)

    with loading(lines=True) as show:
        rows = decision_cost.measure(names, shapes, wanted, size, found, show)
    finish(f"{jobs:,} jobs on {nodes:,} nodes, one core", rows, json_file)


@app.command(epilog="Example: [bold]cumulo bench plans[/bold]")
def plans(
    repeats: Annotated[int, typer.Option(min=1, help="Number of measurements.")] = 5,
    json_file: options.JsonOption = None,
) -> None:
    """Measure the time to send a step's plan to four ranks, through shared memory and over TCP."""
    from cumulo.bench import plan_ring as bench_plan_ring
    from cumulo.cli.shared.terminal import working

    with working("plans") as tell:
        rows = bench_plan_ring.measure(repeats, tell)
    finish("plans to ranks", rows, json_file)


@app.command(epilog="Example: [bold]cumulo bench gateway --streams 200 --minutes 0.5[/bold]")
def gateway(
    streams: Annotated[int, typer.Option(min=1, help="Number of concurrent streams.")] = 1000,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long they are held, in minutes.")] = 10.0,
    json_file: options.JsonOption = None,
) -> None:
    """Measure what a gateway adds to TTFT, and its load and memory under many streams, on one core."""
    from cumulo.bench import gateway as bench_gateway
    from cumulo.cli.shared.terminal import working

    with working("gateway") as tell:
        rows = bench_gateway.measure(streams, minutes, tell)
    finish("gateway, one core", rows, json_file)


@app.command(epilog="Example: [bold]cumulo bench checkpoint --mebibytes 512[/bold]")
def checkpoint(
    mebibytes: Annotated[int, typer.Option(min=16, help="Size of the training state, in MiB.")] = 1024,
    repeats: Annotated[int, typer.Option(min=1, help="Number of measurements.")] = 3,
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder on the disk to measure. Default: the folder for temporary files."),
    ] = None,
    json_file: options.JsonOption = None,
) -> None:
    """Measure how long an asynchronous checkpoint stops training, next to a synchronous one."""
    from cumulo.bench import checkpoint as bench_checkpoint
    from cumulo.cli.shared.terminal import working

    with working("checkpoints") as tell:
        rows = bench_checkpoint.measure(mebibytes, repeats, folder, tell)
    finish("checkpoints, one process", rows, json_file)


@app.command(epilog="Example: [bold]cumulo bench data[/bold]")
def data(
    repeats: Annotated[int, typer.Option(min=1, help="Number of measurements.")] = 3,
    json_file: options.JsonOption = None,
) -> None:
    """Measure how fast training batches are read from a memory-mapped dataset on one core."""
    from cumulo.bench import data as bench_data
    from cumulo.cli.shared.terminal import working

    with working("data") as tell:
        rows = bench_data.measure(repeats, tell)
    finish("data, one core", rows, json_file)


@app.command(epilog="Example: [bold]cumulo bench ddp[/bold]")
def ddp(
    processes: Annotated[int, typer.Option(min=2, help="Number of processes.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Number of measurements of both sides.")] = 7,
    steps: Annotated[int, typer.Option(min=1, help="Steps per measurement.")] = 4,
    json_file: options.JsonOption = None,
) -> None:
    """Measure data-parallel training over gloo against torch's DistributedDataParallel."""
    from cumulo.bench import ddp as bench_ddp
    from cumulo.cli.shared.terminal import working

    warn_if_busy()
    with working("ddp") as tell:
        rows = bench_ddp.measure(processes, rounds, steps, tell)
    finish(f"data parallel, {processes} processes", rows, json_file)


@app.command(epilog="Example: [bold]cumulo bench overhead --json serving.json[/bold]")
def overhead(
    model: options.ModelArgument = None,
    threads: options.Threads = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of measurements of both sides.")] = 5,
    requests: Annotated[int, typer.Option(min=16, help="Requests per round; 16 run at the same time.")] = 32,
    output_tokens: Annotated[
        str, typer.Option("--output", help="Answer length in tokens, for example 64 or uniform:64-128.")
    ] = "uniform:64-128",
    first_tokens: Annotated[
        int, typer.Option(min=1, help="Number of single requests for measuring TTFT.")
    ] = 40,
    json_file: options.JsonOption = None,
) -> None:
    """Measure what the HTTP server adds to the engine: share of throughput kept, and time added to TTFT."""
    from cumulo.base.report import available_cores
    from cumulo.bench import overhead as bench_overhead
    from cumulo.cli.shared.terminal import loading
    from cumulo.load.prompts import parse_lengths

    lengths = parse_lengths(output_tokens, "--output")
    threads = options.engine_config(threads=threads).threads or available_cores()
    warn_if_busy()
    with loading(lines=True) as show:
        rows = bench_overhead.measure(model, threads, rounds, requests, lengths, first_tokens, show)
    finish(f"serving, {threads} threads", rows, json_file)


@app.command(epilog="Example: [bold]cumulo bench kernels[/bold]")
def kernels(
    only: Annotated[
        str,
        typer.Option(
            help="GPU only: measure operations whose names contain one of these, for example moe,sample."
        ),
    ] = "",
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="GPU only: time the candidates for each shape instead, and keep the table of winners that the "
            "decoder loads on such a GPU. This takes many minutes.",
        ),
    ] = False,
    json_file: options.JsonOption = None,
) -> None:
    """Measure each kernel against the limits of the device (the GPU if there is one) and against other kernels."""
    from cumulo.base.report import Row
    from cumulo.cli.shared.terminal import working

    with working("kernels") as tell:
        import torch

        if torch.cuda.is_available():
            words = [word for word in only.split(",") if word]
            if tune:
                from cumulo.bench.gpu.tune import tune_all

                tune_all(tell, words)
            from cumulo.bench.gpu import report as gpu_report

            rows = [Row(**row) for row in gpu_report.rows(words, tell)]
            title = f"kernels, {torch.cuda.get_device_name()}"
        else:
            from cumulo.bench import cpu_kernels as kernel_bench

            rows, title = [Row(**row) for row in kernel_bench.rows()], "kernels"
    finish(title, rows, json_file)


@app.command(epilog="Example: [bold]cumulo bench guided --schemas 24 --steps 60[/bold]")
def guided(
    model: options.ModelArgument = None,
    schemas: Annotated[
        int, typer.Option(min=1, help="Number of schemas to draw from the JSON Schema Test Suite.")
    ] = 200,
    steps: Annotated[
        int, typer.Option(min=20, help="Number of steps to time with guides, and as many without.")
    ] = 200,
    seed: Annotated[int, typer.Option(help="Random seed for drawing the schemas.")] = 1,
    threads: options.Threads = None,
    json_file: options.JsonOption = None,
) -> None:
    """Check that every guided answer fits its schema, and measure what the masks add to a step of 16 sequences."""
    from cumulo.cli.shared.terminal import loading

    config = options.engine_config(threads=threads, max_running=16, kv_memory_gib=0.5)
    with loading(lines=True) as show:
        from cumulo.bench import guided as bench_guided

        rows = bench_guided.measure(model, config, schemas, steps, seed, show)
    finish("guided decoding, 16 sequences", rows, json_file)


@app.command(epilog="Example: [bold]cumulo bench speculate --prompts 16 --new-tokens 64[/bold]")
def speculate(
    model: options.ModelArgument = None,
    speculate: Annotated[str, typer.Option(help="What drafts, as in `cumulo serve --speculate`.")] = "ngram",
    threads: options.Threads = None,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts of each workload.")] = 48,
    new_tokens: Annotated[int, typer.Option(min=2, help="Maximum number of tokens per answer.")] = 128,
    batches: Annotated[str, typer.Option(help="Requests at the same time, separated by commas.")] = "1,16",
    lengths: Annotated[
        str, typer.Option(help="Draft lengths to measure one by one, separated by commas; empty: none.")
    ] = "1,3,5,7,11,15",
    json_file: options.JsonOption = None,
) -> None:
    """Measure speculation: tokens per second with and without drafts, acceptance, and that answers are equal."""
    from cumulo.bench import speculate as bench_speculate
    from cumulo.cli.shared.terminal import working

    warn_if_busy()
    with working("speculation") as tell:
        rows = bench_speculate.measure(
            model, speculate, threads, prompts, new_tokens, _numbers(batches), _numbers(lengths), tell
        )
    finish("speculation", rows, json_file)


@app.command(epilog="Example: [bold]cumulo bench lora --rows 8 --adapters 4 --rounds 3[/bold]")
def lora(
    model: options.ModelArgument = None,
    rows: Annotated[int, typer.Option(min=1, help="Sequences in the step.")] = 64,
    adapters: Annotated[int, typer.Option(min=1, help="Adapters, interleaved over the rows.")] = 32,
    rank: Annotated[int, typer.Option(min=1, help="Rank of every adapter.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Number of measurements.")] = 15,
    threads: options.Threads = None,
    json_file: options.JsonOption = None,
) -> None:
    """Measure what low-rank adapters add to a step: none, one and many in one batch, as ratios."""
    from cumulo.bench import lora as bench_lora
    from cumulo.cli.shared.terminal import working

    warn_if_busy()
    config = options.engine_config(threads=threads)
    with working("adapters") as tell:
        found = bench_lora.measure(model, config, rows, adapters, rank, rounds, tell)
    finish("adapters", found, json_file)


def _numbers(text: str) -> list[int]:
    from cumulo.errors import CumuloError

    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise CumuloError(f"expected whole numbers separated by commas, got {text!r}") from None


@app.command(epilog="Example: [bold]cumulo bench quality --methods rtn --sequences 2 --length 64[/bold]")
def quality(
    model: options.ModelArgument = None,
    methods: Annotated[
        str, typer.Option(help="Methods to quantize with: rtn, awq, gptq, int8, fp8; separated by commas.")
    ] = "rtn,awq,gptq,int8,fp8",
    folder: Annotated[
        list[Path] | None,
        typer.Option(help="Also measure this quantized folder. Can be given more than once."),
    ] = None,
    bits: Annotated[int, typer.Option(help="Bits per weight for rtn, awq and gptq.")] = 4,
    group: Annotated[
        int | None, typer.Option(help="Columns that share a scale. Default: as for `cumulo quantize`.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration text of awq and gptq. Default: as for `cumulo quantize`.")
    ] = None,
    calibration_sequences: Annotated[int, typer.Option(min=1, help="Number of calibration sequences.")] = 64,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Held-out text. Default: the part of the Python reference that is not calibrated with."
        ),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Number of sequences of the text to read.")] = 16,
    length: Annotated[int, typer.Option(min=16, help="Tokens per sequence.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Number of measurements of speed.")] = 3,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw KL over size as SVG.")] = None,
    threads: options.Threads = None,
    json_file: options.JsonOption = None,
) -> None:
    """Quantize a model by every method and compare perplexity, KL, top-1, speed and memory with 16 bits."""
    from cumulo.cli.shared.terminal import loading
    from cumulo.cli.view.quality import print_figures

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

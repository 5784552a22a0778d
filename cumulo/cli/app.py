"""The typer application: which verbs exist. Importing it must stay quick and free of torch."""

from typing import Annotated

import typer

from cumulo import __version__
from cumulo.cli import (
    bench,
    calibrate,
    chat,
    data,
    doctor,
    explain,
    gateway,
    generate,
    jobs,
    launch,
    plan,
    quantize,
    schedule,
    serve,
    simulate,
    train,
)
from cumulo.cli.cloud import autoscale, kubernetes
from cumulo.cli.cluster import simulate as cluster_simulate
from cumulo.cli.collectives import bench as bench_collectives
from cumulo.cli.collectives import bench_overlap, collective
from cumulo.cli.network import diagnose, lint, topology
from cumulo.cli.network import simulate as simulate_network

app = typer.Typer(
    name="cumulo",
    help="Run, serve, train and plan language models.",
    epilog='Try: [bold]echo "What is the capital of France?" | cumulo chat[/bold]',
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # what is not a CumuloError is our bug: keep the plain traceback
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("chat", epilog=chat.EXAMPLE)(chat.chat)
app.command("generate", epilog=generate.EXAMPLE)(generate.generate)
app.command("serve", epilog=serve.EXAMPLE)(serve.serve)
app.command("gateway", epilog=gateway.EXAMPLE)(gateway.gateway)
app.command("train", epilog=train.EXAMPLE)(train.train)
app.command("quantize", epilog=quantize.EXAMPLE)(quantize.quantize)
app.command("explain", epilog=explain.EXAMPLE)(explain.explain)
app.command("launch", epilog=launch.EXAMPLE)(launch.launch)
app.command("jobs", epilog=jobs.JOBS_EXAMPLE)(jobs.jobs)
app.command("logs", epilog=jobs.LOGS_EXAMPLE)(jobs.logs)
app.command("cancel", epilog=jobs.CANCEL_EXAMPLE)(jobs.cancel)
app.command("doctor", epilog=doctor.EXAMPLE)(doctor.doctor)
app.command("diagnose", epilog=diagnose.EXAMPLE)(diagnose.diagnose)
app.command("topology", epilog=topology.EXAMPLE)(topology.topology)
app.command("schedule", epilog=schedule.EXAMPLE)(schedule.schedule)
app.command("calibrate", epilog=calibrate.EXAMPLE)(calibrate.calibrate)
app.add_typer(bench.app, name="bench")
app.add_typer(collective.app, name="collective")
app.add_typer(data.app, name="data")
app.add_typer(kubernetes.app, name="kubernetes")
app.add_typer(lint.app, name="network")
app.add_typer(plan.app, name="plan")
app.add_typer(simulate.app, name="simulate")
simulate.app.command("autoscale", epilog=autoscale.EXAMPLE)(autoscale.autoscale)
bench.app.command("collectives", epilog=bench_collectives.EXAMPLE)(bench_collectives.collectives)
bench.app.command("overlap", epilog=bench_overlap.EXAMPLE)(bench_overlap.overlap)
simulate.app.command("cluster", epilog=cluster_simulate.EXAMPLE)(cluster_simulate.cluster)
simulate.app.command("network", epilog=simulate_network.EXAMPLE)(simulate_network.network)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"cumulo {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Run, serve, train and plan language models."""

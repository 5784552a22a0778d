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

# The panels of `cumulo --help`.
_RUN = "Run and serve"
_TRAIN = "Train and quantize"
_JOBS = "Jobs"
_PLAN = "Plan and simulate"
_NETWORKS = "Networks"
_CHECK = "Check and measure"

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
app.command("chat", epilog=chat.EXAMPLE, rich_help_panel=_RUN)(chat.chat)
app.command("generate", epilog=generate.EXAMPLE, rich_help_panel=_RUN)(generate.generate)
app.command("serve", epilog=serve.EXAMPLE, rich_help_panel=_RUN)(serve.serve)
app.command("gateway", epilog=gateway.EXAMPLE, rich_help_panel=_RUN)(gateway.gateway)
app.command("train", epilog=train.EXAMPLE, rich_help_panel=_TRAIN)(train.train)
app.command("quantize", epilog=quantize.EXAMPLE, rich_help_panel=_TRAIN)(quantize.quantize)
app.command("explain", epilog=explain.EXAMPLE, rich_help_panel=_RUN)(explain.explain)
app.command("launch", epilog=launch.EXAMPLE, rich_help_panel=_JOBS)(launch.launch)
app.command("jobs", epilog=jobs.JOBS_EXAMPLE, rich_help_panel=_JOBS)(jobs.jobs)
app.command("logs", epilog=jobs.LOGS_EXAMPLE, rich_help_panel=_JOBS)(jobs.logs)
app.command("cancel", epilog=jobs.CANCEL_EXAMPLE, rich_help_panel=_JOBS)(jobs.cancel)
app.command("doctor", epilog=doctor.EXAMPLE, rich_help_panel=_CHECK)(doctor.doctor)
app.command("diagnose", epilog=diagnose.EXAMPLE, rich_help_panel=_NETWORKS)(diagnose.diagnose)
app.command("topology", epilog=topology.EXAMPLE, rich_help_panel=_NETWORKS)(topology.topology)
app.command("schedule", epilog=schedule.EXAMPLE, rich_help_panel=_PLAN)(schedule.schedule)
app.command("calibrate", epilog=calibrate.EXAMPLE, rich_help_panel=_PLAN)(calibrate.calibrate)
app.add_typer(bench.app, name="bench", rich_help_panel=_CHECK)
app.add_typer(collective.app, name="collective", rich_help_panel=_NETWORKS)
app.add_typer(data.app, name="data", rich_help_panel=_TRAIN)
app.add_typer(kubernetes.app, name="kubernetes", rich_help_panel=_JOBS)
app.add_typer(lint.app, name="network", rich_help_panel=_NETWORKS)
app.add_typer(plan.app, name="plan", rich_help_panel=_PLAN)
app.add_typer(simulate.app, name="simulate", rich_help_panel=_PLAN)
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

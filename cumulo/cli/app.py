"""The typer application: which verbs exist. Importing it must stay quick and free of torch."""

import typer

from cumulo import __version__
from cumulo.cli import (
    bench,
    calibrate,
    chat,
    collective,
    data,
    diagnose,
    doctor,
    explain,
    gateway,
    generate,
    jobs,
    kubernetes,
    launch,
    network_lint,
    plan,
    quantize,
    schedule,
    serve,
    simulation,
    topology,
    train,
)

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
for verb, example, panel in (
    (chat.chat, chat.EXAMPLE, _RUN),
    (generate.generate, generate.EXAMPLE, _RUN),
    (serve.serve, serve.EXAMPLE, _RUN),
    (gateway.gateway, gateway.EXAMPLE, _RUN),
    (train.train, train.EXAMPLE, _TRAIN),
    (quantize.quantize, quantize.EXAMPLE, _TRAIN),
    (explain.explain, explain.EXAMPLE, _RUN),
    (launch.launch, launch.EXAMPLE, _JOBS),
    (jobs.jobs, jobs.JOBS_EXAMPLE, _JOBS),
    (jobs.logs, jobs.LOGS_EXAMPLE, _JOBS),
    (jobs.cancel, jobs.CANCEL_EXAMPLE, _JOBS),
    (doctor.doctor, doctor.EXAMPLE, _CHECK),
    (diagnose.diagnose, diagnose.EXAMPLE, _NETWORKS),
    (topology.topology, topology.EXAMPLE, _NETWORKS),
    (schedule.schedule, schedule.EXAMPLE, _PLAN),
    (calibrate.calibrate, calibrate.EXAMPLE, _PLAN),
):
    app.command(verb.__name__, epilog=example, rich_help_panel=panel)(verb)
app.add_typer(bench.app, name="bench", rich_help_panel=_CHECK)
app.add_typer(collective.app, name="collective", rich_help_panel=_NETWORKS)
app.add_typer(data.app, name="data", rich_help_panel=_TRAIN)
app.add_typer(kubernetes.app, name="kubernetes", rich_help_panel=_JOBS)
app.add_typer(network_lint.app, name="network", rich_help_panel=_NETWORKS)
app.add_typer(plan.app, name="plan", rich_help_panel=_PLAN)
app.add_typer(simulation.app, name="simulate", rich_help_panel=_PLAN)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"cumulo {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Run, serve, train and plan language models."""

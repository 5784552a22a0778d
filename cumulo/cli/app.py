"""The typer application: which verbs exist. Importing it must stay quick and free of torch."""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from cumulo import __version__
from cumulo.base.nearest import nearest
from cumulo.cli import (
    calibrate,
    chat,
    diagnose,
    doctor,
    explain,
    gateway,
    generate,
    jobs,
    launch,
    models,
    python,
    quantize,
    schedule,
    serve,
    topology,
    train,
)

# The panels of `cumulo --help`, in this order.
_RUN = "Run and serve"
_MODELS = "Models"
_TRAIN = "Train and quantize"
_JOBS = "Jobs"
_PLAN = "Plan and simulate"
_NETWORKS = "Networks"
_CHECK = "Check and measure"
_VERBS = {
    _RUN: (chat.chat, generate.generate, serve.serve, gateway.gateway, explain.explain, python.python),
    _MODELS: (models.pull, models.list_, models.show, models.remove),
    _TRAIN: (train.train, quantize.quantize),
    _JOBS: (launch.launch, jobs.jobs, jobs.logs, jobs.cancel),
    _CHECK: (doctor.doctor,),
    _NETWORKS: (diagnose.diagnose, topology.topology),
    _PLAN: (schedule.schedule, calibrate.calibrate),
}
# Verbs with verbs of their own: the panel, and what its help says.
_GROUPS = {
    "bench": (_CHECK, "Measure performance. Reports show every figure next to the value it must reach."),
    "check": (_CHECK, "Check what jobs run on: whether this node is as fast and as right as it should be."),
    "compile": (_CHECK, "Show every stage of a GPU kernel, and compile models with reasons."),
    "collective": (
        _NETWORKS,
        "Show, check, run and choose the schedules of collectives: who sends what to whom.",
    ),
    "data": (_TRAIN, "Build and inspect datasets for training."),
    "kubernetes": (_JOBS, "Check Kubernetes manifests without a cluster, and scale services with KEDA."),
    "network": (_NETWORKS, "Check the configuration of a network: routing, PFC, ECN, NCCL variables."),
    "plan": (_PLAN, "Plan before you run: memory, speed, parallelism and cost."),
    "simulate": (_PLAN, "Simulate a deployment in virtual time, with the real scheduler."),
}


# Groups whose verbs are modules of their own. `simulate/` is the name of folders that decide.
_FOLDERS = {"compile": "compile", "plan": "plan", "simulate": "simulation"}
_VERBS_OF = {
    "compile": ("model", "stages", "kernels", "onnx"),
    "plan": ("train", "serve", "cluster", "validate", "catalog", "why"),
    "simulate": ("serve", "autoscale", "cluster", "network"),
}


def application(words: Sequence[str] | None = None) -> typer.Typer:
    """The whole command. With the words that were typed, other groups are only listed, not imported, and so are the
    other verbs of a group."""
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
    app.callback()(_options)
    for panel, verbs in _VERBS.items():
        for verb in verbs:
            module, name = sys.modules[verb.__module__], verb.__name__.rstrip("_")
            example = getattr(module, f"{name.upper()}_EXAMPLE", None) or module.EXAMPLE
            settings = getattr(module, "SETTINGS", None)
            app.command(name, epilog=example, rich_help_panel=panel, context_settings=settings)(verb)
    for name, (panel, told) in _GROUPS.items():
        needed = words is None or name in words[:1]
        inner = _group(name, words or ()) if needed else typer.Typer()
        app.add_typer(inner, name=name, help=told, rich_help_panel=panel, no_args_is_help=True)
    return app


def _group(name: str, words: Sequence[str]) -> typer.Typer:
    verbs = _VERBS_OF.get(name)
    if verbs is None:
        found: typer.Typer = importlib.import_module(f"cumulo.cli.{name}").app
        return found
    group = typer.Typer(cls=_ModelFirst if name == "compile" else None)
    for verb in [one for one in verbs if one in words[1:2]] or verbs:
        module = importlib.import_module(f"cumulo.cli.{_FOLDERS[name]}.{verb}")
        group.command(verb, epilog=module.EXAMPLE)(getattr(module, verb))
    return group


class _ModelFirst(TyperGroup):
    """`cumulo compile MODEL --report FILE` is `cumulo compile model MODEL --report FILE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_verb = args[:1] in ([], ["-h"], ["--help"]) or nearest(args[0], self.commands)
        return super().parse_args(ctx, args if is_verb else ["model", *args])


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"cumulo {__version__}")
        raise typer.Exit


def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Run, serve, train and plan language models."""

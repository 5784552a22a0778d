"""`cumulo train`: train a model from a configuration file, or the built-in two-minute run."""

from pathlib import Path
from typing import Annotated

import typer

from cumulo.cli import options

EXAMPLE = "Example: [bold]cumulo train --steps 20 --folder /tmp/first-run[/bold]"


def train(
    config_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG.yaml", help="What to train; none: a small model of Python's own source."
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting: --set optimizer.learning_rate=1e-3. Repeatable."),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Where the run is kept.")] = None,
    steps: Annotated[int | None, typer.Option(help="How many optimizer steps.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the folder's latest good checkpoint.")
    ] = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the configuration in full and end.")
    ] = False,
    explain_layout: Annotated[
        bool, typer.Option("--explain-layout", help="Print which rank stands where, holds what, and end.")
    ] = False,
    verify_layout: Annotated[
        bool,
        typer.Option(
            "--verify-layout",
            help="Prove on the CPU that the layout computes what one process computes, and end.",
        ),
    ] = False,
    json_file: options.JsonOption = None,
) -> None:
    """Train a model. Ctrl-C saves and ends; --resume goes on to the same result as without the break.

    With a layout of several ranks it starts that many processes, and starts them again when one dies. On several
    machines: torchrun --nnodes 2 --nproc-per-node 8 ... -m cumulo train CONFIG.yaml on each.

    The run's folder then has model/ (for cumulo chat and transformers), checkpoints/, log.csv and loss.svg.
    """
    from cumulo.cli import train_run

    wanted = dict(train_run.parse_change(change) for change in changes or [])
    if folder is not None:
        wanted["folder"] = str(folder)
    if steps is not None:
        wanted["steps"] = str(steps)
    config = train_run.configuration(config_file, wanted, resume)
    if show_config:
        train_run.print_config(config)
        return
    if explain_layout:
        train_run.print_layout(config)
        return
    if verify_layout:
        train_run.print_verdict(config, json_file)
        return
    train_run.run(config, resume, json_file)

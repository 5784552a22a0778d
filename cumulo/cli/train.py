"""`cumulo train`: train a model from a configuration file, or the built-in two-minute run."""

from pathlib import Path
from typing import Annotated

import typer

from cumulo.cli.shared import options

EXAMPLE = "Example: [bold]cumulo train --steps 20 --folder /tmp/first-run[/bold]"


def train(
    config_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG.yaml",
            help="Configuration file. Default: a small model trained on Python's standard library.",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change a setting, for example --set optimizer.learning_rate=1e-3. Can be given more than once.",
        ),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder of the run.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of optimizer steps.")] = None,
    collective: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=ALGORITHM",
            help="Algorithms of collectives between CPU ranks, such as all_reduce=ring, or auto for the tuner's "
            "choice. Default: torch.distributed's.",
        ),
    ] = None,
    collective_profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Choose the algorithms by what `cumulo bench collectives --profile FILE` measured.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the latest valid checkpoint in the folder.")
    ] = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the complete configuration and exit.")
    ] = False,
    explain_layout: Annotated[
        bool, typer.Option("--explain-layout", help="Print the place and the shards of every rank, and exit.")
    ] = False,
    verify_layout: Annotated[
        bool,
        typer.Option(
            "--verify-layout",
            help="Check on the CPU that the layout computes the same result as one process, and exit.",
        ),
    ] = False,
    json_file: options.JsonOption = None,
) -> None:
    """Train a model. Ctrl-C saves a checkpoint and exits; --resume leads to the same result as an unbroken run.

    For a layout of several ranks, it starts one process per rank and restarts them when one dies. For several
    machines, run torchrun --nnodes 2 --nproc-per-node 8 ... -m cumulo train CONFIG.yaml on each.

    A configuration with kind: eagle trains a head that drafts for an existing model (cumulo serve --speculate DIR).

    The folder of the run contains model/ (for cumulo chat and transformers), checkpoints/, log.csv and loss.svg.
    """
    from cumulo.cli import train_run
    from cumulo.cli.shared.terminal import note
    from cumulo.train.head.config import read_head_config
    from cumulo.train.run.configuration import configuration

    wanted = dict(train_run.parse_change(change) for change in changes or [])
    if folder is not None:
        wanted["folder"] = str(folder)
    if steps is not None:
        wanted["steps"] = str(steps)
    if collective is not None:
        wanted["collective"] = collective
    if collective_profile is not None:
        wanted["collective_profile"] = collective_profile
    if (head := read_head_config(config_file, wanted)) is not None:
        from cumulo.cli.train_head import train_head

        train_head(head, json_file)
        return
    config = configuration(config_file, wanted, resume, note)
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

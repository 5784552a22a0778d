"""`cumulo train`: train a model from a configuration file, or the built-in two-minute run."""

from pathlib import Path

import typer

from cumulo.cli.shared import options
from cumulo.cli.shared.terminal import note

EXAMPLE = "Example: [bold]cumulo train --steps 20 --folder /tmp/first-run[/bold]"


def train(
    config_file: Path | None = typer.Argument(
        None,
        metavar="CONFIG.yaml",
        help="Configuration file. Default: a small model trained on Python's standard library.",
    ),
    changes: list[str] | None = typer.Option(
        None,
        "--set",
        help="Change a setting, for example --set optimizer.learning_rate=1e-3. Can be given more than once.",
    ),
    folder: Path | None = typer.Option(None, metavar="DIR", help="Folder of the run."),
    steps: int | None = typer.Option(None, help="Number of optimizer steps."),
    collective: str | None = typer.Option(
        None,
        metavar="NAME=ALGORITHM",
        help="Algorithms of collectives between CPU ranks, such as all_reduce=ring, or auto for the tuner's "
        "choice. Default: torch.distributed's.",
    ),
    collective_profile: str | None = typer.Option(
        None,
        metavar="FILE",
        help="Choose the algorithms by what `cumulo bench collectives --profile FILE` measured.",
    ),
    resume: bool = typer.Option(
        False, "--resume", help="Resume from the latest valid checkpoint in the folder."
    ),
    show_config: bool = typer.Option(
        False, "--show-config", help="Print the complete configuration and exit."
    ),
    explain_layout: bool = typer.Option(
        False, "--explain-layout", help="Print the place and the shards of every rank, and exit."
    ),
    verify_layout: bool = typer.Option(
        False,
        "--verify-layout",
        help="Check on the CPU that the layout computes the same result as one process, and exit.",
    ),
    json_file: options.JsonOption = None,
) -> None:
    """Train a model. Ctrl-C saves a checkpoint and exits; --resume leads to the same result as an unbroken run.

    For a layout of several ranks, it starts one process per rank and restarts them when one dies. For several
    machines, run torchrun --nnodes 2 --nproc-per-node 8 ... -m cumulo train CONFIG.yaml on each.

    A configuration with kind: eagle trains a head that drafts for an existing model (cumulo serve --speculate DIR).

    The folder of the run contains model/ (for cumulo chat and transformers), checkpoints/, log.csv and loss.svg.
    """
    from cumulo.cli import train_run
    from cumulo.train.head.config import read_head_config
    from cumulo.train.run.configuration import configuration

    wanted = dict(train_run.parse_change(change) for change in changes or [])
    named = {
        "folder": folder,
        "steps": steps,
        "collective": collective,
        "collective_profile": collective_profile,
    }
    wanted |= {name: str(value) for name, value in named.items() if value is not None}
    if (head := read_head_config(config_file, wanted)) is not None:
        from cumulo.cli.train_run import train_head

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

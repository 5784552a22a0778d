"""`cumulo bench collectives`: schedules on processes of this machine, in turns with gloo."""

from pathlib import Path

import typer

from cumulo.cli.bench.verbs import measure
from cumulo.cli.shared import options
from cumulo.errors import ConfigError

EXAMPLE = (
    "Example: [bold]cumulo bench collectives --ranks 2 --sizes 65536 --rounds 5 --profile profile.json[/bold]"
)


def collectives(
    ranks: int = typer.Option(2, min=2, help="Number of processes."),
    sizes: str = typer.Option("65536,1048576,67108864", help="Message sizes in bytes, separated by commas."),
    algorithms: str = typer.Option(
        "ring,recursive-doubling,halving-doubling,two-shot,one-shot,tree",
        help="All-reduce algorithms to measure, separated by commas.",
    ),
    transport: str = typer.Option("shm", help="shm or torch."),
    rounds: int = typer.Option(9, min=1, help="Number of measurements of each."),
    profile: Path | None = typer.Option(
        None, help="Also write a profile for `cumulo collective tune --profile`."
    ),
    json_file: options.JsonOption = None,
) -> None:
    """Measure all-reduce schedules on processes of this machine, in turns with gloo."""
    try:
        wanted = [int(size) for size in sizes.split(",")]
    except ValueError:
        raise ConfigError(f"--sizes {sizes}: give numbers of bytes, such as 65536,1048576") from None
    title, names = f"collectives, {ranks} ranks over {transport}", algorithms.split(",")
    measure("collectives", title, json_file, ranks, wanted, names, transport, rounds, profile)

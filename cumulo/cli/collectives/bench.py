"""`cumulo bench collectives`: schedules on processes of this machine, in turns with gloo."""

from pathlib import Path
from typing import Annotated

import typer

from cumulo.cli.shared import options

EXAMPLE = (
    "Example: [bold]cumulo bench collectives --ranks 2 --sizes 65536 --rounds 5 --profile profile.json[/bold]"
)


def collectives(
    ranks: Annotated[int, typer.Option(min=2, help="Number of processes.")] = 2,
    sizes: Annotated[
        str, typer.Option(help="Message sizes in bytes, separated by commas.")
    ] = "65536,1048576,67108864",
    algorithms: Annotated[
        str, typer.Option(help="All-reduce algorithms to measure, separated by commas.")
    ] = "ring,recursive-doubling,halving-doubling,two-shot,one-shot,tree",
    transport: Annotated[str, typer.Option(help="shm, tcp or torch.")] = "shm",
    rounds: Annotated[int, typer.Option(min=1, help="Number of measurements of each.")] = 9,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write a profile for `cumulo collective tune --profile`."),
    ] = None,
    json_file: options.JsonOption = None,
) -> None:
    """Measure all-reduce schedules on processes of this machine, in turns with gloo."""
    from cumulo.bench import collectives as bench_collectives
    from cumulo.cli.shared.measured import finish, warn_if_busy
    from cumulo.cli.shared.terminal import working
    from cumulo.errors import ConfigError

    try:
        wanted = [int(size) for size in sizes.split(",")]
    except ValueError:
        raise ConfigError(f"--sizes {sizes}: give numbers of bytes, such as 65536,1048576") from None
    warn_if_busy()
    with working("collectives") as tell:
        rows = bench_collectives.measure(
            ranks, wanted, algorithms.split(","), transport, rounds, profile, tell
        )
    finish(f"collectives, {ranks} ranks over {transport}", rows, json_file)

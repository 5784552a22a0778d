"""`cumulo bench overlap`: what a pipeline saves by computing pairs of passes at the same time."""

from typing import Annotated

import typer

from cumulo.cli.shared import options

EXAMPLE = "Example: [bold]cumulo bench overlap --ranks 4 --shares 1 --rounds 1[/bold]"


def overlap(
    ranks: Annotated[
        int, typer.Option(min=4, help="Number of processes: 4, 8 or another multiple of 4.")
    ] = 4,
    schedule: Annotated[str, typer.Option(help="dualpipe-v or dualpipe.")] = "dualpipe-v",
    micro_batches: Annotated[
        int | None, typer.Option(help="Micro-batches of a step. Default: four for each stage.")
    ] = None,
    shares: Annotated[
        str,
        typer.Option(
            help="Speeds of the network: the time that a step's exchanges need, over the time that its "
            "computation needs on this machine's cores."
        ),
    ] = "2,4",
    limit: Annotated[
        str,
        typer.Option(
            help="What has this speed: each connection, or the card that a rank's connections share."
        ),
    ] = "connection",
    rounds: Annotated[int, typer.Option(min=1, help="Number of measurements of each.")] = 5,
    json_file: options.JsonOption = None,
) -> None:
    """Measure a training step whose paired passes overlap, next to one whose passes do not, and the simulator.

    A mixture of experts in a pipeline: tokens travel to experts on other processes over TCP, through a network that
    is slower than this host. The simulator knows how many cores the processes share.
    """
    from cumulo.bench import overlap as bench_overlap
    from cumulo.cli.bench import _finish, _warn_if_busy
    from cumulo.cli.shared.terminal import working
    from cumulo.errors import ConfigError

    if limit not in ("connection", "card"):
        raise ConfigError(f"--limit {limit}: give connection or card")
    if schedule not in ("dualpipe-v", "dualpipe") or ranks % 4:
        raise ConfigError(
            f"--schedule {schedule} --ranks {ranks}: give dualpipe-v or dualpipe, and a multiple of 4 processes"
        )
    try:
        wanted = tuple(float(share) for share in shares.split(","))
    except ValueError:
        raise ConfigError(f"--shares {shares}: give numbers, such as 0.5,1,2") from None
    if min(wanted) <= 0:
        raise ConfigError(f"--shares {shares}: every share must be more than 0")
    plan = bench_overlap.OverlapPlan(
        ranks, schedule, micro_batches or 2 * ranks, wanted, limit == "connection", rounds
    )
    _warn_if_busy()
    with working("overlap") as tell:
        rows = bench_overlap.measure(plan, tell)
    _finish(f"overlapped passes, {schedule}, {ranks} processes", rows, json_file)

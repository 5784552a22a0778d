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
        None, metavar="FILE", help="Also write a profile for `cumulo collective tune --profile`."
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


OVERLAP_EXAMPLE = "Example: [bold]cumulo bench overlap --of weights --ranks 2 --shares 2 --rounds 1[/bold]"


def overlap(
    ranks: int = typer.Option(4, min=2, help="Number of processes; with --of passes a multiple of 4."),
    of: str = typer.Option(
        "passes",
        help="passes: pairs of a pipeline (overlap_passes); weights: fsdp_prefetch.",
    ),
    schedule: str = typer.Option("dualpipe-v", help="dualpipe-v or dualpipe."),
    micro_batches: int | None = typer.Option(
        None, help="Micro-batches of a step. Default: as many as processes, and at least 8."
    ),
    shares: str = typer.Option(
        "2,4",
        help="Speeds of the network: the time that a step's exchanges need, over the time that its "
        "computation needs on this machine's cores.",
    ),
    limit: str = typer.Option(
        "connection",
        help="What has this speed: each connection, or the card that a rank's connections share.",
    ),
    rounds: int = typer.Option(2, min=1, help="Number of measurements of each."),
    json_file: options.JsonOption = None,
) -> None:
    """Measure what a training step saves by computing while messages travel, in turns with one that does not.

    Messages really travel between processes, through a network that is slower than this host. Passes are those of
    a mixture of experts in a pipeline. Weights are those of data parallelism with ZeRO 3.
    """
    if of not in ("passes", "weights"):
        raise ConfigError(f"--of {of}: give passes or weights")
    if limit not in ("connection", "card"):
        raise ConfigError(f"--limit {limit}: give connection or card")
    if of == "passes" and (schedule not in ("dualpipe-v", "dualpipe") or ranks % 4):
        raise ConfigError(
            f"--schedule {schedule} --ranks {ranks}: give dualpipe-v or dualpipe, and a multiple of 4 processes"
        )
    try:
        wanted = tuple(float(share) for share in shares.split(","))
    except ValueError:
        raise ConfigError(f"--shares {shares}: give numbers, such as 0.5,1,2") from None
    if min(wanted) <= 0:
        raise ConfigError(f"--shares {shares}: every share must be more than 0")
    from cumulo.bench.overlap import OverlapPlan

    if of == "weights":
        title, plan = f"weights that travel meanwhile, {ranks} processes", OverlapPlan(ranks, wanted, rounds)
    else:
        title = f"overlapped passes, {schedule}, {ranks} processes"
        each = micro_batches or max(8, ranks)
        plan = OverlapPlan(ranks, wanted, rounds, schedule, each, limit == "connection")
    measure("overlap", title, json_file, plan)

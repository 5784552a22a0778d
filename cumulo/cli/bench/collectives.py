"""`cumulo bench collectives`: schedules on processes of this machine, in turns with gloo."""

from pathlib import Path

import typer

from cumulo.cli.shared import options
from cumulo.cli.shared.terminal import finish, warn_if_busy, working
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
    from cumulo.bench import collectives as bench_collectives

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
    a mixture of experts in a pipeline.
    Weights are those of data parallelism with ZeRO 3.
    """
    from cumulo.bench import overlap_passes as bench_overlap

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
    warn_if_busy()
    if of != "passes":
        from cumulo.bench import overlap_order as message_order

        with working("overlap") as tell:
            order = message_order.OrderPlan(ranks, wanted, rounds)
            rows = message_order.measure(order, tell)
        finish(f"{of} that travel meanwhile, {ranks} processes", rows, json_file)
        return
    plan = bench_overlap.OverlapPlan(
        ranks, schedule, micro_batches or max(8, ranks), wanted, limit == "connection", rounds
    )
    with working("overlap") as tell:
        rows = bench_overlap.measure(plan, tell)
    finish(f"overlapped passes, {schedule}, {ranks} processes", rows, json_file)

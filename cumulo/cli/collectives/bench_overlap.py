"""`cumulo bench overlap`: what a pipeline saves by computing pairs of passes at the same time."""

from typing import Annotated

import typer

from cumulo.cli.shared import options

EXAMPLE = "Example: [bold]cumulo bench overlap --of weights --ranks 2 --shares 2 --rounds 1[/bold]"


def overlap(
    ranks: Annotated[
        int, typer.Option(min=2, help="Number of processes; with --of passes a multiple of 4.")
    ] = 4,
    of: Annotated[
        str,
        typer.Option(
            help="passes: pairs of a pipeline (overlap_passes); gradients: gradient_order; weights: fsdp_prefetch."
        ),
    ] = "passes",
    schedule: Annotated[str, typer.Option(help="dualpipe-v or dualpipe.")] = "dualpipe-v",
    micro_batches: Annotated[
        int | None,
        typer.Option(help="Micro-batches of a step. Default: as many as processes, and at least 8."),
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
    rounds: Annotated[int, typer.Option(min=1, help="Number of measurements of each.")] = 2,
    json_file: options.JsonOption = None,
) -> None:
    """Measure what a training step saves by computing while messages travel, in turns with one that does not.

    Messages really travel between processes, over TCP, through a network that is slower than this host. Passes are
    those of a mixture of experts in a pipeline, next to the simulator, which knows how many cores are shared.
    Gradients and weights are those of data parallelism.
    """
    from cumulo.bench import overlap_passes as bench_overlap
    from cumulo.cli.shared.measured import finish, warn_if_busy
    from cumulo.cli.shared.terminal import working
    from cumulo.errors import ConfigError

    if of not in ("passes", "gradients", "weights"):
        raise ConfigError(f"--of {of}: give passes, gradients or weights")
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
            order = message_order.OrderPlan(ranks, of == "weights", wanted, rounds)
            rows = message_order.measure(order, tell)
        finish(f"{of} that travel meanwhile, {ranks} processes", rows, json_file)
        return
    plan = bench_overlap.OverlapPlan(
        ranks, schedule, micro_batches or max(8, ranks), wanted, limit == "connection", rounds
    )
    with working("overlap") as tell:
        rows = bench_overlap.measure(plan, tell)
    finish(f"overlapped passes, {schedule}, {ranks} processes", rows, json_file)

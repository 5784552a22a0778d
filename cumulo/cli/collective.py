"""`cumulo collective`: a collective's schedule shown, proved, run on processes, and chosen."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cumulo.base import report
from cumulo.base.files import write_text_file
from cumulo.base.nearest import did_you_mean
from cumulo.base.quantities import parse_bytes, quantity
from cumulo.cli.shared import options
from cumulo.cli.shared.terminal import marked, note, only_json, out, show_report, working
from cumulo.errors import ConfigError

if TYPE_CHECKING:
    from cumulo.collectives.decide.catalog import CollectiveShape
    from cumulo.collectives.decide.tuner import MachineCosts

app = typer.Typer()
_SHOW = "Example: [bold]cumulo collective show all_reduce ring --ranks 4 --svg ring.svg[/bold]"
_CHECK = "Example: [bold]cumulo collective check all_reduce tree --ranks 13[/bold]"
_RUN = "Example: [bold]cumulo collective run all_reduce ring --ranks 2 --elements 1000[/bold]"
_TUNE = "Example: [bold]cumulo collective tune all_reduce --ranks 64 --device h100-sxm --size 1MiB[/bold]"

Collective = Annotated[
    str,
    typer.Argument(
        metavar="COLLECTIVE",
        help="all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all or barrier.",
    ),
]
Algorithm = Annotated[
    str, typer.Argument(metavar="ALGORITHM", help="Such as ring, tree, two-shot; a wrong name lists them.")
]
Ranks = Annotated[int, typer.Option(min=1, help="Number of ranks.")]
Elements = Annotated[
    int, typer.Option(min=0, help="Elements of the buffer, counted as nccl-tests counts bytes.")
]
NodeSize = Annotated[int, typer.Option(min=1, help="Ranks of one node, for algorithms with two levels.")]
Channels = Annotated[int, typer.Option(min=1, help="Channels that share the buffer.")]
Pieces = Annotated[int, typer.Option(min=1, help="Pieces of a channel's share that follow each other.")]


@app.command(epilog=_SHOW)
def show(
    collective: Collective,
    algorithm: Algorithm,
    ranks: Ranks = 4,
    elements: Elements = 1024,
    node_size: NodeSize = 1,
    channels: Channels = 1,
    pieces: Pieces = 1,
    svg: Path | None = typer.Option(None, help="Draw the schedule into this file (SVG)."),
    json_file: options.JsonOption = None,
) -> None:
    """Show a schedule step by step: who sends which chunk to whom, and what is added."""
    from cumulo.collectives.decide.catalog import make_schedule
    from cumulo.collectives.decide.check import placed_messages
    from cumulo.collectives.decide.schedule import Move
    from cumulo.collectives.draw import collective_svg

    shape = _shape(ranks, elements, node_size, channels, pieces)
    schedule = make_schedule(collective, algorithm, shape)
    by_step: dict[int, list[str]] = {}
    for one in placed_messages(schedule):
        sign = "+" if one.transfer.move is Move.REDUCE else ""
        count = f"…{one.transfer.chunks.stop - 1}" if one.transfer.count > 1 else ""
        by_step.setdefault(one.step, []).append(
            f"{one.sender}→{one.receiver} {sign}{one.transfer.chunk}{count}"
        )
    if svg is not None:
        write_text_file(svg, collective_svg(schedule) + "\n")
        note(f"picture written to {svg}")
    if not only_json(json_file):
        out.print(marked("[bold]{}[/bold]: {} ranks, {} chunks", schedule.name, ranks, len(schedule.sizes)))
        for step, messages in by_step.items():
            most = 12
            rest = f"  … {len(messages) - most} more" if len(messages) > most else ""
            out.print(f"step {step + 1:>3}  {'   '.join(messages[:most])}{rest}")
        out.print(
            "0→1 +2: rank 0 sends chunk 2 to rank 1, which adds it; without +, it is copied", style="dim"
        )
    _report(collective, algorithm, shape, json_file)


@app.command(epilog=_CHECK)
def check(
    collective: Collective,
    algorithm: Algorithm,
    ranks: Ranks = 4,
    elements: Elements = 1024,
    node_size: NodeSize = 1,
    channels: Channels = 1,
    pieces: Pieces = 1,
    json_file: options.JsonOption = None,
) -> None:
    """Prove a schedule: right values on every rank, no deadlock under rendezvous; count steps and bytes."""
    _report(collective, algorithm, _shape(ranks, elements, node_size, channels, pieces), json_file)


def _shape(ranks: int, elements: int, node_size: int, channels: int, pieces: int) -> "CollectiveShape":
    from cumulo.collectives.decide.catalog import CollectiveShape

    return CollectiveShape(ranks, elements, node_size, channels, pieces)


def _report(collective: str, algorithm: str, shape: "CollectiveShape", json_file: Path | None) -> None:
    from cumulo.collectives.decide.catalog import make_schedule
    from cumulo.collectives.decide.check import check_collective
    from cumulo.collectives.decide.play_cost import play_cost

    schedule = make_schedule(collective, algorithm, shape)
    checked = check_collective(schedule)
    played = play_cost(schedule, max(1, shape.node_size))
    rows = [
        report.Row("right on every rank", True, must=True, note="every contribution counted once"),
        report.Row("deadlock", "none", note="even if a send waits for its receive"),
        report.Row("steps", checked.steps, "", "lower", note="one after another"),
        report.Row("messages", checked.messages, "", "lower"),
        report.Row("most sent by a rank", checked.most_sent, "elements", "lower"),
        report.Row("sent by all ranks", checked.elements, "elements", "lower"),
        report.Row("most added by a rank", max(checked.additions_by_rank), "elements", "lower"),
        report.Row("longest way", played.near_hops + played.far_hops, "hops", "lower"),
    ]
    show_report(schedule.name, rows, json_file)


@app.command(epilog=_RUN)
def run(
    collective: Collective,
    algorithm: Algorithm,
    ranks: Ranks = 2,
    elements: Elements = 1 << 16,
    node_size: NodeSize = 1,
    channels: Channels = 1,
    pieces: Pieces = 1,
    dtype: str = typer.Option("float32", help="Any torch dtype: float32, bfloat16, int32, ..."),
    transport: str = typer.Option("shm", help="shm or torch."),
    timeout_s: float = typer.Option(
        60.0, help="How long a rank waits for a message before it names who is missing, in s."
    ),
    json_file: options.JsonOption = None,
) -> None:
    """Run a schedule on processes of this machine, and compare the result bit by bit with its own order."""
    shape = _shape(ranks, elements, node_size, channels, pieces)
    with working(f"{ranks} processes"):
        from cumulo.bench.collectives import run_once

        rows = run_once(collective, algorithm, shape, dtype, transport, timeout_s)
    show_report(f"{algorithm} {collective}, {ranks} processes over {transport}", rows, json_file)
    if not all(row.ok for row in rows):
        raise typer.Exit(1)


@app.command(epilog=_TUNE)
def tune(
    collective: Collective,
    ranks: Ranks = 8,
    device: str = typer.Option("h100-sxm", help="Device, by its name in the catalogue."),
    size: str | None = typer.Option(
        None, help="Also compare the choices for a message of this size, such as 1MiB."
    ),
    profile: Path | None = typer.Option(
        None, help="Choose by what `cumulo bench collectives --profile` measured."
    ),
    json_file: options.JsonOption = None,
) -> None:
    """Choose algorithm, protocol, chunk and channels by size; say why, and where the crossovers are."""
    from cumulo.collectives.decide.measured import read_collective_profile
    from cumulo.collectives.decide.schedule import COLLECTIVES
    from cumulo.collectives.decide.tuner import crossovers
    from cumulo.collectives.decide.tuner import tune as tuned

    if (kind := next((one for one in COLLECTIVES if one == collective), None)) is None:
        raise ConfigError(f"there is no collective {collective!r}{did_you_mean(collective, COLLECTIVES)}")
    rows = []
    if known := read_collective_profile("" if profile is None else str(profile)):
        for power in range(10, 27, 2):
            name, seconds = known.ours(collective, 1 << power, ranks)
            gloo_s = known.times(collective, 1 << power, ranks).get("gloo", seconds)
            note = f"{name}; {gloo_s / seconds:.2f} × gloo's speed"
            rows.append(report.Row(quantity(1 << power, "B"), seconds * 1e6, "µs", "lower", note=note))
    else:
        costs = _costs(device, ranks)
        for one in crossovers(kind, ranks, costs):
            best = one.choice
            words = f"{best.algorithm}, {best.protocol}, {_count(best.channels, 'channel')}: {best.why}"
            rows.append(
                report.Row(
                    f"from {quantity(one.size_bytes, 'B')}", best.seconds * 1e6, "µs", "lower", note=words
                )
            )
        if size is not None:
            asked = int(parse_bytes(size, "--size"))
            for best in tuned(kind, asked, ranks, costs)[:6]:
                words = (
                    f"{best.protocol}, {_count(best.channels, 'channel')}, {_count(best.pieces, 'piece')}; "
                    f"latency {quantity(best.latency_s, 's')}, bytes {quantity(best.bytes_s, 's')}"
                )
                name = f"{quantity(asked, 'B')}: {best.algorithm}"
                rows.append(report.Row(name, best.seconds * 1e6, "µs", "lower", note=words))
    show_report(f"{collective} of {ranks} ranks", rows, json_file)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _costs(device: str, ranks: int) -> "MachineCosts":
    from cumulo.plan.network.collectives import machine_costs
    from cumulo.spec import catalog

    return machine_costs(catalog.cluster(ranks, device))

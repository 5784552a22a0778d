"""`cumulo collective`: a collective's schedule shown, proved, run on processes, and chosen."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from cumulo.base import report
from cumulo.base.nearest import did_you_mean
from cumulo.base.quantities import parse_bytes, quantity
from cumulo.cli.shared import options
from cumulo.cli.shared.declare import REQUIRED, argument, group, option, takes_options
from cumulo.cli.shared.terminal import dim, marked, present, save, show_report, working
from cumulo.errors import ConfigError

if TYPE_CHECKING:
    from cumulo.collectives.decide.catalog import CollectiveShape
    from cumulo.collectives.decide.schedule import CollectiveSchedule

app = typer.Typer()
_MOST_SHOWN = 12  # messages of a step
_SHOW = "Example: [bold]cumulo collective show all_reduce ring --ranks 4 --svg ring.svg[/bold]"
_CHECK = "Example: [bold]cumulo collective check all_reduce tree --ranks 13[/bold]"
_RUN = "Example: [bold]cumulo collective run all_reduce ring --ranks 2 --elements 1000[/bold]"
_TUNE = "Example: [bold]cumulo collective tune all_reduce --ranks 64 --device h100-sxm --size 1MiB[/bold]"


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Which schedule."""

    collective: str = argument(
        "all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all or barrier."
    )
    algorithm: str = argument("Such as ring, tree, two-shot; a wrong name lists them.")
    ranks: int = option("Number of ranks.", 4, min=1)
    elements: int = option("Elements of the buffer, counted as nccl-tests counts bytes.", 1024, min=0)
    node_size: int = option("Ranks of one node, for algorithms with two levels.", 1, min=1)
    channels: int = option("Channels that share the buffer.", 1, min=1)
    pieces: int = option("Pieces of a channel's share that follow each other.", 1, min=1)

    def shape(self) -> "CollectiveShape":
        from cumulo.collectives.decide.catalog import CollectiveShape

        return CollectiveShape(self.ranks, self.elements, self.node_size, self.channels, self.pieces)

    def schedule(self) -> "CollectiveSchedule":
        from cumulo.collectives.decide.catalog import make_schedule

        return make_schedule(self.collective, self.algorithm, self.shape())


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    asked: ScheduleOptions = group()
    svg: Path | None = option("Draw the schedule into this file (SVG).", None)
    json_file: options.JsonOption = None


@app.command(epilog=_SHOW)
@takes_options
def show(chosen: ShowOptions) -> None:
    """Show a schedule step by step: who sends which chunk to whom, and what is added."""
    from cumulo.collectives.decide.check import placed_messages
    from cumulo.collectives.decide.schedule import Move
    from cumulo.collectives.draw import collective_svg

    schedule = chosen.asked.schedule()
    by_step: dict[int, list[str]] = {}
    for one in placed_messages(schedule):
        sign = "+" if one.transfer.move is Move.REDUCE else ""
        count = f"…{one.transfer.chunks.stop - 1}" if one.transfer.count > 1 else ""
        by_step.setdefault(one.step, []).append(
            f"{one.sender}→{one.receiver} {sign}{one.transfer.chunk}{count}"
        )
    save(chosen.svg, lambda: collective_svg(schedule) + "\n", "picture")
    shown: list[Any] = [
        marked("[bold]{}[/bold]: {} ranks, {} chunks", schedule.name, schedule.ranks, len(schedule.sizes))
    ]
    for step, messages in by_step.items():
        rest = f"  … {len(messages) - _MOST_SHOWN} more" if len(messages) > _MOST_SHOWN else ""
        shown.append(f"step {step + 1:>3}  {'   '.join(messages[:_MOST_SHOWN])}{rest}")
    shown.append(dim("0→1 +2: rank 0 sends chunk 2 to rank 1, which adds it; without +, it is copied"))
    _report(chosen.asked, chosen.json_file, *shown)


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    asked: ScheduleOptions = group()
    json_file: options.JsonOption = None


@app.command(epilog=_CHECK)
@takes_options
def check(chosen: CheckOptions) -> None:
    """Prove a schedule: right values on every rank, no deadlock under rendezvous; count steps and bytes."""
    _report(chosen.asked, chosen.json_file)


def _report(asked: ScheduleOptions, json_file: Path | None, *shown: Any) -> None:
    from cumulo.collectives.decide.check import check_collective
    from cumulo.collectives.decide.play_cost import play_cost

    schedule = asked.schedule()
    checked = check_collective(schedule)
    played = play_cost(schedule, asked.node_size)
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
    present(rows, json_file, *shown, report.table(schedule.name, rows))


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    asked: ScheduleOptions = ScheduleOptions(
        collective=REQUIRED, algorithm=REQUIRED, ranks=2, elements=1 << 16
    )
    dtype: str = option("Any torch dtype: float32, bfloat16, int32, ...", "float32")
    transport: str = option("shm or torch.", "shm")
    timeout_s: float = option(
        "How long a rank waits for a message before it names who is missing, in s.", 60.0, "--timeout-s"
    )
    json_file: options.JsonOption = None


@app.command(epilog=_RUN)
@takes_options
def run(chosen: RunOptions) -> None:
    """Run a schedule on processes of this machine, and compare the result bit by bit with its own order."""
    asked = chosen.asked
    with working(f"{asked.ranks} processes"):
        from cumulo.bench.collectives import run_once

        what = asked.collective, asked.algorithm, asked.shape()
        rows = run_once(*what, chosen.dtype, chosen.transport, chosen.timeout_s)
    title = f"{asked.algorithm} {asked.collective}, {asked.ranks} processes over {chosen.transport}"
    show_report(title, rows, chosen.json_file)
    if not all(row.ok for row in rows):
        raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    collective: str = argument("all_reduce, all_gather, reduce_scatter, broadcast, reduce or all_to_all.")
    ranks: int = option("Number of ranks.", 8, min=1)
    device: str = option("Device, by its name in the catalogue.", "h100-sxm")
    size: str | None = option("Also compare the choices for a message of this size, such as 1MiB.", None)
    profile: Path | None = option("Choose by what `cumulo bench collectives --profile` measured.", None)
    json_file: options.JsonOption = None


@app.command(epilog=_TUNE)
@takes_options
def tune(chosen: TuneOptions) -> None:
    """Choose algorithm, protocol, chunk and channels by size; say why, and where the crossovers are."""
    from cumulo.collectives.decide.measured import read_collective_profile
    from cumulo.collectives.decide.schedule import COLLECTIVES
    from cumulo.collectives.decide.tuner import crossovers
    from cumulo.collectives.decide.tuner import tune as tuned
    from cumulo.plan.network.collectives import machine_costs
    from cumulo.spec import catalog

    collective, ranks, size = chosen.collective, chosen.ranks, chosen.size
    if (kind := next((one for one in COLLECTIVES if one == collective), None)) is None:
        raise ConfigError(f"there is no collective {collective!r}{did_you_mean(collective, COLLECTIVES)}")
    rows = []
    if known := read_collective_profile("" if chosen.profile is None else str(chosen.profile)):
        for power in range(10, 27, 2):
            name, seconds = known.ours(collective, 1 << power, ranks)
            gloo_s = known.times(collective, 1 << power, ranks).get("gloo", seconds)
            note = f"{name}; {gloo_s / seconds:.2f} × gloo's speed"
            rows.append(report.Row(quantity(1 << power, "B"), seconds * 1e6, "µs", "lower", note=note))
    else:
        costs = machine_costs(catalog.cluster(ranks, chosen.device))
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
    show_report(f"{collective} of {ranks} ranks", rows, chosen.json_file)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

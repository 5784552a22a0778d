"""Faults under load: streams through a gateway while replicas are killed, stopped, drained and replaced, and while
the gateway itself is. Every stream must end with the tokens it would have had:

python -m tests.gateway.faults --streams 500
python -m tests.gateway.faults --streams 200 --kind latent --tp 2 --prefill 1 --seed 3
python -m tests.gateway.faults --streams 56 --more-kinds --lora --server="--speculate ngram --max-running 4"
python -m tests.gateway.faults --streams 40 --layout="--dp 2 --ep 2" --kind experts --gateways 2 --leavers 4
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cumulo.base.report import Row, machine, table, write_json
from cumulo.cli.shared.terminal import out
from tests.gateway.siege_fleet import Fleet, Siege
from tests.gateway.siege_streams import DIFFERENT, KINDS
from tests.serve.tiny_model import KINDS as MODELS


@dataclass(frozen=True, slots=True)
class Outcome:
    streams: int
    lost: int
    wrong: int
    pauses_s: list[float]
    faults: list[str]
    examples: list[str]
    left: int = 0  # by their clients
    left_over: int = 0  # requests that servers still have in the end


async def siege(streams: int, concurrency: int, seed: int = 0, made_of: Fleet = Fleet()) -> Outcome:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        fleet = await asyncio.to_thread(Siege, Path(folder), stack, concurrency, made_of)
        right = await fleet.play(range(min(streams, DIFFERENT)))
        harm = asyncio.create_task(fleet.harm(seed))
        try:
            told = await fleet.play(range(streams), right)
        finally:
            harm.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await harm
        pairs = [(one, right[number % len(right)], number) for number, one in enumerate(told)]
        lost = [one for one, good, _ in pairs if one.error or (not one.left and not one.ends and good.ends)]
        different = {
            number: found for one, good, number in pairs if not one.error and (found := one.difference(good))
        }
        left_over = await fleet.left_over()
        again = dict(zip(different, await fleet.play(different), strict=True))
    wrong = [
        f"stream {number}: {found}; asked once more: "
        + ("as undisturbed" if not again[number].difference(right[number % len(right)]) else
           "as disturbed" if not again[number].difference(told[number]) else "a third answer")
        for number, found in different.items()
    ]  # fmt: skip
    examples = [one.error for one in lost[:3]] + wrong[:3]
    pauses_s = sorted(one.longest_pause_s for one in told)
    left = sum(one.left for one in told)
    return Outcome(streams, len(lost), len(wrong), pauses_s, fleet.faults, examples, left, left_over)


def rows_of(outcome: Outcome) -> list[Row]:
    pauses, count = outcome.pauses_s, len(outcome.pauses_s)
    happened = ", ".join(f"{outcome.faults.count(one)} × {one}" for one in dict.fromkeys(outcome.faults))
    return [
        Row("streams", outcome.streams, "", note=happened),
        Row("lost", outcome.lost, "", "lower", must=0.0, note="; ".join(outcome.examples)),
        Row("with a wrong, missing or doubled token", outcome.wrong, "", "lower", must=0.0),
        Row("whose client hung up in a pause", outcome.left, ""),
        Row("requests that servers still have afterwards", outcome.left_over, "", "lower", must=0.0),
        Row("longest pause of a stream, p50", round(pauses[count // 2], 3), "s", "lower"),
        Row("longest pause of a stream, p99", round(pauses[int(count * 0.99)], 3), "s", "lower"),
        Row("longest pause of all", round(pauses[-1], 3), "s", "lower"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=MODELS, default="dense", help="of the tiny model")
    parser.add_argument("--tp", type=int, default=1, help="ranks of each engine; one of them is killed, too")
    parser.add_argument("--layout", default="", metavar="OPTIONS", help="of ranks instead of --tp: --pp 2")
    parser.add_argument("--gateways", type=int, default=1, help="in front of the same servers")
    parser.add_argument("--chained", action="store_true", help="one more gateway in front of the gateways")
    parser.add_argument("--leavers", type=int, default=0, help="one client of so many hangs up in a pause")
    parser.add_argument("--only", default="", help="faults, such as stop,kill_rank; none: all that apply")
    parser.add_argument("--brief-stops", action="store_true", help="stopped replicas go on at the worst time")
    parser.add_argument("--prefill", type=int, default=0, help="prefill engines of each server, hurt as well")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument(
        "--hang-timeout", type=float, default=3.0, help="of the gateway; more if machines are busy"
    )
    parser.add_argument("--lora", action="store_true", help="every second stream is an adapter's")
    parser.add_argument(
        "--more-kinds", action="store_true", help=f"{len(KINDS)} kinds of requests instead of 8"
    )
    parser.add_argument("--server", action="append", default=[], metavar="OPTIONS", help="of each server")
    parser.add_argument("--gateway", action="append", default=[], metavar="OPTIONS", help="of the gateway")
    parser.add_argument("--json", type=Path, default=None)
    chosen = parser.parse_args()
    more, of_gateway = (
        tuple(word for text in texts for word in text.split()) for texts in (chosen.server, chosen.gateway)
    )
    kinds = KINDS if chosen.more_kinds else KINDS[:8]
    layout = ("--tp", str(chosen.tp)) if chosen.tp > 1 else tuple(chosen.layout.split())
    fleet = Fleet(
        chosen.kind, layout, chosen.prefill, chosen.servers, chosen.hang_timeout, more, of_gateway, chosen.lora,
        kinds, chosen.gateways, chosen.chained, chosen.leavers, chosen.brief_stops,
        tuple(filter(None, chosen.only.split(","))),
    )  # fmt: skip
    rows = rows_of(asyncio.run(siege(chosen.streams, chosen.concurrency, chosen.seed, fleet)))
    out.print(table(f"faults, on {machine()['cpu']}", rows))
    write_json(chosen.json, rows)
    sys.exit(not all(row.ok for row in rows))


if __name__ == "__main__":
    main()

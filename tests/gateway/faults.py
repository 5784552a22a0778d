"""Faults under load: streams through a gateway while replicas are killed, stopped, drained and replaced, and while
the gateway itself is. Every stream must end with the tokens it would have had:

python -m tests.gateway.faults --streams 500
python -m tests.gateway.faults --streams 200 --kind latent --tp 2 --prefill 1 --seed 3
python -m tests.gateway.faults --streams 56 --more-kinds --lora --server="--speculate ngram --max-running 4"
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cumulo.base.report import Row, machine, table, write_json
from cumulo.cli.shared.terminal import out
from cumulo.load.connection import Pool
from cumulo.models.files.load import inspect_model
from tests.gateway.running_gateway import RunningGateway, address, gateway_of, key_file
from tests.gateway.siege_streams import ADAPTER, DIFFERENT, KINDS, Told, asked, listen
from tests.models.adapter_files import write_adapter
from tests.serve.rank_pids import rank_pids
from tests.serve.running_server import RunningServer
from tests.serve.tiny_model import KINDS as MODELS
from tests.serve.tiny_model import NAME, save_tiny_model


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the servers are, and what they are asked."""

    kind: str = "dense"
    tp: int = 1
    prefill: int = 0  # engines that compute prompts for a server's others
    servers: int = 3
    hang_s: float = 3.0  # of silence, until the gateway takes one for hung
    options: tuple[str, ...] = ()  # further ones of each server
    gateway_options: tuple[str, ...] = ()
    lora: bool = False  # every second stream is an adapter's
    spare_engines: int = 0  # that replace a server's lost ones at once
    kinds: tuple[str, ...] = KINDS[:8]

    def server_options(self) -> list[str]:
        ranks = ["--tp", str(self.tp)] if self.tp > 1 else []
        roles = ["--prefill", str(self.prefill), "--decode", "1"] if self.prefill else []
        # Other kinds run on operators whose float32 depends on the batch: one draw in 10⁵ to 10⁶ changes by that.
        plain = self.kind == "dense" and self.tp == 1 and not self.lora
        exact = [] if plain else ["--dtype", "float64"]
        return ["--no-console", "--kv-memory-gib", "0.05", *exact, *ranks, *roles, *self.options]

    def asked(self, number: int) -> tuple[str, dict[str, Any]]:
        model = ADAPTER if self.lora and number // len(self.kinds) % 2 else NAME
        path, body = asked(number, 10 if self.prefill else 0, self.kinds, model)
        return path, body


class Siege:
    """A fleet, its gateway, and what is done to them."""

    def __init__(
        self, folder: Path, stack: contextlib.ExitStack, concurrency: int, fleet: Fleet = Fleet()
    ) -> None:
        self._model, self._key = save_tiny_model(folder, 1024, kind=fleet.kind), key_file(folder)
        self._stack, self._fleet = stack, fleet
        self._options = ["--fleet-key-file", self._key, *fleet.server_options()]
        if fleet.lora:
            adapter = write_adapter(folder / ADAPTER, inspect_model(self._model).spec, strength=2.0)
            self._options += ["--lora", f"{ADAPTER}={adapter}"]
        self.servers = [self._serve() for _ in range(fleet.servers)]
        self.gateway: RunningGateway = stack.enter_context(
            gateway_of(self.servers, self._key, *self._gateway_options())
        )
        self._slots = asyncio.Semaphore(concurrency)
        self.faults: list[str] = []

    def _gateway_options(self) -> list[str]:
        hang_s, more = str(self._fleet.hang_s), self._fleet.gateway_options
        return ["--hang-timeout", hang_s, "--log-level", "warning", "--drain-timeout", "240", *more]

    def _serve(self) -> RunningServer:
        server = RunningServer(str(self._model), *self._options, spare_engines=self._fleet.spare_engines)
        self._stack.callback(server.end)
        return server

    async def play(self, numbers: Iterable[int], right: "list[Told] | None" = None) -> list[Told]:
        """`right`: what they should be told; of one that differs, the story is written to stderr at once."""
        pool = Pool(self.gateway.url)

        async def one(number: int) -> Told:
            async with self._slots:
                told = await listen(pool, *self._fleet.asked(number))
                if right is not None and (found := told.error or told.difference(right[number % len(right)])):
                    await self._tell_story(number, told, found)
                return told

        return await asyncio.gather(*(one(number) for number in numbers))

    async def _tell_story(self, number: int, told: Told, found: str) -> None:
        kind = self._fleet.kinds[number % DIFFERENT % len(self._fleet.kinds)]
        story = await asyncio.to_thread(self.gateway.get, f"/v1/requests/{told.id}/explain")
        print(f"stream {number} ({kind}): {found}\n{story.text}", file=sys.stderr, flush=True)

    async def harm(self, seed: int) -> None:
        """One fault after the other until cancelled; each replica comes back, or another in its place."""
        chance = random.Random(seed)
        faults = [self._kill, self._stop, self._kill_engine, self._drain, self._terminate]
        faults += [self._kill_rank] * (self._fleet.tp > 1)
        faults += [self._kill_prefill, self._stop_prefill] * (self._fleet.prefill > 0)
        while True:
            # The gateway last: until the streams of the old one have ended, nothing else happens.
            for fault in [*chance.sample(faults, len(faults)), self._replace_gateway]:
                await asyncio.sleep(chance.uniform(0.1, 1.0))
                await fault(chance.choice(self.servers))

    async def _kill(self, victim: RunningServer) -> None:
        os.kill(victim.process.pid, signal.SIGKILL)
        self.faults.append("replica killed")
        await self._replace(victim)

    async def _terminate(self, victim: RunningServer) -> None:
        victim.process.send_signal(signal.SIGTERM)
        self.faults.append("replica ended by SIGTERM")
        await asyncio.to_thread(victim.process.wait, 120)
        await self._replace(victim)

    async def _replace(self, victim: RunningServer) -> None:
        self.servers.remove(victim)
        new = await asyncio.to_thread(self._serve)
        self.servers.append(new)
        added = await asyncio.to_thread(self.gateway.operate, "POST", "", url=new.url)
        assert added.status_code == 201, added.text
        await asyncio.to_thread(self.gateway.operate, "DELETE", f"/{address(victim)}")

    async def _stop(self, victim: RunningServer) -> None:
        os.kill(victim.process.pid, signal.SIGSTOP)
        self.faults.append("replica stopped")
        try:
            await asyncio.sleep(self._fleet.hang_s + 2)
        finally:
            os.kill(victim.process.pid, signal.SIGCONT)
        await self._until_ready(victim)

    async def _kill_engine(self, victim: RunningServer) -> None:
        with contextlib.suppress(AssertionError, ProcessLookupError):
            os.kill(victim.engine_pid(), signal.SIGKILL)
            self.faults.append("engine killed")
            await self._until_ready(victim)

    async def _kill_rank(self, victim: RunningServer) -> None:
        found = list[int]()
        with contextlib.suppress(AssertionError, OSError):  # an engine that has just been killed has none
            found = await asyncio.to_thread(lambda: rank_pids(victim.engine_pid()))
        await self._signalled(found[-1:], signal.SIGKILL, "rank killed", victim)

    async def _kill_prefill(self, victim: RunningServer) -> None:
        found = await self._prefill_pids(victim)
        await self._signalled(found, signal.SIGKILL, "prefill engine killed", victim)

    async def _stop_prefill(self, victim: RunningServer) -> None:
        found = await self._prefill_pids(victim)
        try:
            await self._signalled(found, signal.SIGSTOP, "prefill engine stopped", victim)
            await asyncio.sleep(3)
        finally:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    async def _signalled(self, pids: list[int], number: int, what: str, victim: RunningServer) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                self.faults.append(what)
        await self._until_ready(victim)

    async def _prefill_pids(self, server: RunningServer) -> list[int]:
        answer = await asyncio.to_thread(server.get, "/v1/fleet")
        return [one["pid"] for one in answer.json()["prefill_engines"] if one["pid"]]

    async def _drain(self, victim: RunningServer) -> None:
        await asyncio.to_thread(self.gateway.operate, "POST", f"/{address(victim)}/drain?move=true")
        self.faults.append("replica drained")
        await asyncio.to_thread(self.gateway.operate, "POST", f"/{address(victim)}/undrain")

    async def _replace_gateway(self, _: RunningServer) -> None:
        """A new one on the same port; the old one drains. Streams of the old one end there."""
        old, port = self.gateway, self.gateway.url.rpartition(":")[2]
        options = (self._key, *self._gateway_options(), "--port", port)
        self.gateway = await asyncio.to_thread(
            lambda: self._stack.enter_context(gateway_of(self.servers, *options))
        )
        old.process.send_signal(signal.SIGTERM)
        self.faults.append("gateway replaced")
        await asyncio.to_thread(old.process.wait, 300)

    async def _until_ready(self, server: RunningServer) -> None:
        while (await asyncio.to_thread(self.gateway.replica, server.url))["state"] != "ready":
            await asyncio.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Outcome:
    streams: int
    lost: int
    wrong: int
    pauses_s: list[float]
    faults: list[str]
    examples: list[str]


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
        lost = [one for one, good, _ in pairs if one.error or (not one.ends and good.ends)]
        different = {
            number: found for one, good, number in pairs if not one.error and (found := one.difference(good))
        }
        again = dict(zip(different, await fleet.play(different), strict=True))
    wrong = [
        f"stream {number}: {found}; asked once more: "
        + ("as undisturbed" if not again[number].difference(right[number % len(right)]) else
           "as disturbed" if not again[number].difference(told[number]) else "a third answer")
        for number, found in different.items()
    ]  # fmt: skip
    examples = [one.error for one in lost[:3]] + wrong[:3]
    pauses_s = sorted(one.longest_pause_s for one in told)
    return Outcome(streams, len(lost), len(wrong), pauses_s, fleet.faults, examples)


def rows_of(outcome: Outcome) -> list[Row]:
    pauses, count = outcome.pauses_s, len(outcome.pauses_s)
    happened = ", ".join(f"{outcome.faults.count(one)} × {one}" for one in dict.fromkeys(outcome.faults))
    return [
        Row("streams", outcome.streams, "", note=happened),
        Row("lost", outcome.lost, "", "lower", must=0.0, note="; ".join(outcome.examples)),
        Row("with a wrong, missing or doubled token", outcome.wrong, "", "lower", must=0.0),
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
    parser.add_argument("--prefill", type=int, default=0, help="prefill engines of each server, hurt as well")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument(
        "--hang-timeout", type=float, default=3.0, help="of the gateway; more if machines are busy"
    )
    parser.add_argument("--lora", action="store_true", help="every second stream is an adapter's")
    parser.add_argument("--more-kinds", action="store_true", help="14 kinds of requests instead of 8")
    parser.add_argument("--spare-engines", type=int, default=0, help="that replace lost ones at once")
    parser.add_argument("--server", action="append", default=[], metavar="OPTIONS", help="of each server")
    parser.add_argument("--gateway", action="append", default=[], metavar="OPTIONS", help="of the gateway")
    parser.add_argument("--json", type=Path, default=None)
    chosen = parser.parse_args()
    more, of_gateway = (
        tuple(word for text in texts for word in text.split()) for texts in (chosen.server, chosen.gateway)
    )
    kinds = KINDS if chosen.more_kinds else KINDS[:8]
    fleet = Fleet(
        chosen.kind, chosen.tp, chosen.prefill, chosen.servers, chosen.hang_timeout, more, of_gateway,
        chosen.lora, chosen.spare_engines, kinds,
    )  # fmt: skip
    rows = rows_of(asyncio.run(siege(chosen.streams, chosen.concurrency, chosen.seed, fleet)))
    out.print(table(f"faults, on {machine()['cpu']}", rows))
    write_json(chosen.json, rows)
    sys.exit(not all(row.ok for row in rows))


if __name__ == "__main__":
    main()

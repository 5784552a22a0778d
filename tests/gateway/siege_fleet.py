"""A fleet under siege: servers with a tiny model, gateways in front of them, and what is done to them. Played by
tests.gateway.faults."""

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cumulo.load.connection import Pool
from cumulo.models.files.load import inspect_model
from tests.gateway.running_gateway import RunningGateway, address, gateway_of, key_file
from tests.gateway.siege_streams import ADAPTER, DIFFERENT, KINDS, Told, asked, listen
from tests.models.adapter_files import write_adapter
from tests.serve.rank_pids import rank_pids
from tests.serve.running_server import RunningServer
from tests.serve.tiny_model import NAME, save_tiny_model


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the servers are, and what they are asked."""

    kind: str = "dense"
    layout: tuple[str, ...] = ()  # options that give an engine several ranks; one of them is killed, too
    prefill: int = 0  # engines that compute prompts for a server's others
    servers: int = 3
    hang_s: float = 3.0  # of silence, until the gateway takes one for hung
    options: tuple[str, ...] = ()  # further ones of each server
    gateway_options: tuple[str, ...] = ()
    lora: bool = False  # every second stream is an adapter's
    kinds: tuple[str, ...] = KINDS[:8]
    gateways: int = 1  # in front of the same servers; clients take turns
    chained: bool = False  # clients talk to one more gateway, in front of those
    leavers: int = 0  # of so many clients one hangs up as soon as its stream stands still
    brief_stops: bool = False  # a stopped replica goes on just when its streams are being moved
    only: tuple[str, ...] = ()  # faults, by the names of the methods; none: all that apply

    def server_options(self) -> list[str]:
        roles = ["--prefill", str(self.prefill), "--decode", "1"] if self.prefill else []
        # Other kinds run on operators whose float32 depends on the batch: one draw in 10⁵ to 10⁶ changes by that.
        plain = self.kind == "dense" and not self.layout and not self.lora
        exact = [] if plain else ["--dtype", "float64"]
        return ["--no-console", "--kv-memory-gib", "0.05", *exact, *self.layout, *roles, *self.options]

    def asked(self, number: int) -> tuple[str, dict[str, Any]]:
        model = ADAPTER if self.lora and number // len(self.kinds) % 2 else NAME
        path, body = asked(number, 10 if self.prefill else 0, self.kinds, model)
        return path, body

    def patience_s(self, number: int) -> float | None:
        """How long a pause may be until this client hangs up: at once, or about when its stream is moved. None:
        for ever."""
        if not self.leavers or number % self.leavers != self.leavers - 1:
            return None
        return (0.4, self.hang_s, self.hang_s + 0.3)[number // self.leavers % 3]


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
        options = self._gateway_options()
        self.gateways: list[RunningGateway] = [
            stack.enter_context(gateway_of(self.servers, self._key, *options)) for _ in range(fleet.gateways)
        ]
        outer = [stack.enter_context(gateway_of(self.gateways, self._key, *options))] * fleet.chained
        self._fronts = [Pool(one.url) for one in outer or self.gateways]
        self._slots = asyncio.Semaphore(concurrency)
        self.faults: list[str] = []

    def _gateway_options(self) -> list[str]:
        hang_s, more = str(self._fleet.hang_s), self._fleet.gateway_options
        return ["--hang-timeout", hang_s, "--log-level", "warning", "--drain-timeout", "240", *more]

    def _serve(self) -> RunningServer:
        server = RunningServer(str(self._model), *self._options)
        self._stack.callback(server.end)
        return server

    async def play(self, numbers: Iterable[int], right: "list[Told] | None" = None) -> list[Told]:
        """`right`: what they should be told; of one that differs, the story is written to stderr at once."""

        async def one(number: int) -> Told:
            async with self._slots:
                front = self._fronts[number % len(self._fronts)]
                patience_s = None if right is None else self._fleet.patience_s(number)
                told = await listen(front, *self._fleet.asked(number), patience_s)
                if right is not None and (found := told.error or told.difference(right[number % len(right)])):
                    await self._tell_story(number, told, found)
                return told

        return await asyncio.gather(*(one(number) for number in numbers))

    async def _tell_story(self, number: int, told: Told, found: str) -> None:
        kind = self._fleet.kinds[number % DIFFERENT % len(self._fleet.kinds)]
        gateway = self.gateways[number % len(self.gateways)]
        story = await asyncio.to_thread(gateway.read, f"/v1/requests/{told.id}/explain")
        print(f"stream {number} ({kind}): {found}\n{story}", file=sys.stderr, flush=True)

    async def harm(self, seed: int) -> None:
        """One fault after the other until cancelled; each replica comes back, or another in its place."""
        chance = random.Random(seed)
        faults = [self._kill, self._stop, self._kill_engine, self._drain, self._terminate]
        faults += [self._kill_rank] * bool(self._fleet.layout)
        faults += [self._kill_prefill, self._stop_prefill] * (self._fleet.prefill > 0)
        if self._fleet.only:
            faults = [getattr(self, f"_{name}") for name in self._fleet.only]
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
        for gateway in self.gateways:
            added = await asyncio.to_thread(gateway.operate, "POST", "", url=new.url)
            assert added.status_code == 201, added.text
            await asyncio.to_thread(gateway.operate, "DELETE", f"/{address(victim)}")

    async def _stop(self, victim: RunningServer) -> None:
        os.kill(victim.process.pid, signal.SIGSTOP)
        self.faults.append("replica stopped")
        try:
            longer_s = random.uniform(0, 0.8) if self._fleet.brief_stops else 2
            await asyncio.sleep(self._fleet.hang_s + longer_s)
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
        for gateway in self.gateways:
            await asyncio.to_thread(gateway.operate, "POST", f"/{address(victim)}/drain?move=true")
        self.faults.append("replica drained")
        for gateway in self.gateways:
            await asyncio.to_thread(gateway.operate, "POST", f"/{address(victim)}/undrain")

    async def _replace_gateway(self, _: RunningServer) -> None:
        """A new one on the same port; the old one drains. Streams of the old one end there."""
        old = self.gateways.pop(0)
        port = old.url.rpartition(":")[2]
        options = (self._key, *self._gateway_options(), "--port", port)
        self.gateways.append(
            await asyncio.to_thread(lambda: self._stack.enter_context(gateway_of(self.servers, *options)))
        )
        old.process.send_signal(signal.SIGTERM)
        self.faults.append("gateway replaced")
        await asyncio.to_thread(old.process.wait, 300)

    async def _until_ready(self, server: RunningServer) -> None:
        for gateway in self.gateways:
            while (await asyncio.to_thread(gateway.replica, server.url))["state"] != "ready":
                await asyncio.sleep(0.2)

    async def left_over(self) -> int:
        """Requests that servers still have when all clients have ended, after a while in which they may notice."""
        for _ in range(150):
            found = [await asyncio.to_thread(one.get, "/v1/fleet") for one in self.gateways]
            counts = [
                replica["running"] + replica["waiting"] + replica["in_flight"]
                for answer in found
                for replica in answer.json()["replicas"]
            ]
            if not any(counts):
                return 0
            await asyncio.sleep(0.2)
        return sum(counts)

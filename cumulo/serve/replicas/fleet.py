"""Fleet: several engines of one model behind the interface of one EngineClient. Made by Service where there is more
than one replica.

A router (engine/decide/routing.py) says which replica gets a request, from what the engines tell of themselves.
When a replica dies or hangs, the others continue its requests at once, and it is started again meanwhile.
"""

import asyncio
import contextlib
import logging
import time
from array import array
from collections import ChainMap, deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from cumulo.engine.decide.core.block_pool import chain_hashes, root_hash
from cumulo.engine.decide.routing import Ask, NoReplica, ReplicaView, router
from cumulo.fleet.decide.choosing import usual_pace
from cumulo.fleet.decide.scaling import ReplicaLife
from cumulo.serve.adapter_registry import ServedAdapter
from cumulo.serve.engine_link.engine_client import EngineClient
from cumulo.serve.engine_link.engine_settings import EngineSettings, State, Trouble, settings_of_replica
from cumulo.serve.engine_link.in_flight import Dispatch, Inbox, InFlight, Observer
from cumulo.serve.engine_link.messages import AdapterReport, BlockMap, Failure, Ready, Stats, Submit
from cumulo.serve.replicas.prefill_engines import PrefillEngines
from cumulo.serve.replicas.replica import (
    FleetReplica,
    lacks_adapter,
    merged_blocks,
    merged_info,
    merged_stats,
    unlike,
    with_worst_index,
)

log = logging.getLogger(__name__)

_RECENT_DECISIONS = 200  # for the console
_LOOK_S = 0.02  # between two looks at a replica that drains


class Fleet:
    def __init__(
        self,
        settings: EngineSettings,
        observer: Observer,
        replicas: int,
        policy: str,
        prefill: int = 0,
        most_replicas: int = 0,
        most_prefill: int = 0,
    ) -> None:
        """`prefill`: so many further engines compute the replicas' prompts. `most_replicas`, `most_prefill`: that
        there may be later."""
        self.settings, self._observer, self.policy = settings, observer, policy
        self.router = router(policy)
        self.info: Ready | None = None
        self.replicas: dict[str, FleetReplica] = {}
        self.size = max(replicas, most_replicas) + max(prefill, most_prefill)  # what the machine is shared by
        self.start_up_s = 0.0  # that the first replica took
        self.start_ups_s: deque[float] = deque(
            maxlen=_RECENT_DECISIONS
        )  # that replicas of an autoscaler took
        # Set by an autoscaler: whether requests wait while there is no replica, and who is told of each request.
        self.holds_requests = False
        self.on_arrival: Callable[[int, bool], None] | None = None
        self.scaling_report: Callable[[], dict[str, Any]] | None = None
        self.prefill = (
            PrefillEngines(settings, prefill, self.size, most_prefill, self.keep) if prefill else None
        )
        self.decisions: deque[tuple[str, Dispatch]] = deque(maxlen=_RECENT_DECISIONS)
        self._unplaced: dict[
            str, InFlight
        ] = {}  # no replica takes requests now: the first that does gets them
        self._stopped = False
        self._made = 0
        self._gone_restarts = 0  # of replicas that were removed
        self._fairness: dict[str, float] = {}  # by replica
        self._connected = self.prefill is None  # with its prefill engines, at the beginning
        self._tasks: set[asyncio.Task[Any]] = set()
        for _ in range(replicas):
            self.make_replica()

    def make_replica(self) -> FleetReplica:
        """A new member, not started yet."""
        name = f"r{self._made}"
        settings = self.settings if self.prefill is None else self.prefill.settings_of_decode(self.settings)
        settings = settings_of_replica(settings, name, self._made, self.size)
        self._made += 1
        replica = self.replicas[name] = FleetReplica(name, EngineClient(settings, self._observer, self))
        return replica

    # -- what one engine has, too -------------------------------------------------------------------------
    @property
    def state(self) -> State:
        if self._stopped:
            return "stopped"
        if not self._prefill_connected():
            return "starting"
        if any(not replica.refuses for replica in self.replicas.values()):
            return "ready"
        if self.holds_requests and self.info is not None:
            return "ready"
        return "starting" if self.info is None else "restarting"

    @property
    def in_flight(self) -> Mapping[str, InFlight]:
        return ChainMap(self._unplaced, *(replica.client.in_flight for replica in self.replicas.values()))

    @property
    def waiting(self) -> int:
        return len(self._unplaced) + sum(one.client.waiting for one in self._up())

    @property
    def stats(self) -> Stats | None:
        return merged_stats([one.client.stats for one in self._up() if one.client.stats is not None])

    @property
    def restarts(self) -> int:
        prefill = self.prefill.restarts if self.prefill is not None else 0
        return self._gone_restarts + prefill + sum(one.client.restarts for one in self.replicas.values())

    @property
    def last_failure(self) -> str | None:
        failures = [one.client.last_failure for one in self.replicas.values() if one.client.last_failure]
        return "; ".join(failures) or None

    @property
    def engine_pids(self) -> tuple[int, ...]:
        return tuple(pid for client in self._clients() for pid in client.engine_pids)

    @property
    def max_running(self) -> int:
        return sum(one.client.max_running for one in self.replicas.values() if not one.refuses)

    def _prefill_connected(self) -> bool:
        """Whether the first requests find the prefill engines. A fleet whose prefill engines fail does without."""
        if not self._connected and self.prefill is not None:
            told = [one.client.stats.transfers for one in self._up() if one.client.stats is not None]
            wanted = self.prefill.engines
            told_all = all(one is not None and wanted.keys() <= set(one.peers) for one in told)
            self._connected = (bool(told) and told_all) or any(
                one.client.last_failure for one in wanted.values()
            )
        return self._connected

    def _up(self) -> list[FleetReplica]:
        return [one for one in self.replicas.values() if one.client.state == "ready"]

    # -- life ---------------------------------------------------------------------------------------------
    async def start(self) -> Ready:
        """Returns when the first replica is up, or raises EngineStartError; the others follow."""
        first, *others = self.replicas.values()
        began_s = time.perf_counter()
        info = await first.client.start()
        self.start_up_s = time.perf_counter() - began_s
        if self.settings.config.kv_memory_gib is None and self.settings.config.kv_blocks is None:
            self.keep(
                self._start_in_turn(others)
            )  # each plans its memory with what the ones before have left
        else:
            for replica in others:
                self.keep(replica.client.start_until_up())
            if self.prefill is not None:
                self.keep(self.prefill.start())
        return info

    async def _start_in_turn(self, replicas: list[FleetReplica]) -> None:
        for replica in replicas:
            await replica.client.start_until_up()
        if self.prefill is not None:
            await self.prefill.start()

    def keep(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run in the background, until the fleet is closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        self._stopped = True
        for task in list(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._fail_unplaced("the server is shutting down")
        await asyncio.gather(*(replica.client.close() for replica in self.replicas.values()))
        if self.prefill is not None:
            await self.prefill.close()

    # -- requests -----------------------------------------------------------------------------------------
    def submit(self, submit: Submit, inbox: Inbox, position: int = 0) -> InFlight:
        request = InFlight(submit, inbox, position, array("i", submit.resumed))
        self.place(request)
        if self.on_arrival is not None:
            self.on_arrival(len(submit.tokens) // 4, submit.request_id in self._unplaced)
        return request

    def place(self, request: InFlight, tried: frozenset[str] = frozenset(), moved_because: str = "") -> None:
        """Give a request to a replica; if none takes it now, to the first that will."""
        # One that it has left, and that has not taken note of that yet, would mistake its old life for its new one.
        name = request.submit.request_id
        leaving = frozenset(one.name for one in self.replicas.values() if name in one.client.leaving)
        ask = self._ask(request, tried | leaving)
        try:
            route = self.router.route(ask, self.views())
        except NoReplica:
            self._unplaced[name] = request
            return
        dispatch = Dispatch(time.perf_counter(), route, moved_because)
        request.dispatches.append(dispatch)
        self.decisions.append((name, dispatch))
        self.replicas[route.replica].take_request(request, route, ask.prompt_tokens)

    @property
    def unplaced_tokens(self) -> int:
        """The number of tokens of prompts that wait for a replica."""
        return sum(len(one.submit.tokens) // 4 for one in self._unplaced.values())

    def place_unplaced(self) -> None:
        """Some replica takes requests again."""
        unplaced, self._unplaced = self._unplaced, {}
        for request in unplaced.values():
            self.place(request, moved_because="no replica was ready")

    async def dismiss(self, replica: FleetReplica) -> None:
        """Stop a replica that has no requests, and forget it."""
        del self.replicas[replica.name]
        self._gone_restarts += replica.client.restarts
        self._fairness.pop(replica.name, None)
        self.router.forget(replica.name)
        await replica.client.close()

    def _ask(self, request: InFlight, tried: frozenset[str]) -> Ask:
        submit, info = request.submit, self.info
        tokens = array("i", submit.tokens + request.resumed)
        size = info.block_size if info is not None else len(tokens) + 1
        whole = tokens[: len(tokens) // size * size]
        salt = self.settings.adapters.salted(submit.cache_salt, submit.adapter)
        hashes = chain_hashes(root_hash(salt), whole, size)
        return Ask(len(tokens), hashes, submit.session, submit.tenant, submit.priority, tried)

    def views(self) -> list[ReplicaView]:
        now_s, replicas = time.perf_counter(), self.replicas.values()
        usual = usual_pace(one.pace for one in replicas)
        return [one.view(usual, now_s) for one in replicas]

    def abort(self, request_id: str) -> None:
        for replica in self.replicas.values():
            if request_id in replica.client.in_flight:
                replica.client.abort(request_id)
                return
        request = self._unplaced.pop(request_id, None)
        if request is not None:
            self._end(request, "the request was aborted while no replica was ready")

    async def block_map(self) -> BlockMap:
        """The blocks of all replicas that are up, one after the other."""
        return merged_blocks(await asyncio.gather(*(one.client.block_map() for one in self._up())))

    async def load_adapter(self, adapter: ServedAdapter) -> AdapterReport | None:
        """On all engines; those that are not up begin with it. The first refusal, or what one of them said."""
        told = await asyncio.gather(*(client.load_adapter(adapter) for client in self._clients()))
        reports = [report for report in told if report is not None]
        refused = next((report for report in reports if report.error), None)
        if refused is None and len({report.fingerprint for report in reports}) > 1:
            return AdapterReport(
                adapter.key, f"{adapter.folder} was changed while the engines read it: load it again"
            )
        return refused or next(iter(reports), None)

    def drop_adapter(self, key: str) -> None:
        for client in self._clients():
            client.drop_adapter(key)

    def _clients(self) -> list[EngineClient]:
        prefill = self.prefill.engines.values() if self.prefill is not None else ()
        return [one.client for one in (*self.replicas.values(), *prefill)]

    # -- replicas that an autoscaler starts and ends -------------------------------------------------------
    def lives(self) -> list[ReplicaLife]:
        return [one.life() for one in self.replicas.values()]

    def start_another(self) -> None:
        self.keep(self._start_measured(self.make_replica()))

    async def _start_measured(self, replica: FleetReplica) -> None:
        began_s = time.perf_counter()
        await replica.client.start_until_up()
        self.start_ups_s.append(time.perf_counter() - began_s)

    def take_back(self, name: str) -> None:
        self.replicas[name].draining = False
        self.place_unplaced()

    def retire(self, name: str) -> None:
        replica = self.replicas[name]
        replica.draining = True
        self.keep(self._end_when_empty(replica))

    async def _end_when_empty(self, replica: FleetReplica) -> None:
        while replica.draining and (replica.client.in_flight or replica.client.state == "starting"):
            await asyncio.sleep(_LOOK_S)
        if replica.draining and replica.name in self.replicas:  # it may have been taken back
            await self.dismiss(replica)

    def begun_and_waiting(self) -> tuple[int, int]:
        requests = self.in_flight.values()
        begun = sum(one.last_token_s is not None for one in requests)
        return begun, len(requests) - begun

    # -- what becomes of engines: their EngineFleet ---------------------------------------------------------
    def take_over(self, client: EngineClient, trouble: Trouble) -> None:
        replica = self._of(client)
        replica.begin_anew(time.perf_counter())
        self.router.forget(replica.name)
        self.move_all(replica, f"replica {replica.name} {trouble.words}")

    def move_all(self, replica: FleetReplica, because: str) -> None:
        """Continue all its requests elsewhere."""
        for request_id in list(replica.client.in_flight):
            request = replica.client.release(request_id)
            self.place(request, frozenset({replica.name}), because)

    def on_progress(self, client: EngineClient, stats: Stats) -> None:
        replica = self._of(client)
        replica.hear(stats, time.perf_counter())
        if stats.fairness is not None:
            self._fairness[replica.name] = stats.fairness.index
            fairness = with_worst_index(stats.fairness, list(self._fairness.values()))
            stats = msgspec.structs.replace(stats, fairness=fairness)
        reports = [one.client.stats for one in self._up() if one.client.stats is not None]
        self._observer.on_progress(merged_stats(reports, stats) or stats)

    def on_ready(self, client: EngineClient) -> None:
        replica, info = self._of(client), client.info
        assert info is not None
        replica.begin_anew(time.perf_counter())
        replica.unlike = unlike(self.info or info, info) or lacks_adapter(info)
        if replica.unlike:
            log.error("replica %s gets no requests: it %s", replica.name, replica.unlike)
        else:
            self.info = merged_info(self.info, info)
        log.info("replica %s is ready; %d requests waited for it", replica.name, len(self._unplaced))
        self.place_unplaced()

    def on_failed_start(self, client: EngineClient, message: str) -> None:
        if self.state != "ready" or (self.holds_requests and not self._up()):
            self._fail_unplaced(message)

    def _of(self, client: EngineClient) -> FleetReplica:
        return next(one for one in self.replicas.values() if one.client is client)

    def _fail_unplaced(self, message: str) -> None:
        unplaced, self._unplaced = self._unplaced, {}
        for request in unplaced.values():
            self._end(request, message)

    def _end(self, request: InFlight, message: str) -> None:
        failure = Failure(message)
        self._observer.on_end(request, failure)
        request.inbox.put(request.position, failure)

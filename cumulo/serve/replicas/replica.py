"""FleetReplica: one engine of a fleet, and what the fleet's router knows of it. Owned by Fleet."""

import statistics
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

import msgspec

from cumulo.engine.decide.core.block_pool import BlockHash
from cumulo.engine.decide.kv_tiers import TierCounts
from cumulo.engine.decide.routing import ReplicaView, Route
from cumulo.fleet.decide.choosing import Pace
from cumulo.fleet.decide.scaling import ReplicaLife
from cumulo.serve.engine_link.engine_client import EngineClient
from cumulo.serve.engine_link.in_flight import InFlight
from cumulo.serve.engine_link.messages import BlockMap, FairnessReport, Ready, Stats, TierStats

_SILENT_S = 3.0  # an engine says something every second, and after every step
_HASH_BYTES = 16
_STEPS = 15  # the last ones: their median is what a step takes, so that a slow moment does not count


class FleetReplica:
    def __init__(self, name: str, client: EngineClient) -> None:
        self.name, self.client = name, client
        self.draining = False
        self._ordered_s = time.perf_counter()
        self.busy_with = ""  # what an operator has asked for and is not done: "restarted" or "removed"
        self.unlike = ""  # how its model differs from the fleet's; empty: it does not
        self.blocks: set[BlockHash] = set()  # that its engine has told of
        self.heard_s = 0.0
        self._steps_s: deque[float] = deque(maxlen=_STEPS)  # of steps that only decode, as measured
        self.requests = 0  # given to it since the server started
        self.prompt_tokens = 0  # of them
        self.cached_tokens = 0  # of them, as the router expected
        # Requests on their way: the Submit's number, priority, tenant and tokens to compute.
        self._on_the_way: deque[tuple[int, int, str, int]] = deque()

    def take_request(self, request: InFlight, route: Route, tokens: int) -> None:
        """`tokens`: of prompt and answer, as far as they are known."""
        self.requests += 1
        self.prompt_tokens += tokens
        self.cached_tokens += route.cached_tokens
        self.client.adopt(request, route.cached_tokens)
        submit = request.submit
        self._on_the_way.append(
            (self.client.sent, submit.priority, submit.tenant, tokens - route.cached_tokens)
        )

    def hear(self, stats: Stats, now_s: float) -> None:
        self.heard_s = now_s
        for record in stats.records:
            if record.decode_tokens and not record.prefill_tokens:
                self._steps_s.append(record.finished_s - record.started_s)
        news = stats.routing
        if news is not None:
            self.blocks.difference_update(_hashes(news.went))
            self.blocks.update(_hashes(news.came))
        while self._on_the_way and self._on_the_way[0][0] <= stats.received:
            self._on_the_way.popleft()

    def begin_anew(self, now_s: float) -> None:
        """Its engine is a new one, with nothing in its cache."""
        self.blocks.clear()
        self._on_the_way.clear()
        self.heard_s = now_s

    @property
    def step_s(self) -> float | None:
        """The time of a step that only decodes; None: it was not measured yet."""
        return statistics.median(self._steps_s) if self._steps_s else None

    @property
    def refuses(self) -> str:
        """Why it takes no requests; empty: it takes them."""
        if self.client.state != "ready":
            return "is loading its model" if self.client.state == "starting" else "is restarting"
        return "is draining" if self.draining else self.unlike

    @property
    def prompt_s_per_token(self) -> float | None:
        stats = self.client.stats
        return None if stats is None or stats.routing is None else stats.routing.prompt_s_per_token

    @property
    def unfinished(self) -> int:
        """Requests that it has to finish before it ends: its own, or of a prefill engine those of the replicas."""
        stats = self.client.stats
        if stats is None or self.client.settings.config.role != "prefill":
            return len(self.client.in_flight)
        sending = stats.transfers.sending if stats.transfers is not None else 0
        return stats.running + stats.waiting + sending

    def life(self) -> ReplicaLife:
        """The replica as an autoscaler sees it."""
        state: Literal["starting", "ready", "draining"] = "ready"
        if self.draining or self.busy_with:
            state = "draining"
        elif self.client.state != "ready":
            state = "starting"
        return ReplicaLife(self.name, state, self.unfinished, self._ordered_s)

    @property
    def pace(self) -> Pace:
        prompt_s = self.prompt_s_per_token
        return Pace(1.0 / prompt_s if prompt_s else 0.0, self.step_s or 0.0)

    def view(self, usual: Pace, now_s: float) -> ReplicaView:
        """Replicas are alike: all compute prompts at the same speed, and one that has not measured its steps takes
        as long as the others."""
        stats, info = self.client.stats, self.client.info
        news = stats.routing if stats is not None else None
        queues: Counter[tuple[int, str]] = Counter()
        for priority, tenant, tokens in news.queues if news is not None else ():
            queues[priority, tenant] += tokens
        for _, priority, tenant, tokens in self._on_the_way:
            queues[priority, tenant] += tokens
        return ReplicaView(
            self.name,
            waiting_tokens=queues.total(),
            running=(news.requests if news is not None else 0) + len(self._on_the_way),
            max_running=info.max_running if info is not None else 1,
            prompt_tok_s=usual.prompt_tok_s,
            step_s=self.step_s or usual.step_s,
            block_size=info.block_size if info is not None else 16,
            blocks=self.blocks,
            queues=queues,
            refuses=self.refuses,
            silent=now_s - self.heard_s > _SILENT_S,
        )


def _hashes(joined: bytes) -> list[BlockHash]:
    return [joined[start : start + _HASH_BYTES] for start in range(0, len(joined), _HASH_BYTES)]


_SUMMED = Stats.__struct_fields__[: Stats.__struct_fields__.index("records")]  # the counts come first


def merged_stats(reports: Sequence[Stats], news: Stats | None = None) -> Stats | None:
    """The sums; None where there is no report. `news`: the report whose steps nobody has been told yet."""
    if not reports:
        return None
    counts: dict[str, Any] = {name: sum(getattr(one, name) for one in reports) for name in _SUMMED}
    return Stats(
        **counts,
        records=news.records if news is not None else [],
        fairness=news.fairness if news is not None else None,
        tiers=merged_tiers([one.tiers for one in reports if one.tiers is not None]),
    )


def merged_tiers(reports: Sequence[TierStats]) -> TierStats | None:
    """The sums; what is on disk is all engines' together."""
    if not reports:
        return None
    counts = [asdict(one.counts) for one in reports]
    return TierStats(
        sum(one.host_blocks for one in reports),
        sum(one.host_blocks_used for one in reports),
        max(one.disk_blocks for one in reports),
        max(one.disk_bytes for one in reports),
        TierCounts(**{name: sum(one[name] for one in counts) for name in counts[0]}),
    )


def with_worst_index(report: FairnessReport, indices: Sequence[float]) -> FairnessReport:
    """Each engine is fair by itself; the fleet is as fair as its least fair engine."""
    return FairnessReport(min([report.index, *indices]), report.served)


def merged_blocks(maps: Sequence[BlockMap]) -> BlockMap:
    """The blocks of one map after those of the other."""
    owners: list[str] = []
    owner_of: list[int] = []
    for one in maps:
        first = len(owners)
        owners += one.owners
        owner_of += [owner + first if owner >= 0 else -1 for owner in one.owner_of]
    return BlockMap(owners, owner_of, b"".join(one.cached for one in maps))


def merged_info(fleet: Ready | None, replica: Ready) -> Ready:
    """What is true of all: the context that the smallest KV cache holds."""
    if fleet is None or replica.max_context >= fleet.max_context:
        return fleet or replica
    return msgspec.structs.replace(fleet, max_context=replica.max_context)


def unlike(fleet: Ready, replica: Ready) -> str:
    """How a replica's model differs, so that it cannot continue what others began; empty: it does not."""
    for name, what in (
        ("model_name", "another model"),
        ("vocab_size", "another vocabulary"),
        ("eos_ids", "other end tokens"),
        ("block_size", "another block size"),
    ):
        ours, theirs = getattr(fleet, name), getattr(replica, name)
        if ours != theirs:
            return f"has {what} than the fleet ({theirs}, not {ours}); restart the server"
    return ""


def lacks_adapter(replica: Ready) -> str:
    """Which adapter a replica could not load, so that it cannot take all requests; empty: it has all."""
    return next((f"could not load an adapter: {one.error}" for one in replica.adapters if one.error), "")

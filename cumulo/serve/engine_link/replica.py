"""FleetReplica: one engine of a fleet, and what the fleet's router knows of it. Owned by Fleet."""

import statistics
from collections import Counter, deque

from cumulo.engine.decide.core.block_pool import BlockHash
from cumulo.engine.decide.routing import ReplicaView, Route
from cumulo.serve.engine_link.engine_client import EngineClient
from cumulo.serve.engine_link.in_flight import InFlight
from cumulo.serve.engine_link.messages import Stats

_SILENT_S = 3.0  # an engine says something every second, and after every step
_HASH_BYTES = 16
_STEPS = 15  # the last ones: their median is what a step takes, so that a slow moment does not count


class FleetReplica:
    def __init__(self, name: str, client: EngineClient) -> None:
        self.name, self.client = name, client
        self.draining = False
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
        """Of a step that only decodes; None: it was not measured yet."""
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

    def view(self, prompt_s_per_token: float, step_s: float, now_s: float) -> ReplicaView:
        """Replicas are alike: one that has not measured its steps takes as long as the others."""
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
            prompt_tok_s=1.0 / prompt_s_per_token,
            step_s=self.step_s or step_s,
            block_size=info.block_size if info is not None else 16,
            blocks=self.blocks,
            queues=queues,
            refuses=self.refuses,
            silent=now_s - self.heard_s > _SILENT_S,
        )


def _hashes(joined: bytes) -> list[BlockHash]:
    return [joined[start : start + _HASH_BYTES] for start in range(0, len(joined), _HASH_BYTES)]

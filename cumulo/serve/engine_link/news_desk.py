"""NewsDesk: what an engine process tells the router of its fleet. Read by the engine loop at every report."""

from collections import Counter

from cumulo.engine.decide.core.block_pool import BlockHash
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.serve.engine_link.messages import RoutingNews, Submit


class NewsDesk:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._expected: dict[str, int] = {}  # by request: tokens that the router expects in the prefix cache
        # Whatever is cached already is news, too: nobody has been told.
        scheduler.pool.news = dict.fromkeys(scheduler.pool.block_of, True)

    def expect(self, submit: Submit) -> None:
        if submit.expects_cached:
            self._expected[submit.request_id] = submit.expects_cached

    def take_news(self) -> RoutingNews:
        scheduler, expected = self._scheduler, self._expected
        queues: Counter[tuple[int, str]] = Counter()
        for request in scheduler.requests.values():
            computed = max(one.computed for one in request.sequences)
            if computed < request.prompt_length:
                left = request.prompt_length - max(computed, expected.get(request.id, 0))
                queues[request.priority, request.share.name] += max(0, left)
        if len(expected) > 2 * len(scheduler.requests) + 64:
            self._expected = {name: expected[name] for name in scheduler.requests if name in expected}
        came: list[BlockHash] = []
        went: list[BlockHash] = []
        for block_hash, is_here in (scheduler.pool.news or {}).items():
            (came if is_here else went).append(block_hash)
        scheduler.pool.news = {}
        return RoutingNews(
            len(scheduler.requests),
            [(priority, tenant, tokens) for (priority, tenant), tokens in queues.items()],
            scheduler.costs.prompt_s_per_token,
            b"".join(came),
            b"".join(went),
        )

"""A fleet in virtual time: several simulated engines, and a router that says who gets each request. Called by
the planner for `cumulo simulate serve --replicas`.

The router is the real one (engine/decide/routing.py), and it sees what a gateway would: each engine's queue, its
speed and the hashes of its KV blocks, as of the moment in which the request arrives.
"""

from array import array
from collections.abc import Sequence as ListLike

from cumulo.engine.decide.core.block_pool import BlockHash, chain_hashes, root_hash
from cumulo.engine.decide.routing import Ask, ReplicaView, Router
from cumulo.engine.simulate.engine import SimulatedEngine
from cumulo.engine.simulate.run import Arrival, Run


class PromptHashes:
    """Hashes of the shared beginnings of prompts, computed once for each."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._known: dict[tuple[BlockHash, int, int], list[BlockHash]] = {}

    def of_arrival(self, arrival: Arrival) -> list[BlockHash]:
        """Of the full blocks that lie within shared pieces, as the engine's own prompts hash them. A piece that is
        no whole number of blocks ends the chain: what follows depends on where it lies in a block."""
        parent, found, left = root_hash(""), list[BlockHash](), arrival.prompt_tokens
        for name, tokens in arrival.shared:
            blocks = min(tokens, left) // self._size
            key = (parent, name, blocks)
            hashes = self._known.get(key)
            if hashes is None:
                text = array("i", (-1 - name,)) * (blocks * self._size)
                hashes = self._known[key] = chain_hashes(parent, text, self._size)
            found += hashes
            left -= tokens
            if tokens % self._size or left <= 0 or not hashes:
                break
            parent = hashes[-1]
        return found


def simulate_fleet(
    arrivals: ListLike[Arrival], engines: ListLike[SimulatedEngine], router: Router
) -> list[Run]:
    """Serve all arrivals, given in order of time; returns each engine's run. Every engine has played up to the
    moment in which a request is routed."""
    hashes = PromptHashes(engines[0].scheduler.config.block_size)
    by_name = {str(number): engine for number, engine in enumerate(engines)}
    for arrival in arrivals:
        for engine in engines:
            engine.advance(arrival.arrived_s)
        ask = Ask(arrival.prompt_tokens, hashes.of_arrival(arrival))
        # The replicas are alike: one that has computed no prompt yet is as fast as the others.
        prompt_s = min(engine.scheduler.costs.prompt_s_per_token for engine in engines)
        route = router.route(ask, [replica_view(name, engine, prompt_s) for name, engine in by_name.items()])
        by_name[route.replica].give(arrival, route.cached_tokens)
    for engine in engines:
        engine.advance(float("inf"))
    return [engine.end() for engine in engines]


def replica_view(name: str, engine: SimulatedEngine, prompt_s_per_token: float) -> ReplicaView:
    """A simulated engine as a router sees it."""
    scheduler, cached_tokens, coming = engine.scheduler, engine.cached_tokens, engine.waiting_arrivals()
    first = len(engine.arrivals) - len(coming)
    waiting = sum(
        max(0, one.prompt_length - max(one.sequences[0].computed, cached_tokens[int(one.id)]))
        for one in scheduler.requests.values()
    ) + sum(
        arrival.prompt_tokens - cached for arrival, cached in zip(coming, cached_tokens[first:], strict=True)
    )
    return engine_view(name, engine, waiting, prompt_s_per_token)


def engine_view(
    name: str, engine: SimulatedEngine, waiting_tokens: int, prompt_s_per_token: float
) -> ReplicaView:
    """The same, with so many prompt tokens that it has not computed."""
    scheduler = engine.scheduler
    running = len(scheduler.requests) + len(engine.waiting_arrivals())
    decode = engine.cost.decode(max(1, running))
    return ReplicaView(
        name,
        waiting_tokens=waiting_tokens,
        running=running,
        max_running=scheduler.config.max_running,
        prompt_tok_s=1.0 / prompt_s_per_token,
        step_s=decode.fixed_s if decode is not None else 0.02,
        block_size=scheduler.config.block_size,
        blocks=scheduler.pool.block_of.keys(),
    )

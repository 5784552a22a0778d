"""A fleet in virtual time: several simulated engines, and a router that says who gets each request. Called by
the planner for `cumulo simulate serve --replicas`.

The router is the real one (engine/decide/routing.py), and it sees what a gateway would: each engine's queue, its
speed and the hashes of its KV blocks, as of the moment in which the request arrives.
"""

from array import array
from collections.abc import Sequence as ListLike
from functools import lru_cache

from cumulo.engine.decide.core.block_pool import BlockHash, chain_hashes, root_hash
from cumulo.engine.decide.routing import Ask, ReplicaView, Router
from cumulo.engine.simulate.engine import SimulatedEngine
from cumulo.engine.simulate.run import Arrival, Run


def prefix_hashes(arrival: Arrival, block_size: int) -> list[BlockHash]:
    """Of the full blocks of what a prompt shares with others, as the engine's own prompts hash them."""
    shared = min(sum(tokens for _, tokens in arrival.shared), arrival.prompt_tokens)
    return _hashes(arrival.shared, shared // block_size, block_size)


@lru_cache(256)
def _hashes(pieces: tuple[tuple[int, int], ...], blocks: int, block_size: int) -> list[BlockHash]:
    text = array("i")
    for name, tokens in pieces:
        text.extend(array("i", (-1 - name,)) * tokens)
    return chain_hashes(root_hash(""), text[: blocks * block_size], block_size)


def simulate_fleet(
    arrivals: ListLike[Arrival], engines: ListLike[SimulatedEngine], router: Router
) -> list[Run]:
    """Serve all arrivals, given in order of time; returns each engine's run. Every engine has played up to the
    moment in which a request is routed."""
    size = engines[0].scheduler.config.block_size
    by_name = {str(number): engine for number, engine in enumerate(engines)}
    for arrival in arrivals:
        for engine in engines:
            engine.advance(arrival.arrived_s)
        ask = Ask(arrival.prompt_tokens, prefix_hashes(arrival, size))
        # The replicas are alike: one that has computed no prompt yet is as fast as the others.
        prompt_s = min(engine.scheduler.costs.prompt_s_per_token for engine in engines)
        route = router.route(ask, [replica_view(name, engine, prompt_s) for name, engine in by_name.items()])
        by_name[route.replica].give(arrival, route.cached_tokens)
    for engine in engines:
        engine.advance(float("inf"))
    return [engine.end() for engine in engines]


def replica_view(name: str, engine: SimulatedEngine, prompt_s_per_token: float) -> ReplicaView:
    """A simulated engine as a router sees it."""
    return engine_view(name, engine, engine.prompt_tokens_to_compute(), prompt_s_per_token)


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

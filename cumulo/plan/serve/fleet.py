"""Several replicas behind a router, simulated: what each routing policy makes of the same traffic. `cumulo simulate
serve --replicas` prints it.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace

from cumulo.engine.decide.core.block_pool import BlockHash
from cumulo.engine.decide.routing import router
from cumulo.engine.simulate.fleet import prefix_hashes, simulate_fleet
from cumulo.engine.simulate.run import Run
from cumulo.engine.simulate.split_fleet import KVLink, SplitDecode, SplitFleet, SplitPrefill
from cumulo.errors import ConfigError
from cumulo.plan.serve.replica import Replica
from cumulo.plan.serve.report import Percentiles
from cumulo.plan.serve.split import NETWORK_SHARE
from cumulo.plan.serve.traffic import Traffic


@dataclass(frozen=True, slots=True)
class FleetReport:
    router: str
    replicas: int
    requests: int
    finished: int
    simulated_s: float
    output_tok_s: float  # of all replicas together
    ttft_s: Percentiles | None
    itl_s: Percentiles | None
    cached_share: float  # of prompt tokens
    shared_cache_share: float  # ... that one cache of the replicas' total size would have had
    load_over_mean: float  # prompt and output tokens computed by the busiest replica, over the mean

    @property
    def reuse(self) -> float:
        """How much of the reuse of one shared cache the replicas' own caches reach."""
        return self.cached_share / self.shared_cache_share if self.shared_cache_share else 1.0


def play_fleet(
    replica: Replica, replicas: int, policy: str, traffic: Traffic, percentile: float = 99.0
) -> FleetReport:
    """The traffic on so many replicas of one kind, under a routing policy."""
    if replicas < 1:
        raise ConfigError(f"a fleet needs 1 or more replicas, got {replicas}")
    one = replica.one_of(replicas)
    engines = [one.engine_of(one.scheduler(), one.cost()) for _ in range(replicas)]
    runs = simulate_fleet(traffic.arrivals, engines, router(policy))
    return _report(policy, runs, replica, traffic, percentile)


def play_split(
    replica: Replica, prefill: int, decode: int, policy: str, traffic: Traffic, percentile: float = 99.0
) -> FleetReport:
    """The traffic on `decode` replicas whose prompts are computed by `prefill` further ones. KV travels over the
    scale-up links where they reach all of them, else over the network."""
    if prefill < 1 or decode < 1:
        raise ConfigError(
            f"split roles need 1 or more engines of each, got {prefill} prefill, {decode} decode"
        )
    node = replica.node
    together = (prefill + decode) * replica.ranks <= node.scale_up_gpus
    rate = node.device.link_bytes_per_s if together else node.nic_bytes_per_s
    # Each rank of a replica brings its own part.
    link = KVLink(NETWORK_SHARE * rate, replica.work().kv_bytes_per_token, replica.spec.layers)
    engines = [
        SplitDecode(one, replica.scheduler(), replica.cost(), replica.spec.layers) for one in range(decode)
    ]
    for engine in engines:
        engine.acceptance, engine.head_pass_s = replica.acceptance, replica.head_pass_s
    fleet = SplitFleet(
        [SplitPrefill(f"prefill-{one}", replica.scheduler(), replica.cost()) for one in range(prefill)],
        engines,
        link,
    )
    runs = fleet.serve(traffic.arrivals, router(policy))
    report = _report(f"{prefill} prefill + {decode} decode", runs, replica, traffic, percentile)
    computed = sum(one.run.computed_tokens for one in fleet.prefill)
    ordered = sum(one.ordered_tokens for one in fleet.prefill)
    return replace(report, cached_share=max(0.0, 1 - computed / max(1, ordered)))


def _report(
    policy: str, runs: list[Run], replica: Replica, traffic: Traffic, percentile: float
) -> FleetReport:
    served = [one for run in runs for one in run.served]
    done = [one for one in served if one.finished]
    span_s = max(run.ended_s for run in runs) - traffic.arrivals[0].arrived_s
    itl = [(time_s, count) for run in runs for time_s, count in zip(run.itl_s, run.itl_counts, strict=True)]
    computed = [run.computed_tokens for run in runs]
    prompts = sum(one.arrival.prompt_tokens for one in done)
    return FleetReport(
        router=policy,
        replicas=len(runs),
        requests=len(served),
        finished=len(done),
        simulated_s=span_s,
        output_tok_s=sum(one.arrival.output_tokens for one in done) / max(span_s, 1e-12),
        ttft_s=Percentiles.from_values(
            [one.ttft_s + replica.front_door_s for one in done], percentile=percentile
        ),
        itl_s=Percentiles.from_values([time_s for time_s, _ in itl], [count for _, count in itl], percentile),
        cached_share=sum(one.cached_tokens for one in done) / max(1, prompts),
        shared_cache_share=shared_cache_share(
            traffic, len(runs) * replica.memory().kv_blocks, replica.engine_config().block_size
        ),
        load_over_mean=max(computed) * len(computed) / max(1, sum(computed)),
    )


def shared_cache_share(traffic: Traffic, blocks: int, block_size: int) -> float:
    """Prompt tokens found in one cache of so many blocks that evicts what was used longest ago, when requests come
    one after the other: what no fleet of separate caches of that size can beat by much."""
    held: OrderedDict[BlockHash, None] = OrderedDict()
    found = total = 0
    for arrival in traffic.arrivals:
        chain, hit = prefix_hashes(arrival, block_size), True
        for block_hash in chain:
            if block_hash in held:
                found += block_size if hit else 0
                held.move_to_end(block_hash)
            else:
                hit = False
                held[block_hash] = None
        # Blocks of its own take room, too.
        own = arrival.prompt_tokens // block_size - len(chain)
        for number in range(max(0, own)):
            held[b"%d/%d" % (total, number)] = None
        while len(held) > blocks:
            held.popitem(last=False)
        total += arrival.prompt_tokens
    return found / max(1, total)

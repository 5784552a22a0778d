"""The cheapest deployment that keeps the objective, found by simulating. Called by `cumulo plan serve`.

Kinds of replica (device × tensor, pipeline and expert parallel × weight format × prefill apart or not) are ranked
by what they cost at least (`serve_deployment.candidate`), and simulated in that order until no other kind can be
cheaper than the two best found. So the answer is the cheapest of all that were enumerated, as far as the cost model
is right.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from cumulo.errors import ConfigError
from cumulo.plan.serve.capacity import Capacity, find_capacity, play
from cumulo.plan.serve.deployment import Candidate, Deployment, candidate
from cumulo.plan.serve.replica import Replica
from cumulo.plan.serve.report import ServeReport
from cumulo.plan.serve.split import decode, prefill
from cumulo.plan.serve.step_cost import StepLoad
from cumulo.plan.serve.traffic import Traffic, check_rate
from cumulo.spec.catalog import Catalog
from cumulo.spec.device import Node
from cumulo.spec.model import ModelSpec
from cumulo.spec.slo import Slo

TENSOR_SIZES = (1, 2, 4, 8)
STAGES = (1, 2, 4)
_SMALLER_STEPS = (4, 16)  # parts of the engine's default
_LEAST_STEP = 256  # tokens: below, a step is all overhead
_MOST_REPLICAS = 4096


@dataclass(frozen=True, slots=True)
class ServePlan:
    deployments: tuple[Deployment, ...]  # cheapest first; at most two
    capacity: Capacity  # of one replica of the cheapest, for a picture
    enumerated: int
    simulated: int  # kinds of replica
    rejected: tuple[Candidate, ...]  # those that cannot be used at all

    @property
    def best(self) -> Deployment:
        return self.deployments[0]


@dataclass(frozen=True, slots=True)
class Wanted:
    spec: ModelSpec
    traffic: Traffic
    rate: float
    slo: Slo
    most_gpus: int | None = None


def kinds(
    wanted: Wanted, catalog: Catalog, devices: Iterable[str], formats: Iterable[str], split: bool | None
) -> Iterator[Candidate]:
    """Everything that is looked at; `split` None: both ways."""
    for name in devices:
        node, fabric = catalog.cluster(1, name).node, catalog.fabric("rail-infiniband")
        for tp, pp, ep in rank_sizes(wanted.spec, node):
            for weights in formats:
                if weights == "float8" and "float8" not in node.device.peak_flops:
                    continue
                replica = Replica(wanted.spec, node, fabric, tp, ep, weights, pp=pp)
                replica = replica.with_context_for(wanted.traffic.arrivals)
                for apart in (False, True) if split is None else (split,):
                    yield candidate(replica, apart, wanted.traffic, wanted.slo)


def rank_sizes(spec: ModelSpec, node: Node) -> Iterator[tuple[int, int, int]]:
    """tp, pp and ep of one engine that the scale-up links of a node reach. Pipelines run on CPUs only."""
    for pp in STAGES if node.device.generation == "cpu" else (1,):
        for tp in TENSOR_SIZES:
            uneven = spec.heads % tp or (spec.mla is None and spec.kv_heads % tp and tp % spec.kv_heads)
            if uneven or tp * pp > node.scale_up_gpus or pp > spec.layers:
                continue
            yield tp, pp, 1
            if spec.moe is not None and tp > 1 and spec.moe.experts % tp == 0:
                yield tp, pp, tp


def search(
    wanted: Wanted, candidates: Iterable[Candidate], tell: Callable[[str], None] = lambda _: None
) -> ServePlan:
    check_rate(wanted.rate)
    every = sorted(candidates, key=lambda one: one.least_price(wanted.rate))
    if not every:
        raise ConfigError("--devices contains no device: name one or more, or omit it")
    found: list[Deployment] = []
    simulated = 0
    for one in every:
        price = one.least_price(wanted.rate)
        if price == float("inf") or (len(found) >= 2 and price >= found[1].price_per_hour):
            break
        tell(f"{one.replica}{', prefill apart' if one.split else ''}")
        limit = found[1].price_per_hour if len(found) >= 2 else float("inf")
        simulated += 1
        deployment = (_split if one.split else _together)(one, wanted, limit)
        if deployment is not None:
            found.append(deployment)
            found.sort(key=lambda plan: (plan.price_per_hour, plan.gpus))
            del found[2:]
    rejected = tuple(one for one in every if one.most_rate <= 0)
    if not found:
        raise ConfigError(_nothing_works(wanted, every))
    capacity = _capacity(found[0], wanted)
    best = found[0].with_headroom(capacity.rate * found[0].replicas / wanted.rate - 1)
    return ServePlan((best, *found[1:]), capacity, len(every), simulated, rejected)


def _together(one: Candidate, wanted: Wanted, price_limit: float) -> Deployment | None:
    """The fewest replicas that hold, each with its share of the rate; with smaller steps where fewer hold so."""
    least = int(max(1, -(-wanted.rate // one.most_rate)))
    best, most = None, _most(one.replica, wanted, price_limit)
    for replica in (one.replica, *_with_smaller_steps(one.replica, wanted.slo)):
        at = partial(_share_of, wanted, replica)
        found = _fewest(at, lambda result: result.holds(wanted.slo), least, most)
        if found is not None:
            best, most = Deployment(replica, found[0], 0, wanted.rate, found[1]), found[0] - 1
    return best


def _share_of(wanted: Wanted, replica: Replica, replicas: int) -> ServeReport:
    return play(replica, wanted.traffic.at_rate(wanted.rate / replicas), wanted.slo.percentile)


def _with_smaller_steps(replica: Replica, slo: Slo) -> Iterator[Replica]:
    """A step that computes a whole long prompt delays every running answer: where the ITL is bounded, smaller steps
    may do with fewer replicas."""
    usual = replica.engine_config()
    for part in _SMALLER_STEPS if slo.itl_s is not None else ():
        tokens = usual.max_tokens_per_step // part
        if tokens >= _LEAST_STEP:
            yield replace(replica, max_tokens_per_step=tokens, max_running=min(usual.max_running, tokens))


def _split(one: Candidate, wanted: Wanted, price_limit: float) -> Deployment | None:
    """First the fewest prefill replicas for the time to first token, then the fewest for the gaps after it."""
    slo, most = wanted.slo, _most(one.replica, wanted, price_limit)

    def prompts(replicas: int) -> ServeReport:
        return prefill(one.replica, wanted.traffic.at_rate(wanted.rate / replicas), slo.percentile).report

    least = int(max(1, -(-wanted.rate // one.most_rate)))
    first = _fewest(prompts, lambda result: result.holds(slo), least, most - 1)
    if first is None:
        return None
    prefilled = prefill(one.replica, wanted.traffic.at_rate(wanted.rate / first[0]), slo.percentile)

    def answers(replicas: int) -> ServeReport:
        return decode(one.replica, wanted.traffic.at_rate(wanted.rate / replicas), prefilled, slo.percentile)

    second = _fewest(answers, lambda result: result.holds(slo), 1, most - first[0])
    return None if second is None else Deployment(one.replica, second[0], first[0], wanted.rate, second[1])


def _most(replica: Replica, wanted: Wanted, price_limit: float) -> int:
    """Replicas beyond which it is too dear or there are no GPUs."""
    most = _MOST_REPLICAS if wanted.most_gpus is None else wanted.most_gpus // replica.ranks
    if price_limit < float("inf"):
        most = min(most, int(price_limit / replica.price_per_hour) if replica.price_per_hour else most)
    return most


def _fewest(
    at: Callable[[int], ServeReport], holds: Callable[[ServeReport], bool], least: int, most: int
) -> tuple[int, ServeReport] | None:
    """The smallest number in least..most that holds, given that more hold if fewer do: stride, then halve."""
    if least > most:
        return None
    low, high, stride = least - 1, least, 1
    while not holds(result := at(high)):
        if high == most:
            return None
        low, high, stride = high, min(most, high + stride), stride * 2
    while high - low > 1:
        middle = (low + high) // 2
        if holds(tried := at(middle)):
            high, result = middle, tried
        else:
            low = middle
    return high, result


def _capacity(best: Deployment, wanted: Wanted) -> Capacity:
    """How much one (decode) replica of the deployment would take."""
    slo, share = wanted.slo, wanted.rate / best.replicas
    prompts = wanted.traffic.at_rate(wanted.rate / best.prefill_replicas) if best.prefill_replicas else None
    prefilled = None if prompts is None else prefill(best.replica, prompts, slo.percentile)

    def at(rate: float) -> ServeReport:
        traffic = wanted.traffic.at_rate(rate)
        if prefilled is None:
            return play(best.replica, traffic, slo.percentile)
        # More traffic reaches the prefill replicas in the same measure.
        more = wanted.traffic.at_rate(wanted.rate / best.prefill_replicas * rate / share)
        return decode(best.replica, traffic, prefill(best.replica, more, slo.percentile), slo.percentile)

    return find_capacity(at, slo, start=share)


def _nothing_works(wanted: Wanted, every: list[Candidate]) -> str:
    """Why no deployment was found, and the nearest thing that works."""
    fitting = [one for one in every if one.fits]
    if not fitting:
        largest = max(every, key=lambda one: one.replica.ranks * one.replica.device.memory_bytes)
        return (
            f"the model fits none of the {len(every)} kinds of replica considered (leave --devices out to consider "
            f"all); in the largest, {largest.why_not}"
        )
    usable = [one for one in fitting if one.most_rate > 0]
    if not usable:
        fastest = min(fitting, key=_alone_s)
        return (
            f"no device considered keeps this objective even for one request at a time; on {fastest.replica} "
            f"{fastest.why_not}: loosen the objective beyond that, or shorten prompts"
        )
    least = min(usable, key=lambda one: one.least_price(wanted.rate))
    gpus = int(least.least_price(wanted.rate) / least.replica.price_per_hour) * least.replica.ranks
    allowed = "" if wanted.most_gpus is None else f" with {wanted.most_gpus} GPUs"
    return (
        f"no deployment keeps this objective at {wanted.rate:g} requests per second{allowed}; the cheapest kind, "
        f"{least.replica}, needs at least {gpus:,} GPUs: allow more with --max-gpus, lower --rate, or loosen the "
        "objective"
    )


def _alone_s(one: Candidate) -> float:
    """A short prompt's step: which kind is fast at all."""
    return sum(one.replica.cost().parts(StepLoad(512, 1, 1, 0, 0, 1 << 17, 512)))

"""The cheapest deployment that keeps the objective, found by simulating. Called by `cumulo plan serve`.

Kinds of replica (`kinds`) are ranked by what they cost at least (`deployment.candidate`), and simulated in that
order until no other kind can be cheaper than the two best found. So the answer is the cheapest of all that were
enumerated, as far as the cost model is right. The objective is kept at the pessimistic end of predicted step
times.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from cumulo.base.quantities import number
from cumulo.errors import ConfigError
from cumulo.plan.serve.capacity import Capacity, RateGrid, RateTrial, play
from cumulo.plan.serve.deployment import Candidate, Deployment, Promised, promised
from cumulo.plan.serve.replica import CUMULO, Replica
from cumulo.plan.serve.report import ServeReport
from cumulo.plan.serve.split import decode, prefill
from cumulo.plan.serve.step_cost import StepLoad
from cumulo.plan.serve.traffic import Traffic, check_rate
from cumulo.spec.model import ModelSpec
from cumulo.spec.slo import Slo

_STEPS = (4096, 2048, 1024, 512, 256, 128)  # tokens, beside the engine's default
_MOST_REPLICAS = 4096
_LEAST_LOOK = 1.1  # times a replica's share: how far headroom is looked for, at least


@dataclass(frozen=True, slots=True)
class ServePlan:
    deployments: tuple[Deployment, ...]  # cheapest first; at most two
    share: tuple[
        ServeReport, ServeReport, ServeReport
    ]  # of one replica of the best: fast, expected, slow steps
    capacity: tuple[Capacity, Capacity, Capacity]  # of one replica of the best: slow, expected, fast steps
    curve: tuple[RateTrial, ...]  # of one replica of the best, by rate, as expected
    every: tuple[Candidate, ...]  # kinds of replica, those first that cost the least at least
    tried: tuple[Deployment | None, ...]  # of the first of them: what was simulated, and what came of it
    promise: Promised | None = None  # of one replica of the best; None: nothing, or it was not asked for

    @property
    def enumerated(self) -> int:
        return len(self.every)

    @property
    def simulated(self) -> int:
        return len(self.tried)

    @property
    def rejected(self) -> tuple[Candidate, ...]:
        """Options that cannot be used at all."""
        return tuple(one for one in self.every if one.most_rate <= 0)

    @property
    def best(self) -> Deployment:
        return self.deployments[0]

    @property
    def headroom(self) -> tuple[float, float, float]:
        """How much more traffic would hold, as a share: at the pessimistic end, expected, at the other end."""
        share = self.best.rate / self.best.replicas
        low, middle, high = (one.rate / share - 1 for one in self.capacity)
        return low, middle, high


@dataclass(frozen=True, slots=True)
class Wanted:
    spec: ModelSpec
    traffic: Traffic
    rate: float
    slo: Slo
    most_gpus: int | None = None

    @property
    def output_tokens(self) -> float:
        return self.traffic.means()[1]


def search(
    wanted: Wanted,
    candidates: Iterable[Candidate],
    tell: Callable[[str], None] = lambda _: None,
    *,
    promises: bool = False,
) -> ServePlan:
    """`promises`: also play the best deployment with its SLO promised."""
    check_rate(wanted.rate)
    every = sorted(candidates, key=lambda one: (one.least_price(wanted.rate), one.replica.ranks))
    if not every:
        raise ConfigError(
            "--devices contains no device that computes in these --weights: name others, or omit either option; "
            "float4 and mxfp4 need --hypothetical"
        )
    found: list[Deployment] = []
    tried: list[Deployment | None] = []
    for one in every:
        price = one.least_price(wanted.rate)
        if price == float("inf") or (len(found) >= 2 and price >= found[1].price_per_hour):
            break
        tell(f"{one.replica}{', prefill apart' if one.split else ''}")
        limit = found[1].price_per_hour if len(found) >= 2 else float("inf")
        deployment = (_split if one.split else _together)(one, wanted, limit)
        tried.append(deployment)
        if deployment is not None:
            found.append(deployment)
            # Of two that cost the same, the one whose SLO the server can promise (`_promise`).
            found.sort(key=lambda plan: (plan.price_per_hour, plan.gpus, plan.prefill_replicas > 0))
            del found[2:]
    if not found:
        raise ConfigError(_nothing_works(wanted, every))
    tell("headroom")
    best, sure = found[0], found[0].replica.confidence
    rates = RateGrid(_at_rate(best, wanted, 1.0), wanted.rate / best.replicas, wanted.slo)
    most = next(one.most_rate for one in every if one.is_of(best)) * sure.slowest
    if best.prefill_replicas:  # it bounds prefill replicas, of which there may be fewer or more
        most *= best.prefill_replicas / best.replicas
    slow, usual, fast = (
        rates.capacity(slower, max(most / slower, rates.share * _LEAST_LOOK))
        for slower in (sure.slowest, 1.0, sure.fastest)
    )
    reports = _at_rate(best, wanted, sure.fastest)(rates.share), rates.report(0), best.report
    return ServePlan(
        tuple(found), reports, (slow, usual, fast), rates.curve(usual), tuple(every), tuple(tried),
        _promise(best, wanted) if promises else None,
    )  # fmt: skip


def _promise(best: Deployment, wanted: Wanted) -> Promised | None:
    """Where prefill is apart nobody has tested promises, so the plan makes none."""
    if best.prefill_replicas or best.replica.engine != CUMULO:
        return None
    traffic = wanted.traffic.at_rate(wanted.rate / best.replicas)
    return promised(best.replica.one_of(best.replicas), traffic, wanted.slo)


def _together(one: Candidate, wanted: Wanted, price_limit: float) -> Deployment | None:
    """The fewest replicas that hold, each with its share of the rate; with smaller steps, and then with further
    options, where fewer hold so."""
    together = one.replica.dp  # as many share their experts
    least = int(max(1, -(-wanted.rate // (one.most_rate * together))))
    most = _most(one.replica, wanted, price_limit) // together

    def fewest(replica: Replica) -> Deployment | None:
        at = partial(_share_of, wanted, replica)
        found = _fewest(
            lambda groups: at(groups * together), lambda result: result.holds(wanted.slo), least, most
        )
        if found is None:
            return None
        return Deployment(replica, found[0] * together, 0, wanted.rate, found[1], wanted.output_tokens)

    sizes, best = list(_step_sizes(one.replica, wanted)), None
    for replica in sizes:
        if (found := fewest(replica)) is not None:
            best, most = found, found.replicas // together - 1
    steps = sizes[0] if best is None else best.replica
    for option in one.options:
        replica = replace(
            option, max_tokens_per_step=steps.max_tokens_per_step, max_running=steps.max_running
        )
        if (found := fewest(replica)) is not None:
            best, most = found, found.replicas // together - 1
    return best


def _share_of(wanted: Wanted, replica: Replica, replicas: int) -> ServeReport:
    traffic = wanted.traffic.at_rate(wanted.rate / replicas)
    return play(replica.one_of(replicas), traffic, wanted.slo.percentile, replica.confidence.slowest)


def _step_sizes(replica: Replica, wanted: Wanted) -> Iterator[Replica]:
    """A step that computes a whole long prompt delays every running answer: where the ITL is bounded, the largest
    step that keeps it, the engine's default, and half of the first."""
    itl_s, usual = wanted.slo.itl_s, replica.engine_config()
    sizes = []
    if itl_s is not None and usual.max_tokens_per_step > _STEPS[-1]:
        cost, slow = replica.cost(), replica.confidence.slowest
        rows, context = 64, round(sum(wanted.traffic.means()[:2]))

        def step_s(tokens: int) -> float:
            load = StepLoad(tokens, rows, rows, rows * context, 0, tokens * tokens // 2, tokens)
            return slow * sum(cost.parts(load))

        within = next((tokens for tokens in _STEPS if step_s(tokens) <= itl_s), _STEPS[-1])
        sizes = [within, 0, within // 2] if within > _STEPS[-1] else [within, 0]
    for tokens in sizes or [0]:
        running = min(usual.max_running, tokens) if tokens else usual.max_running
        if tokens < usual.max_tokens_per_step:
            yield replace(replica, max_tokens_per_step=tokens, max_running=running)


def _split(one: Candidate, wanted: Wanted, price_limit: float) -> Deployment | None:
    """The fewest replicas, with further options where fewer hold so."""
    best = _apart(one, one.replica, wanted, price_limit)
    for option in one.options:
        limit = price_limit if best is None else best.price_per_hour - one.replica.price_per_hour
        found = _apart(one, option, wanted, limit)
        if found is not None and (best is None or found.gpus < best.gpus):
            best = found
    return best


def _apart(one: Candidate, replica: Replica, wanted: Wanted, price_limit: float) -> Deployment | None:
    """First the fewest prefill replicas for the time to first token, then the fewest for the gaps after it. Both
    run on one host, where keys and values go from GPU to GPU, unless many share their experts."""
    slo, most, slow = (
        wanted.slo,
        _most(replica, wanted, price_limit) // replica.dp,
        replica.confidence.slowest,
    )
    if replica.dp == 1:
        most = min(most, replica.node.gpus)

    def share(groups: int) -> Traffic:
        return wanted.traffic.at_rate(wanted.rate / (groups * replica.dp))

    def prompts(groups: int) -> ServeReport:
        return prefill(replica, share(groups), slo.percentile, slow).report

    least = int(max(1, -(-wanted.rate // (one.most_rate * replica.dp))))
    first = _fewest(prompts, lambda result: result.holds(slo), least, most - 1)
    if first is None:
        return None
    prefilled = prefill(replica, share(first[0]), slo.percentile, slow)

    def answers(groups: int) -> ServeReport:
        return decode(replica, share(groups), prefilled, slo.percentile, slow)

    second = _fewest(answers, lambda result: result.holds(slo), 1, most - first[0])
    if second is None:
        return None
    engines = (second[0] * replica.dp, first[0] * replica.dp)
    return Deployment(replica, *engines, wanted.rate, second[1], wanted.output_tokens)


def _most(replica: Replica, wanted: Wanted, price_limit: float) -> int:
    """Replicas beyond which it is too expensive or there are no GPUs."""
    most = _MOST_REPLICAS if wanted.most_gpus is None else wanted.most_gpus // replica.ranks
    if price_limit < float("inf"):
        most = min(most, int(price_limit / replica.price_per_hour) if replica.price_per_hour else most)
    return most


def _fewest(
    at: Callable[[int], ServeReport], holds: Callable[[ServeReport], bool], least: int, most: int
) -> tuple[int, ServeReport] | None:
    """The smallest number in least..most that holds, given that more hold if fewer do: stride, then halve. Where
    the fewest do not hold, it is first seen whether any do."""
    if least > most:
        return None
    low, high, stride = least - 1, least, 1
    while not holds(result := at(high)):
        if high == most or (high == least and not holds(at(most))):
            return None
        low, high, stride = high, min(most, high + stride), stride * 2
    while high - low > 1:
        middle = (low + high) // 2
        if holds(tried := at(middle)):
            high, result = middle, tried
        else:
            low = middle
    return high, result


def _at_rate(best: Deployment, wanted: Wanted, slower: float) -> Callable[[float], ServeReport]:
    """One (decode) replica of a deployment under any rate."""
    slo, replica = wanted.slo, best.replica.one_of(best.replicas)
    if not best.prefill_replicas:
        return lambda rate: play(replica, wanted.traffic.at_rate(rate), slo.percentile, slower)
    ratio = best.replicas / best.prefill_replicas

    def apart(rate: float) -> ServeReport:
        prompts = prefill(replica, wanted.traffic.at_rate(rate * ratio), slo.percentile, slower)
        return decode(replica, wanted.traffic.at_rate(rate), prompts, slo.percentile, slower)

    return apart


def _nothing_works(wanted: Wanted, every: list[Candidate]) -> str:
    """Why no deployment was found, and the nearest thing that works."""
    fitting = [one for one in every if one.fits]
    hint = ", or add --hypothetical to plan for engines with 8- and 4-bit experts and 8-bit KV caches"
    hint *= all(one.replica.engine == "cumulo" and one.replica.device.generation != "cpu" for one in every)
    if not fitting:
        tried = [one for one in every if one.runnable] or every
        largest = max(tried, key=lambda one: one.replica.ranks * one.replica.device.memory_bytes)
        return (
            f"`cumulo serve` runs the model on none of the {len(every)} kinds of replica considered (omit "
            f"--devices to consider all{hint}); in the largest, {largest.why_not}"
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
    allowed = {None: "", 1: " with 1 GPU"}.get(wanted.most_gpus, f" with {wanted.most_gpus} GPUs")
    return (
        f"no deployment keeps this objective at {number(wanted.rate)} requests/s{allowed}; the cheapest kind, "
        f"{least.replica}, needs at least {gpus:,} GPUs, and has to keep it with steps that are "
        f"{least.replica.confidence.error:.0%} longer than expected: allow more with --max-gpus, lower the rate, "
        f"or loosen the objective{hint}"
    )


def _alone_s(one: Candidate) -> float:
    """A short prompt's step: which kind is fast at all."""
    return sum(one.replica.cost().parts(StepLoad(512, 1, 1, 0, 0, 1 << 17, 512)))

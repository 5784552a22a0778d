"""Why the best deployment has an engine option, or does not. `cumulo plan serve` prints it.

An option that keeps KV blocks beyond the device costs nothing that is priced, so it is chosen only where fewer
replicas keep the objective with it: the best deployment is played with the option and without. Other choices
(number formats, drafts, prefill apart) are kinds of replica of their own, and their prices say why.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from cumulo.base.quantities import quantity
from cumulo.errors import OutOfMemory
from cumulo.plan.serve.capacity import play
from cumulo.plan.serve.deployment import Candidate, Deployment
from cumulo.plan.serve.kinds import ReplicaChoices, why_no_store
from cumulo.plan.serve.replica import Replica
from cumulo.plan.serve.report import ServeReport
from cumulo.plan.serve.search import ServePlan, Wanted
from cumulo.plan.serve.step_cost import StepLoad, pairs
from cumulo.plan.serve.traffic import Traffic

_SAME = 0.005  # shares and ratios that are this close are called the same


@dataclass(frozen=True, slots=True)
class OptionVerdict:
    option: str  # as `cumulo serve` takes it, or in words
    chosen: bool
    why: str

    def __str__(self) -> str:
        return f"{self.option}: {'chosen' if self.chosen else 'not chosen'}, {self.why}"


def weigh(plan: ServePlan, wanted: Wanted, choices: ReplicaChoices) -> tuple[OptionVerdict, ...]:
    """Every option that was considered, one line each."""
    stores = (_store(plan.best, wanted, option, fields) for option, fields in choices.stores.items())
    return (*_kinds(plan), *stores)


# -- kinds of replica ------------------------------------------------------------------------------------------
def _kinds(plan: ServePlan) -> Iterator[OptionVerdict]:
    """Of each way in which kinds differ, the one that is chosen and why the others are not."""
    best = plan.best
    ways: tuple[Callable[[Candidate], str], ...] = (
        lambda one: f"{one.replica.weights} weights",
        lambda one: f"{one.replica.form.kv} KV cache",
        lambda one: "speculation" if one.replica.acceptance else "no speculation",
        lambda one: "prefill on replicas of its own" if one.split else "prefill and decode together",
    )
    mine = next(one for one in plan.every if one.is_of(best))
    for way in ways:
        others = dict.fromkeys(way(one) for one in plan.every if way(one) != way(mine))
        if others:
            yield OptionVerdict(way(mine), True, f"{quantity(best.price_per_hour, 'USD/h')}")
        for other in others:
            members = [one for one in plan.every if way(one) == other]
            yield OptionVerdict(other, False, _price_of(plan, members))


def _price_of(plan: ServePlan, members: list[Candidate]) -> str:
    """What the cheapest of these kinds costs, as far as it is known."""
    usable = [one for one in members if one.most_rate > 0]
    if not usable:
        return f"no kind of replica can be used: {members[0].replica}: {members[0].why_not}"
    best, found = plan.best, dict(zip(map(id, plan.every), plan.tried, strict=False))
    simulated = [one for one in usable if id(one) in found]
    prices = [one.price_per_hour for one in (found[id(one)] for one in simulated) if one is not None]
    if prices:
        more = min(prices) / best.price_per_hour - 1 if best.price_per_hour else 0.0
        told = f"{more:.0%} more expensive" if more >= _SAME else "the same price"
        return f"{quantity(min(prices), 'USD/h')} at least, {told}"
    if simulated:
        return "those that were simulated miss the SLO, or cost more than the second best"
    least = min(one.least_price(best.rate) for one in usable)
    return f"{quantity(least, 'USD/h')} at least, by a bound that needs no simulation"


# -- KV blocks beyond the device -------------------------------------------------------------------------------
def _store(best: Deployment, wanted: Wanted, option: str, fields: dict[str, Any]) -> OptionVerdict:
    replica = best.replica
    chosen = all(getattr(replica, name) == value for name, value in fields.items())
    usual = Replica(replica.spec, replica.node, replica.fabric)
    without = replace(replica, **{name: getattr(usual, name) for name in fields})
    with_it = replace(replica, **fields)
    if why := why_no_store(with_it, best.prefill_replicas > 0):
        return OptionVerdict(option, False, why)
    if best.prefill_replicas:
        return OptionVerdict(option, chosen, f"{best.gpus} replicas hold")
    try:
        there = _played(with_it, best, wanted)
    except OutOfMemory:
        return OptionVerdict(option, False, "the memory has no room for it")
    absent = _played(without, best, wanted)
    effect = _effect(with_it, absent, there, wanted)
    several = f"{best.replicas} replica{'s' if best.replicas > 1 else ''}"
    if not chosen:
        return OptionVerdict(
            option, False, f"{several} meet{'' if best.replicas > 1 else 's'} the SLO without; {effect}"
        )
    miss = "" if absent.holds(wanted.slo) else f" ({absent.limit(wanted.slo).partition(';')[0]})"
    return OptionVerdict(option, True, f"without it {several} would not meet the SLO{miss}; {effect}")


def _played(replica: Replica, best: Deployment, wanted: Wanted) -> ServeReport:
    """One of the best deployment's replicas with its share of the traffic, at the pessimistic end."""
    traffic = wanted.traffic.at_rate(best.rate / best.replicas)
    slow = replica.confidence.slowest
    return play(replica.one_of(best.replicas), traffic, wanted.slo.percentile, slow)


def _effect(with_it: Replica, absent: ServeReport, there: ServeReport, wanted: Wanted) -> str:
    words = [_first_token(absent, there)]
    shares = any(one.shared for one in wanted.traffic.arrivals)
    if absent.preemptions:
        words.insert(0, f"recomputed tokens {absent.recomputed_tokens:,} → {there.recomputed_tokens:,}")
    elif not shares:
        return "no prompts share a prefix and no request is preempted"
    if shares:
        words.insert(0, f"prefix cache hit rate {absent.cached_share:.0%} → {there.cached_share:.0%}")
        if there.cached_share - absent.cached_share < _SAME:
            words.append(_why_not_fetched(with_it, absent, wanted.traffic))
    return ", ".join(words)


def _first_token(absent: ServeReport, there: ServeReport) -> str:
    if absent.ttft_s is None or there.ttft_s is None:
        return "TTFT unknown"
    before, after = absent.ttft_s.at_slo, there.ttft_s.at_slo
    return f"TTFT {quantity(before, 's')} → {quantity(after, 's')}"


def _why_not_fetched(replica: Replica, absent: ServeReport, traffic: Traffic) -> str:
    """Where a tier finds nothing more: the device holds all prefixes, or computing is sooner."""
    size = replica.engine_config().block_size
    fetch_s = replica.block_bytes / replica.device.host_bytes_per_s
    if replica.kv_disk:
        fetch_s += replica.block_bytes / replica.disk_bytes_per_s
    cost, many = replica.cost(), 32 * size
    compute_s = sum(cost.parts(StepLoad(many, 1, 1, 0, 0, pairs(0, many), many))) / 32
    if fetch_s >= compute_s:
        where = "from disk" if replica.kv_disk else "from host memory"
        return f"a KV block comes {where} in {quantity(fetch_s, 's')} and is computed in {quantity(compute_s, 's')}"
    prompt_tokens, _, shared_tokens = traffic.means()
    if absent.cached_share > shared_tokens / prompt_tokens - 2 * _SAME:  # as in a cache without limits
        return "the KV cache holds all prefixes"
    passing = replica.memory().tier_blocks
    prefix = max(sum(tokens for _, tokens in one.shared) for one in traffic.arrivals) // size
    if replica.kv_disk and passing < prefix:
        return f"blocks pass through {passing} blocks of host memory, and a prefix has {prefix}: add --kv-host-gib"
    return "what left the KV cache is not asked for again"

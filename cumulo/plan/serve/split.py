"""Prefill and decode on engines of their own: what such a deployment's requests go through. Used by the search.

Prompts are computed by prefill replicas, which draw the first token; keys and values travel over the network, and
decode replicas draw the rest (Zhong et al. 2024, "DistServe"; Patel et al. 2024, "Splitwise"). Both run the real
scheduler: a prefill replica's requests have one output token, a decode replica's arrive with keys and values.
"""

from dataclasses import dataclass, replace

from cumulo.engine.simulate.engine import simulate
from cumulo.engine.simulate.run import Arrival, Run
from cumulo.plan.serve.replica import Replica
from cumulo.plan.serve.report import ServeReport, grows, report
from cumulo.plan.serve.traffic import Traffic

NETWORK_SHARE = 0.9  # of a card's rate that long transfers reach


@dataclass(frozen=True, slots=True)
class Prefilled:
    """One prefill replica's run: first tokens of the traffic it was given."""

    traffic: Traffic
    run: Run
    report: ServeReport


def prefill(replica: Replica, traffic: Traffic, percentile: float, slower: float = 1.0) -> Prefilled:
    prompts = tuple(replace(one, output_tokens=1) for one in traffic.arrivals)
    run, cost = replica.serve(prompts, slower)
    blocks = replica.memory().kv_blocks
    return Prefilled(traffic, run, report(run, blocks, cost.spent(run), percentile, replica.front_door_s))


def landings(replica: Replica, traffic: Traffic, waits_s: list[float]) -> list[Arrival]:
    """Requests as a decode replica gets them: a rank's card brings one prompt's keys and values after the other."""
    bytes_per_s = NETWORK_SHARE * replica.node.nic_bytes_per_s
    token_s = replica.work().kv_bytes_per_token / bytes_per_s
    first = [
        (one.arrived_s + waits_s[index % len(waits_s)], one) for index, one in enumerate(traffic.arrivals)
    ]
    landed: list[Arrival] = []
    card_free_s = 0.0
    for first_s, one in sorted(first, key=lambda item: item[0]):
        if one.output_tokens > 1:
            card_free_s = max(card_free_s, first_s) + one.prompt_tokens * token_s
            landed_s = card_free_s + replica.fabric.latency_s
            landed.append(replace(one, arrived_s=landed_s, first_token_s=first_s, shared=()))
    return landed


def decode(
    replica: Replica, traffic: Traffic, prefilled: Prefilled, percentile: float, slower: float = 1.0
) -> ServeReport:
    """One decode replica's run. Its requests' first tokens take as long as those of the prefill run, one by one."""
    waits_s = [one.ttft_s for one in prefilled.run.served]
    arrivals = landings(replica, traffic, waits_s)
    transfers_grow = grows(
        [one.first_token_s or 0.0 for one in arrivals], [one.arrived_s for one in arrivals]
    )
    blocks = replica.memory().kv_blocks
    cost = replica.cost(slower)
    run = simulate(
        arrivals, replica.scheduler(), cost, acceptance=replica.acceptance, head_pass_s=replica.head_pass_s
    )
    result = report(run, blocks, cost.spent(run), percentile)
    return replace(
        result,
        ttft_s=prefilled.report.ttft_s,
        e2e_s=None,  # its two halves were simulated apart
        cached_share=prefilled.report.cached_share,
        waiting_grows=result.waiting_grows or prefilled.report.waiting_grows or transfers_grow,
    )

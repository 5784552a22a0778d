"""When nodes fail: at random, at published rates. The cluster simulator plays them."""

import random
from dataclasses import dataclass

# Failures per 1,000 node-days. RSC-1 and RSC-2: Kokolis et al., HPCA 2025 (arXiv 2410.21680); Llama 3 405B: 419
# in 54 days on 2,048 nodes (arXiv 2407.21783, table 5).
PUBLISHED_RATES = {"rsc-1": 6.5, "rsc-2": 2.34, "llama-3": 3.79}


@dataclass(frozen=True, slots=True)
class FailureRates:
    per_1000_node_days: float
    repair_s: float = 4 * 3600.0
    # Some nodes fail again and again: this share of them takes this share of all failures.
    bad_nodes: float = 0.0
    bad_share: float = 0.0


def failure_times(rates: FailureRates, nodes: int, until_s: float, seed: int) -> list[tuple[float, int]]:
    """(second, node), in order: a Poisson process over all nodes."""
    draw = random.Random(f"failures {seed}")
    mean_gap_s = (
        86_400_000.0 / (rates.per_1000_node_days * nodes) if rates.per_1000_node_days > 0 else float("inf")
    )
    bad = max(1, round(rates.bad_nodes * nodes)) if rates.bad_nodes else 0
    found: list[tuple[float, int]] = []
    at_s = draw.expovariate(1 / mean_gap_s)
    while at_s < until_s:
        among = bad if bad and draw.random() < rates.bad_share else nodes
        found.append((at_s, draw.randrange(among)))
        at_s += draw.expovariate(1 / mean_gap_s)
    return found

"""Simulated speculation of SmolLM2-135M on an H200, next to what was measured (docs/speculation.md).

    python benchmarks/simulate_drafts.py

Constants of the H200 were fitted to runs of other models without drafts.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from cumulo.engine.decide.speculation.rounds import RoundPolicy
from cumulo.engine.simulate.drafts import tree_rates
from cumulo.engine.simulate.run import Arrival
from cumulo.plan.serve.replica import Replica
from cumulo.spec import catalog
from cumulo.spec.model import ModelSpec

MODEL = ModelSpec(
    family="llama", vocab_size=49152, hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, ffn_hidden=1536,
    max_context=8192, tied_embeddings=True,
)  # fmt: skip
# How often a head's first to fourth choice is right: of 50,000 answers, and of 55,000 (the last two are guesses).
HEADS = {"50,000": (0.548, 0.124, 0.060, 0.036), "55,000": (0.661, 0.116, 0.05, 0.03)}
ANSWER = 400


def main() -> None:
    cluster = catalog.cluster(1, "h200")
    plain = Replica(MODEL, cluster.node, cluster.fabric, max_context=2048)
    usual_s = seconds(plain)[0]
    for right in (0.3, 0.47, 0.94, 0.98):
        print(f"n-gram, acceptance {right}: {usual_s / seconds(replace(plain, acceptance=right))[0]:.2f}×")
    for name, (first, *others) in HEADS.items():
        for levels in (0, 2, 3, 4):
            head = replace(
                plain, acceptance=first, speculate="head", draft_choices=tuple(others), draft_tree=levels
            )
            took_s, policy = seconds(head)
            assert isinstance(policy, RoundPolicy) and head.head is not None
            rounds = {kind: f"{1e3 * known[0]:.3f} ms" for kind, known in policy._by_rows[1].rounds.items()}
            kept = f", {tokens_of_a_round((first, *others), levels):.2f} tokens of a tree" if levels else ""
            print(
                f"head of {name} answers, {levels} levels: {usual_s / took_s:.2f}×, a proposal "
                f"{1e6 * head.head.pass_s:.0f} µs, rounds {rounds}{kept}"
            )


def seconds(replica: Replica) -> tuple[float, object]:
    """Of one answer, and the policy that has learnt from it."""
    scheduler = replica.scheduler()
    engine = replica.engine_of(scheduler, replica.cost())
    engine.arrivals = [Arrival(0.0, 300, ANSWER)]
    engine.advance(float("inf"))
    return engine.end().ended_s, scheduler.speculation


def tokens_of_a_round(choices: tuple[float, ...], levels: int) -> float:
    tokens = chance = 1.0
    for rate in tree_rates(choices, levels):
        tokens += (chance := chance * rate)
    return tokens


if __name__ == "__main__":
    main()

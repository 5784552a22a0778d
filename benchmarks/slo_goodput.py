"""Goodput under an SLO at rising request rates: `--slo` against steps of fixed size, with the simulator.

    python benchmarks/slo_goodput.py AzureLLMInferenceTrace_conv.csv --rates 10,20,30,40

Every request is judged on its own (TTFT, and 99% of its tokens within the ITL). The figure is the highest goodput
that each way reaches over all rates, so a fixed step is not blamed for rates that it should never be given.
"""

import argparse
from pathlib import Path

from cumulo.base.report import Row, write_json
from cumulo.load.simulated import parse_objective, read_any_trace
from cumulo.plan.serve.goodput import Goodput, play_goodput
from cumulo.plan.serve.replica import Replica
from cumulo.plan.serve.traffic import Traffic
from cumulo.spec.catalog import shipped

# Tokens per step, and whether the engine schedules by the SLO.
WAYS = {
    "512-token steps": (512, False),
    "8192-token steps": (8192, False),
    "512-token steps with the SLO's door": (512, True),
    "--slo": (8192, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rates", default="10,20,30,40", help="requests per second")
    parser.add_argument("--requests", type=int, default=4000, help="of the trace, from its beginning")
    parser.add_argument(
        "--skip", type=int, default=0, help="requests of the trace that are left out before them"
    )
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--slo", default="ttft=1s,itl=50ms")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    rows = _measure(chosen)
    write_json(chosen.json, rows)


def _measure(chosen: argparse.Namespace) -> list[Row]:
    slo = parse_objective(chosen.slo, 99.0)
    assert slo is not None
    trace = read_any_trace(chosen.trace).arrivals[chosen.skip : chosen.skip + chosen.requests]
    catalog = shipped(None)
    spec, cluster = catalog.model_or_file(chosen.model), catalog.cluster(1, chosen.device)
    traffic = Traffic(
        tuple(one for one in trace if one.prompt_tokens + one.output_tokens <= spec.max_context)
    )
    best: dict[str, float] = {}
    rows, least_kept = list[Row](), 1.0
    print(
        f"{'requests/s':>10} {'way':36} {'goodput':>8} {'refused':>8} {'kept':>7} {'late TTFT':>9} {'late ITL':>9}"
    )
    for rate in map(float, chosen.rates.split(",")):
        for way, (tokens, promise) in WAYS.items():
            replica = Replica(spec, cluster.node, cluster.fabric, max_tokens_per_step=tokens)
            found = play_goodput(
                replica.with_context_for(traffic.arrivals), traffic.at_rate(rate), slo, promise=promise
            )
            _show(rate, way, found)
            best[way] = max(best.get(way, 0.0), found.request_s)
            if way == "--slo":
                least_kept = min(least_kept, found.kept_share)
            rows.append(Row(f"{way}: goodput at {rate:g} requests/s", found.request_s, "requests/s"))
            rows.append(Row(f"{way}: kept at {rate:g} requests/s", 100 * found.kept_share, "% of admitted"))
    fixed = max(goodput for way, goodput in best.items() if not WAYS[way][1])
    rows.append(Row("--slo: goodput, over the better fixed step", best["--slo"] / fixed, "×", must=1.3))
    rows.append(Row("--slo: promises kept, at the worst rate", 100 * least_kept, "%", must=99.0))
    for row in rows[-2:]:
        print(
            f"{row.name:48} {row.value:.4g} {row.unit} (must {row.must:g}{'' if row.ok else ', NOT REACHED'})"
        )
    return rows


def _show(rate: float, way: str, found: Goodput) -> None:
    refused = found.requests - found.admitted
    print(
        f"{rate:10g} {way:36} {found.request_s:8.2f} {refused / found.requests:8.1%} {found.kept_share:7.2%} "
        f"{found.missed_ttft / found.requests:9.2%} {found.missed_itl / found.requests:9.2%}",
        flush=True,
    )


if __name__ == "__main__":
    main()

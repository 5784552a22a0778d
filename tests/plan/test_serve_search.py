"""Traffic, reports, capacity, and the search for the cheapest deployment."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cumulo.engine.simulate.run import Arrival
from cumulo.errors import ConfigError, CumuloError
from cumulo.load.simulated import read_traffic
from cumulo.plan.serve.capacity import find_capacity, play
from cumulo.plan.serve.deployment import Candidate
from cumulo.plan.serve.kinds import ReplicaChoices, kinds, obstacle
from cumulo.plan.serve.replica import Replica
from cumulo.plan.serve.report import Percentiles, ServeReport, grows
from cumulo.plan.serve.search import Wanted, _split, _together, search
from cumulo.plan.serve.split import decode, landings, prefill
from cumulo.plan.serve.traffic import Traffic, drawn_traffic
from cumulo.spec import catalog
from cumulo.spec.slo import Slo

SLO = Slo(ttft_s=0.3, itl_s=0.03, share=0.99)


def some_traffic(
    count: int = 80, prompt: int = 400, output: int = 30, seed: int = 0, prefix: int = 0
) -> Traffic:
    rng, now_s, times_s = random.Random(seed), 0.0, []
    for _ in range(count):
        times_s.append(now_s := now_s + rng.expovariate(1.0))
    return drawn_traffic(count, lambda _: prompt, lambda _: output, times_s=times_s, prefix_tokens=prefix)


def replica(
    device: str = "h200", model: str = "llama-3.1-8b", tp: int = 1, weights: str = "bfloat16"
) -> Replica:
    cluster = catalog.cluster(1, device)
    return Replica(catalog.model(model), cluster.node, cluster.fabric, tp, 1, weights, max_context=4096)


# -- memory ------------------------------------------------------------------------------------------------------
def test_8_bit_weights_must_fit_before_they_are_quantised() -> None:
    with pytest.raises(CumuloError, match=r"tp 2 would fit: .* loaded before they are quantised"):
        replica("h100-sxm", "llama-3.1-70b", weights="float8").memory()
    assert replica("h100-sxm", "llama-3.1-70b", tp=2, weights="float8").memory().kv_blocks > 0


@pytest.mark.parametrize(("device", "model"), [("rtx-4090", "llama-3.1-8b"), ("l40s", "qwen3-14b")])
@pytest.mark.parametrize("longest", [3000, 20_000, 33_000])
def test_the_context_to_serve_with_is_one_that_fits(device: str, model: str, longest: int) -> None:
    sampled = replace(replica(device, model), max_context=longest)
    roomy = sampled.roomy_context()
    assert longest <= roomy <= 2 * longest
    replace(sampled, max_context=roomy).memory()


# -- traffic -----------------------------------------------------------------------------------------------------
def test_a_rate_stretches_time_and_changes_nothing_else() -> None:
    slow, fast = some_traffic().at_rate(2.0), some_traffic().at_rate(20.0)
    assert slow.rate == pytest.approx(2.0) and fast.rate == pytest.approx(20.0)
    assert [one.arrived_s for one in slow.arrivals] == pytest.approx(
        [10 * one.arrived_s for one in fast.arrivals]
    )
    assert slow.means() == (400, 30, 0)


def test_a_trace_is_read_with_its_shared_prefixes(tmp_path: Path) -> None:
    lines = [
        {
            "arrival_s": 12.5,
            "prompt_tokens": 100,
            "output_tokens": 5,
            "prefix": "system",
            "prefix_tokens": 64,
        },
        {"arrival_s": 10.0, "prompt_tokens": 50, "output_tokens": 7},
        {"arrival_s": 13.0, "prompt_tokens": 90, "output_tokens": 5, "prefix": "system", "prefix_tokens": 64},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    traffic = read_traffic(path)
    assert traffic.arrivals == (
        Arrival(0.0, 50, 7), Arrival(2.5, 100, 5, ((0, 64),)), Arrival(3.0, 90, 5, ((0, 64),)),
    )  # fmt: skip
    assert traffic.means()[2] == pytest.approx(64 / 3)  # the first of them computes it


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{nonsense", "line 1 is not JSON"),
        ('{"arrival_s": 0, "prompt_tokens": 3}', r"line 1 has no answer length \(output_tokens\)"),
        ('{"arrival_s": 0, "prompt_tokens": -3, "output_tokens": 1}', "line 1: the prompt's length must be"),
        ('{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 1, "prefix": "a"}', "has no prefix_tokens"),
        ('{"arrival_s": "soon", "prompt_tokens": 3, "output_tokens": 1}', "neither a number of seconds nor"),
        ("", "has no rows"),
    ],
)
def test_a_damaged_trace_is_refused_with_its_line(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(CumuloError, match=words):
        read_traffic(path)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="more than 0 requests/s"):
        some_traffic().at_rate(rate)


def test_an_objective_needs_a_bound_that_can_be_kept() -> None:
    for fields in ({}, {"ttft_s": 0.0}, {"itl_s": -1.0}, {"ttft_s": 1.0, "share": 1.0}):
        with pytest.raises(ConfigError, match="SLO"):
            Slo(**fields)


# -- reports -----------------------------------------------------------------------------------------------------
def test_percentiles_of_counted_values_are_numpys_of_them_all() -> None:
    rng = np.random.default_rng(0)
    values, counts = rng.exponential(size=50), rng.integers(1, 20, size=50)
    found = Percentiles.from_values(values.tolist(), counts.tolist(), percentile=95.0)
    assert found is not None
    whole = np.repeat(values, counts)
    expected = np.percentile(whole, (50, 90, 99, 95))
    assert (found.p50, found.p90, found.p99, found.at_slo) == pytest.approx(tuple(expected))
    assert found.mean == pytest.approx(whole.mean()) and found.most == whole.max()
    assert Percentiles.from_values([]) is None


def test_a_queue_that_fills_up_is_seen_even_where_no_bound_is_missed() -> None:
    came_s = [float(index) for index in range(200)]
    assert grows(came_s, [3 * index + 1.0 for index in range(200)])  # one a second comes, one in three goes
    assert not grows(came_s, [index + 1.0 + 20 * (index % 2) for index in range(200)])
    assert not grows([0.0] * 50, [9.0] * 50)  # all at once: there is no while
    only_gaps = Slo(itl_s=10.0)
    flooded = play(replica(), some_traffic(300).at_rate(500.0))
    assert not flooded.misses(only_gaps) and not flooded.holds(only_gaps)


def test_where_the_time_went_adds_up() -> None:
    result = play(replica(), some_traffic(prefix=256).at_rate(10.0))
    assert sum(result.time_by_part.values()) == pytest.approx(1.0)
    assert result.bound_by == "reading weights"
    assert result.cached_share > 0.3 and result.finished == 80


def test_slower_steps_make_everybody_wait_longer() -> None:
    usual, slow = (play(replica(), some_traffic().at_rate(10.0), slower=factor) for factor in (1.0, 1.2))
    assert (
        usual.itl_s is not None
        and slow.itl_s is not None
        and usual.ttft_s is not None
        and slow.ttft_s is not None
    )
    assert slow.itl_s.p50 == pytest.approx(1.2 * usual.itl_s.p50, rel=0.05)
    assert slow.ttft_s.p99 > usual.ttft_s.p99


# -- capacity ----------------------------------------------------------------------------------------------------
@pytest.mark.long
def test_the_capacity_holds_and_a_little_more_does_not() -> None:
    traffic, one = some_traffic(200), replica()

    def at(rate: float) -> ServeReport:
        return play(one, traffic.at_rate(rate), SLO.percentile)

    found = find_capacity(at, SLO, start=1.0)
    assert at(found.rate).holds(SLO)
    assert any(not trial.holds and trial.rate <= 1.021 * found.rate for trial in found.trials)
    assert find_capacity(at, SLO, start=4 * found.rate).rate == pytest.approx(found.rate, rel=0.05)
    # Little's law around the loop: rate × (thinking + answering).
    answer = found.best.report.e2e_s
    assert answer is not None and found.users(10.0) == pytest.approx(found.rate * (10.0 + answer.mean))


def test_an_objective_no_request_can_keep_is_refused_with_what_is_reached() -> None:
    with pytest.raises(ConfigError, match=r"itl \d+\.\d+ ms against 1 ms; bounded by reading weights"):
        find_capacity(lambda rate: play(replica(), some_traffic(40).at_rate(rate)), Slo(itl_s=0.001))


# -- prefill and decode apart ------------------------------------------------------------------------------------
def test_split_replicas_answer_all_and_decode_undisturbed() -> None:
    traffic, one = some_traffic().at_rate(15.0), replica()
    together = play(one, traffic)
    first = prefill(one, traffic, 99.0)
    apart = decode(one, traffic, first, 99.0)
    assert apart.finished == together.finished == 80
    assert apart.ttft_s == first.report.ttft_s
    assert apart.itl_s is not None and together.itl_s is not None
    assert apart.itl_s.p90 < together.itl_s.p90  # no prompt comes between two tokens
    assert first.report.steps < together.steps


def test_transfers_wait_for_one_another_on_the_card() -> None:
    one = replica()
    slow = replace(one, node=replace(one.node, nic_bytes_per_s=1e8))
    traffic = Traffic((Arrival(0.0, 1000, 5), Arrival(0.0, 1000, 5)))
    token_s = 131_072 / (0.9 * 1e8)
    landed = [arrival.arrived_s for arrival in landings(slow, traffic, [0.5, 0.5])]
    assert landed == pytest.approx([0.5 + 1000 * token_s, 0.5 + 2000 * token_s], rel=1e-4)


# -- the search --------------------------------------------------------------------------------------------------
def every_kind(wanted: Wanted, devices: list[str], weights: list[str], split: bool | None) -> list[Candidate]:
    choices = ReplicaChoices(tuple(devices), tuple(weights), split=split)
    return list(kinds(wanted.spec, wanted.traffic, wanted.slo, catalog.shipped(), choices))


@pytest.mark.long
def test_the_plan_is_the_cheapest_of_all_that_could_be_enumerated() -> None:
    traffic = some_traffic(40, 200, 12)
    wanted = Wanted(catalog.model("qwen3-8b"), traffic, 30.0, SLO)
    every = every_kind(wanted, ["l40s", "h200"], ["bfloat16", "float8"], None)
    plan = search(wanted, every)
    usable = [one for one in every if one.most_rate > 0 and one.replica.tp < 8]
    exhaustive = [(_split if one.split else _together)(one, wanted, float("inf")) for one in usable]
    prices = sorted(found.price_per_hour for found in exhaustive if found is not None)
    assert [one.price_per_hour for one in plan.deployments] == pytest.approx(prices[:2])
    assert plan.simulated < len(every)
    low, middle, high = plan.headroom
    assert -0.05 <= low <= middle <= high
    assert plan.best.report.holds(SLO)  # with steps as slow as they may be
    assert plan.best.output_tok_s == pytest.approx(30.0 * 12)


@pytest.mark.long
def test_no_kind_of_replica_takes_more_than_its_bound() -> None:
    traffic = some_traffic(200, 300, 40)
    wanted = Wanted(catalog.model("llama-3.1-8b"), traffic, 1.0, SLO)
    for one in every_kind(wanted, ["h200", "a100-80gb"], ["bfloat16"], False):
        if one.most_rate > 0 and one.replica.tp < 4:
            slow = one.replica.confidence.slowest
            at = lambda rate, one=one, slow=slow: play(one.replica, traffic.at_rate(rate), 99.0, slow)  # noqa: E731
            assert find_capacity(at, SLO, start=one.most_rate / 2, tolerance=0.1).rate < one.most_rate


@pytest.mark.long
def test_more_traffic_needs_more_replicas() -> None:
    traffic = some_traffic(60, 300, 30)
    plans = []
    for rate in (20.0, 400.0):
        wanted = Wanted(catalog.model("llama-3.1-8b"), traffic, rate, SLO)
        plans.append(search(wanted, every_kind(wanted, ["h200"], ["bfloat16"], False)).best)
    assert plans[0].replicas < plans[1].replicas
    assert plans[1].price_per_hour == pytest.approx(plans[1].gpus * catalog.device("h200").price_per_hour)


@pytest.mark.parametrize(
    ("model", "devices", "rate", "slo", "gpus", "words"),
    [
        (
            "llama-3.1-405b",
            ["rtx-4090"],
            1.0,
            SLO,
            None,
            "runs the model on none .* --hypothetical .* take .* GiB",
        ),
        (
            "llama-3.1-8b",
            ["h200"],
            1.0,
            Slo(ttft_s=1e-4),
            None,
            "even for one request at a time; on .* takes",
        ),
        ("llama-3.1-8b", ["h200"], 5000.0, SLO, 2, "with 2 GPUs; .* needs at least .* GPUs"),
        ("llama-3.1-8b", [], 1.0, SLO, None, "contains no device .* need --hypothetical"),
        ("llama-3.1-8b", ["h200"], 0.0, SLO, None, "more than 0"),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_that_can(
    model: str, devices: list[str], rate: float, slo: Slo, gpus: int | None, words: str
) -> None:
    wanted = Wanted(catalog.model(model), some_traffic(20), rate, slo, gpus)
    with pytest.raises(CumuloError, match=words):
        search(wanted, every_kind(wanted, devices, ["bfloat16"], None))


def test_requests_longer_than_the_model_was_made_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="131,072"):
        replica().with_context_for((Arrival(0.0, 131_072, 1),))


@pytest.mark.parametrize(
    ("device", "changes", "split", "words"),
    [
        ("h200", {}, False, ""),
        ("h200", {"tp": 2, "weights": "int4"}, False, ""),
        ("mi300x", {}, False, "NVIDIA"),
        ("rtx-4090", {"tp": 2}, False, "NVLink"),
        ("h200", {"pp": 2}, False, ""),
        ("rtx-4090", {"pp": 2}, False, "NVLink"),
        ("gb200", {"tp": 8}, False, "one host"),
        ("h200", {"tp": 2}, True, ""),
        ("cpu", {"tp": 2, "weights": "float32"}, True, ""),
        ("cpu", {"pp": 2, "weights": "float32"}, True, "without a pipeline"),
        ("h200", {"tp": 2, "pp": 2}, True, "without a pipeline"),
        ("h200", {"tp": 2, "acceptance": 0.5}, False, "one rank"),
        ("h200", {"max_loras": 8}, False, ""),
        ("h200", {"tp": 2, "max_loras": 8}, False, "one GPU"),
        ("cpu", {"tp": 2, "max_loras": 8, "weights": "float32"}, False, ""),
        ("b200", {"engine": "tensorrt-llm", "weights": "float4"}, False, "not Cumulo's engine"),
    ],
)
def test_only_what_the_server_can_run_is_planned(
    device: str, changes: dict[str, Any], split: bool, words: str
) -> None:
    found = obstacle(replace(replica(device), **changes), split)
    assert words in found and bool(found) == bool(words)


def test_the_ends_of_a_prediction_are_what_slower_and_faster_steps_do() -> None:
    """A run in stretched time is the run of slower steps, but for the time that no device spends."""
    slow = play(replica(), some_traffic().at_rate(10.0), slower=1.25)
    stretched = play(replica(), some_traffic().at_rate(12.5)).stretched(1.25)
    assert slow.itl_s is not None and stretched.itl_s is not None
    assert stretched.itl_s.p50 == pytest.approx(slow.itl_s.p50, rel=0.02)
    assert stretched.output_tok_s == pytest.approx(slow.output_tok_s, rel=0.02)


def test_a_model_that_is_planned_only_is_not_said_to_be_served() -> None:
    cluster = catalog.cluster(1, "h200")
    for name in ("gpt-oss-20b", "llama-4-scout", "gpt3-6.7b"):
        assert "planned, but not run" in obstacle(Replica(catalog.model(name), cluster.node, cluster.fabric))
    assert not obstacle(Replica(catalog.model("llama-3.1-8b"), cluster.node, cluster.fabric))

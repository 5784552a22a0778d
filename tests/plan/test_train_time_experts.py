"""Mixtures of experts in a step's time: how tokens travel, what the host adds, further tokens, and evidence."""

import itertools
from dataclasses import replace

import pytest

from cumulo.errors import ConfigError
from cumulo.layout.layout import Layout
from cumulo.plan.job import TrainJob
from cumulo.plan.network.collectives import Network, collective_s
from cumulo.plan.time.communication import distinct, exchanged_s
from cumulo.plan.time.compute import model_flops
from cumulo.plan.time.step import estimate
from cumulo.spec import catalog
from cumulo.spec.model import MoESpec

QWEN = catalog.model("qwen3-30b-a3b")
B200S, H100S = catalog.cluster(64, "b200"), catalog.cluster(64, "h100-sxm")
PIPELINE = Layout(dp=8, pp=8, ep=8, zero=1, schedule="interleaved-1f1b", chunks_per_stage=3)


def job(**fields: object) -> TrainJob:
    given = {"layout": PIPELINE, "global_batch": 128, "sequence_length": 4096, "dtype": "float8", **fields}
    return TrainJob(QWEN, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("places", "choices"), [(2, 2), (4, 2), (3, 4), (5, 3)])
def test_as_many_places_are_met_as_trying_all_choices_shows(places: int, choices: int) -> None:
    every = [len(set(chosen)) for chosen in itertools.product(range(places), repeat=choices)]
    assert distinct(places, MoESpec(64, choices, 8)) == pytest.approx(sum(every) / len(every))


def test_routing_to_few_groups_meets_fewer_places() -> None:
    """DeepSeek-V3 sends each token to four nodes at most (DeepSeek-AI 2024, section 2.1.2)."""
    limited = catalog.model("deepseek-v3").moe
    assert limited is not None
    free = replace(limited, groups=1, top_groups=1)
    assert distinct(8, limited) < 4 < distinct(8, free)
    # Of the 70 ways to take four of eight groups, one leaves the first of two nodes out, and one the second.
    assert distinct(2, replace(limited, experts_per_token=10**6)) == pytest.approx(2 * (1 - 1 / 70))


def test_sending_a_token_once_saves_most_between_nodes() -> None:
    network, moe = Network(H100S), QWEN.moe
    assert moe is not None
    near, far = (
        (
            exchanged_s(16e6, moe, network, ranks, 1),
            collective_s("all_to_all", 16e6 * moe.experts_per_token, network.group(ranks, 1)),
        )
        for ranks in (8, 64)
    )
    assert near[0] < near[1] < far[0] < far[1]
    assert far[1] / far[0] > 1.25 > near[1] / near[0] * 0.85


def test_a_host_that_waits_makes_chunks_dear_and_overlap_cheap() -> None:
    waits = job(expert_exchange="all-to-all")
    flat = replace(PIPELINE, schedule="1f1b", chunks_per_stage=None)

    def seconds(one: TrainJob) -> float:
        return estimate(one, B200S, explain=False).step_s

    assert (
        seconds(job(expert_exchange="once")) < seconds(replace(waits, overlap_expert=True)) < seconds(waits)
    )
    # Interleaving pays where nobody waits, and does not where the host is asked for every chunk.
    assert seconds(job(expert_exchange="once")) < seconds(job(expert_exchange="once", layout=flat))
    assert seconds(waits) > seconds(job(expert_exchange="all-to-all", layout=flat))


def test_a_further_token_costs_what_the_published_tables_count() -> None:
    """Megatron-Bridge 26.02.01 prints 1,219 TFLOP/s at 4,691 tokens/s with it, 25.11 961 at 3,848 without."""
    model = catalog.model("deepseek-v3")
    assert model_flops(model, 4096, ahead=1) == pytest.approx(1219e12 / 4691, rel=0.005)
    assert model_flops(model, 4096) == pytest.approx(961e12 / 3848, rel=0.005)
    plain = TrainJob(model, Layout(dp=256, ep=64, zero=1), 512, 4096, dtype="float8", expert_exchange="once")
    cluster = catalog.cluster(256, "gb200")
    ahead = estimate(replace(plain, predict_ahead=1), cluster, explain=False).step_s
    assert 1.02 < ahead / estimate(plain, cluster, explain=False).step_s < 1.08
    with pytest.raises(ConfigError, match="predict_ahead"):
        replace(plain, predict_ahead=-1)


def test_mixtral_on_h100_is_near_what_megatron_core_reports() -> None:
    """Megatron-Core's notes on mixtures name 468 TFLOP/s with release 0.9; no constant was fitted to it."""
    model = catalog.model("mixtral-8x7b")
    layout = Layout(dp=16, pp=4, ep=8, zero=1, schedule="interleaved-1f1b", chunks_per_stage=8)
    found = estimate(TrainJob(model, layout, 256, 4096, software="megatron-core-2024"), H100S)
    named_s = model_flops(model, 4096, causal=False) * 256 * 4096 / (468e12 * 64)
    assert found.interval.low < named_s < found.interval.high
    assert found.step_s == pytest.approx(named_s, rel=0.25)


def test_a_mixture_on_devices_where_no_row_has_one_gets_an_interval_for_it() -> None:
    mixture = TrainJob(catalog.model("mixtral-8x7b"), Layout(dp=8, pp=8, ep=8, zero=1), 512, 4096)
    found = estimate(mixture, catalog.cluster(64, "a100-80gb"))
    assert found.mfu < 0.6
    dense = TrainJob(catalog.model("llama-3.1-8b"), Layout(dp=8, zero=3), 64, 2048)
    narrow = estimate(dense, catalog.cluster(8, "a100-80gb"))
    assert 1.1 < found.interval.high / found.step_s < 2
    assert narrow.interval.high / narrow.step_s < 1.4

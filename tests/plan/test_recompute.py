"""What computing operations again adds to a step: from little to much, and each by its own arithmetic."""

import itertools
from dataclasses import replace

import pytest

from cumulo.layout.layout import Layout
from cumulo.plan.job import Recompute, TrainJob
from cumulo.plan.search.space import Choices
from cumulo.plan.time.chunks import Chunks, chunks_of
from cumulo.plan.time.compute_profile import shipped
from cumulo.plan.time.step import estimate
from cumulo.spec.catalog import cluster, model

GPUS = cluster(16, "h100-sxm")
LAYOUTS = [Layout(dp=16), Layout(dp=2, tp=4, pp=2, sequence_parallel=True), Layout(dp=4, tp=2, cp=2)]


def _chunks(name: str, layout: Layout, recompute: Recompute) -> Chunks:
    job = TrainJob(model(name), layout, 16, 4096, recompute=recompute)
    profile, _ = shipped().find(GPUS.device, job.dtype, job.software)
    return chunks_of(job, GPUS, profile)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "gpt3-6.7b"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_chunk_is_faster_when_more_is_computed_again(name: str, layout: Layout) -> None:
    """The search relies on it: it stops at the first choice that fits into memory."""
    for less, more in itertools.pairwise(Choices().recompute):
        for little, much in zip(
            _chunks(name, layout, less).costs, _chunks(name, layout, more).costs, strict=True
        ):
            assert much.forward_s == little.forward_s
            assert much.backward_input_s >= little.backward_input_s
            assert much.backward_weight_s == little.backward_weight_s


def test_each_operation_repeats_its_own_arithmetic() -> None:
    layout = Layout(dp=16)
    plain = _chunks("llama-3.1-8b", layout, "none").passes[0].forward
    again = {
        name: _chunks("llama-3.1-8b", layout, name).recomputed[0]
        for name in ("norm", "activation", "attention", "norm+activation")
    }
    assert again["attention"].attention == pytest.approx(plain.attention)
    assert {again[name].matmul for name in again} == {0.0}  # no product is computed twice
    cheap = again["norm"].elementwise + again["activation"].elementwise
    assert again["norm+activation"].elementwise == pytest.approx(cheap)
    # Of 8 h + 2 (a + a_kv) d + 3 f numbers: norms read and write h each, the activation has 3 f.
    h, rotated, f = 4096, 2 * (32 + 8) * 128, 14336
    assert again["norm"].elementwise / again["activation"].elementwise == pytest.approx(4 * h / (3 * f))
    shares = (4 * h + 3 * f) / (8 * h + rotated + 3 * f)
    assert 0.5 * shares < cheap / plain.elementwise < shares  # the rest of it is embedding and loss


def test_latent_attention_repeats_the_products_from_its_latents() -> None:
    again = _chunks("deepseek-v2-lite", Layout(dp=16), "attention")
    forward = again.passes[0].forward
    assert 0 < again.recomputed[0].matmul < 0.3 * forward.matmul


def test_norms_under_sequence_parallelism_gather_their_tokens_again() -> None:
    split = LAYOUTS[1]
    assert _chunks("llama-3.1-8b", split, "norm").recomputed[0].tensor > 0
    assert _chunks("llama-3.1-8b", split, "activation").recomputed[0].tensor == 0


def test_before_experts_one_norm_of_two_is_repeated_with_its_gather() -> None:
    """Of two gathers and two scatters that forward waits for: two gathers, or one where the router keeps a norm."""
    split = LAYOUTS[1]
    for name, share in (("llama-3.1-8b", 1 / 2), ("qwen3-30b-a3b", 1 / 4)):
        chunk = _chunks(name, split, "norm")
        assert chunk.recomputed[0].tensor == pytest.approx(share * chunk.passes[0].forward.tensor)


@pytest.mark.parametrize(
    ("name", "recompute", "tp", "cp"),
    [
        ("llama-3.1-8b", "norm", 2.5, 3),
        ("llama-3.1-8b", "activation", 2, 3),
        ("llama-3.1-8b", "attention", 2, 4),
        ("llama-3.1-8b", "norm+activation+attention", 2.5, 4),
        ("llama-3.1-8b", "full", 3, 4),
        ("qwen3-30b-a3b", "norm", 2.25, 3),
    ],
)
def test_what_is_sent_follows_what_is_computed_again(
    name: str, recompute: Recompute, tp: float, cp: float
) -> None:
    """In forwards: without recomputation, 2 of tensor parallelism and 3 of context parallelism."""
    layout = Layout(dp=4, tp=2, cp=2, sequence_parallel=True)
    plain = TrainJob(model(name), layout, 16, 4096)
    before = dict(estimate(plain, GPUS, explain=False).link_bytes)
    sent = dict(estimate(replace(plain, recompute=recompute), GPUS, explain=False).link_bytes)
    assert (2 * sent["tp"] / before["tp"], 3 * sent["cp"] / before["cp"]) == pytest.approx((tp, cp))
    alone = replace(plain, layout=replace(layout, sequence_parallel=False))
    norms = replace(alone, recompute="norm")  # nothing is gathered behind them
    assert estimate(norms, GPUS, explain=False).link_bytes == estimate(alone, GPUS, explain=False).link_bytes


def test_norms_and_activations_cost_little_and_everything_a_third() -> None:
    """Korthikanti et al. 2022, figure 8: full recomputation costs 30 to 40% of a layer's time."""
    times = {}
    for recompute in Choices().recompute:
        job = TrainJob(model("llama-3.1-8b"), Layout(dp=16, zero=1), 64, 4096, recompute=recompute)
        times[recompute] = estimate(job, GPUS, explain=False).step_s
    assert times["norm+activation"] < 1.1 * times["none"]
    assert 1.2 * times["none"] < times["full"] < 1.4 * times["none"]

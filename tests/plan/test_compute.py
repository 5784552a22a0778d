"""Per-operation rooflines, against numbers that others measured."""

import math
from dataclasses import replace

import pytest

from cumulo.errors import ConfigError
from cumulo.plan.time import compute_profile
from cumulo.plan.time.compute import (
    LayerWork,
    Seconds,
    add,
    attention_flops,
    head,
    layer,
    megatron_flops,
    met_weights,
    model_flops,
    product_s,
    rates,
    scale,
    visible_keys,
)
from cumulo.plan.time.compute_profile import Profiles
from cumulo.spec import catalog
from cumulo.spec.counting import parameter_shapes
from cumulo.spec.model import ModelSpec

A100, H100 = catalog.device("a100-80gb"), catalog.device("h100-sxm")
PROFILES = compute_profile.shipped()


def gpt(hidden: int, layers: int, heads: int) -> ModelSpec:
    return ModelSpec(
        "gpt", 51200, hidden, layers, heads, heads, hidden // heads, 4 * hidden, 2048,
        tied_embeddings=True, gated_ffn=False, learned_positions=True,
    )  # fmt: skip


def test_a_product_takes_its_flops_and_what_is_exposed_of_its_traffic() -> None:
    profile = replace(PROFILES.named("fsdp-2023-hopper"), matmul_efficiency=0.5, matmul_traffic=0.25)
    rate = rates(profile, H100)
    seconds = product_s(rate, 8192, 4096, 1024)
    flops_s = 2 * 8192 * 4096 * 1024 / (989.4e12 * 0.5)
    traffic_s = 0.25 * 2 * (8192 * 1024 + 1024 * 4096 + 8192 * 4096) / 3.35e12
    assert seconds == pytest.approx(flops_s + traffic_s)


def test_a_thin_product_is_less_efficient_than_a_square_one_of_the_same_flops() -> None:
    rate = rates(PROFILES.named("fsdp-2023-hopper"), H100)
    assert product_s(rate, 65536, 1024, 1024) > product_s(rate, 4096, 4096, 4096)


@pytest.mark.parametrize(
    ("sequence_parallel", "forward_ms", "backward_ms"), [(False, 7.7, 11.9), (True, 7.2, 11.8)]
)
def test_a_layer_takes_what_korthikanti_et_al_measured(
    sequence_parallel: bool, forward_ms: float, backward_ms: float
) -> None:
    """Table 4: one layer of the 22B model, 4 sequences, 8-way tensor parallel, communication included."""
    from cumulo.layout.layout import Layout
    from cumulo.plan.job import TrainJob
    from cumulo.plan.time.chunks import chunks_of

    def seconds(layers: int) -> tuple[float, float]:
        job = TrainJob(
            gpt(6144, layers, 64),
            Layout(tp=8, sequence_parallel=sequence_parallel),
            global_batch=4,
            micro_batch=4,
            sequence_length=2048,
            dtype="float16",
            flash_attention=False,
            software="megatron-2021",
        )
        cost = chunks_of(job, catalog.cluster(8, "a100-80gb"), PROFILES.named("megatron-2021-ampere")).costs[
            0
        ]
        return cost.forward_s, cost.backward_s

    (one_forward, one_backward), (two_forward, two_backward) = seconds(1), seconds(2)
    assert (two_forward - one_forward) * 1e3 == pytest.approx(forward_ms, rel=0.1)
    assert (two_backward - one_backward) * 1e3 == pytest.approx(backward_ms, rel=0.15)


def test_sharing_tokens_between_products_saves_memory_traffic() -> None:
    model, profile = gpt(6144, 1, 64), PROFILES.named("megatron-2021-ampere")
    work = LayerWork(tokens=8192, sequence=2048, tensor=8)
    alone = layer(model, False, work, profile, A100)
    shared = layer(model, False, replace(work, sequence_parallel=True), profile, A100)
    assert shared.forward.elementwise < alone.forward.elementwise
    assert shared.forward.matmul == alone.forward.matmul


def test_a_window_leaves_fewer_keys_to_see() -> None:
    assert visible_keys(4096, None) == 2048.5
    assert visible_keys(4096, 4096) == 2048.5
    assert visible_keys(8, 2) == pytest.approx((1 + 7 * 2) / 8)
    model = catalog.model("llama-3.1-8b")
    assert attention_flops(model, 10, 8192, 128) < attention_flops(model, 10, 8192, None) / 30


def test_the_vocabulary_stays_in_16_bits_under_8_bit_layers() -> None:
    model = catalog.model("llama-3.1-8b")
    wide = replace(PROFILES.named("megatron-core-2024-hopper-fp8"), dtype="bfloat16")
    narrow = PROFILES.named("megatron-core-2024-hopper-fp8")
    at = (model, 128256, 8192, 1)
    assert head(*at, narrow, H100).forward.matmul >= head(*at, wide, H100).forward.matmul * 0.99


def test_a_mixture_layer_waits_for_its_host_only_where_the_device_is_faster() -> None:
    model, profile = catalog.model("qwen3-30b-a3b"), PROFILES.named("megatron-bridge-2025-blackwell-fp8")
    device = catalog.device("b200")
    small = layer(model, True, LayerWork(64, 4096, expert_ranks=8, host_waits=True), profile, device)
    large = layer(model, True, LayerWork(262144, 4096, expert_ranks=8, host_waits=True), profile, device)
    free = layer(model, True, LayerWork(64, 4096, expert_ranks=8), profile, device)
    assert free.forward.total < small.forward.total / 2
    assert small.forward.total == pytest.approx(16 * profile.expert_launch_s)
    assert small.total == pytest.approx(3 * 16 * profile.expert_launch_s)
    assert large.forward.launch == pytest.approx(profile.launch_s)


def test_seconds_add_up_by_cause() -> None:
    one = Seconds(matmul=1.0, tensor=2.0)
    assert add(one, scale(one, 2.0)) == Seconds(matmul=3.0, tensor=6.0)
    assert one.total == 3.0


def test_flops_of_a_gpt_are_those_of_the_papers_formula() -> None:
    """Korthikanti et al. 2022, equation 7, counts what our own counting counts without the mask."""
    model = gpt(12288, 96, 96)
    ours = model_flops(model, 2048, causal=False) * 1536 * 2048
    assert ours == pytest.approx(megatron_flops(model, 1536 * 2048, 2048, full_recompute=False), rel=1e-9)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-8b", "deepseek-v2-lite"])
def test_met_weights_are_the_parameters_less_what_is_not_multiplied(name: str) -> None:
    model = catalog.model(name)
    total = sum(math.prod(shape) for shape in parameter_shapes(model).values())
    if model.moe is None:
        embedding = model.vocab_size * model.hidden * (0 if model.tied_embeddings else 1)
        assert met_weights(model) == pytest.approx(total - embedding, rel=1e-3)
    else:
        assert met_weights(model) < 0.2 * total


def test_an_unknown_software_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean megatron-2021"):
        PROFILES.find(A100, "bfloat16", "megatron-2012")


def test_a_profile_of_another_generation_is_said_to_be_borrowed() -> None:
    _, borrowed = PROFILES.find(catalog.device("mi300x"), "bfloat16")
    assert any("cdna3" in sentence for sentence in borrowed)
    _, own = PROFILES.find(H100, "float8", "megatron-core-2024")
    assert own == ()


def test_every_shipped_profile_is_within_what_its_constants_mean() -> None:
    for profile in Profiles.load().known.values():
        assert 0.2 < profile.matmul_efficiency <= 0.95
        assert 0 <= profile.matmul_traffic <= 1
        assert profile.launch_s < 0.01

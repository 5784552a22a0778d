"""The memory ledger's activations: against the papers' formulas, and against played pipeline schedules."""

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumulo.layout.layout import Layout, held_chunks
from cumulo.pipeline.decide.catalog import FAMILIES, build
from cumulo.pipeline.decide.check import peak_live_activations
from cumulo.plan.job import OPERATIONS, Recompute, TrainJob
from cumulo.plan.memory.live import layer_bytes_per_token, least_alive, stage_loads
from cumulo.plan.memory.peak import least_memory_bytes, peak_memory, stage_memory
from cumulo.spec.catalog import model
from tests.plan.jobs import job_with


@pytest.mark.parametrize("recompute", ["none", "norm+activation", "full"])
def test_a_further_token_keeps_as_much_as_a_layer_and_what_joins_it(recompute: Recompute) -> None:
    job = replace(job_with("llama-3.1-8b"), recompute=recompute)
    layer = replace(job, model=replace(job.model, layers=job.model.layers + 1))
    ahead = peak_memory(replace(job, predict_ahead=1)).activations - peak_memory(layer).activations
    assert ahead == 5 * 2 * job.model.hidden * job.tokens_per_rank


def test_of_offloaded_activations_one_layer_is_on_the_device() -> None:
    job = replace(job_with("llama-3.1-8b"), micro_batch=4)
    kept, moved = peak_memory(job), peak_memory(replace(job, offload_activations=True))
    assert moved.host == kept.activations
    layers = kept.activations / moved.activations
    assert layers == pytest.approx(32, rel=0.02)  # and the inputs of the last norm and of the head


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3"])
def test_each_operation_that_is_computed_again_keeps_less(name: str) -> None:
    spec = model(name)
    job = TrainJob(spec, Layout(), 1, 4096)
    experts = spec.moe is not None
    kept = {choice: layer_bytes_per_token(job, experts, choice) for choice in get_args(Recompute)}
    norms = 1 if experts else 2  # that of the router is kept
    assert kept["none"] - kept["norm"] == norms * 2 * spec.hidden
    width = spec.ffn_hidden
    if spec.moe is not None:
        width = spec.moe.experts_per_token * spec.moe.expert_hidden + spec.moe.shared_hidden
    assert kept["none"] - kept["activation"] == 2 * width
    if spec.mla is None:
        before_norm = (spec.heads + spec.kv_heads) * spec.head_dim if spec.qk_norm else 0
        result = spec.heads * spec.head_dim
        assert kept["none"] - kept["attention"] == 2 * (before_norm + result) + 4 * spec.heads
    saved = sum(kept["none"] - kept[name] for name in OPERATIONS)
    assert kept["none"] - kept["norm+activation+attention"] == pytest.approx(saved)
    assert kept["full"] < kept["norm+activation+attention"]


def test_latent_attention_computed_again_keeps_latents_only() -> None:
    """DeepSeek-V3's own choice (DeepSeek-AI 2024, section 3.2.3): norms and the products up from the latents."""
    spec = model("deepseek-v3")
    assert spec.mla is not None
    job = TrainJob(spec, Layout(), 1, 4096)
    none, again = (layer_bytes_per_token(job, True, choice) for choice in ("none", "norm+attention"))
    expanded = 128 * (2 * (128 + 64) + 2 * 128)  # queries, keys, values, results of 128 heads
    assert none - again == 2 * (expanded + 1536 + 512 + spec.hidden) + 4 * 128


# Korthikanti et al. 2022, table 2: bytes of a layer over s·b·h, for 16 bits and dropout.
KORTHIKANTI = {
    ("none", 1, False): lambda a, s, h, t: 34 + 5 * a * s / h,
    ("none", 8, False): lambda a, s, h, t: 10 + 24 / t + 5 * a * s / (h * t),
    ("none", 8, True): lambda a, s, h, t: 34 / t + 5 * a * s / (h * t),
    ("selective", 8, False): lambda a, s, h, t: 10 + 24 / t,
    ("selective", 8, True): lambda a, s, h, t: 34 / t,
    ("full", 1, False): lambda a, s, h, t: 2,
}


@pytest.mark.parametrize(("recompute", "tp", "sequence_parallel"), KORTHIKANTI)
@pytest.mark.parametrize("name", ["gpt-22b", "gpt-175b", "gpt-530b", "gpt-1t"])
def test_activations_of_a_layer_are_within_5_percent_of_the_papers_formulas(
    name: str, recompute: Recompute, tp: int, sequence_parallel: bool
) -> None:
    spec = model(name)
    layout = Layout(tp=tp, sequence_parallel=sequence_parallel)
    job = TrainJob(spec, layout, 1, 2048, flash_attention=False, dropout=True, dtype="float16")
    formula = KORTHIKANTI[recompute, tp, sequence_parallel](spec.heads, 2048, spec.hidden, tp) * spec.hidden
    assert layer_bytes_per_token(job, False, recompute) == pytest.approx(formula, rel=0.05)


def test_flash_attention_keeps_no_scores() -> None:
    """Twice as long a sequence, twice the bytes; with stored scores it would be nearly four times."""
    short, long = (
        TrainJob(model("gpt-22b"), Layout(), 1, length, flash_attention=True) for length in (2048, 4096)
    )
    stored = TrainJob(model("gpt-22b"), Layout(), 1, 4096, flash_attention=False)
    assert layer_bytes_per_token(short, False, "none") == layer_bytes_per_token(long, False, "none")
    assert layer_bytes_per_token(stored, False, "none") > 3 * layer_bytes_per_token(long, False, "none")


@pytest.mark.parametrize("schedule", FAMILIES)
@pytest.mark.parametrize("stages", [2, 4, 6])
@pytest.mark.parametrize("rounds", [2, 3, 5, 8])
def test_live_micro_batches_are_those_of_the_whole_schedule(schedule: str, stages: int, rounds: int) -> None:
    """Also where only the first micro-batches were played because the pattern repeats."""
    for chunks in (2, 3) if FAMILIES[schedule].any_chunks else (FAMILIES[schedule].chunks_per_stage,):
        plan = build(schedule, stages, rounds * stages, chunks)
        loads = stage_loads(schedule, stages, rounds * stages, chunks)
        assert tuple(max(map(sum, load.peaks)) for load in loads) == peak_live_activations(plan)


@pytest.mark.parametrize("schedule", FAMILIES)
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_what_a_stage_holds_at_least_is_counted_without_playing_the_schedule(
    schedule: str, stages: int
) -> None:
    family = FAMILIES[schedule]
    chunks = 3 if family.any_chunks else family.chunks_per_stage
    for micro_batches in range(1, 5 * stages):
        if family.refusal(stages, micro_batches, chunks):
            continue
        plan = build(schedule, stages, micro_batches, chunks)
        loads = stage_loads(schedule, stages, micro_batches, chunks)
        held = peak_live_activations(plan)
        assert tuple(max(map(sum, load.peaks)) for load in loads) == held  # also where rounds are left out
        least = tuple(least_alive(schedule, stages, micro_batches, chunks, stage) for stage in range(stages))
        assert all(few <= many for few, many in zip(least, held, strict=True))
        if schedule != "gpipe" and (schedule != "interleaved-1f1b" or micro_batches % stages == 0):
            assert least == held
        layout = Layout(pp=stages, schedule=schedule, chunks_per_stage=chunks)
        assert [held_chunks(layout, stage) for stage in range(stages)] == [load.places for load in loads]


@given(
    st.sampled_from(["1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe", "dualpipe-v"]),
    st.sampled_from([2, 4]),
    st.sampled_from(["gpt3-125m", "deepseek-v2-lite", "qwen3-0.6b"]),
    st.integers(2, 9),
    st.sampled_from(["none", "norm+activation", "full"]),
    st.sampled_from([0, 2]),
)
def test_the_peak_is_that_of_the_worst_stage(
    schedule: str, stages: int, name: str, rounds: int, recompute: Recompute, ahead: int
) -> None:
    """The ledger looks at a few stages only; the others must not need more."""
    layout = Layout(pp=stages, schedule=schedule)
    job = TrainJob(model(name), layout, rounds * stages, 1024, recompute=recompute, predict_ahead=ahead)
    worst = max(stage_memory(job, stage).total for stage in range(stages))
    assert least_memory_bytes(job) <= peak_memory(job).total == worst


def test_the_first_stage_of_1f1b_keeps_as_much_as_the_whole_model_on_one() -> None:
    """Korthikanti et al. 2022, section 4.2.3: p micro-batches of L/p layers are L layers, whatever p."""
    bytes_of = [stage_memory(job_with("gpt3-125m", pp=pp), 0).activations for pp in (2, 3, 4)]
    assert len(set(bytes_of)) == 1


def test_interleaving_costs_the_papers_factor() -> None:
    """1 + (p-1)/(p m): Narayanan et al. 2021, section 2.2; here p = 4 and m = 3 chunks."""
    plain = stage_memory(job_with("gpt3-125m", pp=4), 0).activations
    looped = stage_memory(job_with("gpt3-125m", pp=4, schedule="interleaved-1f1b", chunks_per_stage=3), 0)
    assert looped.activations == pytest.approx(plain * (1 + 3 / 12), rel=0.02)

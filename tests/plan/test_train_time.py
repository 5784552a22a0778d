"""Step time as a whole: the worked examples of docs/plan-time.md, bounds, and what must change when a job does."""

import random
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from cumulo.layout.layout import Layout, split_layers
from cumulo.plan.job import TrainJob
from cumulo.plan.memory.states import heaviest_stage
from cumulo.plan.time import compute_profile
from cumulo.plan.time.step import estimate, step_time, surroundings
from cumulo.spec import catalog
from cumulo.spec.cluster import Cluster
from cumulo.spec.model import ModelSpec

GPT_175B = TrainJob(
    catalog.model("gpt-175b"),
    Layout(dp=16, tp=8, pp=8),
    global_batch=1536,
    sequence_length=2048,
    recompute="full",
    dtype="float16",
    flash_attention=False,
    software="megatron-2021",
)
A100S = catalog.cluster(1024, "a100-80gb")
LLAMA = TrainJob(
    catalog.model("llama-3.1-8b"), Layout(dp=8, zero=3), global_batch=64, sequence_length=8192, micro_batch=1
)
H100S = catalog.cluster(8, "h100-sxm")


def test_gpt_3_on_1024_a100_takes_what_the_paper_estimates() -> None:
    """Narayanan et al. 2021, section 5.1.1: 175B parameters, 300B tokens, 1,024 A100 at 140 TFLOP/s: 34 days."""
    days = 300e9 / estimate(GPT_175B, A100S).tokens_per_s / 86400
    assert days == pytest.approx(34, rel=0.1)


@pytest.mark.parametrize(("micro_batch", "tokens_per_s"), [(4, 61_700), (8, 63_300)])
def test_a_llama_on_one_h200_trains_as_fast_as_it_was_measured(micro_batch: int, tokens_per_s: int) -> None:
    """A hand-written 1.24B model with compiled blocks, bf16 weights and fused AdamW; nothing was fitted to it."""
    model = ModelSpec("llama", 128256, 2048, 16, 32, 8, 64, 8192, 4096, tied_embeddings=True)
    job = TrainJob(
        model,
        Layout(),
        global_batch=micro_batch,
        micro_batch=micro_batch,
        sequence_length=4096,
        master_weights=False,
        software="cumulo-2026",
    )
    assert estimate(job, catalog.cluster(1, "h200")).tokens_per_s == pytest.approx(tokens_per_s, rel=0.05)


def test_the_breakdown_sums_to_the_step() -> None:
    for job, cluster in ((GPT_175B, A100S), (LLAMA, H100S)):
        found = estimate(job, cluster)
        assert sum(seconds for _, seconds in found.breakdown) == pytest.approx(found.step_s, rel=1e-9)


def test_the_interval_holds_the_prediction_and_evidence_names_rows() -> None:
    found = estimate(GPT_175B, A100S)
    assert found.interval.low < found.step_s < found.interval.high
    assert any("narayanan2021" in sentence for sentence in found.evidence)


def test_hardware_flops_count_what_full_recomputation_repeats() -> None:
    found = estimate(GPT_175B, A100S)
    assert found.hfu / found.mfu == pytest.approx(4 / 3, abs=0.03)
    assert estimate(LLAMA, H100S).hfu == estimate(LLAMA, H100S).mfu


def random_job(dice: random.Random) -> tuple[TrainJob, int]:
    model = catalog.model(
        dice.choice(["llama-3.1-8b", "llama-3.1-70b", "gpt-22b", "qwen3-30b-a3b", "deepseek-v3"])
    )
    tp, pp, dp = dice.choice([1, 2, 4, 8]), dice.choice([1, 2, 4, 8]), dice.choice([1, 2, 4])
    if model.kv_heads % tp:
        tp = 1
    schedule = (
        dice.choice(["1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe", "gpipe"]) if pp > 1 else "1f1b"
    )
    layout = Layout(
        dp=dp, tp=tp, pp=pp, zero=dice.choice([0, 1, 3]), sequence_parallel=tp > 1, schedule=schedule,
        ep=dp if model.moe else 1,
    )  # fmt: skip
    job = TrainJob(
        model, layout, global_batch=dp * pp * dice.choice([2, 4, 6]), sequence_length=4096,
        recompute=dice.choice(["none", "selective", "full"]), dtype=dice.choice(["bfloat16", "float8"]),
    )  # fmt: skip
    return job, layout.world


def lower_bound_s(job: TrainJob, cluster: Cluster) -> float:
    profile, _ = compute_profile.shipped_for(cluster.device, job.dtype, job.software)
    return step_time(job, cluster, profile, play=False).step_s


def test_the_lower_bound_is_never_above_the_estimate() -> None:
    dice = random.Random(0)
    for _ in range(60):
        job, gpus = random_job(dice)
        cluster = catalog.cluster(max(8, gpus), "h100-sxm")
        bound, found = lower_bound_s(job, cluster), estimate(job, cluster, explain=False).step_s
        assert bound <= found * (1 + 1e-9), job
        if job.layout.pp == 1:
            assert bound == pytest.approx(found)


def test_recomputation_costs_time_and_faster_devices_save_it() -> None:
    plain = estimate(LLAMA, H100S, explain=False).step_s
    assert estimate(replace(LLAMA, recompute="full"), H100S, explain=False).step_s > 1.2 * plain
    assert estimate(LLAMA, catalog.cluster(8, "b200"), explain=False).step_s < 0.7 * plain
    assert estimate(replace(LLAMA, dtype="float8"), H100S, explain=False).step_s < 0.85 * plain


def test_more_virtual_stages_shrink_the_bubble() -> None:
    def bubble(job: TrainJob) -> float:
        return dict(estimate(job, A100S, explain=False).breakdown)["pipeline bubble"]

    interleaved = replace(GPT_175B.layout, schedule="interleaved-1f1b", chunks_per_stage=3)
    assert bubble(replace(GPT_175B, layout=interleaved)) < 0.6 * bubble(GPT_175B)


def test_hidden_communication_is_cheaper_than_waiting_for_it() -> None:
    layout = Layout(tp=8, sequence_parallel=True)
    job = TrainJob(catalog.model("llama-3.1-70b"), layout, global_batch=8, sequence_length=8192)
    cluster = catalog.cluster(8, "h100-sxm")
    profile = compute_profile.shipped().named("megatron-core-2024-hopper")
    waits = estimate(job, cluster, profile, explain=False).step_s
    assert estimate(replace(job, overlap_tensor=True), cluster, profile, explain=False).step_s < waits
    many = TrainJob(catalog.model("llama-3.1-8b"), Layout(dp=64), global_batch=64, sequence_length=4096)
    far = catalog.cluster(64, "h100-sxm")
    alone = replace(many, overlap_data=False)
    open_s = surroundings(alone, far, profile).data_s(alone, profile, 1.0)
    assert surroundings(many, far, profile).data_s(many, profile, 1.0) < open_s


def test_zero_stages_send_what_rajbhandari_et_al_say() -> None:
    """Section 7: stages 0 to 2 move 2P numbers, stage 3 half as many again, for 2-byte gradients and weights."""
    profile = compute_profile.shipped().named("megatron-core-2024-hopper")
    sent = {}
    for zero in (0, 1, 2, 3):
        job = replace(LLAMA, layout=Layout(dp=8, zero=zero), gradient_dtype="bfloat16", global_batch=8)  # type: ignore[arg-type]
        sent[zero] = surroundings(job, H100S, profile).sent_bytes
    parameters = heaviest_stage(LLAMA).total
    assert sent[0] == pytest.approx(2 * 2 * parameters * 7 / 8)
    assert sent[0] == sent[1] == sent[2]
    assert sent[3] == pytest.approx(1.5 * sent[0])


def test_the_loss_counts_as_layers_where_stages_are_balanced() -> None:
    assert split_layers(16, 2, 4.0) == (10, 6)
    assert split_layers(32, 4, 0.0) == (8, 8, 8, 8)
    assert sum(split_layers(80, 16, 2.5)) == 80
    assert min(split_layers(8, 4, 30.0)) >= 1


@pytest.mark.long
def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; from cumulo.plan.evidence import validate; from cumulo.plan.time import step; "
        "from cumulo.cli import calibrate; from cumulo.cli.plan import cluster, serve, train, validate; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_bound_takes_little_time() -> None:
    jobs = [random_job(random.Random(seed))[0] for seed in range(20)]
    for job in jobs:
        lower_bound_s(job, catalog.cluster(max(8, job.layout.world), "h100-sxm"))
    begin = time.process_time()
    for job in jobs:
        lower_bound_s(job, catalog.cluster(max(8, job.layout.world), "h100-sxm"))
    assert (time.process_time() - begin) / len(jobs) < 0.01

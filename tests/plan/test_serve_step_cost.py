"""What a step costs: counted by hand, and against the runs the constants were fitted to and held out from."""

import json
import random
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.simulate.run import Arrival, Run
from cumulo.errors import ConfigError
from cumulo.layout.layout import local_spec
from cumulo.plan.network.collectives import Network, collective_s
from cumulo.plan.serve.profile import profile_for, published_profile, read_profile, shipped_profiles
from cumulo.plan.serve.replica import Replica
from cumulo.plan.serve.step_cost import (
    PARTS,
    StepCostModel,
    StepLoad,
    load_of,
    pairs,
)
from cumulo.plan.serve.step_cost_work import Format, step_work
from cumulo.spec import catalog

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
H200 = catalog.device("h200")


def cost(model: str = "llama-3.1-8b", weights: str = "bfloat16", tp: int = 1, ep: int = 1) -> StepCostModel:
    cluster = catalog.cluster(max(1, tp), "h200")
    return Replica(catalog.model(model), cluster.node, cluster.fabric, tp, ep, weights).cost()


def parts(model: StepCostModel, load: StepLoad) -> dict[str, float]:
    return dict(zip(PARTS, model.parts(load), strict=True))


# -- what must be moved and computed -----------------------------------------------------------------------------
def test_the_work_of_llama_3_1_8b_is_what_its_configuration_says() -> None:
    work = step_work(catalog.model("llama-3.1-8b"), Format())
    # 32 layers of 4096·(4096 + 2·1024) + 4096² + 3·4096·14336, and 128,256·4096 of the output matrix.
    assert work.dense_parameters == 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) == 6_979_321_856
    assert work.head_parameters == 525_336_576
    assert work.kv_bytes_per_token == 131_072  # 32 layers · 8 heads · (128 + 128) · 2 bytes
    assert work.attention_flops_per_pair == 32 * 32 * 4 * 128
    # All weights in 16 bits: 8,030,261,248 parameters, as its model card says.
    assert work.held_bytes == 2 * 8_030_261_248


def test_a_step_reads_the_adapters_that_its_rows_name() -> None:
    cluster = catalog.cluster(1, "h200")
    plain = Replica(catalog.model("llama-3.1-8b"), cluster.node, cluster.fabric, max_context=4096)
    adapted = replace(plain, max_loras=32, max_lora_rank=16)
    # 16 · (3·4096 + 6144 + 4096 + 4096 + 2·4096 + 28672 + 14336 + 4096) numbers a layer: 84 MB of 32 adapters.
    adapter_bytes = 32 * 16 * (3 * 4096 + 6144 + 2 * 4096 + 2 * 4096 + 28672 + 14336 + 4096) * 2
    rows = StepLoad(64, 64, 64)
    plain_s, adapted_s = (sum(one.cost().parts(rows)) for one in (plain, adapted))
    hit = 1 - (1 - 1 / 32) ** 64
    assert adapted_s - plain_s == pytest.approx(
        32 * hit * adapter_bytes / (0.45 * H200.memory_bytes_per_s), rel=0.1
    )
    # Measured: a step of 64 rows takes 1.20 times as long with 32 adapters of rank 16 (docs/adapters.md).
    assert 1.15 < adapted_s / plain_s < 1.25
    held = plain.memory().ledger, adapted.memory().ledger
    assert plain.memory().kv_blocks > adapted.memory().kv_blocks and "adapters" in str(held[1])
    assert "adapters" not in str(held[0])


def test_tensor_parallel_ranks_share_matrices_heads_and_kv() -> None:
    whole, half = (step_work(catalog.model("llama-3.1-8b"), Format(), tp) for tp in (1, 2))
    assert half.dense_parameters * 2 == whole.dense_parameters
    assert half.kv_bytes_per_token * 2 == whole.kv_bytes_per_token
    assert half.held_bytes * 2 == pytest.approx(whole.held_bytes, rel=1e-4)  # norms are held by both
    assert local_spec(catalog.model("llama-3.1-8b"), 2, 1).kv_heads == 4


def test_experts_are_counted_by_how_many_of_them_are_hit() -> None:
    work = step_work(catalog.model("qwen3-30b-a3b"), Format())
    assert work.experts_hit(1) == pytest.approx(8)
    rng = random.Random(0)
    hit = [len({e for _ in range(64) for e in rng.sample(range(128), 8)}) for _ in range(200)]
    assert work.experts_hit(64) == pytest.approx(sum(hit) / len(hit), rel=0.01)
    spread = step_work(catalog.model("qwen3-30b-a3b"), Format(), 4, 4)
    assert spread.experts == 32 and spread.expert_parameters == work.expert_parameters


@pytest.mark.parametrize(("tp", "ep", "words"), [(3, 1, "divide"), (0, 1, "divide"), (2, 2, "no experts")])
def test_a_split_that_does_not_divide_is_refused_with_one_that_does(tp: int, ep: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        step_work(catalog.model("llama-3.1-8b"), Format(), tp, ep)


@pytest.mark.parametrize("window", [None, 1, 7, 64])
def test_pairs_are_the_keys_that_each_token_sees(window: int | None) -> None:
    for start, count in ((0, 1), (0, 100), (5, 3), (60, 10), (200, 50)):
        seen = sum(min(position + 1, window or 10**9) for position in range(start, start + count))
        assert pairs(start, count, window) == seen


def test_a_plans_load_counts_decodes_and_chunks_apart() -> None:
    plan = StepPlan(
        0, slots=[0, 1, 2], starts=[99, 10, 0], counts=[1, 1, 50], draw_rows=[0, 1], draw_slots=[0, 1]
    )
    load = load_of(plan, None, {1: 8})
    assert load == StepLoad(
        52, 3, 2, decode_context=111, shared_context=8, chunk_pairs=1275, chunk_context=50
    )
    assert load_of(plan, 32).decode_context == 32 + 11


# -- seconds -----------------------------------------------------------------------------------------------------
def test_a_lone_sequence_waits_for_weights() -> None:
    """Worked example of docs/simulate-serving.md: 13.96 GB at 92.49% of 4.8 TB/s are 3.14 ms."""
    found = parts(cost(), StepLoad(1, 1, 1, 512))
    assert found["weights"] == pytest.approx(6_979_321_856 * 2 / (4.8e12 * 0.9249), rel=1e-3)
    assert found["weights"] == pytest.approx(3.144e-3, rel=1e-3)
    assert found["products"] == 0 and found["fixed"] == pytest.approx(20e-6 + 32 * 16.63e-6)
    assert found["attention"] == pytest.approx(
        512 * 131_072 / (4.8e12 * 0.885), rel=1e-4
    )  # not its arithmetic


def test_a_full_prompt_step_waits_for_arithmetic() -> None:
    found = parts(cost(), StepLoad(8192, 1, 1, 0, 0, pairs(0, 8192), 8192))
    assert found["weights"] == 0
    assert found["products"] == pytest.approx(2 * 6_979_321_856 * 8192 / (989.4e12 * 0.7128), rel=1e-3)
    assert max(found, key=lambda name: found[name]) == "products"


def test_a_decode_step_costs_the_same_by_either_door() -> None:
    model = cost()
    plan = StepPlan(0, slots=[3, 4], starts=[99, 10], counts=[1, 1], draw_rows=[0, 1], draw_slots=[3, 4])
    line, time = model.decode(2), model.time_of(plan, {4: 6})
    assert line is not None and line.time_with(111, 6) == time
    stretch = Run(stretch_steps=Counter({2: 1}), stretch_read=111 - 6 * line.shared_saving)
    assert sum(model.spent(stretch).values()) == pytest.approx(
        2 * time.device_s
    )  # asked about once, stretched once


def test_more_of_anything_never_takes_less() -> None:
    model = cost("qwen3-30b-a3b")
    base = StepLoad(100, 60, 60, 5000, 0, 4000, 500, 0)
    for name in ("tokens", "draws", "decode_context", "chunk_pairs", "chunk_context", "swapped_blocks"):
        more = base._replace(**{name: getattr(base, name) * 2 + 100})
        assert sum(model.parts(more)) > sum(model.parts(base)), name


def test_tensor_parallel_pays_two_all_reduces_a_layer() -> None:
    from cumulo.plan.network.collectives import collective_s

    cluster = catalog.cluster(2, "h200")
    group = Network(cluster).group(2)
    found = parts(cost(tp=2), StepLoad(64, 64, 64, 64_000))
    assert found["communication"] == pytest.approx(64 * collective_s("all_reduce", 64 * 4096 * 2, group))
    assert found["weights"] == pytest.approx(parts(cost(), StepLoad(64, 64, 64))["weights"] / 2, rel=0.02)
    assert parts(cost("qwen3-30b-a3b", tp=4, ep=4), StepLoad(64, 64, 64))["communication"] > 0


def test_a_windowed_model_reads_no_more_than_its_window() -> None:
    spec = replace(catalog.model("llama-3.1-8b"), sliding_window=128)
    work = step_work(spec, Format())
    model = StepCostModel(work, H200, profile_for(H200), weights="bfloat16", compute="bfloat16")
    plan = StepPlan(0, slots=[0], starts=[9999], counts=[1], draw_rows=[0], draw_slots=[0])
    assert model.decode(1) is None  # it has to be asked plan by plan
    assert model.time_of(plan).device_s == pytest.approx(sum(model.parts(StepLoad(1, 1, 1, 128))))


# -- profiles ----------------------------------------------------------------------------------------------------
def test_an_unmeasured_device_says_so_and_is_trusted_less() -> None:
    own, near, far = (profile_for(catalog.device(name)) for name in ("h200", "h100-sxm", "b200"))
    assert own.error < near.error < far.error
    assert "has not been measured" in near.evidence and "Held out" in own.evidence


def test_a_format_without_measured_products_is_refused() -> None:
    with pytest.raises(ConfigError, match="no measured products of q4_1"):
        StepCostModel(
            step_work(catalog.model("llama-3.1-8b"), Format("q4_1")), H200, profile_for(H200), weights="q4_1",
            compute="bfloat16",
        )  # fmt: skip


def test_a_profile_with_a_missing_constant_is_refused_by_name() -> None:
    fields: dict[str, Any] = asdict(shipped_profiles()["h200"])
    del fields["device"], fields["layer_s"]
    with pytest.raises(ConfigError, match="layer_s"):
        read_profile("mine", fields)


# -- against measured runs ---------------------------------------------------------------------------------------
def _gpu_runs() -> list[dict[str, Any]]:
    path = BENCHMARKS / "results" / "gpu.json"
    return [row for row in json.loads(path.read_text())["rows"] if "steps" in row] if path.exists() else []


@pytest.mark.long
@pytest.mark.parametrize("row", _gpu_runs(), ids=lambda row: row["name"])
def test_runs_measured_on_an_h200_are_predicted_within_seven_percent(row: dict[str, Any]) -> None:
    """The very steps (their number is the scheduler's, so it must agree exactly), and their time."""
    name, workload_name = row["name"].rsplit(" ", 1)
    workload = json.loads((BENCHMARKS / "workloads.json").read_text())["workloads"][workload_name]
    lengths, shared, arrivals = random.Random(workload["seed"]), workload.get("shared_prefix", 0), []
    for _ in range(workload["seqs"]):
        prompt, output = lengths.randint(*workload["prompt"]), lengths.randint(*workload["output"])
        arrivals.append(Arrival(0.0, shared + prompt, output, ((0, shared),) if shared else ()))
    cluster = catalog.cluster(1, "h200")
    weights = "float8" if name.endswith(" fp8") else "bfloat16"
    spec = catalog.model(name.removesuffix(" fp8"))
    run, _ = Replica(spec, cluster.node, cluster.fabric, weights=weights, max_context=9096).serve(
        tuple(arrivals)
    )
    assert run.steps == row["steps"]
    assert run.ended_s == pytest.approx(row["steps"] * row["ms_per_step"] / 1e3, rel=0.07)


def test_small_models_on_many_ranks_are_bound_by_the_latency_of_their_sums_and_by_the_host() -> None:
    cluster = catalog.cluster(8, "h200")
    eight = Replica(
        catalog.model("qwen3-0.6b"), cluster.node, cluster.fabric, 8, engine="tensorrt-llm"
    ).cost()
    latency_s = collective_s("all_reduce", 0.0, Network(cluster).group(8))
    communication_s = parts(eight, StepLoad(1, 1, 1, 512))["communication"]
    assert communication_s >= 2 * 28 * latency_s * published_profile().collectives
    one, both = (cost("qwen3-0.6b", tp=tp).decode(1) for tp in (1, 2))
    assert one is not None and both is not None
    assert both.submit_s > one.submit_s

"""The memory ledger against the papers' tables and formulas, and against peaks that Megatron measured."""

import csv
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cumulo.errors import ConfigError
from cumulo.layout.layout import Layout, Place
from cumulo.layout.pieces import pieces
from cumulo.layout.stages import split_layers
from cumulo.pipeline.decide.catalog import FAMILIES, build
from cumulo.pipeline.decide.check import peak_live_activations
from cumulo.plan.evidence.published import held_out_rows, rows
from cumulo.plan.job import OPERATIONS, OptimizerKind, Recompute, TrainJob
from cumulo.plan.memory import framework
from cumulo.plan.memory.activations import layer_bytes_per_token
from cumulo.plan.memory.live import least_alive, places_of, stage_loads
from cumulo.plan.memory.peak import least_memory_bytes, peak_memory, stage_loads_of, stage_memory
from cumulo.plan.memory.states import BLOCK, LEAST_FOR_8_BITS, Elements, stage_elements, state_bytes
from cumulo.plan.search.saving import fitted
from cumulo.spec.catalog import model
from cumulo.spec.counting import parameter_count
from cumulo.spec.model import ModelSpec
from cumulo.train.decide.config import OptimizerConfig
from cumulo.train.model.model import TrainingDecoder
from cumulo.train.model.recompute import Operation
from cumulo.train.optimizer import adam8bit
from cumulo.train.optimizer.adam8bit import Adam8bit
from cumulo.train.optimizer.optimizer import _LEAST_FOR_8_BITS, Optimizer
from tests.plan.megatron_rows import ROWS, MeasuredPeak, job_of_row
from tests.train.split_case import DENSE, SPARSE

GIB = 2**30


def _job(name: str = "gpt3-125m", **layout: object) -> TrainJob:
    split = Layout(**layout)  # type: ignore[arg-type]
    return TrainJob(model(name), split, global_batch=64 * split.dp, sequence_length=2048)


# Rajbhandari et al. 2020, table 1: gigabytes of states on a rank, by parameters and ranks, for stages 1, 2 and 3.
ZERO_TABLE = {
    (7.5e9, 1): ("120", "120", "120"),
    (7.5e9, 4): ("52.5", "41.3", "30"),
    (7.5e9, 16): ("35.6", "21.6", "7.5"),
    (7.5e9, 64): ("31.4", "16.6", "1.88"),
    (7.5e9, 256): ("30.4", "15.4", "0.47"),
    (7.5e9, 1024): ("30.1", "15.1", "0.12"),
    (128e9, 1): ("2048", "2048", "2048"),
    (128e9, 4): ("896", "704", "512"),
    (128e9, 16): ("608", "368", "128"),
    (128e9, 64): ("536", "284", "32"),
    (128e9, 256): ("518", "263", "8"),
    (128e9, 1024): ("513", "257", "2"),
    (1e12, 1): ("16000", "16000", "16000"),
    (1e12, 4): ("7000", "5500", "4000"),
    (1e12, 16): ("4750", "2875", "1000"),
    (1e12, 64): ("4187", "2218", "250"),
    (1e12, 256): ("4046", "2054", "62.5"),
    (1e12, 1024): ("4011", "2013", "15.6"),
}


@pytest.mark.parametrize(("parameters", "ranks"), ZERO_TABLE)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_zero_papers_table_comes_out_to_the_printed_digit(
    parameters: float, ranks: int, stage: int
) -> None:
    layout = Layout(dp=ranks, zero=stage)  # type: ignore[arg-type]
    job = TrainJob(
        model("gpt3-6.7b"), layout, ranks, 2048, dtype="float16", gradient_dtype="float16", optimizer="adamw"
    )
    states = state_bytes(job, Elements(rest=round(parameters)))
    gigabytes = (states.weights + states.gradients + states.optimizer) / 1e9
    printed = ZERO_TABLE[parameters, ranks][stage - 1]
    unit = 10.0 ** -len(printed.partition(".")[2])
    # The table cuts some of its numbers off and rounds others: 2,218.75 is printed as 2218, 41.25 as 41.3.
    assert float(printed) in (pytest.approx(gigabytes, abs=unit / 2 + 1e-9), _cut(gigabytes, unit))


def _cut(number: float, unit: float) -> float:
    return math.floor(number / unit + 1e-9) * unit


@pytest.mark.parametrize("name", ["gpt3-125m", "llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "qwen2-0.5b"])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_ranks_of_a_job_hold_the_whole_model(name: str, tp: int) -> None:
    """Over all tensor-parallel ranks: every matrix once, and once for each rank what they all keep."""
    job = _job(name, tp=tp)
    elements = stage_elements(job, ((0, 0),))
    spec = job.model
    padding = (job.padded_vocabulary - spec.vocab_size) * spec.hidden * (1 if spec.tied_embeddings else 2)
    if tp == 1:
        assert elements.total == parameter_count(spec) + padding
    else:
        whole = stage_elements(_job(name), ((0, 0),))
        replicated = tp * elements.total - whole.total
        assert 0 < replicated < 0.02 * whole.total


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-v", "dualpipe"])
def test_the_stages_hold_the_whole_model(schedule: str) -> None:
    """A bidirectional pipeline holds it twice; an untied model has its two tables on the stages at the ends."""
    job = _job("llama-3.1-8b", pp=4, schedule=schedule)
    loads = stage_loads(schedule, 4, job.micro_batches, job.chunks_per_stage)
    whole = stage_elements(_job("llama-3.1-8b"), ((0, 0),)).total
    assert sum(stage_elements(job, load.places).total for load in loads) == whole * (1 + job.bidirectional)


def test_a_tied_embedding_is_held_where_the_model_begins_and_where_it_ends() -> None:
    spec = model("gpt3-125m")
    job = _job("gpt3-125m", pp=2)
    both = sum(stage_elements(job, load.places).total for load in stage_loads("1f1b", 2, 64, 1))
    whole = stage_elements(_job("gpt3-125m"), ((0, 0),)).total
    assert both == whole + job.padded_vocabulary * spec.hidden
    around = _job("gpt3-125m", pp=2, schedule="zb-v")  # the first and the last chunk are on the same stage
    assert sum(stage_elements(around, load.places).total for load in stage_loads("zb-v", 2, 64, 2)) == whole


def test_what_predicts_a_further_token_has_the_parameters_of_deepseeks_files() -> None:
    """Their numbers by format, as the hub lists them for DeepSeek-V3 and R1, without the scales of the 8-bit ones.
    The files have the embedding and the head, which it shares with the model, a second time."""
    published = {"BF16": 3_918_786_560, "F8_E4M3": 680_571_043_840, "F32": 15_104}
    job = replace(_job("deepseek-v3"), predict_ahead=1)
    tables = 2 * job.model.vocab_size * job.model.hidden
    assert stage_elements(job, ((0, 0),)).total + tables == sum(published.values())


@pytest.mark.parametrize(("schedule", "copies"), [("1f1b", 1), ("zb-v", 0), ("dualpipe", 0)])
def test_further_tokens_are_predicted_where_the_model_ends(schedule: str, copies: int) -> None:
    """From an embedding that stage may have already, where it has the first chunk too."""
    plain = _job("llama-3.1-8b", pp=2, schedule=schedule)
    job = replace(plain, predict_ahead=1)
    one, two = (replace(_job("llama-3.1-8b"), predict_ahead=ahead) for ahead in (1, 2))
    own = stage_elements(two, ((0, 0),)).total - stage_elements(one, ((0, 0),)).total
    more = [
        stage_elements(job, load.places).total - stage_elements(plain, load.places).total
        for load in stage_loads_of(job)
    ]
    table = job.padded_vocabulary * job.model.hidden
    expected = {"1f1b": [0, own], "zb-v": [own, 0], "dualpipe": [own, own]}[schedule]
    assert more == [size + (copies * table if size else 0) for size in expected]


@pytest.mark.parametrize("recompute", ["none", "norm+activation", "full"])
def test_a_further_token_keeps_as_much_as_a_layer_and_what_joins_it(recompute: Recompute) -> None:
    job = replace(_job("llama-3.1-8b"), recompute=recompute)
    layer = replace(job, model=replace(job.model, layers=job.model.layers + 1))
    ahead = peak_memory(replace(job, predict_ahead=1)).activations - peak_memory(layer).activations
    assert ahead == 5 * 2 * job.model.hidden * job.tokens_per_rank


def test_experts_are_shared_by_the_ranks_that_hold_the_same() -> None:
    """8 data ranks, experts over 4: each is on 2 ranks, which share its states; the rest is shared by 8."""
    elements = Elements(matrices=800, experts=400)
    job = _job("mixtral-8x7b", dp=8, ep=4, zero=1)
    assert state_bytes(job, elements).optimizer == 12 * (800 // 8 + 400 // 2)
    assert state_bytes(job, elements).weights == 2 * 1200


def test_hybrid_sharding_shares_less() -> None:
    elements = Elements(rest=6400)
    assert state_bytes(_job(dp=8, zero=3, shard=2), elements).weights == 2 * 3200
    assert state_bytes(_job(dp=8, zero=3), elements).weights == 2 * 800


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", get_args(OptimizerKind))
@pytest.mark.parametrize("spec", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_the_optimizers_states_are_as_large_as_the_trainers(
    kind: OptimizerKind, spec: ModelSpec, dtype: Literal["float32", "bfloat16"]
) -> None:
    spec = replace(spec, vocab_size=128, hidden=64, tied_embeddings=False)
    model = TrainingDecoder(spec, getattr(torch, dtype))
    optimizer = Optimizer(
        dict(model.named_parameters()), OptimizerConfig(kind=kind), spec, master_weights=True
    )
    job = TrainJob(spec, Layout(), 1, 16, dtype=dtype, optimizer=kind)
    kept = 0
    for rule in optimizer._rules:
        if isinstance(rule, Adam8bit):
            kept += rule.kept_bytes
        else:
            kept += sum(tensor.nbytes for tensor in rule.state().values() if tensor.ndim)
    kept += sum(
        master.nbytes
        for name, master in optimizer.masters.items()
        if master is not optimizer.parameters[name]
    )
    predicted = state_bytes(job, stage_elements(job, ((0, 0),))).optimizer
    # The trainer gives the router to AdamW where Muon takes the rest, and fills each tensor's last block of bytes.
    assert predicted == pytest.approx(kept, rel={"adamw": 0, "adamw8bit": 0.002, "muon": 0.01}[kind])


def test_the_planners_names_are_the_trainers() -> None:
    assert get_args(OptimizerKind) == get_args(get_type_hints(OptimizerConfig)["kind"])
    assert get_args(Operation) == OPERATIONS
    assert (LEAST_FOR_8_BITS, BLOCK) == (_LEAST_FOR_8_BITS, adam8bit.BLOCK)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_offloaded_states_leave_the_device_for_the_host(zero: Literal[0, 1, 2, 3]) -> None:
    here = _job("llama-3.1-8b", dp=4, zero=zero)
    there = replace(here, offload_optimizer=True)
    mine, host = peak_memory(here), peak_memory(there)
    # Where weights are shared out, the float32 copy is the weights' own and stays: 4 of 12 bytes.
    assert host.optimizer == (pytest.approx(mine.optimizer / 3, rel=1e-6) if zero >= 2 else 0)
    elements = stage_elements(here, ((0, 0),))
    updated = elements.total / (4 if zero else 1)
    assert host.host == pytest.approx((12 + 4) * updated, rel=1e-6)
    assert mine.host == 0


def test_one_process_hands_its_gradients_over_in_the_width_of_its_weights() -> None:
    job = _job("llama-3.1-8b")
    kept, handed = peak_memory(job), peak_memory(replace(job, offload_optimizer=True))
    assert (kept.gradients, handed.gradients) == (2 * kept.weights, kept.weights)


def test_of_offloaded_activations_one_layer_is_on_the_device() -> None:
    job = replace(_job("llama-3.1-8b"), micro_batch=4)
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
        assert [places_of(schedule, stages, chunks, stage) for stage in range(stages)] == [
            load.places for load in loads
        ]


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
    bytes_of = [stage_memory(_job("gpt3-125m", pp=pp), 0).activations for pp in (2, 3, 4)]
    assert len(set(bytes_of)) == 1


def test_interleaving_costs_the_papers_factor() -> None:
    """1 + (p-1)/(p m): Narayanan et al. 2021, section 2.2; here p = 4 and m = 3 chunks."""
    plain = stage_memory(_job("gpt3-125m", pp=4), 0).activations
    looped = stage_memory(_job("gpt3-125m", pp=4, schedule="interleaved-1f1b", chunks_per_stage=3), 0)
    assert looped.activations == pytest.approx(plain * (1 + 3 / 12), rel=0.02)


def test_layers_are_split_evenly_and_the_last_chunk_is_light() -> None:
    assert split_layers(126, 16) == (7, *[8] * 14, 7)
    assert split_layers(61, 16) == (3, 3, *[4] * 13, 3)
    for layers in range(1, 40):
        for chunks in range(1, layers + 1):
            parts = split_layers(layers, chunks)
            assert sum(parts) == layers and max(parts) - min(parts) <= 1


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v2-lite", "qwen3-30b-a3b", "qwen2-0.5b"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, pp=3),
        Layout(dp=4, tp=2, ep=2),
        Layout(pp=3, schedule="interleaved-1f1b", chunks_per_stage=2),
        Layout(pp=4, schedule="zb-v"),
        Layout(pp=4, schedule="dualpipe"),
        Layout(tp=2, pp=2, dp=2, ep=2),
    ],
    ids=str,
)
def test_the_ledger_counts_the_very_parameters_that_the_trainer_gives_a_rank(
    name: str, layout: Layout
) -> None:
    if model(name).moe is None:
        layout = replace(layout, ep=1)
    job = TrainJob(model(name), layout, 64 * layout.dp, 2048)
    filled = replace(job.model, vocab_size=job.padded_vocabulary)
    for stage, load in enumerate(stage_loads_of(job)):
        rank = layout.rank(Place(stage, 0, 0, 0))
        held = sum(math.prod(piece.shape) for piece in pieces(filled, layout, rank).values())
        assert stage_elements(job, load.places).total == held


@pytest.mark.parametrize("changes", [{"zero": 1}, {"zero": 2}, {"zero": 3}])
def test_each_zero_stage_needs_less(changes: dict[str, int]) -> None:
    less = _job("llama-3.1-8b", dp=8, **changes)
    more = _job("llama-3.1-8b", dp=8, zero=changes["zero"] - 1)
    assert peak_memory(less).states < peak_memory(more).states


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tp": 3}, "tp 3 cannot share 32 attention heads evenly; tp 2 can"),
        ({"tp": 64}, "tp 64 cannot share 32 attention heads evenly; tp 32 can"),
        ({"ep": 2, "dp": 2}, "this model has none; use ep 1"),
        ({"pp": 64}, "use pp 34 or fewer"),
        ({"dp": 5}, "cut into micro-batches of 1 over dp 5; a batch of 15 or 20 can"),
        ({"cp": 3}, "cp 3 cannot share 2048 tokens of a sequence evenly; cp 2 can"),
        ({"pp": 4, "schedule": "interleaved-1f1b", "chunks_per_stage": 1}, "2 or more chunks"),
    ],
)
def test_what_does_not_divide_is_refused_with_what_would(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        TrainJob(model("llama-3.1-8b"), Layout(**fields), global_batch=16, sequence_length=2048)  # type: ignore[arg-type]


# -- measured peaks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_measured_peak_is_met_within_10_percent(row: MeasuredPeak) -> None:
    predicted = stage_memory(row.job, row.job.layout.pp - 1).peak
    assert predicted == pytest.approx(row.peak_bytes, rel=0.10)


SHARED = Path(__file__).parents[3] / "shared/data/training/megatron_golden_memory_time.csv"


@pytest.mark.skipif(not SHARED.exists(), reason="the table of all measured cases is not here")
def test_all_measured_peaks_are_met_within_10_percent_at_the_median() -> None:
    errors = []
    with SHARED.open() as file:
        for row in csv.DictReader(file):
            if (job := job_of_row(row)) is not None:
                measured = float(row["mem_max_alloc_bytes"])
                errors.append(abs(stage_memory(job, job.layout.pp - 1).peak / measured - 1))
    assert len(errors) > 200
    assert statistics.median(errors) < 0.04
    assert statistics.quantiles(errors, n=10)[7] < 0.10


def test_memory_that_nvidia_smi_showed_of_blooms_trials_is_predicted() -> None:
    measured = {
        line["id"]: float(line["gib"])
        for line in csv.DictReader(
            (Path(framework.__file__).parents[1] / "data" / "published_memory.csv").open()
        )
    }
    by_name = {row.name: row for row in rows()}
    errors = sorted(
        abs(peak_memory(by_name[name].job).total / 2**30 / gib - 1) for name, gib in measured.items()
    )
    assert errors[len(errors) // 2] <= 0.05
    assert errors[int(0.9 * len(errors))] <= 0.15


def test_no_layout_that_is_known_to_have_run_is_refused() -> None:
    chosen = 0
    for row in (*rows()[::12], *held_out_rows()[::3]):
        limit = row.cluster.device.memory_bytes
        found = fitted(row.job, limit, ("recompute",) if row.job.recompute != "none" else ())
        assert peak_memory(found.job).total <= limit, row.name
        assert bool(found.saved_by) == (peak_memory(row.job).total > limit)
        chosen += bool(found.saved_by)
    assert chosen > 2


def test_what_a_user_says_of_recomputation_is_kept() -> None:
    row = next(row for row in rows() if row.name == "bridge-26.02-gb200-llama3_70b-64-fp8")
    limit = row.cluster.device.memory_bytes
    assert "recomputed" in fitted(row.job, limit).saved_by[0]
    assert fitted(row.job, limit, ("recompute",)).job.recompute == "none"

"""The memory ledger's weights, gradients and optimizer states: against the ZeRO paper's table, and against what the
trainer gives its ranks."""

import math
from dataclasses import replace
from typing import Literal, get_args, get_type_hints

import pytest
import torch

from cumulo.errors import ConfigError
from cumulo.layout.layout import Layout, Place, split_layers
from cumulo.layout.pieces import pieces
from cumulo.pipeline.decide.catalog import family
from cumulo.plan.job import OPERATIONS, OptimizerKind, TrainJob
from cumulo.plan.memory.live import stage_loads
from cumulo.plan.memory.peak import peak_memory, stage_loads_of
from cumulo.plan.memory.states import BLOCK, LEAST_FOR_8_BITS, Elements, stage_elements, state_bytes
from cumulo.spec.catalog import model
from cumulo.spec.counting import parameter_count
from cumulo.spec.model import ModelSpec
from cumulo.train.decide.config import OptimizerConfig
from cumulo.train.model.model import TrainingDecoder
from cumulo.train.model.recompute import Operation
from cumulo.train.optimizer import adam8bit
from cumulo.train.optimizer.adam8bit import Adam8bit
from cumulo.train.optimizer.optimizer import _LEAST_FOR_8_BITS, Optimizer
from tests.plan.jobs import job_with
from tests.train.split_case import DENSE, SPARSE

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
    job = job_with(name, tp=tp)
    elements = stage_elements(job, ((0, 0),))
    spec = job.model
    padding = (job.padded_vocabulary - spec.vocab_size) * spec.hidden * (1 if spec.tied_embeddings else 2)
    if tp == 1:
        assert elements.total == parameter_count(spec) + padding
    else:
        whole = stage_elements(job_with(name), ((0, 0),))
        replicated = tp * elements.total - whole.total
        assert 0 < replicated < 0.02 * whole.total


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-v", "dualpipe"])
def test_the_stages_hold_the_whole_model(schedule: str) -> None:
    """A bidirectional pipeline holds it twice; an untied model has its two tables on the stages at the ends."""
    job = job_with("llama-3.1-8b", pp=4, schedule=schedule)
    loads = stage_loads(schedule, 4, job.micro_batches, job.chunks_per_stage)
    whole = stage_elements(job_with("llama-3.1-8b"), ((0, 0),)).total
    assert sum(stage_elements(job, load.places).total for load in loads) == whole * (
        1 + family(job.layout.schedule).bidirectional
    )


def test_a_tied_embedding_is_held_where_the_model_begins_and_where_it_ends() -> None:
    spec = model("gpt3-125m")
    job = job_with("gpt3-125m", pp=2)
    both = sum(stage_elements(job, load.places).total for load in stage_loads("1f1b", 2, 64, 1))
    whole = stage_elements(job_with("gpt3-125m"), ((0, 0),)).total
    assert both == whole + job.padded_vocabulary * spec.hidden
    around = job_with(
        "gpt3-125m", pp=2, schedule="zb-v"
    )  # the first and the last chunk are on the same stage
    assert sum(stage_elements(around, load.places).total for load in stage_loads("zb-v", 2, 64, 2)) == whole


def test_what_predicts_a_further_token_has_the_parameters_of_deepseeks_files() -> None:
    """Their numbers by format, as the hub lists them for DeepSeek-V3 and R1, without the scales of the 8-bit ones.
    The files have the embedding and the head, which it shares with the model, a second time."""
    published = {"BF16": 3_918_786_560, "F8_E4M3": 680_571_043_840, "F32": 15_104}
    job = replace(job_with("deepseek-v3"), predict_ahead=1)
    tables = 2 * job.model.vocab_size * job.model.hidden
    assert stage_elements(job, ((0, 0),)).total + tables == sum(published.values())


@pytest.mark.parametrize(("schedule", "copies"), [("1f1b", 1), ("zb-v", 0), ("dualpipe", 0)])
def test_further_tokens_are_predicted_where_the_model_ends(schedule: str, copies: int) -> None:
    """From an embedding that stage may have already, where it has the first chunk too."""
    plain = job_with("llama-3.1-8b", pp=2, schedule=schedule)
    job = replace(plain, predict_ahead=1)
    one, two = (replace(job_with("llama-3.1-8b"), predict_ahead=ahead) for ahead in (1, 2))
    own = stage_elements(two, ((0, 0),)).total - stage_elements(one, ((0, 0),)).total
    more = [
        stage_elements(job, load.places).total - stage_elements(plain, load.places).total
        for load in stage_loads_of(job)
    ]
    table = job.padded_vocabulary * job.model.hidden
    expected = {"1f1b": [0, own], "zb-v": [own, 0], "dualpipe": [own, own]}[schedule]
    assert more == [size + (copies * table if size else 0) for size in expected]


def test_experts_are_shared_by_the_ranks_that_hold_the_same() -> None:
    """8 data ranks, experts over 4: each is on 2 ranks, which share its states; the rest is shared by 8."""
    elements = Elements(matrices=800, experts=400)
    job = job_with("mixtral-8x7b", dp=8, ep=4, zero=1)
    assert state_bytes(job, elements).optimizer == 12 * (800 // 8 + 400 // 2)
    assert state_bytes(job, elements).weights == 2 * 1200
    hybrid = job_with("mixtral-8x7b", dp=8, ep=4, zero=1, shard=4)  # which leaves experts as they are
    assert state_bytes(hybrid, elements).optimizer == 12 * (800 // 4 + 400 // 2)
    frozen = replace(job_with("mixtral-8x7b", dp=8, ep=4, zero=3), lora_rank=8, frozen_bits=16)
    whole = state_bytes(replace(frozen, layout=Layout(dp=8, ep=4)), elements).weights
    assert whole - state_bytes(frozen, elements).weights == 2 * (800 - 800 // 8 + 400 - 400 // 2)


def test_hybrid_sharding_shares_less() -> None:
    elements = Elements(rest=6400)
    assert state_bytes(job_with(dp=8, zero=3, shard=2), elements).weights == 2 * 3200
    assert state_bytes(job_with(dp=8, zero=3), elements).weights == 2 * 800


@pytest.mark.long
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
    here = job_with("llama-3.1-8b", dp=4, zero=zero)
    there = replace(here, offload_optimizer=True)
    mine, host = peak_memory(here), peak_memory(there)
    # Where weights are shared out, the float32 copy is the weights' own and stays: 4 of 12 bytes.
    assert host.optimizer == (pytest.approx(mine.optimizer / 3, rel=1e-6) if zero >= 2 else 0)
    elements = stage_elements(here, ((0, 0),))
    updated = elements.total / (4 if zero else 1)
    assert host.host == pytest.approx((12 + 4) * updated, rel=1e-6)
    assert mine.host == 0


def test_one_process_hands_its_gradients_over_in_the_width_of_its_weights() -> None:
    job = job_with("llama-3.1-8b")
    kept, handed = peak_memory(job), peak_memory(replace(job, offload_optimizer=True))
    assert (kept.gradients, handed.gradients) == (2 * kept.weights, kept.weights)


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
    less = job_with("llama-3.1-8b", dp=8, **changes)
    more = job_with("llama-3.1-8b", dp=8, zero=changes["zero"] - 1)
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

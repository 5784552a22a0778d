"""A kind of operation is added in one place; ledgers, planner and meter count it."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from cumulo.engine.config import EngineConfig
from cumulo.engine.memory.memory_plan import plan_memory
from cumulo.layout.layout import Layout
from cumulo.plan.job import TrainJob
from cumulo.plan.memory.peak import peak_memory
from cumulo.plan.serve.step_cost_work import Format, step_work
from cumulo.plan.time.chunks import chunks_of
from cumulo.plan.time.compute_profile import shipped_for
from cumulo.spec import catalog, operations
from cumulo.spec.counting import parameter_count
from cumulo.spec.model import ModelSpec
from cumulo.spec.operations import Form, Kept, MatrixProduct, Operation, Weight
from cumulo.train.decide.config import config_from
from cumulo.train.decide.ledger import predict
from cumulo.train.run.metrics import training_flops_per_token

PLAIN = ModelSpec("llama", 1024, 256, 4, 4, 2, 64, 512, 512)
TOY = replace(PLAIN, family="toy")
WIDTH = 2048


def _toy(spec: ModelSpec, has_experts: bool, form: Form) -> Iterator[Operation]:
    """A square product of its own in every layer, whose result is kept."""
    if spec.family == "toy":
        yield Operation(
            "ffn.toy", "matmul", (Weight("ffn.toy.weight", (WIDTH, spec.hidden), "tensor"),),
            MatrixProduct(WIDTH, spec.hidden, "outputs"), kept=(Kept(WIDTH, "tensor"),),
            buffer=WIDTH, eager=WIDTH,
        )  # fmt: skip


@pytest.fixture(autouse=True)
def _added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "LAYER_PARTS", [*operations.LAYER_PARTS, _toy])


def test_parameters_and_the_meter_count_it() -> None:
    weights = PLAIN.layers * WIDTH * PLAIN.hidden
    assert parameter_count(TOY) - parameter_count(PLAIN) == weights
    assert training_flops_per_token(TOY, 128) - training_flops_per_token(PLAIN, 128) == 6 * weights


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16")])
def test_the_engines_ledger_counts_it(device: str, dtype: str) -> None:
    config = EngineConfig(device=device, dtype=dtype, max_running=8, max_tokens_per_step=64, kv_blocks=64)
    plain, toy = (plan_memory(spec, 1 << 20, config, 8 << 30).ledger["activations"] for spec in (PLAIN, TOY))
    assert toy.predicted - plain.predicted == 64 * WIDTH * (4 if dtype == "float32" else 2)


def test_the_serving_step_reads_its_weights() -> None:
    plain, toy = (step_work(spec, Format(), tp=2) for spec in (PLAIN, TOY))
    assert toy.dense_parameters - plain.dense_parameters == PLAIN.layers * WIDTH * PLAIN.hidden // 2


def test_the_planner_counts_its_memory_and_its_time() -> None:
    profile, _ = shipped_for(catalog.device("h100-sxm"), "bfloat16", "cumulo-2026")
    jobs = [TrainJob(spec, Layout(), 8, 512, 2) for spec in (PLAIN, TOY)]
    plain, toy = map(peak_memory, jobs)
    weights = PLAIN.layers * WIDTH * PLAIN.hidden
    assert toy.weights - plain.weights == weights * jobs[0].weight_bytes_each
    assert toy.activations - plain.activations == PLAIN.layers * 2 * 512 * WIDTH * 2
    fast, slow = (chunks_of(job, catalog.cluster(1, device="h100-sxm"), profile).passes[0] for job in jobs)
    for name in ("forward", "backward_input", "backward_weight"):
        assert getattr(slow, name).matmul > getattr(fast, name).matmul


@pytest.mark.parametrize("device", [None, "NVIDIA H100"])
def test_the_trainers_ledger_counts_it(device: str | None) -> None:
    config = config_from({"micro_batch": 2, "batch_sequences": 2, "data": {"sequence_length": 128}})
    plain, toy = (predict(config, spec, device, 1e12, 1e12) for spec in (PLAIN, TOY))
    assert plain is not None
    assert toy is not None
    assert toy.first.weights > plain.first.weights
    each = 2 if config.dtype == "bfloat16" else 4
    assert toy.first.activations - plain.first.activations == PLAIN.layers * 2 * 128 * WIDTH * each

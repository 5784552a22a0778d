"""What is kept for backward on a CPU: counted exactly, and as predicted under every recompute choice."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cumulo.layout.layout import Layout
from cumulo.plan.job import TrainJob
from cumulo.ranks.groups import Groups
from cumulo.spec.model import MLASpec, ModelSpec, MoESpec
from cumulo.train.data.packing import to_device
from cumulo.train.decide.config import DataConfig, ModelConfig, TrainConfig
from cumulo.train.decide.ledger import cpu_activation_bytes
from cumulo.train.model.model import TrainingDecoder, initialise
from cumulo.train.run.forecast import KeptActivations
from cumulo.train.run.model_run import ModelRun
from cumulo.train.run.verify import random_batch
from tests.train.pool import run_ranks

CPU = torch.device("cpu")
LENGTH = 64
DENSE = ModelSpec("llama", 512, 128, 4, 8, 8, 16, 384, LENGTH)
SPECS = {
    "dense": DENSE,
    "grouped queries": replace(DENSE, kv_heads=2, qk_norm=True),
    "experts": replace(DENSE, kv_heads=2, moe=MoESpec(8, 2, 96, shared_hidden=64, dense_layers=(0,))),
    "latent": replace(DENSE, mla=MLASpec(32, 32, 16, 8, 16), head_dim=24),
}


def test_a_storage_counts_once_and_weights_do_not() -> None:
    weight, x = nn.Parameter(torch.ones(8, 8)), torch.ones(4, 8, requires_grad=True)
    with KeptActivations() as kept:
        y = nn.functional.linear(x, weight)  # keeps x and the weight
        assert kept.bytes == x.nbytes
        z = y.exp()  # keeps its result
        product = z[:2] * z[2:]  # two parts of the same
        assert kept.bytes == x.nbytes + z.nbytes
        product.sum().backward()
    assert kept.bytes == 0 and kept.peak_bytes == x.nbytes + z.nbytes


def test_graphs_count_together_while_both_are_alive() -> None:
    x = torch.ones(4, 8, requires_grad=True)
    with KeptActivations() as kept:
        first = x.exp()
        second = x.sin().exp()  # and x
        first.sum().backward()
        assert kept.bytes == 2 * x.nbytes
        second.sum().backward()
    assert (kept.bytes, kept.peak_bytes) == (0, 3 * x.nbytes)


def train_config(layout: Layout, rows: int, **changes: Any) -> TrainConfig:
    return TrainConfig(
        batch_sequences=rows, micro_batch=2, device="cpu", model=ModelConfig(start_from="the test's spec"),
        data=DataConfig(sequence_length=LENGTH), layout=layout, **changes,
    )  # fmt: skip


def job_of(spec: ModelSpec, config: TrainConfig, recompute: Any) -> TrainJob:
    rows = config.batch_sequences
    return TrainJob(
        spec, config.layout, rows, LENGTH, config.micro_batch, recompute=recompute, dtype="float32"
    )


def gradients(spec: ModelSpec, recompute: str, counts: bool) -> tuple[dict[str, Tensor], int]:
    operations = [name for name in recompute.split("+") if name not in ("none", "full")]
    model = TrainingDecoder(spec, recompute=recompute == "full" or operations)
    initialise(dict(model.named_parameters()), spec, 0)
    batch = to_device(random_batch(spec, train_config(Layout(), 2), 0), CPU)
    kept = KeptActivations()
    if counts:
        kept.__enter__()
    losses = model(batch)
    (losses.token_sum + (losses.balance_sum or 0.0)).backward()
    if counts:
        kept.__exit__(None, None, None)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, kept.peak_bytes


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "full", "norm", "activation", "attention", "norm+activation"])
@pytest.mark.parametrize("name", SPECS)
def test_as_much_is_kept_as_predicted(name: str, recompute: str) -> None:
    spec = SPECS[name]
    found, kept_bytes = gradients(spec, recompute, counts=True)
    predicted = cpu_activation_bytes(job_of(spec, train_config(Layout(), 2), recompute), 0)
    assert kept_bytes == pytest.approx(predicted, rel=0.01)
    expected, _ = gradients(spec, recompute, counts=False)
    assert all(torch.equal(found[parameter], gradient) for parameter, gradient in expected.items())


def kept_of_a_step(rank: int, spec: ModelSpec, config: TrainConfig) -> int:
    groups = Groups(config.layout, rank)
    run = ModelRun(spec, config, groups, CPU)
    rows = config.batch_sequences // config.layout.dp
    first = groups.place.dp * rows
    batch = random_batch(spec, config, 0)
    with KeptActivations() as kept:
        run.gradients(batch.rows(first, first + rows), batch.loss_tokens)
    return kept.peak_bytes


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("dense", Layout(dp=2, zero=3)),
        ("dense", Layout(tp=2)),
        ("experts", Layout(tp=2, sequence_parallel=True)),
        ("experts", Layout(dp=2, ep=2)),
        ("latent", Layout(pp=2)),
        ("grouped queries", Layout(cp=2)),
        ("dense", Layout(cp=2, ulysses=2)),
    ],
    ids=str,
)
def test_a_rank_keeps_as_much_as_predicted(name: str, layout: Layout) -> None:
    """Routing is predicted as even, which it is not."""
    spec, config = SPECS[name], train_config(layout, 4 * layout.dp)
    for rank, kept_bytes in enumerate(run_ranks(kept_of_a_step, layout.world, spec, config)):
        predicted = cpu_activation_bytes(job_of(spec, config, "none"), layout.place(rank).pp)
        assert kept_bytes == pytest.approx(predicted, rel=0.05 if layout.ep > 1 else 0.01), rank

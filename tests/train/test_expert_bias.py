"""The selection biases that keep experts evenly used: how they move, and that all ranks move them alike."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from cumulo.layout.layout import Layout
from cumulo.layout.pieces import pieces
from cumulo.ranks.groups import Groups
from cumulo.train.data.packing import to_device
from cumulo.train.decide.config import TrainConfig
from cumulo.train.model.model import TrainingDecoder
from cumulo.train.model.split import split_for
from cumulo.train.optimizer.optimizer import Optimizer
from cumulo.train.parallel.expert_balance import steer_selection_biases
from cumulo.train.run.model_run import ModelRun
from cumulo.train.run.verify import plain_gradients, random_batch, start_weights
from tests.thorough import rare
from tests.train.layout_runs import LATENT as SPEC
from tests.train.layout_runs import train_config
from tests.train.pool import run_ranks
from tests.train.split_case import LATENT, Case, cut, make_batch, rows, whole_model

pytestmark = pytest.mark.long

NAME = "layers.1.ffn.router.selection_bias"
CPU = torch.device("cpu")


def test_experts_above_the_mean_load_become_less_attractive_and_those_below_more() -> None:
    model = whole_model(LATENT)
    before = dict(model.named_parameters())[NAME].detach().clone()
    batch = to_device(make_batch(LATENT, rows(2, 16, 2)), CPU)
    model(batch)
    (load,) = model.take_loads().values()
    assert load.sum() == 2 * 16 * 2  # tokens, two experts each
    assert not model.take_loads()
    model(batch)
    with torch.no_grad():
        model(batch)  # an evaluation steers nothing
    steer_selection_biases([model], 0.25, None)
    moved = dict(model.named_parameters())[NAME] - before
    torch.testing.assert_close(moved, 0.25 * torch.sign(load.mean() - load), atol=1e-15, rtol=0)
    assert moved.unique().numel() > 1


def test_steering_evens_out_an_unequal_load() -> None:
    model = whole_model(LATENT)
    batch = to_device(make_batch(LATENT, rows(4, 32, 1)), CPU)

    def imbalance() -> float:
        model(batch)
        (load,) = model.take_loads().values()
        return float(load.max() / load.mean())

    first = imbalance()
    for _ in range(60):
        model(batch)
        steer_selection_biases([model], 0.01, None)
    assert imbalance() < 1 + 0.5 * (first - 1), first


def biases_after_steps(rank: int, case: Case) -> Any:
    """The bias of this rank and of the whole model, after the same three steps."""
    layout, count = case.layout, len(case.documents)
    groups, whole = Groups(layout, rank), whole_model(case.spec)
    model = TrainingDecoder(case.spec, torch.float64, split=split_for(layout, groups))
    held, originals = pieces(case.spec, layout, rank), dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(cut(originals[name], held[name]))
    per_rank = count // layout.dp
    first = layout.place(rank).dp * per_rank
    batch = make_batch(case.spec, case.documents)
    for _ in range(3):
        for row in range(count):  # micro-batches
            whole(to_device(batch.rows(row, row + 1), CPU))
        model(to_device(batch.rows(first, first + per_rank), CPU))
        steer_selection_biases([whole], 0.05, None)
        steer_selection_biases([model], 0.05, groups)
    return dict(model.named_parameters())[NAME].detach(), originals[NAME].detach()


@pytest.mark.parametrize("layout", [
    Layout(dp=2, ep=2), Layout(cp=2, tp=2, sequence_parallel=True), *rare(Layout(dp=2, tp=2)),
], ids=str)  # fmt: skip
def test_loads_are_those_of_all_ranks_tokens(layout: Layout) -> None:
    for own, expected in run_ranks(biases_after_steps, layout.world, Case(LATENT, layout, rows(4, 16, 2))):
        assert torch.equal(own, expected)


def steered_weights(rank: int, config: TrainConfig) -> Any:
    """Parts of the biases after some steps with gradients and steering."""
    groups = Groups(config.layout, rank)
    run = ModelRun(SPEC, config, groups, CPU, start_weights(SPEC, config.seed))
    count = config.batch_sequences // config.layout.dp
    first = groups.place.dp * count
    for step in range(config.steps):
        batch = random_batch(SPEC, config, step)
        run.gradients(batch.rows(first, first + count), batch.loss_tokens)
        run.clip()
        run.step(1.0)
    return {
        name: (shard.piece.cut_rows(shard.begin, shard.end), shard.tensor.detach().clone())
        for name, shard in run.shards.items()
        if name.endswith("selection_bias")
    }


@pytest.mark.parametrize("layout", [
    Layout(dp=2, zero=3), Layout(pp=2, schedule="dualpipe"),
    *rare(Layout(dp=2, zero=1), Layout(dp=2, pp=2, ep=2)),
], ids=str)  # fmt: skip
def test_biases_of_shared_out_and_piped_models_are_those_of_one_process(layout: Layout) -> None:
    config = replace(train_config(layout, rows=8, steps=3), expert_bias_rate=0.02)
    model = TrainingDecoder(SPEC, torch.float64)
    model.load_state_dict(start_weights(SPEC, config.seed))
    optimizer = Optimizer(dict(model.named_parameters()), config.optimizer, SPEC, config.master_weights)
    for step in range(config.steps):
        plain_gradients(model, optimizer, random_batch(SPEC, config, step), 1, config.balance_loss)
        optimizer.clip()
        optimizer.step(1.0)
        optimizer.zero_grad()
        steer_selection_biases([model], config.expert_bias_rate, None)
    own = dict(model.named_parameters())
    compared = 0
    for found in run_ranks(steered_weights, layout.world, config):
        for name, (boxes, part) in found.items():
            for box in boxes:
                torch.testing.assert_close(
                    part[box.held_slices], own[name][box.whole_slices], atol=1e-12, rtol=0
                )
                compared += 1
    assert compared >= 3  # layers with experts

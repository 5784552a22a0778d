"""Experts that move between ranks by their load: the same mathematics, the same checkpoints, and an even load."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.distributed", reason="this torch has no distributed package")

import torch
from torch import Tensor

from cumulo.layout.expert_placement import heaviest_share
from cumulo.layout.layout import Layout, pipeline_chunks
from cumulo.layout.pieces import pieces, zero_rows
from cumulo.models.files.load import load_model
from cumulo.ranks.groups import Groups, world_group
from cumulo.spec.model import ModelSpec, MoESpec
from cumulo.train.decide.config import LoraConfig, OptimizerConfig, TrainConfig
from cumulo.train.parallel.expert_balance import exchange_rows
from cumulo.train.run.model_run import ModelRun
from cumulo.train.run.verify import (
    TOLERANCE,
    Outcome,
    largest_difference,
    random_batch,
    start_weights,
    train_alone,
)
from tests.train.layout_runs import EXPERTS, LATENT, train_config, train_parallel
from tests.train.pool import run_ranks
from tests.train.ranked import tiny, train, write_texts
from tests.train.test_resume import difference

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
BEFORE = ((4, 0, 2), (1, 3, 5), ())
AFTER = ((1, 2, 4), (0, 5, 3), ())


def exchanged(rank: int) -> list[Tensor]:
    rows = torch.tensor(BEFORE[rank], dtype=torch.float64)
    tensors = [rows[:, None] + torch.arange(2) / 4, (10 * rows[:, None, None] + torch.arange(3)).bfloat16()]
    exchange_rows(tensors if len(rows) else [], BEFORE, AFTER, world_group(), CPU)
    return tensors


def test_rows_of_every_type_arrive_where_they_are_wanted() -> None:
    for rank, (wide, half) in enumerate(run_ranks(exchanged, 3)):
        rows = torch.tensor(AFTER[rank], dtype=torch.float64)
        assert torch.equal(wide, rows[:, None] + torch.arange(2) / 4)
        assert torch.equal(half, (10 * rows[:, None, None] + torch.arange(3)).bfloat16())


CASES: dict[str, tuple[ModelSpec, Layout, dict[str, Any]]] = {
    "expert parallel": (EXPERTS, Layout(dp=2, ep=2), {}),
    "sliced experts": (LATENT, Layout(dp=2, tp=2, ep=2, sequence_parallel=True), {"expert_bias_rate": 0.02}),
    "zero 1": (EXPERTS, Layout(dp=4, ep=2, zero=1), {}),
    "zero 3 over sequences": (EXPERTS, Layout(dp=2, cp=2, ep=2, zero=3), {}),
    "frozen experts": (EXPERTS, Layout(dp=4, ep=2, zero=1), {"lora": LoraConfig(rank=2)}),
    "two copies": (EXPERTS, Layout(dp=2, ep=2, pp=2, schedule="dualpipe"), {}),
    "muon": (EXPERTS, Layout(dp=2, ep=2, zero=1), {"optimizer": OptimizerConfig("muon", clip_norm=0.5)}),
    "in the host's memory": (EXPERTS, Layout(dp=2, ep=2), {"optimizer": OptimizerConfig(offload=True)}),
}


RARE = ("zero 3 over sequences", "muon", "in the host's memory")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] if name in RARE else []) for name in CASES]
)
def test_moving_experts_changes_nothing(name: str) -> None:
    spec, layout, changes = CASES[name]
    check_moves(replace(spec, layers=max(2, pipeline_chunks(layout))), layout, 8, **changes)


def test_ranks_without_rows_of_an_expert_help_to_move_it() -> None:
    """Each half of 8 experts is shared out among three ranks: two each, and none for the third."""
    check_moves(replace(EXPERTS, layers=2, moe=MoESpec(8, 2, 8)), Layout(dp=6, ep=2, zero=1), 12)


def check_moves(spec: ModelSpec, layout: Layout, rows: int, **changes: Any) -> None:
    expected = train_alone(spec, replace(train_config(Layout(), rows, 4), **changes))
    config = replace(train_config(layout, rows, expert_rebalance_every_steps=1), **changes)
    ranks = train_parallel(spec, config)
    found, where = largest_difference(expected, ranks)
    assert found < TOLERANCE, f"{layout}: {found:.1e} at {where}"
    assert any(moved_experts(spec, layout, rank, own) for rank, own in enumerate(ranks))


def moved_experts(spec: ModelSpec, layout: Layout, rank: int, outcome: Outcome) -> int:
    """Rows of experts' weights that are not where a run begins with them."""
    found = 0
    for name, piece in pieces(spec, layout, rank).items():
        if not piece.expert:
            continue
        rows = piece.shape[0]
        members = layout.group("expert_data", rank)
        begin, end = zero_rows(rows, len(members), members.index(rank)) if layout.zero else (0, rows)
        first = layout.group("ep", rank).index(rank) * rows + begin
        held = {box.at[0]: box.offset[0] for box in outcome.weights[name][0]}
        assert sorted(held) == list(range(end - begin))
        found += sum(expert != first + row for row, expert in held.items())
    return found


def shares_of_steps(rank: int, config: TrainConfig) -> list[tuple[float, float]]:
    """Of each layer and step: the busiest rank's share where experts lay, and where they began."""
    run = ModelRun(EXPERTS, config, Groups(config.layout, rank), CPU, start_weights(EXPERTS, 3))
    assert run.balance is not None
    found = []
    measured: list[Tensor] = []
    after_step = run.balance.after_step

    def noting(loads: Tensor) -> str | None:
        measured.append(loads)
        return after_step(loads)

    run.balance.after_step = noting  # type: ignore[method-assign]
    rows = config.batch_sequences // config.layout.dp
    for step in range(config.steps):
        orders = dict(run.balance.orders)
        batch = random_batch(EXPERTS, config, step).rows(rank * rows, (rank + 1) * rows)
        run.gradients(batch, batch.loss_tokens * config.layout.dp)
        run.clip()
        run.step(1e-6)
        for layer, order in orders.items():
            loads = measured[-1][layer].tolist()
            found.append((heaviest_share(loads, order, 2), heaviest_share(loads, range(len(order)), 2)))
    return found


def test_the_busiest_rank_has_less_to_do_after_a_move() -> None:
    config = train_config(Layout(dp=2, ep=2), 8, micro=4, steps=3, expert_rebalance_every_steps=2)
    first, second = run_ranks(shares_of_steps, 2, config)
    assert first == second
    layers = len(first) // 3
    assert all(now == began for now, began in first[: 2 * layers])  # two steps are measured first
    after = first[2 * layers :]
    assert sum(now for now, _ in after) < sum(began for _, began in after)


@pytest.mark.thorough
def test_a_checkpoint_does_not_say_where_experts_lay(tmp_path: Path) -> None:
    """Moving all the time, under one layout after the other, against one process that never stopped."""
    source = write_texts(tmp_path / "texts.jsonl")
    _, expected, _ = train(tiny(tmp_path / "whole", source, Layout(), experts=True, steps=8))
    layouts = [Layout(dp=2, ep=2), Layout(dp=4, ep=4, zero=3), Layout(), Layout(dp=2, ep=2, zero=1)]
    heard: list[str] = []
    for leg, layout in enumerate(layouts):
        config = tiny(
            tmp_path / "broken", source, layout, experts=True, steps=8,
            expert_rebalance_every_steps=1 if layout.ep > 1 else 0,
        )  # fmt: skip
        told, found, _ = train(config, resume=leg > 0, stop_after=2 * leg + 2)
        heard += told
        assert difference(found, expected[: 2 * leg + 2]) < 1e-9, layouts[: leg + 1]
    assert any(": experts moved in " in line for line in heard)
    weights = [load_model(tmp_path / name / "model").decoder.parameters() for name in ("whole", "broken")]
    for one, many in zip(*weights, strict=True):
        torch.testing.assert_close(many, one, rtol=0, atol=1e-9 * float(one.abs().max()))

"""Placing experts by their load: even, allowed by the router's groups, and the same model afterwards."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cumulo.errors import ConfigError
from cumulo.spec.layout import Layout
from cumulo.train.expert_moves import renumber_experts
from cumulo.train.expert_placement import heaviest_share, place_experts
from cumulo.train.groups import Groups
from cumulo.train.model import TrainingDecoder
from cumulo.train.pieces import pieces
from cumulo.train.split import split_for
from tests.train.pool import run_ranks
from tests.train.split_case import LATENT, SPARSE, Case, cut, make_batch, objective, rows, whole_model


@given(st.data())
def test_a_placement_is_an_order_no_worse_than_the_greedy_bound(data: st.DataObject) -> None:
    ranks, room = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 8))
    loads = data.draw(st.lists(st.floats(0, 100), min_size=ranks * room, max_size=ranks * room))
    order = place_experts(loads, ranks)
    assert sorted(order) == list(range(len(loads)))
    if sum(loads):
        # No rank can be ahead of another by more than one expert per place it has.
        sums = [sum(loads[e] for e in order[r * room : (r + 1) * room]) for r in range(ranks)]
        assert max(sums) - min(sums) <= max(loads) * (1 + 1e-9)


def test_heavy_experts_that_lay_together_are_spread() -> None:
    loads = [9.0, 8.0, 7.0, 6.0, 1.0, 1.0, 1.0, 1.0]
    order = place_experts(loads, 4)
    assert heaviest_share(loads, range(8), 4) == pytest.approx(2.0)
    assert heaviest_share(loads, order, 4) == pytest.approx(10 * 4 / 34)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_groups_of_the_router_stay_together(ranks: int) -> None:
    loads = [float((7 * expert) % 13) for expert in range(16)]
    order = place_experts(loads, ranks, groups=4)
    assert sorted(order) == list(range(16))
    for begin in range(0, 16, 4):
        assert len({expert // 4 for expert in order[begin : begin + 4]}) == 1


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="6 experts do not divide into 4 ranks"):
        place_experts([1.0] * 6, 4)
    with pytest.raises(ConfigError, match="cannot be placed whole"):
        place_experts([1.0] * 24, 6, groups=4)


def losses_before_and_after(rank: int, case: Case) -> Any:
    """Loss, loads by rank of the ep group, and the first expert's gradient under its old and its new number."""
    moe, groups = case.spec.moe, Groups(case.layout, rank)
    assert moe is not None
    ranks = case.layout.ep
    whole = whole_model(case.spec)
    model = TrainingDecoder(case.spec, torch.float64, split=split_for(case.layout, groups))
    held, originals = pieces(case.spec, case.layout, rank), dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(cut(originals[name], held[name]))
    batch, count = make_batch(case.spec, case.documents), len(case.documents)
    objective(whole, batch, 1, count)
    loads = {layer: load.tolist() for layer, load in whole.take_loads().items()}
    orders = {layer: place_experts(load, ranks, moe.groups) for layer, load in loads.items()}
    own = batch.rows(rank * count // ranks, (rank + 1) * count // ranks)
    before = objective(model, own, 1, count).item()
    renumber_experts({name: p.data for name, p in model.named_parameters()}, orders, groups.of("ep"))
    renumber_experts({name: p.data for name, p in whole.named_parameters()}, orders, None)
    same = [torch.equal(p, cut(originals[name], held[name])) for name, p in model.named_parameters()]
    shares = [
        (heaviest_share(load, range(moe.experts), ranks), heaviest_share(load, orders[layer], ranks))
        for layer, load in loads.items()
    ]
    return before, objective(model, own, 1, count).item(), all(same), shares


assert LATENT.moe is not None
GROUPED = replace(LATENT, moe=replace(LATENT.moe, experts=16, groups=2, top_groups=1))


@pytest.mark.parametrize("spec", [SPARSE, GROUPED], ids=["free", "in groups"])
def test_a_renumbered_model_computes_the_same_with_its_load_spread(spec: Any) -> None:
    case = Case(spec, Layout(dp=4, ep=4), rows(4, 16, 2))
    results = run_ranks(losses_before_and_after, 4, case)
    for before, after, same_as_in_one_process, shares in results:
        assert after == pytest.approx(before, rel=1e-13)
        assert same_as_in_one_process
        assert all(placed <= lay for lay, placed in shares)
        assert any(placed < lay for lay, placed in shares)

"""ZeRO 0 to 3 against one process: the same weights, from ranks that see some of the rows and keep less."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cumulo.layout.layout import Layout
from cumulo.layout.pieces import pieces
from cumulo.ranks.groups import Groups
from cumulo.train.decide.config import OptimizerConfig
from cumulo.train.optimizer.sharded_optimizer import gradient_sink
from cumulo.train.run.verify import largest_difference, train_alone
from tests.thorough import rare
from tests.train.data_case import DENSE, EXPERTS, Case, alone, together
from tests.train.layout_runs import SPECS, train_config, train_parallel
from tests.train.pool import run_ranks

LAYOUTS = [
    *(Layout(dp=4, zero=zero) for zero in (0, 1, 2, 3)),
    *(Layout(dp=4, zero=zero, shard=2) for zero in (1, 2, 3)),
]


@pytest.mark.long
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[-1], *rare(*LAYOUTS[1:-1])], ids=str)
def test_ranks_that_share_the_work_move_the_weights_as_one_process_does(layout: Layout) -> None:
    compare(layout, Case(EXPERTS))


@pytest.mark.long
@pytest.mark.parametrize("layout", [LAYOUTS[3], *rare(*LAYOUTS[:3], *LAYOUTS[4:])], ids=str)
def test_they_do_so_with_a_model_without_experts(layout: Layout) -> None:
    compare(layout, Case(DENSE))


@pytest.mark.long
@pytest.mark.parametrize(
    "recompute",
    [False, pytest.param(True, marks=pytest.mark.thorough), ("norm", "attention", "activation")],
    ids=str,
)
@pytest.mark.parametrize("zero", [3, *rare(0, 1, 2)])
def test_weight_gradients_may_come_after_and_apart_from_the_inputs(
    zero: int, recompute: bool | tuple[str, ...]
) -> None:
    compare(Layout(dp=2, zero=zero), Case(EXPERTS, in_halves=True, recompute=recompute))


@pytest.mark.long
@pytest.mark.parametrize("zero", [0, 3])
def test_one_micro_batch_is_the_last_one(zero: int) -> None:
    compare(Layout(dp=2, zero=zero), Case(micro_batches=1, recompute=True))


@pytest.mark.long
@pytest.mark.parametrize("zero", [1, 3, *rare(0, 2)])
def test_half_precision_has_the_masters_of_one_process_in_rows(zero: int) -> None:
    layout, case = Layout(dp=2, zero=zero), Case(EXPERTS, dtype=torch.bfloat16, steps=1)
    # As many rows in a micro-batch as a rank has: then only float32 sums are taken in another order. A second
    # step would begin from weights of which some are rounded the other way.
    expected = alone(replace(case, micro_batches=4))
    seen: dict[str, int] = {}
    for outcome in run_ranks(together, layout.world, layout, case):
        for slot, tensor in outcome.state.items():
            name, _, kind = slot.rpartition(".")
            if kind == "step":
                continue
            assert tensor.dtype == torch.float32
            begin, end = outcome.rows[name]
            seen[slot] = seen.get(slot, 0) + end - begin
            whole = expected.state[slot]
            # A norm's gradient is computed in float32: buckets take it as it is, others round it on the way.
            share = 2e-2 if name.endswith("norm.weight") else 1e-5
            atol = share * float(whole.abs().max())
            torch.testing.assert_close(tensor, whole[begin:end], rtol=0, atol=atol)
    for slot, whole in expected.state.items():
        if whole.ndim:  # shared out under ZeRO, each rank has all otherwise
            assert seen[slot] == len(whole) * (1 if zero else 2), slot


@pytest.mark.long
@pytest.mark.parametrize("zero", [2, *rare(0, 1, 3)])
def test_muon_makes_whole_matrices_orthogonal_however_their_rows_are_shared_out(zero: int) -> None:
    # Of 6 experts each of 4 ranks has 2 or none.
    compare(Layout(dp=4, zero=zero), Case(EXPERTS, OptimizerConfig(kind="muon", clip_norm=0.05)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("latent", Layout(dp=2, tp=2, zero=3)),
        ("dense", Layout(tp=2, sequence_parallel=True)),
        *rare(("experts", Layout(dp=2, tp=2, ep=2, zero=1))),
    ],
    ids=str,
)
def test_muon_makes_whole_matrices_orthogonal_however_they_are_sliced(name: str, layout: Layout) -> None:
    spec = replace(SPECS[name], layers=2)  # the second has the experts
    config = replace(
        train_config(layout, rows=4, steps=3), optimizer=OptimizerConfig(kind="muon", clip_norm=0.5)
    )
    difference, where = largest_difference(train_alone(spec, config), train_parallel(spec, config))
    assert difference < 1e-9, where


class SentBytes(TorchDispatchMode):
    """What a ring algorithm sends for the collectives that torch is asked for, in parts of what each is about."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.rounds = (ranks - 1) / ranks
        self.all_reduced = self.reduce_scattered = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.allreduce_.default:
            self.all_reduced += 2 * self.rounds * sum(tensor.nbytes for tensor in args[0])
        elif func is torch.ops.c10d._reduce_scatter_base_.default:
            self.reduce_scattered += self.rounds * args[1].nbytes
        return func(*args, **(kwargs or {}))


def sent_for_gradients(rank: int, layout: Layout) -> tuple[float, float]:
    groups, case = Groups(layout, rank), Case()
    model = case.model()
    sink = gradient_sink({0: model}, pieces(case.spec, layout, rank), groups, wide_gradients=True)
    with SentBytes(layout.world) as sent:
        sink.begin()
        objective = case.objective(model, 0, 0, 2)
        sink.last(0)
        objective.backward()
        sink.finish()
    return sent.all_reduced, sent.reduce_scattered


def test_sharing_out_the_optimizer_halves_what_is_sent_for_gradients() -> None:
    whole, nothing = run_ranks(sent_for_gradients, 2, Layout(dp=2))[0]
    none, half = run_ranks(sent_for_gradients, 2, Layout(dp=2, zero=1))[0]
    assert nothing == none == 0 and whole > 0
    assert half == pytest.approx(whole / 2, rel=0.02)  # an odd number of rows is filled up


def compare(layout: Layout, case: Case) -> None:
    expected = alone(case)
    for outcome in run_ranks(together, layout.world, layout, case):
        np.testing.assert_allclose(outcome.norms, expected.norms, rtol=1e-11)
        assert set(outcome.weights) == set(expected.weights)
        for name, weight in expected.weights.items():
            torch.testing.assert_close(outcome.weights[name], weight, rtol=1e-10, atol=1e-12)

"""Expert parallelism against the whole model: losses and all gradients in float64."""

from dataclasses import replace

import pytest
import torch

from cumulo.layout.layout import Layout
from cumulo.models.linear import TensorKind
from cumulo.train.model.experts import TrainingExperts
from cumulo.train.model.recompute import Recompute
from cumulo.train.model.split import LayerSettings
from tests.train.split_case import LATENT, SPARSE, Case, check, fill, rows


@pytest.mark.long
@pytest.mark.parametrize("layout", [
    Layout(dp=2, ep=2), Layout(dp=4, ep=2), Layout(dp=4, ep=4), Layout(dp=2, ep=2, tp=2),
    Layout(dp=2, ep=2, tp=2, sequence_parallel=True),
], ids=str)  # fmt: skip
def test_experts_on_other_ranks_have_the_whole_models_loss_and_gradients(layout: Layout) -> None:
    check(Case(SPARSE, layout, rows(4, 12, 2)))


def test_grouped_sigmoid_routing_with_a_selection_bias_works_across_ranks() -> None:
    check(Case(LATENT, Layout(dp=2, ep=2), rows(4, 12, 2)))


def test_experts_nobody_chose_are_no_problem() -> None:
    assert SPARSE.moe is not None
    spec = replace(SPARSE, moe=replace(SPARSE.moe, experts=16, experts_per_token=1))
    check(Case(spec, Layout(dp=4, ep=4), ((2,), (2,), (2,), (2,))))  # 8 tokens cannot choose 16 experts


@pytest.mark.parametrize("recompute", [False, ("activation",)], ids=str)
def test_all_experts_in_one_kernel_compute_what_each_computes_alone(
    recompute: bool | tuple[str, ...],
) -> None:
    assert SPARSE.moe is not None
    spec = replace(SPARSE, hidden=16, moe=replace(SPARSE.moe, expert_hidden=8))
    assert spec.moe is not None
    settings = LayerSettings(TensorKind(torch.float32, "cpu"), recompute=Recompute.from_option(recompute))
    experts = TrainingExperts(spec, spec.moe, settings)
    for name, parameter in experts.named_parameters():
        fill(name, parameter.requires_grad_())
    counts = torch.tensor([3, 0, 5, 1, 0, 0, 7, 4])
    x = torch.randn(20, 16, generator=torch.Generator().manual_seed(2)).requires_grad_()
    results = [compute(x, counts) for compute in (experts, experts.grouped)]
    torch.testing.assert_close(*results, atol=1e-6, rtol=0)
    upstream = torch.randn(20, 16, generator=torch.Generator().manual_seed(3))
    leaves = [x, *experts.parameters()]
    gradients = [torch.autograd.grad(result, leaves, upstream) for result in results]
    for alone, together in zip(*gradients, strict=True):
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)

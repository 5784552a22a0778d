"""Cross-entropy without the logits: losses and gradients against torch's in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cumulo.kernels.cuda.loss import linear_cross_entropy as module
from cumulo.kernels.cuda.loss.linear_cross_entropy import linear_cross_entropy, reference
from tests.kernels.cuda.tolerance import check_close, relative_error

ROWS, VOCABULARY, HIDDEN = 11, 37, 16


def inputs(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, HIDDEN, generator=generator).to(device, dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(device, dtype)
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    targets[[2, 7]] = 3
    targets[5] = VOCABULARY - 1
    return x, weight, targets.to(device)


def loss_and_gradients(
    function: Any, x: Tensor, weight: Tensor, targets: Tensor, **settings: Any
) -> list[Tensor]:
    """For an upstream gradient that is not 1."""
    leaves = [x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()]
    loss = function(*leaves, targets, **settings)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, torch.full_like(loss, 1.7))]


@pytest.mark.parametrize(("ignore_index", "chunk_rows"), [(-100, 0), (3, 0), (3, 4), (-100, 4)])
def test_losses_and_gradients_are_torchs(ignore_index: int, chunk_rows: int, device: torch.device) -> None:
    x, weight, targets = inputs(device)
    found = loss_and_gradients(
        linear_cross_entropy, x, weight, targets, ignore_index=ignore_index, chunk_rows=chunk_rows
    )
    exact = loss_and_gradients(reference, x.double(), weight.double(), targets, ignore_index=ignore_index)
    for ours, right in zip(found, exact, strict=True):
        assert ours.shape == right.shape and relative_error(ours, right) < 1e-6


def test_half_precision_loses_no_more_than_torchs(device: torch.device) -> None:
    x, weight, targets = inputs(device, torch.float16)
    found = loss_and_gradients(linear_cross_entropy, x, weight, targets, chunk_rows=4)
    for index, ours in enumerate(found):

        def torchs(a: Tensor, w: Tensor, i: int = index) -> Tensor:
            return loss_and_gradients(reference, a, w, targets)[i]

        check_close(ours, torchs, x, weight)


def test_rows_longer_than_a_block_and_a_strided_input(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK", 16)
    x, weight, targets = inputs(device)
    wide = torch.cat((x, x), 1)[:, :HIDDEN]
    found = loss_and_gradients(linear_cross_entropy, wide, weight, targets, ignore_index=3)
    exact = loss_and_gradients(reference, x.double(), weight.double(), targets, ignore_index=3)
    assert all(relative_error(ours, right) < 1e-6 for ours, right in zip(found, exact, strict=True))


def test_logits_of_any_size_neither_overflow_nor_hide_a_nan(device: torch.device) -> None:
    x, weight, targets = inputs(device)
    loss = linear_cross_entropy(1000 * x, weight, targets)
    assert relative_error(loss, reference(1000 * x.double(), weight.double(), targets)) < 1e-5
    x[4, 0] = torch.nan
    assert linear_cross_entropy(x, weight, targets).isnan()


def test_ignored_targets_cost_nothing_even_where_all_are(device: torch.device) -> None:
    x, weight, _ = inputs(device)
    nothing = torch.full((ROWS,), -100, device=device)
    loss, grad_x, grad_weight = loss_and_gradients(linear_cross_entropy, x, weight, nothing)
    assert loss == 0 and not grad_x.any() and not grad_weight.any()


def test_only_the_gradients_that_are_wanted_are_given(device: torch.device) -> None:
    x, weight, targets = inputs(device)
    loss = linear_cross_entropy(x.requires_grad_(), weight, targets)
    loss.backward()
    assert x.grad is not None and weight.grad is None
    with torch.no_grad():
        again = linear_cross_entropy(x, weight.requires_grad_(), targets)
    assert again == loss and again.grad_fn is None


def test_the_peak_of_memory_is_a_chunk_of_logits() -> None:
    for rows, vocabulary in ((8192, 128256), (100, 128256), (65536, 49152), (8192, 1000), (1, 5)):
        chunk = module.default_chunk_rows(rows, vocabulary, 2)
        assert 1 <= chunk <= rows and (chunk == rows or chunk % 128 == 0)
        assert chunk * vocabulary * 2 <= max(module.logit_bytes() * 1.1, 256 * vocabulary * 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="real sizes take a GPU")
def test_bfloat16_at_a_real_size_loses_no_more_than_torchs() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(600, 512, device="cuda", dtype=torch.bfloat16, generator=generator)
    weight = torch.randn(20001, 512, device="cuda", dtype=torch.bfloat16, generator=generator) * 512**-0.5
    targets = torch.randint(0, 20001, (600,), device="cuda", generator=generator)
    found = loss_and_gradients(linear_cross_entropy, x, weight, targets, chunk_rows=256)
    same = loss_and_gradients(reference, x, weight, targets)
    exact = loss_and_gradients(reference, x.double(), weight.double(), targets)
    for ours, torchs, right in zip(found, same, exact, strict=True):
        assert relative_error(ours, right) <= 2 * max(relative_error(torchs, right), 2**-9)

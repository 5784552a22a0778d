"""Cross-entropy without the logits: losses and gradients against torch's in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cumulo.kernels.cuda.loss import cross_entropy_rows
from cumulo.kernels.cuda.loss import linear_cross_entropy as module
from cumulo.kernels.cuda.loss.linear_cross_entropy import (
    linear_cross_entropy,
    reference,
    token_cross_entropy_op,
)
from tests.kernels.cuda.operators import opcheck
from tests.kernels.cuda.tolerance import check_close, relative_error
from tests.thorough import rare

ROWS, VOCABULARY, HIDDEN = 11, 37, 16
EVERYTHING: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": 3}
SETTINGS: dict[str, dict[str, Any]] = {"plain": {}, "everything": EVERYTHING}


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
    """For an upstream gradient that is not 1, and differs per token where there is a loss per token."""
    leaves = [x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()]
    loss = function(*leaves, targets, **settings)
    upstream = torch.linspace(-2, 3, loss.numel() + 1)[1:].view(loss.shape).to(loss.device, loss.dtype)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, upstream)]


_CASES = [
    (way, reduction, rows) for way in SETTINGS for reduction in ("mean", "sum", "none") for rows in (0, 4)
]
_USUAL = [("plain", "mean", 0), ("everything", "sum", 4), ("everything", "none", 0), ("plain", "none", 4)]


@pytest.mark.parametrize(
    ("way", "reduction", "chunk_rows"), [*_USUAL, *rare(*(case for case in _CASES if case not in _USUAL))]
)
def test_losses_and_gradients_are_torchs(
    way: str, reduction: str, chunk_rows: int, device: torch.device
) -> None:
    settings = SETTINGS[way]
    x, weight, targets = inputs(device)
    found = loss_and_gradients(
        linear_cross_entropy, x, weight, targets, reduction=reduction, chunk_rows=chunk_rows, **settings
    )
    exact = loss_and_gradients(
        reference, x.double(), weight.double(), targets, reduction=reduction, **settings
    )
    for ours, right in zip(found, exact, strict=True):
        assert ours.shape == right.shape and relative_error(ours, right) < 1e-6


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_half_precision_loses_no_more_than_torchs(reduction: str, device: torch.device) -> None:
    x, weight, targets = inputs(device, torch.float16)
    found = loss_and_gradients(linear_cross_entropy, x, weight, targets, reduction=reduction, chunk_rows=4)
    for index, ours in enumerate(found):

        def torchs(a: Tensor, w: Tensor, i: int = index) -> Tensor:
            return loss_and_gradients(reference, a, w, targets, reduction=reduction)[i]

        check_close(ours, torchs, x, weight)


def test_rows_longer_than_a_block_and_a_strided_input(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy_rows, "_BLOCK", 16)
    x, weight, targets = inputs(device)
    wide = torch.cat((x, x), 1)[:, :HIDDEN]
    found = loss_and_gradients(linear_cross_entropy, wide, weight, targets, **EVERYTHING)
    exact = loss_and_gradients(reference, x.double(), weight.double(), targets, **EVERYTHING)
    assert all(relative_error(ours, right) < 1e-6 for ours, right in zip(found, exact, strict=True))


def test_logits_of_any_size_neither_overflow_nor_hide_a_nan(device: torch.device) -> None:
    x, weight, targets = inputs(device)
    loss = linear_cross_entropy(1000 * x, weight, targets)
    assert relative_error(loss, reference(1000 * x.double(), weight.double(), targets)) < 1e-5
    x[4, 0] = torch.nan
    losses = linear_cross_entropy(x, weight, targets, reduction="none")
    assert losses.isnan().tolist() == [row == 4 for row in range(ROWS)]


def test_ignored_targets_cost_nothing_even_where_all_are(device: torch.device) -> None:
    x, weight, _ = inputs(device)
    nothing = torch.full((ROWS,), -100, device=device)
    loss, grad_x, grad_weight = loss_and_gradients(linear_cross_entropy, x, weight, nothing, reduction="sum")
    assert loss == 0 and not grad_x.any() and not grad_weight.any()


def test_without_gradients_none_are_computed(device: torch.device) -> None:
    x, weight, targets = inputs(device)
    loss, grad_x, grad_weight = torch.ops.cumulo.linear_cross_entropy(
        x, weight, targets, -100, 0.0, 0.0, True, False, 0
    )
    assert grad_x.numel() == 0 and grad_weight.numel() == 0
    with torch.no_grad():
        assert linear_cross_entropy(x, weight.requires_grad_(), targets) == loss


def test_they_are_torch_operators_with_fake_kernels_and_gradients(device: torch.device) -> None:
    x, weight, targets = inputs(device)
    x.requires_grad_()
    weight.requires_grad_()
    opcheck(token_cross_entropy_op, (x, weight, targets, 3, 0.1, 0.0, 4))
    opcheck(module.linear_cross_entropy_op, (x, weight, targets, 3, 0.1, 0.0, True, True, 4))


def test_the_peak_of_memory_is_a_chunk_of_logits() -> None:
    for rows, vocabulary in ((8192, 128256), (100, 128256), (65536, 49152), (8192, 1000), (1, 5)):
        chunk = cross_entropy_rows.default_chunk_rows(rows, vocabulary, 2)
        assert 1 <= chunk <= rows and (chunk == rows or chunk % 128 == 0)
        assert chunk * vocabulary * 2 <= max(cross_entropy_rows.logit_bytes() * 1.1, 256 * vocabulary * 2)


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"they must be \[T, H\]"):
        linear_cross_entropy(torch.zeros(2, 4), torch.zeros(5, 3), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="use mean, sum or none"):
        linear_cross_entropy(
            torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(2, dtype=torch.long), reduction="max"
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="real sizes take a GPU")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_bfloat16_at_a_real_size_loses_no_more_than_torchs(reduction: str) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(600, 512, device="cuda", dtype=torch.bfloat16, generator=generator)
    weight = torch.randn(20001, 512, device="cuda", dtype=torch.bfloat16, generator=generator) * 512**-0.5
    targets = torch.randint(0, 20001, (600,), device="cuda", generator=generator)
    found = loss_and_gradients(linear_cross_entropy, x, weight, targets, reduction=reduction, chunk_rows=256)
    same = loss_and_gradients(reference, x, weight, targets, reduction=reduction)
    exact = loss_and_gradients(reference, x.double(), weight.double(), targets, reduction=reduction)
    for ours, torchs, right in zip(found, same, exact, strict=True):
        assert relative_error(ours, right) <= 2 * max(relative_error(torchs, right), 2**-9)

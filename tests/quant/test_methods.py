"""The methods on small matrices in float64: GPTQ against a brute-force surgeon, AWQ's searches, fp8."""

import pytest
import torch
from torch import Tensor

from cumulo.quant.rounding import (
    Grid,
    float8,
    gptq,
    output_error,
    round_to_nearest,
    search_clipping,
    search_scale,
)


def case(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, correlated inputs of very different sizes, and their Hessian."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    mixing = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    sizes = torch.logspace(-1, 1, columns, dtype=torch.float64)[torch.randperm(columns, generator=generator)]
    inputs = torch.randn(4 * columns, columns, generator=generator, dtype=torch.float64) @ mixing * sizes
    return weight, inputs, inputs.T @ inputs


def brute_force(
    weight: Tensor, hessian: Tensor, grid: Grid, group: int, act_order: bool, damping: float
) -> Tensor:
    """Fix one column after the other; after each invert what is left of H and move the free columns (Hassibi &
    Stork 1993, equation 5). Returns the matrix a reader sees."""
    weight, rows = weight.clone(), weight.shape[0]
    hessian = hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    order = (
        hessian.diagonal().argsort(descending=True, stable=True).tolist()
        if act_order
        else range(len(hessian))
    )
    fixed = torch.empty_like(weight)
    free = list(range(len(hessian)))
    scale, zero = grid.fit_groups(weight, group)
    for column in order:
        own = column // group
        if not act_order and column % group == 0:
            now = weight[:, column : column + group]
            scale[:, own], zero[:, own] = grid.fit(now.amin(1), now.amax(1))
        code = grid.codes(weight[:, column], scale[:, own], zero[:, own])
        fixed[:, column] = (code - zero[:, own]) * scale[:, own]
        inverse = torch.linalg.inv(hessian[free][:, free])
        place = free.index(column)
        error = (weight[:, column] - fixed[:, column]) / inverse[place, place]
        weight[:, free] -= error[:, None] * inverse[place].expand(rows, -1)
        free.remove(column)
    return fixed


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [8, 24])
def test_gptq_rounds_as_a_brute_force_surgeon_would(act_order: bool, symmetric: bool, group: int) -> None:
    weight, _, hessian = case(5, 24)
    grid = Grid(3, symmetric, torch.float64)
    found = gptq(weight, hessian, grid, group, act_order, 0.02)
    expected = brute_force(weight, hessian, grid, group, act_order, 0.02)
    assert float((found.dequantise(torch.float64) - expected).abs().max()) < 1e-9


def test_runs_of_columns_do_not_change_gptq() -> None:
    weight, _, hessian = case(3, 160)  # more than one run of 128
    grid = Grid(4, True, torch.float64)
    found = gptq(weight, hessian, grid, 32, act_order=True)
    expected = brute_force(weight, hessian, grid, 32, act_order=True, damping=0.01)
    assert float((found.dequantise(torch.float64) - expected).abs().max()) < 1e-9


def test_gptq_changes_the_output_less_than_rounding_to_nearest_and_act_order_less_still() -> None:
    weight, inputs, hessian = case(16, 64, seed=3)
    grid = Grid(4, True)
    matrices = [
        round_to_nearest(weight, grid, 32),
        gptq(weight, hessian, grid, 32, act_order=False),
        gptq(weight, hessian, grid, 32, act_order=True),
    ]
    errors = [float(((weight - one.dequantise(torch.float64)) @ inputs.T).square().sum()) for one in matrices]
    assert errors[1] < 0.8 * errors[0] and errors[2] < errors[1]


def test_inputs_that_were_never_seen_do_not_stop_gptq() -> None:
    weight, _, hessian = case(4, 32)
    hessian[5], hessian[:, 5] = 0, 0
    found = gptq(weight, hessian, Grid(4, True), 16).dequantise(torch.float64)
    assert bool(found.isfinite().all())
    assert float((found[:, 5] - weight[:, 5]).abs().max()) < 0.3  # rounded, not dropped


def test_the_hessian_s_error_is_the_squared_error_of_the_outputs() -> None:
    weight, inputs, hessian = case(4, 16)
    rounded = weight + 0.1
    direct = float(((weight - rounded) @ inputs.T).square().sum())
    assert output_error(weight, rounded, hessian) == pytest.approx(direct)


def test_awq_scales_and_clipping_each_lower_the_error_of_the_output() -> None:
    weight, inputs, hessian = case(32, 64, seed=5)
    grid, group = Grid(3, False, torch.float64), 32
    plain = output_error(weight, round_to_nearest(weight, grid, group).dequantise(torch.float64), hessian)
    scale = search_scale([weight], inputs.abs().mean(0), hessian, grid, group)
    scaled_hessian = hessian / (scale[:, None] * scale)
    scaled = round_to_nearest(weight * scale, grid, group).dequantise(torch.float64)
    with_scale = output_error(weight * scale, scaled, scaled_hessian)
    clipping = search_clipping(weight * scale, scaled_hessian, grid, group)
    clipped = round_to_nearest(weight * scale, grid, group, clipping).dequantise(torch.float64)
    with_both = output_error(weight * scale, clipped, scaled_hessian)
    assert with_scale < 0.8 * plain
    assert with_both < with_scale


@pytest.mark.parametrize("scheme", ["channel", "tensor", "block"])
def test_fp8_keeps_weights_to_four_bits_of_mantissa(scheme: str) -> None:
    weight = torch.randn(200, 150, generator=torch.Generator().manual_seed(1)) * 0.02
    matrix = float8(weight, scheme)  # type: ignore[arg-type]
    assert matrix.scale.shape == {"channel": (200, 1), "tensor": (1, 1), "block": (2, 2)}[scheme]
    close = (matrix.dequantise() - weight).abs() <= weight.abs() / 16 + matrix.scale.max() * 2**-9
    assert bool(close.all())


def test_a_group_of_zeros_stays_zero() -> None:
    for symmetric in (False, True):
        matrix = round_to_nearest(torch.zeros(2, 64), Grid(4, symmetric), 32)
        assert bool((matrix.dequantise() == 0).all()) and bool(matrix.scale.isfinite().all())

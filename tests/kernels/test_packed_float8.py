"""The product with 8-bit floats against the expanded matrix, for every code and every tile."""

import pytest
import torch

from cumulo.kernels.cpu.packed_float8 import PackedFloat8


def all_codes() -> torch.Tensor:
    """Every e4m3 number, subnormal ones included; 0x7f and 0xff are NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    return codes[(codes & 0x7F) != 0x7F]


def test_every_code_is_decoded_exactly() -> None:
    codes = torch.nn.functional.pad(all_codes(), (0, 2)).view(1, 256)
    matrix = PackedFloat8(codes.view(torch.float8_e4m3fn), torch.ones(1, 1), 256)
    assert torch.equal(matrix.matmul(torch.eye(256))[:, 0], codes.view(torch.float8_e4m3fn).float()[0])


@pytest.mark.parametrize(
    ("rows", "columns", "block"), [(37, 96, 96), (16, 256, 128), (9, 208, 64), (5, 30, 30)]
)
def test_the_product_is_that_of_the_expanded_matrix_whatever_else_is_in_the_call(
    rows: int, columns: int, block: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(rows, -(-columns // block), generator=generator)
    matrix = PackedFloat8(codes, scale, block)
    expanded = codes.double() * scale.double().repeat_interleave(block, 1)[:, :columns]
    x = torch.randn(11, columns, generator=generator)
    together = matrix.matmul(x)
    assert torch.allclose(together.double(), x.double() @ expanded.T, rtol=1e-4, atol=1e-4)
    assert torch.allclose(PackedFloat8(codes, scale, block, None).matmul(x), together, rtol=1e-4, atol=1e-4)
    if matrix.library is not None:
        assert torch.equal(together, torch.cat([matrix.matmul(row[None]) for row in x]))
    assert torch.equal(matrix.rows(torch.tensor([2, 0])), expanded[[2, 0]].float())


def test_parts_with_different_blocks_are_stacked() -> None:
    generator = torch.Generator().manual_seed(1)
    parts = []
    for rows, block in ((4, 128), (6, 256)):
        codes = torch.randn(rows, 256, generator=generator).to(torch.float8_e4m3fn)
        parts.append((codes, torch.rand(rows, 256 // block, generator=generator), block))
    stacked = PackedFloat8.stacked(parts)
    x = torch.randn(3, 256, generator=generator)
    alone = torch.cat([PackedFloat8(*part).matmul(x) for part in parts], 1)
    assert torch.allclose(stacked.matmul(x), alone, rtol=1e-5, atol=1e-5)

"""The plain float product against float64, and its independence of the batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.kernels.cpu.packed_float8 import float_linear
from tests import thorough


@settings(max_examples=thorough.examples(40), deadline=None)
@given(
    tokens=st.integers(1, 20), rows=st.integers(1, 70), vectors=st.integers(1, 30), seed=st.integers(0, 1000)
)
def test_the_product_is_right_and_a_token_s_bits_do_not_depend_on_the_others(
    tokens: int, rows: int, vectors: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(tokens, 8 * vectors, generator=generator), torch.randn(rows, 8 * vectors)
    together = float_linear(x, weight)
    assert torch.allclose(together.double(), x.double() @ weight.double().T, atol=1e-4)
    assert torch.equal(together, torch.cat([float_linear(row[None], weight) for row in x]))


def test_a_bias_is_added() -> None:
    x, weight, bias = torch.randn(3, 16), torch.randn(5, 16), torch.randn(5)
    assert torch.equal(float_linear(x, weight, bias), float_linear(x, weight) + bias)


@pytest.mark.parametrize(("dtype", "columns"), [(torch.float64, 16), (torch.float32, 7)])
def test_what_the_kernel_cannot_do_torch_does(dtype: torch.dtype, columns: int) -> None:
    x, weight = torch.randn(3, columns, dtype=dtype), torch.randn(5, columns, dtype=dtype)
    assert torch.equal(float_linear(x, weight), torch.nn.functional.linear(x, weight))


def test_no_tokens_give_no_rows() -> None:
    assert float_linear(torch.zeros(0, 16), torch.zeros(5, 16)).shape == (0, 5)

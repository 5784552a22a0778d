"""The packed product against the dequantised matrix in float64, and its independence of the batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.kernels.cpu.affine_blocks import AffineBlocks
from cumulo.kernels.cpu.packed_linear import PackedStack, PackedWeight
from tests import thorough
from tests.kernels.blocks import random_blocks

FORMATS = [(4, 32), (4, 16), (8, 32), (8, 16)]
LONG_FORMATS = [(4, 64), (4, 128), (8, 128), (8, 112)]  # of AWQ, GPTQ and compressed-tensors files


def exact_product(x: torch.Tensor, parts: list[AffineBlocks]) -> torch.Tensor:
    dense = np.concatenate([part.dequantize() for part in parts]).astype(np.float64)
    return x.double() @ torch.from_numpy(dense).T


def rounding_bound(x: torch.Tensor, parts: list[AffineBlocks], activation_bits: int) -> torch.Tensor:
    """Half a step of every activation times the size of its weight, and float32 sums, per output."""
    levels = 127 if activation_bits == 8 else 2**13 - 64  # wide ones have at least 14 bits
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 32))
    step = padded.view(len(x), -1, 32).abs().amax(-1).repeat_interleave(32, 1)[:, : x.shape[1]] / levels
    dense = torch.from_numpy(np.concatenate([np.abs(p.dequantize()) for p in parts]).astype(np.float64))
    sizes = [np.abs(p.codes.astype(np.float64)) * np.abs(p.scale).repeat(p.group, 1) for p in parts]
    # Codes and minima are summed apart and may cancel: float32 rounds each of the two.
    float_sums = 3e-7 * (x.double().abs() @ (dense + 2 * torch.from_numpy(np.concatenate(sizes))).T)
    return 0.501 * step.double() @ dense.T + float_sums + 1e-6


@pytest.mark.parametrize(("bits", "group"), FORMATS + LONG_FORMATS)
@pytest.mark.parametrize("with_minimum", [False, True])
@pytest.mark.parametrize("half_exact", [False, True])
@pytest.mark.parametrize("activation_bits", [8, 16])
def test_the_product_is_exact_but_for_the_rounding_of_activations(
    bits: int, group: int, with_minimum: bool, half_exact: bool, activation_bits: int
) -> None:
    # 112 is not a multiple of the activations' groups of 32
    columns = 3 * group if group in (32, 64) else 112 if group in (16, 112) else 256
    blocks = random_blocks(37, columns, bits, group, with_minimum, half_exact)
    packed = PackedWeight.pack(blocks, activation_bits)
    x = (
        torch.randn(13, columns, generator=torch.Generator().manual_seed(1))
        * torch.logspace(-2, 2, 13)[:, None]
    )
    error = (packed.matmul(x) - exact_product(x, [blocks])).abs()
    assert bool((error <= rounding_bound(x, [blocks], activation_bits)).all())


def test_wide_activations_are_fifty_times_closer_than_eight_bits() -> None:
    blocks = random_blocks(64, 256, 4, 32)
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(2))
    exact = exact_product(x, [blocks])
    errors = [float((PackedWeight.pack(blocks, bits).matmul(x) - exact).std()) for bits in (8, 16)]
    assert errors[1] * 50 < errors[0]


@settings(max_examples=thorough.examples(40), deadline=None)
@given(
    formats=st.lists(st.sampled_from(FORMATS), min_size=1, max_size=3),
    rows=st.integers(1, 30),
    groups=st.integers(1, 5),
    tokens=st.integers(1, 45),
    activation_bits=st.sampled_from([8, 16]),
    minimum=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_token_s_result_is_the_same_bits_whatever_else_is_in_the_call(
    formats: list[tuple[int, int]],
    rows: int,
    groups: int,
    tokens: int,
    activation_bits: int,
    minimum: bool,
    seed: int,
) -> None:
    parts = [random_blocks(rows + i, 32 * groups, *f, minimum, seed=seed + i) for i, f in enumerate(formats)]
    packed = PackedWeight.pack(parts, activation_bits)
    x = torch.randn(tokens, 32 * groups, generator=torch.Generator().manual_seed(seed))
    together = packed.matmul(x)
    alone = torch.cat([packed.matmul(row[None]) for row in x])
    assert torch.equal(together, alone)
    assert bool(
        ((together - exact_product(x, parts)).abs() <= rounding_bound(x, parts, activation_bits)).all()
    )


@pytest.mark.parametrize(("bits", "code"), [(4, 15), (8, -128), (8, 127)])
def test_the_largest_sums_are_those_of_a_token_alone(bits: int, code: int) -> None:
    kind = np.uint8 if bits == 4 else np.int8
    blocks = AffineBlocks(np.full((9, 96), code, kind), np.full((9, 3), 0.37, np.float32), None, bits, 32)
    packed = PackedWeight.pack(blocks)
    # Codes of activations at both ends of their range, and those whose lower byte is.
    x = torch.tensor([1.0, -1.0, 1 - 2**-8, 2**-8 - 1, 0.5 + 2**-9])[:, None].repeat(1, 96)
    x[:, ::32] = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])[:, None]
    together = packed.matmul(x)
    assert torch.equal(together, torch.cat([packed.matmul(row[None]) for row in x]))
    assert bool(((together - exact_product(x, [blocks])).abs() <= rounding_bound(x, [blocks], 16)).all())


def test_the_product_does_not_depend_on_the_number_of_threads() -> None:
    packed = PackedWeight.pack(random_blocks(1024, 576, 4, 32))
    x = torch.randn(9, 576, generator=torch.Generator().manual_seed(3))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = packed.matmul(x)
        torch.set_num_threads(3)
        assert torch.equal(packed.matmul(x), single)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("library", ["auto", None])
def test_rows_are_the_file_s_weights_exactly(library: str | None) -> None:
    parts = [random_blocks(21, 64, *f, seed=i) for i, f in enumerate(FORMATS)]
    packed = PackedWeight.pack(parts, library=library)
    dense = torch.from_numpy(np.concatenate([part.dequantize() for part in parts]))
    assert packed.shape == (84, 64)
    assert torch.equal(packed.dequantize(), dense)
    chosen = torch.tensor([83, 0, 21, 40, 40])
    assert torch.equal(packed.rows(chosen), dense[chosen])
    with pytest.raises(IndexError, match="84"):
        packed.rows(torch.tensor([84]))


def test_without_the_native_library_the_product_is_torch_s() -> None:
    parts = [random_blocks(5, 64, 4, 32), random_blocks(3, 64, 8, 16, seed=1)]
    packed = PackedWeight.pack(parts, library=None)
    x, bias = torch.randn(4, 64), torch.randn(8)
    assert torch.allclose(packed.matmul(x, bias).double(), exact_product(x, parts) + bias, atol=1e-4)


def test_a_bias_is_added() -> None:
    packed = PackedWeight.pack(random_blocks(37, 64, 4, 32))
    x, bias = torch.randn(3, 64), torch.randn(37)
    assert torch.equal(packed.matmul(x, bias), packed.matmul(x) + bias)


def test_zeros_give_the_zero_vector_and_no_token_gives_no_row() -> None:
    packed = PackedWeight.pack(random_blocks(8, 32, 4, 32))
    assert torch.equal(packed.matmul(torch.zeros(3, 32)), torch.zeros(3, 8))
    assert packed.matmul(torch.zeros(0, 32)).shape == (0, 8)


def test_four_bit_weights_take_five_bits_of_memory_each() -> None:
    packed = PackedWeight.pack(random_blocks(1024, 1024, 4, 32))
    assert packed.nbytes * 8 / 1024**2 == pytest.approx(5.0, rel=0.01)


def test_input_of_the_wrong_shape_or_type_is_refused() -> None:
    packed = PackedWeight.pack(random_blocks(8, 32, 4, 32))
    for x in (torch.zeros(2, 64), torch.zeros(2, 32, dtype=torch.float64), torch.zeros(32)):
        with pytest.raises(ValueError, match=r"expected float32 \[tokens, 32\]"):
            packed.matmul(x)
    with pytest.raises(ValueError, match="equal columns"):
        PackedWeight.pack([random_blocks(8, 32, 4, 32), random_blocks(8, 64, 4, 32)])
    with pytest.raises(ValueError, match="activation_bits"):
        PackedWeight.pack(random_blocks(8, 32, 4, 32), activation_bits=4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_no_number_spoils_its_own_token_only(bad: float) -> None:
    packed = PackedWeight.pack(random_blocks(20, 96, 4, 32))
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(4))
    clean = packed.matmul(x)
    x[3, 40] = bad
    spoiled = packed.matmul(x)
    assert bool(spoiled[3].isnan().all())
    others = [i for i in range(9) if i != 3]
    assert torch.equal(spoiled[others], clean[others])


def test_columns_in_act_order_give_the_matrix_s_own_product_and_rows() -> None:
    blocks = random_blocks(21, 192, 4, 64)
    order = np.random.default_rng(3).permutation(192)
    blocks = AffineBlocks(blocks.codes, blocks.scale, blocks.minimum, 4, 64, order)
    packed = PackedWeight.pack(blocks)
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(4))
    error = (packed.matmul(x) - exact_product(x, [blocks])).abs()
    assert float(error.max()) < 1e-3
    assert torch.equal(packed.dequantize(), torch.from_numpy(blocks.dequantize()))
    other = AffineBlocks(blocks.codes, blocks.scale, blocks.minimum, 4, 64, order[::-1].copy())
    with pytest.raises(ValueError, match="different orders"):
        PackedWeight.pack([blocks, other])
    stack = PackedStack([packed, PackedWeight.pack(other)])
    assert float((stack.matmul(x) - exact_product(x, [blocks, other])).abs().max()) < 1e-3
    assert torch.equal(
        stack.rows(torch.tensor([3, 40])),
        torch.cat([packed.rows(torch.tensor([3])), stack.parts[1].rows(torch.tensor([19]))]),
    )

"""AffineBlocks keeps a quantised matrix exactly and refuses what is not one."""

import numpy as np
import pytest

from cumulo.kernels.cpu.affine_blocks import AffineBlocks
from tests.kernels.blocks import random_blocks


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("with_minimum", [False, True])
def test_dequantising_is_scale_times_code_plus_minimum(bits: int, group: int, with_minimum: bool) -> None:
    blocks = random_blocks(5, 96, bits, group, with_minimum)
    dense = blocks.dequantize()
    for row, column in [(0, 0), (4, 95), (2, 33)]:
        at = column // group
        minimum = 0 if blocks.minimum is None else blocks.minimum[row, at]
        expected = np.float32(np.float32(blocks.codes[row, column]) * blocks.scale[row, at]) + minimum
        assert dense[row, column] == np.float32(expected)
    assert dense.dtype == np.float32


def test_chosen_rows_keep_their_scales() -> None:
    blocks = random_blocks(6, 32, 8, 16)
    order = np.array([5, 0, 3])
    assert np.array_equal(blocks.take_rows(order).dequantize(), blocks.dequantize()[order])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "bits 5"),
        ({"group": 64}, "group size 64"),
        ({"codes": np.zeros((2, 32), np.int8)}, "dtype int8"),
        ({"codes": np.zeros((2, 48), np.uint8)}, "48 columns"),
        ({"scale": np.zeros((2, 1), np.float64)}, "scale is float64"),
        ({"minimum": np.zeros((1, 1), np.float32)}, r"minimum is float32 \(1, 1\)"),
    ],
)
def test_inconsistent_fields_are_refused_by_name(change: dict, message: str) -> None:
    fields = {
        "codes": np.zeros((2, 32), np.uint8),
        "scale": np.zeros((2, 1), np.float32),
        "minimum": None,
        "bits": 4,
        "group": 32,
    }
    with pytest.raises(ValueError, match=message):
        AffineBlocks(**(fields | change))

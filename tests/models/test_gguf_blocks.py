"""Every block format of GGUF against the reference dequantisation, bit for bit."""

import gguf
import numpy as np
import pytest

from cumulo.kernels.cpu.packed_linear import PackedWeight, native
from cumulo.models.files.gguf_blocks import affine_blocks, float_array, held_bytes, is_quantised
from cumulo.models.files.gguf_file import BLOCK_BYTES, FLOAT_TYPES, GGUFTensor, open_gguf
from cumulo.models.files.hub import built_in_model
from tests.models.gguf_writing import quantised

ROWS, COLUMNS = 7, 768


def random_tensor(type_name: str, seed: int) -> GGUFTensor:
    """Random bytes: every bit pattern of codes and scales occurs, infinities and NaN too."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    raw = np.random.default_rng(seed).integers(0, 256, (ROWS, COLUMNS // block * block_bytes), dtype=np.uint8)
    return GGUFTensor("t", type_name, (ROWS, COLUMNS), raw)


def reference(tensor: GGUFTensor) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.dequantize(tensor.raw, gguf.GGMLQuantizationType[tensor.type_name])


@pytest.mark.parametrize("type_name", [*BLOCK_BYTES, *FLOAT_TYPES])
@pytest.mark.parametrize("seed", range(5))
def test_random_blocks_dequantise_to_the_reference_bit_for_bit(type_name, seed):
    tensor = random_tensor(type_name, seed)
    with np.errstate(all="raise"):  # damaged scales are no reason for a flood of warnings
        found = float_array(tensor)
    assert found.dtype == np.float32
    assert np.array_equal(found, reference(tensor).reshape(ROWS, COLUMNS), equal_nan=True)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32"])
def test_quantised_weights_dequantise_to_the_reference_bit_for_bit(type_name):
    values = np.random.default_rng(1).normal(scale=0.05, size=(ROWS, COLUMNS)).astype(np.float32)
    values[0] = 0
    raw = np.ascontiguousarray(gguf.quantize(values, gguf.GGMLQuantizationType[type_name])).view(np.uint8)
    tensor = GGUFTensor("t", type_name, (ROWS, COLUMNS), raw)
    assert np.array_equal(float_array(tensor), reference(tensor).reshape(ROWS, COLUMNS))
    assert np.abs(float_array(tensor) - values).max() < 0.02


@pytest.mark.parametrize("type_name", BLOCK_BYTES)
def test_codes_are_whole_numbers_of_the_format_and_rebuild_the_weights(type_name):
    tensor = random_tensor(type_name, 9)
    blocks = affine_blocks(tensor)
    assert is_quantised(tensor)
    assert (blocks.bits, blocks.group) == {
        "Q4_0": (4, 32), "Q4_1": (4, 32), "Q4_K": (4, 32), "Q5_0": (8, 32), "Q5_1": (8, 32),
        "Q5_K": (8, 32), "Q8_0": (8, 32), "Q6_K": (8, 16), "Q2_K": (8, 16), "Q3_K": (8, 16), "IQ4_NL": (8, 32),
        "IQ4_XS": (8, 32),
    }[type_name]  # fmt: skip
    levels = {"Q2": 4, "Q3": 8, "Q4": 16, "IQ": 16, "Q5": 32, "Q6": 64, "Q8": 256}[type_name[:2]]
    assert len(np.unique(blocks.codes)) == levels
    with np.errstate(all="ignore"):
        scale = np.repeat(blocks.scale, blocks.group, axis=1)
        minimum = 0 if blocks.minimum is None else np.repeat(blocks.minimum, blocks.group, axis=1)
        rebuilt = scale * blocks.codes.astype(np.float32) + minimum
    assert np.array_equal(rebuilt, reference(tensor), equal_nan=True)


@pytest.mark.parametrize("type_name", BLOCK_BYTES)
def test_memory_is_planned_as_it_is_taken(type_name):
    library = native()
    if library is None or not library.has_half:
        pytest.skip("the layout of the native kernels, with scales of two bytes")
    values = np.random.default_rng(2).normal(scale=0.05, size=(64, COLUMNS)).astype(np.float32)
    raw = np.ascontiguousarray(quantised(values, type_name)).view(np.uint8).reshape(64, -1)
    if type_name in ("IQ4_NL", "IQ4_XS") or type_name.endswith("_K"):
        raw = np.random.default_rng(3).integers(0, 120, raw.shape, dtype=np.uint8)  # scales of many sizes
    tensor = GGUFTensor("t", type_name, (64, COLUMNS), raw)
    assert PackedWeight.pack(affine_blocks(tensor)).nbytes == pytest.approx(held_bytes(tensor), rel=0.01)


def test_a_stack_of_matrices_keeps_its_shape():
    tensor = random_tensor("Q8_0", 3)
    stacked = GGUFTensor("t", "Q8_0", (ROWS, 3, COLUMNS // 3), tensor.raw.reshape(ROWS * 3, -1))
    assert np.array_equal(float_array(stacked).reshape(ROWS, COLUMNS), float_array(tensor), equal_nan=True)
    assert affine_blocks(stacked).shape == (ROWS * 3, COLUMNS // 3)


def test_tensors_of_the_built_in_model_dequantise_to_the_reference_bit_for_bit():
    for tensor in list(open_gguf(built_in_model()).tensors.values())[::9]:
        assert np.array_equal(float_array(tensor).reshape(-1), reference(tensor).reshape(-1))

"""The block formats of GGUF: raw bytes to `AffineBlocks`, integers kept exactly, or to float32. Called by
`weights_gguf`.

A row is a sequence of fixed-size blocks. The simple formats (Q4_0 ... Q8_0) hold 32 weights under one float16
scale and perhaps a float16 minimum; the K formats hold 256 in groups of 32 or 16, whose small integer scales
are multiplied by one float16 per block. The 4-bit IQ formats look their codes up in a table of sixteen 8-bit
numbers, so those numbers are the codes here. Nothing here rounds: products of scales are single float32
multiplications, as in the reference reader, so dequantised weights are equal to its bit for bit.
"""

from collections.abc import Callable

import numpy as np

from cumulo.kernels.cpu.affine_blocks import AffineBlocks
from cumulo.models.files.gguf_file import BLOCK_BYTES, FLOAT_TYPES, GGUFTensor


def is_quantised(tensor: GGUFTensor) -> bool:
    return tensor.type_name not in FLOAT_TYPES


def affine_blocks(tensor: GGUFTensor) -> AffineBlocks:
    """A quantised tensor as codes, scales and minima; dimensions before the last are flattened to rows."""
    unpack, _ = _FORMATS[tensor.type_name]
    # Damaged files may hold NaN or infinite scales: they stay what they are, without a warning each.
    with np.errstate(all="ignore"):
        return unpack(tensor.raw.reshape(tensor.rows, -1, BLOCK_BYTES[tensor.type_name]))


def held_bytes(tensor: GGUFTensor) -> int:
    """What a quantised tensor takes in memory while it stays quantised, as `PackedWeight` lays it out."""
    bits, group, numbers, number_bytes = _FORMATS[tensor.type_name][1]
    weights = tensor.rows * tensor.columns
    return weights * bits // 8 + weights // group * numbers * number_bytes


def float_array(tensor: GGUFTensor) -> np.ndarray:
    """Any tensor as float32 in its own shape (a view of the file where it is stored so)."""
    with np.errstate(all="ignore"):
        if tensor.type_name == "F32":
            values = tensor.raw.view("<f4")
        elif tensor.type_name == "F16":
            values = tensor.raw.view("<f2").astype(np.float32)
        elif tensor.type_name == "BF16":  # the upper half of a float32
            values = (tensor.raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            values = affine_blocks(tensor).dequantize()
        return values.reshape(tensor.shape)


# In all unpackers `blocks` is [rows, blocks per row, bytes per block] uint8.


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at byte `start` of each block, as float32 [rows, blocks per row]."""
    return np.ascontiguousarray(blocks[:, :, start : start + 2]).view("<f2")[:, :, 0].astype(np.float32)


def _nibbles(packed: np.ndarray, run: int) -> np.ndarray:
    """[rows, blocks, n] bytes to [rows, blocks, 2n] values: per `run` bytes all low halves, then all high."""
    rows, blocks, length = packed.shape
    halves = np.empty((rows, blocks, length // run, 2, run), np.uint8)
    runs = packed.reshape(rows, blocks, length // run, run)
    np.bitwise_and(runs, 0x0F, out=halves[:, :, :, 0])
    np.right_shift(runs, 4, out=halves[:, :, :, 1])
    return halves.reshape(rows, blocks, 2 * length)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """[rows, blocks, 4] bytes to the 32 bits of each block, lowest first, already shifted to 16."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _rows(codes: np.ndarray) -> np.ndarray:
    return codes.reshape(codes.shape[0], -1)


def _q4_0(blocks: np.ndarray) -> AffineBlocks:
    scale = _half(blocks, 0)
    # w = d (q - 8): -8 d is exact in float32, so codes can stay unsigned.
    return AffineBlocks(_rows(_nibbles(blocks[:, :, 2:], 16)), scale, scale * np.float32(-8), 4, 32)


def _q4_1(blocks: np.ndarray) -> AffineBlocks:
    return AffineBlocks(_rows(_nibbles(blocks[:, :, 4:], 16)), _half(blocks, 0), _half(blocks, 2), 4, 32)


def _q5_0(blocks: np.ndarray) -> AffineBlocks:
    codes = _nibbles(blocks[:, :, 6:], 16)
    codes |= _fifth_bits(blocks[:, :, 2:6])
    return AffineBlocks(_rows(codes).view(np.int8) - np.int8(16), _half(blocks, 0), None, 8, 32)


def _q5_1(blocks: np.ndarray) -> AffineBlocks:
    codes = _nibbles(blocks[:, :, 8:], 16)
    codes |= _fifth_bits(blocks[:, :, 4:8])
    return AffineBlocks(_rows(codes).view(np.int8), _half(blocks, 0), _half(blocks, 2), 8, 32)


def _q8_0(blocks: np.ndarray) -> AffineBlocks:
    codes = np.ascontiguousarray(blocks[:, :, 2:])
    return AffineBlocks(_rows(codes).view(np.int8), _half(blocks, 0), None, 8, 32)


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum of the eight groups of a Q4_K or Q5_K block: six-bit integers times d and dmin.

    Twelve bytes: the first eight hold the low six bits of groups 0-3's scales and minima, with the top two
    bits of groups 4-7 above them; the last four hold the low four bits of groups 4-7, scale then minimum.
    """
    packed = blocks[:, :, 4:16]
    first, second, low = packed[:, :, 0:4], packed[:, :, 4:8], packed[:, :, 8:12]
    scales = np.concatenate([first & 0x3F, (low & 0x0F) | ((first >> 2) & 0x30)], axis=-1)
    minima = np.concatenate([second & 0x3F, (low >> 4) | ((second >> 2) & 0x30)], axis=-1)
    scale = _half(blocks, 0)[:, :, None] * scales.astype(np.float32)
    minimum = _half(blocks, 2)[:, :, None] * minima.astype(np.float32)
    return _rows(scale), -_rows(minimum)


def _high_bits(packed: np.ndarray) -> np.ndarray:
    """[rows, blocks, 32] bytes to 256 values: bit g of byte i belongs to weight i in run g of 32."""
    bits = packed[:, :, None] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    return bits.reshape(*packed.shape[:2], 256)


def _q4_k(blocks: np.ndarray) -> AffineBlocks:
    scale, minimum = _k_scales(blocks)
    return AffineBlocks(_rows(_nibbles(blocks[:, :, 16:], 32)), scale, minimum, 4, 32)


def _q5_k(blocks: np.ndarray) -> AffineBlocks:
    scale, minimum = _k_scales(blocks)
    codes = _nibbles(blocks[:, :, 48:], 32)
    codes |= _high_bits(blocks[:, :, 16:48]) << np.uint8(4)
    return AffineBlocks(_rows(codes).view(np.int8), scale, minimum, 8, 32)


def _bit_pairs(packed: np.ndarray) -> np.ndarray:
    """[rows, blocks, 64] bytes to 256 values: per 32 bytes all lowest pairs of bits, then all second ones, ..."""
    rows, count = packed.shape[:2]
    pairs = packed.reshape(rows, count, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return (pairs & np.uint8(3)).reshape(rows, count, 256)


def _q2_k(blocks: np.ndarray) -> AffineBlocks:
    scale = _half(blocks, 80)[:, :, None] * (blocks[:, :, 0:16] & 0x0F).astype(np.float32)
    minimum = _half(blocks, 82)[:, :, None] * (blocks[:, :, 0:16] >> 4).astype(np.float32)
    codes = _rows(_bit_pairs(blocks[:, :, 16:80])).view(np.int8)
    return AffineBlocks(codes, _rows(scale), -_rows(minimum), 8, 16)


def _q3_k(blocks: np.ndarray) -> AffineBlocks:
    rows, count = blocks.shape[:2]
    # Without its third bit a weight is 4 less.
    codes = _bit_pairs(blocks[:, :, 32:96]) | _high_bits(blocks[:, :, 0:32]) << np.uint8(2)
    # Sixteen six-bit scales: eight bytes with two low halves each, then four with four pairs of high bits.
    low = np.concatenate([blocks[:, :, 96:104] & 0x0F, blocks[:, :, 96:104] >> 4], axis=-1)
    top = blocks[:, :, None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)
    scales = (low | top.reshape(rows, count, 16) << np.uint8(4)).astype(np.float32) - np.float32(32)
    scale = _half(blocks, 108)[:, :, None] * scales
    return AffineBlocks(_rows(codes).view(np.int8) - np.int8(4), _rows(scale), None, 8, 16)


_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _iq4_nl(blocks: np.ndarray) -> AffineBlocks:
    return AffineBlocks(_IQ4[_rows(_nibbles(blocks[:, :, 2:], 16))], _half(blocks, 0), None, 8, 32)


def _iq4_xs(blocks: np.ndarray) -> AffineBlocks:
    rows, count = blocks.shape[:2]
    # Eight six-bit scales: the pairs of high bits in two bytes, then the low halves in four.
    top = blocks[:, :, 2:4, None] >> np.arange(0, 8, 2, dtype=np.uint8) & np.uint8(3)
    low = np.stack([blocks[:, :, 4:8] & 0x0F, blocks[:, :, 4:8] >> 4], axis=-1)
    scales = low.reshape(rows, count, 8) | top.reshape(rows, count, 8) << np.uint8(4)
    scale = _half(blocks, 0)[:, :, None] * (scales.astype(np.float32) - np.float32(32))
    return AffineBlocks(_IQ4[_rows(_nibbles(blocks[:, :, 8:], 16))], _rows(scale), None, 8, 32)


def _q6_k(blocks: np.ndarray) -> AffineBlocks:
    codes = _nibbles(blocks[:, :, 0:128], 64)
    # Per half block of 128: 32 bytes whose four bit pairs are the top bits of four runs of 32 weights.
    codes |= _bit_pairs(blocks[:, :, 128:192]) << np.uint8(4)
    scales = blocks[:, :, 192:208].view(np.int8).astype(np.float32)
    scale = _half(blocks, 208)[:, :, None] * scales
    return AffineBlocks(_rows(codes).view(np.int8) - np.int8(32), _rows(scale), None, 8, 16)


# How blocks are unpacked; then, in memory: bits of a code, weights of a group, how many numbers a group has (a
# scale, a minimum; 4-bit codes always have both), of how many bytes. Those of the K formats are products, which
# two bytes do not hold.
_FORMATS: dict[str, tuple[Callable[[np.ndarray], AffineBlocks], tuple[int, int, int, int]]] = {
    "Q4_0": (_q4_0, (4, 32, 2, 2)),
    "Q4_1": (_q4_1, (4, 32, 2, 2)),
    "Q5_0": (_q5_0, (8, 32, 1, 2)),
    "Q5_1": (_q5_1, (8, 32, 2, 2)),
    "Q8_0": (_q8_0, (8, 32, 1, 2)),
    "Q4_K": (_q4_k, (4, 32, 2, 4)),
    "Q5_K": (_q5_k, (8, 32, 2, 4)),
    "Q6_K": (_q6_k, (8, 16, 1, 4)),
    "Q2_K": (_q2_k, (8, 16, 2, 4)),
    "Q3_K": (_q3_k, (8, 16, 1, 4)),
    "IQ4_NL": (_iq4_nl, (8, 32, 1, 2)),
    "IQ4_XS": (_iq4_xs, (8, 32, 1, 4)),
}

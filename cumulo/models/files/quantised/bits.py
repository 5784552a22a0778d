"""Small unsigned codes in 32-bit words and back, the lowest bits first. Used by the formats of this folder."""

import torch
from torch import Tensor


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """[..., n] uint8 to [..., n * bits / 32] int32, rounded up; what is missing of the last word is zero."""
    per_word = 32 // bits
    missing = -codes.shape[-1] % per_word
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing))
    grouped = codes.to(torch.int64).unflatten(-1, (-1, per_word))
    words: Tensor = (grouped << _shifts(bits)).sum(-1)
    return words.to(torch.int32)  # wraps into the sign bit


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of each row of words, as uint8."""
    codes: Tensor = (words.to(torch.int64)[..., None] >> _shifts(bits)) & ((1 << bits) - 1)
    return codes.flatten(-2)[..., :count].to(torch.uint8)


def _shifts(bits: int) -> Tensor:
    return torch.arange(0, 32, bits, dtype=torch.int64)

"""Keys and values in 8 bits: errors within their bounds, and the kernels read and write what torch does."""

import pytest
import torch

from cumulo.kernels.cpu.library import native
from cumulo.kernels.cpu.paged_attention import bytes_of, decode, encode, paged_attention, reference
from cumulo.models.batch import KVCache
from cumulo.models.play.fused import FusedDecoder
from tests.kernels.test_paged_attention import NAMED, Case
from tests.models.stepper import Stepper
from tests.models.test_fused import SPECS, random_decoder, tokens

KINDS = [torch.int8, torch.float8_e4m3fn]
needs_kernels = pytest.mark.skipif(native() is None, reason="no compiler")


def test_int8_is_off_by_at_most_half_a_step_of_the_largest() -> None:
    values = (
        torch.randn((50, 3, 64), generator=torch.Generator().manual_seed(0))
        * torch.logspace(-9, 9, 50)[:, None, None]
    )
    values[7] = 0
    stored = encode(values, torch.int8)
    assert stored.shape == (50, 3, 68)
    bound = values.abs().amax(dim=-1, keepdim=True) / 127 * 0.5001
    assert bool(((decode(stored, torch.float32) - values).abs() <= bound).all())


def test_fp8_keeps_four_digits_and_saturates() -> None:
    values = torch.cat((torch.linspace(-440, 440, 999), torch.tensor([0.0, 1e-4, 500.0, -1e9])))
    found = decode(encode(values, torch.float8_e4m3fn), torch.float32)
    clamped = values.clamp(-448, 448)
    assert bool(((found - clamped).abs() <= torch.clamp(clamped.abs() / 16, min=2**-10)).all())


@needs_kernels
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize(
    "name", ["decodes of many lengths", "prefill and decodes mixed", "values wider than keys"]
)
def test_attention_over_8_bits_is_attention_over_the_numbers_they_stand_for(
    name: str, dtype: torch.dtype
) -> None:
    plain = NAMED[name]
    case = Case(plain.sequences, key_dim=plain.key_dim, value_dim=plain.value_dim)
    keys, values = (encode(one.nan_to_num(0), dtype) for one in (case.keys, case.values))
    case.keys, case.values = decode(keys, torch.float32), decode(values, torch.float32)
    exact = case.token_by_token()
    for function in (paged_attention, reference):
        found = function(case.query, keys, values, case, 0.3, None)
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


@needs_kernels
def test_the_kernel_reads_every_8_bit_float_as_torch_does() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(4, 64)
    for row in codes:  # one position: its value is the result
        case = Case([(1, 1)], heads=1, kv_heads=1, key_dim=64, value_dim=64)
        block = int(case.block_tables[0, 0])
        keys, values = (encode(torch.zeros(case.keys.shape), torch.float8_e4m3fn) for _ in range(2))
        bytes_of(values)[block, 0, 0] = bytes_of(row)
        found = paged_attention(case.query, keys, values, case, 0.3, None)[0, 0]
        torch.testing.assert_close(found, row.float(), rtol=0, atol=0, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_fused_step_writes_the_codes_that_torch_writes(dtype: torch.dtype) -> None:
    decoder = random_decoder(SPECS["tied"])
    plain, packed = Stepper(FusedDecoder(decoder)), Stepper(FusedDecoder(decoder))
    blocks, size = plain.cache.blocks, plain.cache.block_size
    plain.cache, packed.cache = (KVCache(decoder.spec, blocks, size, one) for one in (torch.float32, dtype))
    logits = [one.step({"a": tokens(40)})["a"] for one in (plain, packed)]
    # The first layer's keys and values depend on no other's; a number between two codes may go to either.
    expected, found = (
        decode(encode(plain.cache.keys[0], dtype), torch.float32),
        decode(packed.cache.keys[0], torch.float32),
    )
    differs = (expected - found).abs() > 1e-6
    assert float(differs.float().mean()) < 1e-3
    assert float((logits[0] - logits[1]).abs().max()) < (0.1 if dtype == torch.int8 else 0.4) * float(
        logits[0].std()
    )

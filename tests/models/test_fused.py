"""The fused decoder against the torch decoder it was made from, and against itself in other batches."""

import dataclasses

import pytest
import torch

from cumulo.kernels.cpu.packed_linear import PackedWeight
from cumulo.models.decoder import Decoder
from cumulo.models.linear import Linear
from cumulo.models.play.fused import FusedDecoder, why_not
from cumulo.spec.model import ModelSpec, MoESpec, RopeScaling
from tests.kernels.blocks import random_blocks
from tests.models.stepper import Stepper

PLAIN = ModelSpec(
    family="tiny", vocab_size=131, hidden=96, layers=3, heads=6, kv_heads=2, head_dim=16, ffn_hidden=160,
    max_context=256, tied_embeddings=True,
)  # fmt: skip
SPECS = {
    "tied": PLAIN,
    "untied": dataclasses.replace(PLAIN, tied_embeddings=False),
    "biased": dataclasses.replace(PLAIN, qkv_bias=True, output_bias=True, mlp_bias=True),
    "query and key norms": dataclasses.replace(PLAIN, qk_norm=True, norm_eps=1e-6),
    "windowed": dataclasses.replace(PLAIN, sliding_window=11, windowed_layers=(0, 2)),
    "interleaved": dataclasses.replace(PLAIN, rope_interleaved=True),
    "stretched": dataclasses.replace(
        PLAIN, rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_context=32)
    ),
    "one head": dataclasses.replace(PLAIN, heads=1, kv_heads=1, head_dim=64),
}
# Formats by what a file mixes: all 4-bit, or the usual mixture with wider values and down projections.
MIXTURES = {"four bits": ((4, 32),), "mixed": ((4, 32), (8, 32), (8, 16))}


def random_decoder(spec: ModelSpec, mixture: tuple[tuple[int, int], ...] = ()) -> Decoder:
    """Random weights, plain or (with a mixture of formats) packed."""
    decoder = Decoder(spec)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.data.normal_(0, 0.3 if name.endswith("bias") else 0.08, generator=generator)
    if mixture:
        linears = [(name, module) for name, module in decoder.named_modules() if isinstance(module, Linear)]
        for index, (name, module) in enumerate(linears):
            rows, columns = module.shape
            cut = [0, rows // 3 + 1, 2 * rows // 3 + 1, rows] if len(mixture) == 3 else [0, rows]
            parts = [
                random_blocks(
                    end - begin, columns, *form, seed=10 * index + i, spread=0.01 if form[0] == 4 else 0.001
                )
                for i, (begin, end, form) in enumerate(zip(cut, cut[1:], mixture, strict=False))
            ]
            decoder.pack(f"{name}.weight", PackedWeight.pack(parts))
    return decoder


def dequantised(decoder: Decoder) -> Decoder:
    """The same weights as plain float64 tensors: the exact result."""
    plain = Decoder(decoder.spec, torch.float64)
    for name, module in plain.named_modules():
        other = decoder.get_submodule(name)
        if isinstance(module, Linear) and isinstance(other, Linear):
            weight = other.weight if other.packed is None else other.packed.dequantize()  # type: ignore[attr-defined]
            module.weight.data.copy_(weight)
            if module.bias is not None and other.bias is not None:
                module.bias.data.copy_(other.bias)
        elif name.endswith("norm"):
            module.weight.data.copy_(other.weight)  # type: ignore[operator, union-attr]
    return plain


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, PLAIN.vocab_size, (count,), generator=generator).tolist()


@pytest.mark.long
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("mixture", ["float", *MIXTURES])
def test_logits_agree_with_the_torch_decoder_in_float64(name: str, mixture: str) -> None:
    decoder = random_decoder(SPECS[name], MIXTURES.get(mixture, ()))
    fused, exact = Stepper(FusedDecoder(decoder)), Stepper(dequantised(decoder))
    for chunks in (
        {"a": tokens(75)},
        {"a": tokens(1, 1), "b": tokens(9, 2)},
        {"b": tokens(1, 3), "a": tokens(4, 4)},
    ):
        got, expected = fused.step(chunks), exact.step(chunks)
        for sequence in chunks:
            scale = float(expected[sequence].std())
            assert float((got[sequence] - expected[sequence]).abs().max()) < 2e-3 * scale


@pytest.mark.parametrize("mixture", ["float", *MIXTURES])
def test_a_sequence_gets_the_same_bits_in_any_chunks_and_any_company(mixture: str) -> None:
    decoder = random_decoder(SPECS["windowed"], MIXTURES.get(mixture, ()))
    prompt = tokens(90)
    whole = Stepper(FusedDecoder(decoder)).feed(prompt, 90)
    for chunk in (1, 7, 33):
        assert torch.equal(Stepper(FusedDecoder(decoder)).feed(prompt, chunk), whole)
    company = Stepper(FusedDecoder(decoder), block_size=16)
    pieces = [
        company.step({"x": tokens(5, i), "mine": prompt[i * 30 : i * 30 + 30], "y": tokens(1 + i, 9 + i)})[
            "mine"
        ]
        for i in range(3)
    ]
    assert torch.equal(torch.cat(pieces), whole)


def test_only_the_wanted_rows_are_returned() -> None:
    decoder = random_decoder(PLAIN, MIXTURES["four bits"])
    every = Stepper(FusedDecoder(decoder)).step({"a": tokens(20), "b": tokens(3, 1)})

    class LastOnly(FusedDecoder):
        def forward(self, batch, cache):  # type: ignore[no-untyped-def, override]
            batch.logit_rows = batch.query_starts[1:].to(torch.int64) - 1
            return super().forward(batch, cache)

    last = Stepper(LastOnly(decoder)).step({"a": tokens(20), "b": tokens(3, 1)})
    assert torch.equal(last["a"][0], every["a"][-1])
    assert torch.equal(last["a"][1], every["b"][-1])


def test_no_wanted_row_still_fills_the_cache() -> None:
    decoder = random_decoder(PLAIN)

    class Silent(FusedDecoder):
        def forward(self, batch, cache):  # type: ignore[no-untyped-def, override]
            batch.logit_rows = batch.logit_rows[:0]
            return super().forward(batch, cache)

    silent, loud = Stepper(Silent(decoder)), Stepper(FusedDecoder(decoder))
    silent.step({"a": tokens(20)})
    loud.step({"a": tokens(20)})
    assert torch.equal(silent.cache.key_storage.nan_to_num(), loud.cache.key_storage.nan_to_num())


def test_a_token_outside_the_vocabulary_is_an_error_not_a_crash() -> None:
    stepper = Stepper(FusedDecoder(random_decoder(PLAIN)))
    for bad in (PLAIN.vocab_size, -1):
        with pytest.raises(IndexError, match="a token id is out of range"):
            stepper.step({"a": [1, bad]})


def test_what_cannot_be_fused_is_said() -> None:
    mixture = dataclasses.replace(PLAIN, moe=MoESpec(experts=4, experts_per_token=2, expert_hidden=32))
    assert "mixture-of-experts" in str(why_not(Decoder(mixture, device="meta")))
    assert "float64" in str(why_not(Decoder(PLAIN, torch.float64)))
    assert "head_dim 10" in str(why_not(Decoder(dataclasses.replace(PLAIN, head_dim=10))))
    with pytest.raises(ValueError, match="cannot be fused"):
        FusedDecoder(Decoder(PLAIN, torch.float64))
    assert why_not(random_decoder(PLAIN)) is None

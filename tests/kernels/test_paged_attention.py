"""Paged attention, kernel and reference, against a per-token loop in float64 over random mixes of requests."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cumulo.kernels.cpu import paged_attention as paged_attention_file
from cumulo.kernels.cpu.paged_attention import paged_attention, reference
from tests import thorough


@dataclass
class Case:
    """Sequences of (new tokens, context length) over a cache whose blocks lie in random order among NaNs."""

    sequences: list[tuple[int, int]]
    heads: int = 6
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    block_size: int = 16
    window: int | None = None
    latent: bool = False  # values are a strided view of the keys
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        used = [-(-length // self.block_size) for _, length in self.sequences]
        blocks = sum(used) + 3
        shape = (blocks, self.kv_heads, self.block_size)
        order = torch.randperm(blocks, generator=generator).tolist()
        self.keys = torch.full((*shape, self.key_dim), float("nan"), dtype=self.dtype)
        stored = None if self.latent else torch.full((*shape, self.value_dim), float("nan"), dtype=self.dtype)
        self.block_tables = torch.full((len(used), max(used) + 2), -1, dtype=torch.int32)
        for sequence, ((_, length), count) in enumerate(zip(self.sequences, used, strict=True)):
            table = [order.pop() for _ in range(count)]
            self.block_tables[sequence, :count] = torch.tensor(table, dtype=torch.int32)
            for position in range(length):
                block, offset = table[position // self.block_size], position % self.block_size
                for cache in (self.keys, stored):
                    if cache is not None:
                        cache[block, :, offset] = torch.randn(
                            cache[block, :, offset].shape, generator=generator, dtype=self.dtype
                        )
        self.values = self.keys[..., : self.value_dim] if stored is None else stored
        counts = torch.tensor([0] + [count for count, _ in self.sequences])
        self.query_starts = counts.cumsum(0).to(torch.int32)
        self.context_lengths = torch.tensor([length for _, length in self.sequences], dtype=torch.int32)
        self.query = torch.randn(
            (int(counts.sum()), self.heads, self.key_dim), generator=generator, dtype=self.dtype
        )

    def run(self, function: object) -> Tensor:
        return function(self.query, self.keys, self.values, self, 0.3, self.window)  # type: ignore[operator]

    def token_by_token(self) -> Tensor:
        out = torch.empty((*self.query.shape[:2], self.value_dim), dtype=torch.float64)
        for sequence, (count, length) in enumerate(self.sequences):
            table = self.block_tables[sequence].tolist()
            where = [(table[p // self.block_size], p % self.block_size) for p in range(length)]
            keys = torch.stack([self.keys[block, :, offset] for block, offset in where]).double()
            values = torch.stack([self.values[block, :, offset] for block, offset in where]).double()
            for i in range(count):
                last = length - count + i
                seen = slice(0 if self.window is None else max(0, last + 1 - self.window), last + 1)
                row = int(self.query_starts[sequence]) + i
                for head in range(self.heads):
                    kv = head * self.kv_heads // self.heads
                    weights = (0.3 * keys[seen, kv] @ self.query[row, head].double()).softmax(0)
                    out[row, head] = weights @ values[seen, kv]
        return out


NAMED = {
    "a lone decode": Case([(1, 1)]),
    "decodes of many lengths": Case([(1, n) for n in (1, 2, 15, 16, 17, 63, 64, 65, 200)]),
    "prefill from the start": Case([(150, 150)]),
    "a chunk in the middle": Case([(70, 190)]),
    "prefill and decodes mixed": Case([(1, 90), (40, 40), (1, 7), (9, 100), (3, 3)]),
    "nine heads over three": Case([(20, 75), (1, 80)], heads=9, kv_heads=3, key_dim=64, value_dim=64),
    "sliding window": Case([(1, 100), (60, 100), (1, 5)], window=17),
    "window of one": Case([(5, 9), (1, 70)], window=1),
    "values wider than keys": Case([(30, 90), (1, 66)], key_dim=20, value_dim=36),
    "latent attention": Case([(30, 90), (1, 66)], heads=8, kv_heads=1, key_dim=40, value_dim=32, latent=True),
    "blocks of four": Case([(30, 90), (1, 66)], block_size=4),
    "blocks of one": Case([(30, 90), (1, 66)], block_size=1),
    "an odd head dimension": Case([(12, 40), (1, 30)], key_dim=10, value_dim=6),
    "as many heads as a row tile": Case([(3, 9), (1, 70)], heads=70, kv_heads=1),
}


@pytest.mark.parametrize("name", NAMED)
def test_the_kernel_agrees_with_a_float64_loop(name: str) -> None:
    case = NAMED[name]
    assert torch.allclose(case.run(paged_attention).double(), case.token_by_token(), atol=5e-6)


@pytest.mark.parametrize("name", NAMED)
def test_the_reference_agrees_with_a_float64_loop(name: str) -> None:
    case = NAMED[name]
    assert torch.allclose(case.run(reference).double(), case.token_by_token(), atol=5e-6)


@pytest.mark.parametrize("window", [None, 9])
def test_the_reference_is_exact_in_float64(window: int | None) -> None:
    case = Case([(1, 90), (40, 40), (1, 7), (9, 100)], window=window, dtype=torch.float64)
    assert torch.allclose(case.run(paged_attention), case.token_by_token(), atol=1e-13)


@settings(max_examples=thorough.examples(40), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5),
    data=st.data(),
    window=st.sampled_from([None, 1, 30, 64, 65]),
    block_size=st.sampled_from([1, 3, 16, 32]),
    groups=st.sampled_from([(4, 4), (6, 2), (9, 3), (8, 1)]),
    seed=st.integers(0, 100),
)
def test_random_mixes_are_right_and_each_token_is_the_same_bits_alone(
    lengths: list[int],
    data: st.DataObject,
    window: int | None,
    block_size: int,
    groups: tuple[int, int],
    seed: int,
) -> None:
    sequences = [(data.draw(st.integers(1, length)), length) for length in lengths]
    case = Case(sequences, *groups, block_size=block_size, window=window, seed=seed)
    together = case.run(paged_attention)
    assert torch.allclose(together.double(), case.run(reference).double(), atol=1e-5)
    for sequence, (count, length) in enumerate(sequences):
        for i in {0, count // 2, count - 1}:
            row = int(case.query_starts[sequence]) + i
            alone = Case([(1, 1)])  # only its tables are used
            alone.query_starts = torch.tensor([0, 1], dtype=torch.int32)
            alone.context_lengths = torch.tensor([length - count + i + 1], dtype=torch.int32)
            alone.block_tables = case.block_tables[sequence, None]
            one = paged_attention(case.query[row, None], case.keys, case.values, alone, 0.3, window)
            assert torch.equal(one[0], together[row])


def test_a_nan_in_one_sequence_stays_there() -> None:
    case = Case([(1, 50), (20, 40), (1, 30)])
    clean = case.run(paged_attention)
    case.keys[case.block_tables[1, 0]] = float("nan")
    spoiled = case.run(paged_attention)
    assert bool(spoiled[1:21].isnan().all())
    assert torch.equal(spoiled[[0, 21]], clean[[0, 21]])


def test_very_large_scores_do_not_overflow() -> None:
    case = Case([(20, 80), (1, 80)])
    case.query *= 1000
    assert torch.allclose(case.run(paged_attention).double(), case.token_by_token(), atol=1e-3)


def test_a_block_outside_the_cache_is_an_error_not_a_crash() -> None:
    case = Case([(1, 50)])
    case.block_tables[0, 1] = 10_000
    with pytest.raises(IndexError, match="a block is out of range"):
        case.run(paged_attention)


def test_no_tokens_give_no_output() -> None:
    case = Case([(1, 5)])
    empty = paged_attention(case.query[:0], case.keys, case.values, case, 0.3)
    assert empty.shape == (0, 6, 16)


def test_the_reference_in_pieces_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(4)
    contexts, counts = [21, 9, 40, 7], [5, 1, 40, 1]
    starts = torch.tensor([0, 5, 6, 46, 47], dtype=torch.int32)
    batch = SimpleNamespace(
        query_starts=starts, context_lengths=torch.tensor(contexts, dtype=torch.int32),
        block_tables=torch.randperm(40, generator=generator).view(4, 10).int(),
    )  # fmt: skip
    query = torch.randn(sum(counts), 4, 8, generator=generator, dtype=torch.float64)
    keys, values = torch.randn(2, 40, 2, 4, 8, generator=generator, dtype=torch.float64)
    whole = reference(query, keys, values, batch, 0.3, window=11)
    monkeypatch.setattr(paged_attention_file, "_AT_ONCE", 500)
    pieces = reference(query, keys, values, batch, 0.3, window=11)
    assert torch.allclose(pieces, whole, rtol=1e-12, atol=1e-14)

"""Draws with cuts on the device pick the very tokens that the CPU's sampler picks with the same seeds."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from cumulo.engine.play.cuda.step_words import draw_words
from cumulo.engine.sampling.sampler import DRAW_COLUMNS, DrawBatch, draw
from cumulo.kernels.cuda.sampling import sample, sample_cuts
from tests.kernels.cuda.conftest import HAS_GPU

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Cut:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


CUTS = [
    Cut(0.6, top_k=20, top_p=0.95),
    Cut(1.0, top_k=1),
    Cut(2.0, top_k=7),
    Cut(1.0, top_p=0.9),
    Cut(0.3, top_p=0.5),
    Cut(1.0, min_p=0.1),
    Cut(1.5, top_k=50, min_p=0.02),
    Cut(0.8, top_p=0.7, min_p=0.3),
    Cut(1.0, top_k=40, top_p=0.8, min_p=0.05),
    Cut(1.0, top_k=3, top_p=0.01),
    Cut(1.0),
    Cut(0.0, top_k=5, top_p=0.5),
]


def columns_of(cuts: list[Cut], seed: int) -> np.ndarray:
    columns = np.zeros(len(cuts), dtype=DRAW_COLUMNS)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        columns[name] = [getattr(cut, name) for cut in cuts]
    columns["greedy"] = columns["temperature"] == 0
    columns["temperature"][columns["greedy"]] = 1.0
    columns["repetition_penalty"], columns["logprobs"] = 1.0, -1
    random = np.random.default_rng(seed)
    columns["seed"] = random.integers(0, 2**63, len(cuts))
    columns["sample_index"] = random.integers(0, 4, len(cuts))
    return columns


def drawn(logits: Tensor, words: Tensor, tokens: Tensor) -> Tensor:
    picked = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    shared = sample.SampleBuffers(*logits.shape, logits.device)
    cuts = sample_cuts.CutBuffers(*logits.shape, logits.device)
    sample_cuts.sample_with_cuts(logits, words, shared, cuts, picked, tokens)
    return picked


def check_like_the_cpu(logits: Tensor, cuts: list[Cut], device: torch.device, seed: int = 0) -> None:
    """The device's tokens and the history they are entered into, against `draw` on the same numbers."""
    rows = len(cuts)
    columns = columns_of(cuts, seed)
    slots, positions = np.arange(rows)[::-1].astype(np.int64), np.arange(rows, dtype=np.int64) % 4
    words = torch.from_numpy(draw_words(columns, slots, positions)).to(device)
    history = torch.full((rows, 4), -7, dtype=torch.int32, device=device)
    picked = drawn(logits.to(device), words, history).cpu()
    expected = draw(logits.float().clone(), DrawBatch(np.arange(rows), positions, columns))
    assert not expected.errors
    assert picked.tolist() == expected.tokens.tolist()
    assert history.cpu()[slots, positions].tolist() == picked.tolist()
    assert (history != -7).sum() == rows


def random_logits(rows: int, vocabulary: int, spread: float, seed: int = 0) -> Tensor:
    return spread * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [
        (50, torch.float32),
        (5001, torch.float16),
        pytest.param(151_936, torch.bfloat16, marks=pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")),
    ],
)
def test_every_combination_of_cuts_picks_what_the_cpu_picks(
    vocabulary: int, dtype: torch.dtype, device: torch.device
) -> None:
    logits = random_logits(len(CUTS), vocabulary, 3.0).to(dtype)
    check_like_the_cpu(logits, CUTS, device)


def test_of_equal_logits_the_lower_tokens_stay(device: torch.device) -> None:
    logits = (2 * random_logits(len(CUTS), 700, 1.0)).round() / 2  # a dozen values, all of them many times
    check_like_the_cpu(logits, CUTS, device, seed=1)
    alike = [Cut(1.0, top_k=3), Cut(1.0, top_p=0.6), Cut(1.0, top_k=10, top_p=0.6), Cut(1.0, min_p=1.0)]
    logits = torch.zeros(len(alike), 40)
    logits[:, ::3] = -0.0  # the same number
    check_like_the_cpu(logits, alike, device, seed=2)


@pytest.mark.long
def test_flat_rows_and_large_k_are_drawn_from_the_whole_row(device: torch.device) -> None:
    vocabulary = 2 * sample_cuts.CANDIDATES + 77
    cuts = [Cut(1.0, top_p=0.95), Cut(1.0, top_k=6000), Cut(1.0, top_k=5000, top_p=0.9), Cut(1.0, min_p=1e-4)]
    check_like_the_cpu(random_logits(len(cuts), vocabulary, 0.5), cuts, device)
    flat = torch.zeros(2, vocabulary)
    check_like_the_cpu(flat, [Cut(1.0, top_p=0.5), Cut(1.0, top_k=100, top_p=0.5)], device)


def test_a_bound_that_proves_too_high_is_given_up(device: torch.device) -> None:
    """A peak with half the mass over a wide plain with the other half: what lies above the guess is too light."""
    vocabulary = 3 * 4096
    logits = 0.01 * random_logits(2, vocabulary, 1.0)
    logits[:, 4711] = float(np.log(vocabulary))
    check_like_the_cpu(logits, [Cut(1.0, top_p=0.9), Cut(1.0, top_p=0.4)], device)


def test_impossible_tokens_are_never_drawn_and_unsound_rows_have_no_token(device: torch.device) -> None:
    logits = torch.full((3, 300), -torch.inf)
    logits[:, [7, 200]] = torch.tensor([1.0, 0.5])
    check_like_the_cpu(logits, [Cut(1.0, top_k=20), Cut(1.0, top_p=0.99), Cut(1.0, min_p=0.01)], device)
    unsound = torch.zeros(3, 300, device=device)
    unsound[0, 5], unsound[1, 5], unsound[2] = torch.nan, torch.inf, -torch.inf
    words = torch.from_numpy(
        draw_words(columns_of([Cut(1.0, top_k=5)] * 3, 0), np.arange(3), np.zeros(3, np.int64))
    )
    tokens = torch.zeros((3, 1), dtype=torch.int32, device=device)
    assert drawn(unsound, words.to(device), tokens).tolist() == [-1, -1, -1]


@pytest.mark.long
def test_padding_and_strided_logits_are_drawn_into_given_buffers(device: torch.device) -> None:
    rows, vocabulary = 3, 130
    wide = random_logits(rows, 200, 2.0).to(device)
    logits = wide[:, :vocabulary]
    columns = columns_of([Cut(0.9, top_k=9, top_p=0.9)] * rows, 3)
    words = torch.from_numpy(draw_words(columns, np.array([1, -1, 0]), np.zeros(rows, np.int64))).to(device)
    shared = sample.SampleBuffers(8, vocabulary, device)
    cuts = sample_cuts.CutBuffers(8, vocabulary, device)
    for tensor in (cuts.tops, cuts.totals, cuts.weights):
        tensor.fill_(float("nan"))
    for tensor in (cuts.bounds, cuts.unfinished, cuts.counts, cuts.keys, cuts.tokens):
        tensor.fill_(-1_000_000)
    found = []
    for _ in range(2):
        picked = torch.full((rows,), -9, dtype=torch.int32, device=device)
        tokens = torch.full((2, 1), -7, dtype=torch.int32, device=device)
        sample_cuts.sample_with_cuts(logits, words, shared, cuts, picked, tokens)
        found.append((picked.tolist(), tokens.tolist()))
    assert found[0] == found[1]
    alone = DrawBatch(np.arange(rows), np.zeros(rows, np.int64), columns)
    expected = draw(logits.cpu().clone(), alone).tokens.tolist()
    assert found[0] == (expected, [[expected[2]], [expected[0]]])

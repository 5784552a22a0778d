"""Slices of the logits, drawn from together, give the tokens and log-probabilities of the whole."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from cumulo.engine.sampling.sampler import DRAW_COLUMNS, DrawBatch, Drawn, LogitEdits, TokenMasks, draw
from cumulo.engine.sampling.sliced import SlicedSampler


class Meeting:
    """What ranks exchange, between threads."""

    def __init__(self, slices: int) -> None:
        self.barrier, self.told = threading.Barrier(slices), [None] * slices
        self.largest = 0

    def exchange(self, index: int, array: np.ndarray) -> np.ndarray:
        self.told[index] = array.copy()
        self.barrier.wait()
        found = np.stack(self.told)
        self.largest = max(self.largest, array.size)
        self.barrier.wait()
        return found


def draw_together(logits: torch.Tensor, batch: DrawBatch, slices: int) -> tuple[list[Drawn], Meeting]:
    vocabulary, meeting = logits.shape[1], Meeting(slices)

    def one(index: int) -> Drawn:
        tokens = range(vocabulary * index // slices, vocabulary * (index + 1) // slices)
        sampler = SlicedSampler(index, tokens, vocabulary, lambda array: meeting.exchange(index, array))
        return sampler.draw(logits[:, tokens.start : tokens.stop].clone(), batch)

    with ThreadPoolExecutor(slices) as threads:
        return list(threads.map(one, range(slices))), meeting


def batch_of(rng: np.random.Generator, draws: int, rows: int, vocabulary: int) -> DrawBatch:
    columns = np.zeros(draws, dtype=DRAW_COLUMNS)
    columns["temperature"] = rng.choice([0.3, 1.0, 2.5], draws)
    columns["top_k"] = rng.choice([0, 0, 1, 5, vocabulary], draws)
    columns["top_p"] = rng.choice([1.0, 0.3, 0.9, 0.999], draws)
    columns["min_p"] = rng.choice([0.0, 0.0, 0.05], draws)
    columns["repetition_penalty"] = 1.3
    columns["presence_penalty"], columns["frequency_penalty"] = 0.5, 0.2
    columns["seed"] = rng.integers(0, 1 << 62, draws)
    columns["sample_index"] = rng.integers(0, 3, draws)
    columns["greedy"] = rng.random(draws) < 0.2
    columns["logprobs"] = rng.choice([-1, 0, 3, vocabulary], draws)
    batch = DrawBatch(rng.integers(0, rows, draws), rng.integers(0, 99, draws), columns)

    def pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
        return rng.integers(0, draws, count), rng.integers(0, vocabulary, count)

    if rng.random() < 0.5:
        bias, seen, output, forbidden = pairs(3), pairs(20), pairs(20), pairs(4)
        values = rng.choice([1.5, -2.0, -np.inf], 3)
        batch.edits = LogitEdits(*bias, values, *seen, *output, *forbidden)
    if rng.random() < 0.5:
        guided = np.arange(0, draws, 2)
        bits = rng.integers(-(1 << 31), 1 << 31, (len(guided), -(-vocabulary // 32))).astype(np.int32)
        bits[0] = 0  # nothing is allowed: this draw fails
        batch.masks = TokenMasks(guided, bits)
    return batch


@pytest.mark.parametrize("slices", [2, 3, 4])
def test_slices_draw_what_the_whole_draws(slices: int) -> None:
    for seed in range(25):
        rng = np.random.default_rng(seed)
        vocabulary, rows, draws = int(rng.integers(5, 300)), 4, 9
        sharpness = rng.choice([0.0 if vocabulary > 9 else 0.1, 0.1, 3.0])
        logits = torch.from_numpy(
            sharpness * rng.standard_normal((rows, vocabulary)) + 1e-3 * rng.random(vocabulary)
        )
        batch = batch_of(rng, draws, rows, vocabulary)
        expected = draw(logits.clone(), batch)
        found, _ = draw_together(logits, batch, slices)
        for one in found:
            assert one.tokens.tolist() == expected.tokens.tolist()
            assert one.errors == expected.errors
            assert one.logprobs.keys() == expected.logprobs.keys()
            for index, entry in one.logprobs.items():
                theirs = expected.logprobs[index]
                assert (entry.token, entry.rank) == (theirs.token, theirs.rank)
                assert entry.logprob == pytest.approx(theirs.logprob, abs=1e-12)
                assert [token for token, _ in entry.top] == [token for token, _ in theirs.top]
                assert [p for _, p in entry.top] == pytest.approx([p for _, p in theirs.top], abs=1e-12)


def test_not_a_number_in_one_slice_is_an_error_on_all() -> None:
    logits = torch.zeros(2, 40, dtype=torch.float64)
    logits[1, 30] = torch.nan
    columns = np.zeros(2, dtype=DRAW_COLUMNS)
    columns["temperature"], columns["top_p"], columns["logprobs"] = 1.0, 1.0, -1
    found, _ = draw_together(logits, DrawBatch(np.arange(2), np.arange(2), columns), 2)
    assert all(one.errors == {1: "the model returned NaN logits"} for one in found)


def test_a_peaked_top_p_draw_exchanges_few_numbers() -> None:
    vocabulary = 50_000
    logits = 3 * torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    columns = np.zeros(1, dtype=DRAW_COLUMNS)
    columns["temperature"], columns["top_p"], columns["logprobs"] = 0.7, 0.9, 5
    _, meeting = draw_together(logits, DrawBatch(np.arange(1), np.arange(1), columns), 2)
    assert meeting.largest < vocabulary / 20

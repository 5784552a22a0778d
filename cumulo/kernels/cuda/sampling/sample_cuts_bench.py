"""Sampling with cuts timed, for `cumulo bench kernels`; every draw is checked against the reference."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cumulo.kernels.cuda.sampling.sample import (
    COLUMNS,
    MIN_P,
    POSITION,
    SAMPLE_INDEX,
    SEED_HIGH,
    SEED_LOW,
    SLOT,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SampleBuffers,
)  # fmt: skip
from cumulo.kernels.cuda.sampling.sample_cuts import CutBuffers, reference, sample_with_cuts, work
from cumulo.kernels.cuda.timing import copies_past_cache, graph_us
from cumulo.kernels.cuda.work import KernelRow

VOCABULARY = 151_936
CHECKED = 32  # rows of which the token is checked

# Settings that people use, and the worst there is: flat logits, of which top-p keeps most.
_BENCHES = (
    # rows, spread of the logits, temperature, top_k, top_p, min_p, must_us
    (1, 3.0, 0.6, 20, 0.95, 0.0, 60.0),
    (512, 3.0, 0.6, 20, 0.95, 0.0, 1000.0),
    (512, 3.0, 0.6, 0, 0.95, 0.05, None),
    (1, 1.0, 1.0, 0, 0.95, 0.0, None),
)


def bench_rows() -> Iterator[KernelRow]:
    vocabulary = VOCABULARY
    for rows, spread, temperature, top_k, top_p, min_p, must_us in _BENCHES:
        copies = copies_past_cache(rows * vocabulary * 2, limit=16)
        logits = [
            (spread * torch.randn(rows, vocabulary, device="cuda")).to(torch.bfloat16) for _ in range(copies)
        ]
        draws = torch.zeros((rows, COLUMNS), dtype=torch.int32, device="cuda")
        for column, value in ((TEMPERATURE, temperature), (TOP_P, top_p), (MIN_P, min_p)):
            draws[:, column] = torch.full((rows,), value, device="cuda").view(torch.int32)
        draws[:, TOP_K] = top_k
        draws[:, SLOT] = draws[:, SEED_LOW] = torch.arange(rows, device="cuda")
        shared, own = (
            SampleBuffers(rows, vocabulary, logits[0].device),
            CutBuffers(rows, vocabulary, logits[0].device),
        )
        picked = torch.full((rows,), -9, dtype=torch.int32, device="cuda")
        tokens = torch.zeros((rows, 4), dtype=torch.int32, device="cuda")
        sample_with_cuts(logits[0], draws, shared, own, picked, tokens)
        wrong = sum(
            int(picked[row]) != _expected(logits[0][row : row + 1], draws[row])
            for row in range(min(rows, CHECKED))
        )

        def rival(
            i: int, k: int = top_k, p: float = top_p, m: float = min_p, t: float = temperature
        ) -> Tensor:
            return _torch_draw(logits[i], k, p, m, t)

        yield KernelRow(
            "sample with cuts", f"R={rows} V={vocabulary} T={temperature} k={top_k} p={top_p} min_p={min_p}"
            + (" flat" if spread == 1 else ""), work(rows, vocabulary, 2),
            graph_us(lambda i: sample_with_cuts(logits[i], draws, shared, own, picked, tokens), copies),
            {"torch (sort or topk, multinomial's exponential trick)": graph_us(rival, copies)},
            error=wrong / min(rows, CHECKED), must_us=must_us,
        )  # fmt: skip


def _expected(logits: Tensor, draw: Tensor) -> int:
    """What the reference picks for one draw."""
    words = draw.cpu()
    seed = (int(words[SEED_HIGH]) & 0xFFFFFFFF) << 32 | int(words[SEED_LOW]) & 0xFFFFFFFF
    number = _number(seed, int(words[SAMPLE_INDEX]), int(words[POSITION]))
    floats = words.view(torch.float32)
    return int(
        reference(
            logits.cpu(), floats[TEMPERATURE : TEMPERATURE + 1], words[TOP_K : TOP_K + 1],
            floats[TOP_P : TOP_P + 1], floats[MIN_P : MIN_P + 1], torch.tensor([number], dtype=torch.float64),
        )
    )  # fmt: skip


def _number(*coordinates: int) -> float:
    """The random number of (seed, sample, position): SplitMix64 chained (engine/sampling/random_numbers.py)."""
    golden, whole, state = 0x9E3779B97F4A7C15, (1 << 64) - 1, 0
    for index, coordinate in enumerate(coordinates):
        state = state + (coordinate + 1) * golden if index else coordinate + golden
        state &= whole
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & whole
        state = (state ^ state >> 27) * 0x94D049BB133111EB & whole
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


def _torch_draw(logits: Tensor, top_k: int, top_p: float, min_p: float, temperature: float) -> Tensor:
    """The same distribution by torch's operators, in the order most engines use."""
    scaled = logits.float() / temperature
    ordered, tokens = scaled.topk(top_k, -1) if top_k else scaled.sort(-1, descending=True)
    probabilities = ordered.softmax(-1)
    cut = (probabilities.cumsum(-1) - probabilities >= top_p) | (probabilities < min_p * probabilities[:, :1])
    probabilities = probabilities.masked_fill(cut, 0.0)
    chosen = probabilities.div_(torch.empty_like(probabilities).exponential_()).argmax(-1, keepdim=True)
    return tokens.gather(-1, chosen)

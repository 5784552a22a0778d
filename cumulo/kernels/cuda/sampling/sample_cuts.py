"""Draws with top-k, top-p and min-p on the device, without the host. CudaRunner calls it for steps that have them.

The CPU sampler (engine/sampling/distribution.py) has the same rule. Each cut keeps the beginning of one order,
likeliest first and of equals the lower token first; so what survives all of them is: every token above some logit,
and the first few of those that equal it. That logit is found by bisection over the logits' bits, not by sorting.

First a bound is found that is low enough, as on a CPU: of 64 tokens each the largest logit is known, and the k best
tokens are among those that reach the k-th largest of these; top-p and min-p follow from the peak. The few
candidates are copied out in token order and one program finishes the row. Where they are too many (flat logits) or
too light for top-p, that program reads the whole row instead, some twenty times.

Must move: the logits once; the parts of a row that hold candidates are read twice more, from the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.sampling import sample as whole
from cumulo.kernels.cuda.sampling.sample import (
    COLUMNS,
    MIN_P,
    PART,
    POSITION,
    SAMPLE_INDEX,
    SEED_HIGH,
    SEED_LOW,
    SLOT,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SampleBuffers,
    uniform,
)  # fmt: skip
from cumulo.kernels.cuda.sampling.sample_cuts_row import draw_row, held_above, order_key

CANDIDATES = 4096  # a row with more is drawn from where it lies
FULL_CHUNK = 4096
NO_CUT = tl.constexpr(0x7FFFFFFF)  # a bound that no logit reaches: this row is not ours
LOWEST = tl.constexpr(-3.4028234663852886e38)  # -infinity is no candidate
# Bits of a float32 that a logit of the dtype never uses.
_UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@triton.jit
def _cuts(draw, vocabulary, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr):
    """top_k (the vocabulary's size: none), top_p and min_p of a draw."""
    k = tl.load(draw + TOP_K)
    k = tl.where((k > 0) & (k < vocabulary), k, vocabulary)
    p = tl.load(draw + TOP_P).to(tl.float32, bitcast=True)
    min_p = tl.load(draw + MIN_P).to(tl.float32, bitcast=True)
    return k, p, min_p


@triton.jit(do_not_specialize_on_alignment=["draws"])
def _bound(draws, maxima, masses, tops, bounds, totals, vocabulary, parts, tops_count, COLUMNS: tl.constexpr,
           TEMPERATURE: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
           UNUSED: tl.constexpr, PARTS: tl.constexpr, TOPS: tl.constexpr):  # fmt: skip
    """Per row the key that every token reaches which the cuts could keep, and the mass of all tokens."""
    row = tl.program_id(0)
    draw = draws + row * COLUMNS
    temperature = tl.load(draw + TEMPERATURE).to(tl.float32, bitcast=True)
    k, p, min_p = _cuts(draw, vocabulary, TOP_K, TOP_P, MIN_P)
    index = tl.arange(0, PARTS)
    peaks = tl.load(maxima + row * parts + index, mask=index < parts, other=float("-inf"))
    mass = tl.load(masses + row * parts + index, mask=index < parts, other=0.0)
    peak = tl.max(peaks, 0)
    sound = (tl.sum(tl.where(mass == mass, 0, 1), 0) == 0) & (peak > float("-inf")) & (peak < float("inf"))
    bound = tl.full((), NO_CUT, tl.int32)
    if sound & (temperature > 0) & ((k < vocabulary) | (p < 1) | (min_p > 0)):
        mass = tl.where(peaks == float("-inf"), 0.0, mass * tl.exp((peaks - peak) / temperature))
        total = tl.sum(mass.to(tl.float64), 0)
        tl.store(totals + row, total)
        lowest = order_key(tl.full((), LOWEST, tl.float32), UNUSED)
        bound = lowest
        if k < vocabulary:
            if k <= tops_count:
                slot = tl.arange(0, TOPS)
                top = tl.load(tops + row * tops_count + slot, mask=slot < tops_count, other=float("-inf"))
                keys = order_key(top, UNUSED)
                low = tl.min(tl.where(slot < tops_count, keys, NO_CUT), 0).to(tl.int64)
                high = tl.max(keys, 0).to(tl.int64)
                while low < high:  # the largest key that k blocks reach
                    middle = (low + high + 1) >> 1
                    reached = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0) >= k
                    low = tl.where(reached, middle, low)
                    high = tl.where(reached, high, middle - 1)
                bound = tl.maximum(low.to(tl.int32), lowest)
        else:
            # Few tokens hold most of the mass: a high bound for top-p is tried, and `_finish` checks it.
            light = tl.log(tl.maximum(total * (1 - p.to(tl.float64)) * 0.0009765625, 1e-30)).to(tl.float32)
            reach = temperature * tl.where(p < 1, light, tl.log(tl.maximum(min_p, 1e-30)))
            value = peak + reach - 1e-5 * (tl.abs(peak) + tl.abs(reach))
            bound = tl.maximum(order_key(value, UNUSED), lowest)
    tl.store(bounds + row, bound)


@triton.jit
def _count(logits, maxima, bounds, counts, vocabulary, logit_stride, parts, UNUSED: tl.constexpr,
           PART: tl.constexpr):  # fmt: skip
    """Per part, how many of its tokens reach the row's bound."""
    row, part = tl.program_id(0), tl.program_id(1)
    bound = tl.load(bounds + row)
    count = 0
    if order_key(tl.load(maxima + row * parts + part), UNUSED) >= bound:
        token = part * PART + tl.arange(0, PART)
        x = tl.load(
            logits + row.to(tl.int64) * logit_stride + token, mask=token < vocabulary, other=float("-inf")
        )
        count = tl.sum((order_key(x.to(tl.float32), UNUSED) >= bound).to(tl.int32), 0)
    tl.store(counts + row * parts + part, count)


@triton.jit(do_not_specialize_on_alignment=["draws"])
def _compact(logits, draws, maxima, bounds, counts, keys, weights, tokens, vocabulary, logit_stride, parts,
             COLUMNS: tl.constexpr, TEMPERATURE: tl.constexpr, UNUSED: tl.constexpr, PART: tl.constexpr,
             PARTS: tl.constexpr, CANDIDATES: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Copy out the tokens that reach the bound, in token order, with their keys and weights."""
    row, part = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, PARTS)
    every = tl.load(counts + row * parts + index, mask=index < parts, other=0)
    before = tl.sum(tl.where(index < part, every, 0), 0)
    if (tl.sum(tl.where(index == part, every, 0), 0) > 0) & (tl.sum(every, 0) <= CANDIDATES):
        bound = tl.load(bounds + row)
        peak = tl.max(tl.load(maxima + row * parts + index, mask=index < parts, other=float("-inf")), 0)
        temperature = tl.load(draws + row * COLUMNS + TEMPERATURE).to(tl.float32, bitcast=True)
        first = row.to(tl.int64) * CANDIDATES
        source = logits + row.to(tl.int64) * logit_stride
        for start in range(part * PART, part * PART + PART, CHUNK):
            token = start + tl.arange(0, CHUNK)
            x = tl.load(source + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
            key = order_key(x, UNUSED)
            kept = key >= bound
            place = before + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(keys + first + place, key, mask=kept)
            tl.store(weights + first + place, tl.exp((x - peak) * (1.0 / temperature)), mask=kept)
            tl.store(tokens + first + place, token, mask=kept)
            before += tl.sum(kept.to(tl.int32), 0)


@triton.jit(do_not_specialize_on_alignment=["draws"])
def _finish(logits, draws, maxima, bounds, totals, counts, keys, weights, tokens, unfinished, picked, history,
            vocabulary, logit_stride, history_stride, parts, COLUMNS: tl.constexpr, SLOT: tl.constexpr,
            POSITION: tl.constexpr, TEMPERATURE: tl.constexpr, SEED_LOW: tl.constexpr, SEED_HIGH: tl.constexpr,
            SAMPLE_INDEX: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
            UNUSED: tl.constexpr, PARTS: tl.constexpr, CANDIDATES: tl.constexpr, FULL: tl.constexpr,
            CHUNK: tl.constexpr):  # fmt: skip
    """Draw a row that has cuts from its candidates. Where they are too many or too light the row is marked in
    `unfinished`, and a second launch with FULL draws it from where it lies.
    """
    index = tl.program_id(0)
    bound = tl.load(bounds + index)
    if FULL:
        bound = tl.where(tl.load(unfinished + index) > 0, bound, NO_CUT)
    ours = bound != NO_CUT
    if ours:
        draw = draws + index * COLUMNS
        k, p, min_p = _cuts(draw, vocabulary, TOP_K, TOP_P, MIN_P)
        cooled = 1.0 / tl.load(draw + TEMPERATURE).to(tl.float32, bitcast=True)
        number = uniform(tl.load(draw + SEED_LOW), tl.load(draw + SEED_HIGH), tl.load(draw + SAMPLE_INDEX),
                         tl.load(draw + POSITION))  # fmt: skip
        part = tl.arange(0, PARTS)
        count = tl.sum(tl.load(counts + index * parts + part, mask=part < parts, other=0), 0)
        peak = tl.max(tl.load(maxima + index * parts + part, mask=part < parts, other=float("-inf")), 0)
        total = tl.load(totals + index)
        by_mass = (k >= vocabulary) & (p < 1)
        if FULL:
            # Top-p alone has only a guessed bound, which may have been what failed.
            bound = tl.where(by_mass, order_key(tl.full((), LOWEST, tl.float32), UNUSED), bound)
            count = vocabulary
        first = index.to(tl.int64) * CANDIDATES
        source = logits + index.to(tl.int64) * logit_stride
        row = (count, source, bound, peak, cooled, keys + first, weights + first, tokens + first)
        sound = True
        if not FULL:
            sound = count <= CANDIDATES
            if sound & by_mass:
                sound = (
                    held_above(bound - 1, row, True, UNUSED, FULL, CHUNK)
                    >= p.to(tl.float64) * total * 1.00001
                )
            tl.store(unfinished + index, tl.where(sound, 0, 1))
        if sound:
            token = draw_row(
                number, k, p, min_p, total, order_key(peak, UNUSED), vocabulary, row, UNUSED, FULL, CHUNK
            )
            tl.store(picked + index, token)
            slot = tl.load(draw + SLOT).to(tl.int64)
            if slot >= 0:
                tl.store(history + slot * history_stride + tl.load(draw + POSITION), token)
    elif not FULL:
        tl.store(unfinished + index, 0)


class CutBuffers:
    """What `sample_with_cuts` keeps between its kernels, beside SampleBuffers, for up to `rows` draws."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        parts = -(-vocabulary // PART)
        self.candidates = min(CANDIDATES, triton.next_power_of_2(vocabulary))

        def buffer(columns: int, dtype: torch.dtype) -> Tensor:
            return torch.empty((rows, columns), dtype=dtype, device=device)

        self.tops = buffer(parts * PART // whole.BLOCK, torch.float32)  # the largest logit of every block
        self.bounds, self.totals = buffer(1, torch.int32), buffer(1, torch.float64)
        self.unfinished = buffer(1, torch.int32)
        self.counts = buffer(parts, torch.int32)
        self.keys, self.tokens = buffer(self.candidates, torch.int32), buffer(self.candidates, torch.int32)
        self.weights = buffer(self.candidates, torch.float32)

    @property
    def nbytes(self) -> int:
        own = (
            self.tops, self.bounds, self.totals, self.unfinished, self.counts, self.keys, self.tokens, self.weights,
        )  # fmt: skip
        return sum(tensor.nbytes for tensor in own)


def sample_with_cuts(
    logits: Tensor, draws: Tensor, buffers: SampleBuffers, cuts: CutBuffers, picked: Tensor, tokens: Tensor
) -> None:
    """`sample`, and then again the draws that have cuts; those without, and unsound logits, stay as they are."""
    rows, vocabulary = logits.shape
    if rows == 0:
        return
    whole.sample(logits, draws, buffers, picked, tokens, cuts.tops)
    parts, unused = buffers.parts, _UNUSED_BITS[logits.dtype]
    width, tops = triton.next_power_of_2(parts), cuts.tops.shape[1]
    _bound[(rows,)](
        draws, buffers.maxima, buffers.masses, cuts.tops, cuts.bounds, cuts.totals, vocabulary, parts, tops,
        COLUMNS=COLUMNS, TEMPERATURE=TEMPERATURE, TOP_K=TOP_K, TOP_P=TOP_P, MIN_P=MIN_P, UNUSED=unused, PARTS=width,
        TOPS=triton.next_power_of_2(tops), num_warps=8,
    )  # fmt: skip
    _count[(rows, parts)](
        logits, buffers.maxima, cuts.bounds, cuts.counts, vocabulary, logits.stride(0), parts,
        UNUSED=unused, PART=PART, num_warps=8,
    )  # fmt: skip
    _compact[(rows, parts)](
        logits, draws, buffers.maxima, cuts.bounds, cuts.counts, cuts.keys, cuts.weights, cuts.tokens, vocabulary,
        logits.stride(0), parts, COLUMNS=COLUMNS, TEMPERATURE=TEMPERATURE, UNUSED=unused, PART=PART, PARTS=width,
        CANDIDATES=cuts.candidates, CHUNK=1024, num_warps=4,
    )  # fmt: skip
    # A row that is not done from its candidates is read whole, by many threads.
    for full, chunk, warps in ((False, min(1024, cuts.candidates), 4), (True, FULL_CHUNK, 16)):
        _finish[(rows,)](
            logits, draws, buffers.maxima, cuts.bounds, cuts.totals, cuts.counts, cuts.keys, cuts.weights,
            cuts.tokens, cuts.unfinished, picked, tokens, vocabulary, logits.stride(0), tokens.stride(0), parts,
            COLUMNS=COLUMNS, SLOT=SLOT, POSITION=POSITION, TEMPERATURE=TEMPERATURE, SEED_LOW=SEED_LOW,
            SEED_HIGH=SEED_HIGH, SAMPLE_INDEX=SAMPLE_INDEX, TOP_K=TOP_K, TOP_P=TOP_P, MIN_P=MIN_P, UNUSED=unused,
            PARTS=width, CANDIDATES=cuts.candidates, FULL=full, CHUNK=chunk, num_warps=warps,
        )  # fmt: skip

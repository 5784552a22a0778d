"""Draws with top-k, top-p and min-p on the device, without the host. CudaRunner calls it in steps that have such draws.

The rule is the CPU sampler's (engine/distribution.py). Each cut keeps the beginning of one order, likeliest first and
of equals the lower token first; so what survives all of them is: every token above some logit, and the first few of
those that equal it. That logit is found by bisection over the logits' bits, not by sorting.

First a bound is found that is provably low enough, as on a CPU: of 64 tokens each the largest logit is known, and the
k best tokens are among those that reach the k-th largest of these; top-p and min-p follow from the peak. The few
candidates are copied out in token order and one program finishes the row. Where they are too many (flat logits) or
too light for top-p, that program reads the whole row instead, some twenty times.

Must move: the logits once; the parts of a row that hold candidates are read twice more, from the cache.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda import sample as whole
from cumulo.kernels.cuda.sample import (
    COLUMNS, MIN_P, PART, POSITION, SAMPLE_INDEX, SEED_HIGH, SEED_LOW, SLOT, TEMPERATURE, TOP_K, TOP_P, SampleBuffers,
    uniform,
)  # fmt: skip
from cumulo.kernels.cuda.timing import copies_past_cache, graph_us
from cumulo.kernels.cuda.work import KernelRow, Work

CANDIDATES = 4096  # a row with more is drawn from where it lies
NO_CUT = tl.constexpr(0x7FFFFFFF)  # a bound that no logit reaches: this row is not ours
# Bits of a float32 that a logit of the dtype never uses.
_UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


def reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, numbers: Tensor
) -> Tensor:
    """Tokens from logits [R, V] by sorting; top_k 0, top_p 1 and min_p 0 cut nothing; numbers in [0, 1) pick."""
    rows, vocabulary = logits.shape
    logits = logits.double()
    ordered, tokens = logits.sort(-1, descending=True, stable=True)
    weights = ((ordered - ordered[:, :1]) / temperature.double()[:, None]).exp()
    limits = torch.where(top_k > 0, top_k, vocabulary)[:, None]
    weights = weights.masked_fill(torch.arange(vocabulary, device=logits.device) >= limits, 0.0)
    before = weights.cumsum(-1) - weights
    mass = torch.where(top_p < 1, top_p.double() * weights.sum(-1), torch.inf)[:, None]
    weights = weights.masked_fill((before >= mass) | (weights < min_p.double()[:, None]), 0.0)
    weights = torch.zeros_like(weights).scatter_(1, tokens, weights)
    cumulative = weights.cumsum(-1)
    picked = (cumulative <= numbers.double()[:, None] * cumulative[:, -1:]).sum(-1)
    last = vocabulary - 1 - (weights.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(picked, last)


@triton.jit
def _key(x, UNUSED: tl.constexpr):
    """An integer in the order of the logits; both zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> UNUSED


@triton.jit
def _cuts(draw, vocabulary, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr):
    """top_k (the vocabulary's size: none), top_p and min_p of a draw."""
    k = tl.load(draw + TOP_K)
    k = tl.where((k > 0) & (k < vocabulary), k, vocabulary)
    p = tl.load(draw + TOP_P).to(tl.float32, bitcast=True)
    min_p = tl.load(draw + MIN_P).to(tl.float32, bitcast=True)
    return k, p, min_p


@triton.jit
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
        lowest = _key(tl.full((), -3.4028234663852886e38, tl.float32), UNUSED)
        bound = lowest
        if k < vocabulary:
            if k <= tops_count:
                slot = tl.arange(0, TOPS)
                top = tl.load(tops + row * tops_count + slot, mask=slot < tops_count, other=float("-inf"))
                keys = _key(top, UNUSED)
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
            light = tl.log(tl.maximum(total * (1 - p.to(tl.float64)) / 1024, 1e-300)).to(tl.float32)
            reach = temperature * tl.where(p < 1, light, tl.log(tl.maximum(min_p, 1e-38)))
            value = peak + reach - 1e-5 * (tl.abs(peak) + tl.abs(reach))
            bound = tl.maximum(_key(value, UNUSED), lowest)
    tl.store(bounds + row, bound)


@triton.jit
def _count(logits, maxima, bounds, counts, vocabulary, logit_stride, parts, UNUSED: tl.constexpr,
           PART: tl.constexpr):  # fmt: skip
    """Per part, how many of its tokens reach the row's bound."""
    row, part = tl.program_id(0), tl.program_id(1)
    bound = tl.load(bounds + row)
    count = 0
    if _key(tl.load(maxima + row * parts + part), UNUSED) >= bound:
        token = part * PART + tl.arange(0, PART)
        x = tl.load(logits + row.to(tl.int64) * logit_stride + token, mask=token < vocabulary, other=float("-inf"))
        count = tl.sum((_key(x.to(tl.float32), UNUSED) >= bound).to(tl.int32), 0)
    tl.store(counts + row * parts + part, count)


@triton.jit
def _compact(logits, draws, maxima, bounds, counts, keys, weights, tokens, vocabulary, logit_stride, parts,
             COLUMNS: tl.constexpr, TEMPERATURE: tl.constexpr, UNUSED: tl.constexpr, PART: tl.constexpr,
             PARTS: tl.constexpr, CANDIDATES: tl.constexpr):  # fmt: skip
    """Copy out the tokens that reach the bound, in token order, with their keys and weights."""
    row, part = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, PARTS)
    every = tl.load(counts + row * parts + index, mask=index < parts, other=0)
    before = tl.sum(tl.where(index < part, every, 0), 0)
    if (tl.sum(tl.where(index == part, every, 0), 0) > 0) & (tl.sum(every, 0) <= CANDIDATES):
        bound = tl.load(bounds + row)
        peak = tl.max(tl.load(maxima + row * parts + index, mask=index < parts, other=float("-inf")), 0)
        temperature = tl.load(draws + row * COLUMNS + TEMPERATURE).to(tl.float32, bitcast=True)
        token = part * PART + tl.arange(0, PART)
        x = tl.load(logits + row.to(tl.int64) * logit_stride + token, mask=token < vocabulary, other=float("-inf"))
        x = x.to(tl.float32)
        key = _key(x, UNUSED)
        kept = key >= bound
        place = row.to(tl.int64) * CANDIDATES + before + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(keys + place, key, mask=kept)
        tl.store(weights + place, tl.exp((x - peak) * (1.0 / temperature)), mask=kept)
        tl.store(tokens + place, token, mask=kept)


@triton.jit
def _chunk(start, count, source, keys, weights, tokens, bound, peak, cooled, UNUSED: tl.constexpr, FULL: tl.constexpr,
           CHUNK: tl.constexpr):  # fmt: skip
    """Keys, weights and tokens from `start` on: of the candidates, or with FULL of the row itself."""
    index = start + tl.arange(0, CHUNK)
    inside = index < count
    if FULL:
        x = tl.load(source + index, mask=inside, other=float("-inf")).to(tl.float32)
        key = _key(x, UNUSED)
        return key, tl.exp((x - peak) * cooled), index, key >= bound
    else:
        key = tl.load(keys + index, mask=inside, other=0)
        weight = tl.load(weights + index, mask=inside, other=0.0)
        return key, weight, tl.load(tokens + index, mask=inside, other=0), inside


@triton.jit
def _above(pivot, count, source, keys, weights, tokens, bound, peak, cooled, MASS: tl.constexpr,
           UNUSED: tl.constexpr, FULL: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """The mass of the tokens above a key, or their number."""
    held = tl.zeros((CHUNK,), tl.float64)
    for start in range(0, count, CHUNK):
        key, weight, _, inside = _chunk(
            start, count, source, keys, weights, tokens, bound, peak, cooled, UNUSED, FULL, CHUNK
        )
        if MASS:
            held += tl.where(inside & (key > pivot), weight, 0.0).to(tl.float64)
        else:
            held += tl.where(inside & (key > pivot), 1.0, 0.0).to(tl.float64)
    return tl.sum(held, 0)


@triton.jit
def _equal(pivot, count, source, keys, weights, tokens, bound, peak, cooled, UNUSED: tl.constexpr,
           FULL: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """How many tokens have exactly this key, and the weight of each of them."""
    number = tl.zeros((CHUNK,), tl.int32)
    each = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, count, CHUNK):
        key, weight, _, inside = _chunk(
            start, count, source, keys, weights, tokens, bound, peak, cooled, UNUSED, FULL, CHUNK
        )
        same = inside & (key == pivot)
        number += same.to(tl.int32)
        each = tl.maximum(each, tl.where(same, weight, 0.0))
    return tl.sum(number, 0), tl.max(each, 0).to(tl.float64)


@triton.jit
def _threshold(limit, low, high, count, source, keys, weights, tokens, bound, peak, cooled, MASS: tl.constexpr,
               UNUSED: tl.constexpr, FULL: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """The smallest key from low to high above which less than `limit` lies (of mass, or of tokens)."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        held = _above(middle.to(tl.int32), count, source, keys, weights, tokens, bound, peak, cooled, MASS, UNUSED,
                      FULL, CHUNK)  # fmt: skip
        low = tl.where(held < limit, low, middle + 1)
        high = tl.where(held < limit, middle, high)
    return low.to(tl.int32)


@triton.jit
def _draw(number, k, p, min_p, total, top, count, vocabulary, source, keys, weights, tokens, bound, peak, cooled,
          UNUSED: tl.constexpr, FULL: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """The token that `number` picks from what the cuts leave."""
    border = bound  # every key above it stays, and of those equal to it the first `equals` tokens
    equals = vocabulary
    if k < vocabulary:
        border = _threshold(k.to(tl.float64), bound, top, count, source, keys, weights, tokens, bound, peak, cooled,
                            False, UNUSED, FULL, CHUNK)  # fmt: skip
        taken = _above(border, count, source, keys, weights, tokens, bound, peak, cooled, False, UNUSED, FULL, CHUNK)
        equals = k - taken.to(tl.int32)
    if p < 1:
        if k < vocabulary:  # of what top-k has left
            found, each = _equal(border, count, source, keys, weights, tokens, bound, peak, cooled, UNUSED, FULL, CHUNK)
            above = _above(border, count, source, keys, weights, tokens, bound, peak, cooled, True, UNUSED, FULL, CHUNK)
            total = above + tl.minimum(found, equals).to(tl.float64) * each
        mass = p.to(tl.float64) * total
        lower = border
        border = _threshold(mass, lower, top, count, source, keys, weights, tokens, bound, peak, cooled, True, UNUSED,
                            FULL, CHUNK)  # fmt: skip
        found, each = _equal(border, count, source, keys, weights, tokens, bound, peak, cooled, UNUSED, FULL, CHUNK)
        above = _above(border, count, source, keys, weights, tokens, bound, peak, cooled, True, UNUSED, FULL, CHUNK)
        # A token stays if the likelier ones do not reach the mass: the n-th equal one if above + n * each does not.
        wanted = tl.where(each > 0, tl.ceil((mass - above) / tl.where(each > 0, each, 1.0)), 0.0)
        wanted = tl.minimum(wanted, vocabulary.to(tl.float64)).to(tl.int32)
        equals = tl.where(border == lower, tl.minimum(equals, wanted), wanted)
    # In token order, as on a CPU: first what is left weighs, then where the number falls.
    kept_mass = tl.zeros((CHUNK,), tl.float64)
    seen = tl.zeros((), tl.int32)
    for start in range(0, count, CHUNK):
        key, weight, _, inside = _chunk(
            start, count, source, keys, weights, tokens, bound, peak, cooled, UNUSED, FULL, CHUNK
        )
        same = (inside & (key == border)).to(tl.int32)
        kept = inside & (weight >= min_p) & ((key > border) | ((same > 0) & (seen + tl.cumsum(same, 0) <= equals)))
        kept_mass += tl.where(kept, weight, 0.0).to(tl.float64)
        seen += tl.sum(same, 0)
    target = number * tl.sum(kept_mass, 0)
    reached = tl.zeros((), tl.float64)
    seen = tl.zeros((), tl.int32)
    chosen = vocabulary
    last = tl.zeros((), tl.int32)
    for start in range(0, count, CHUNK):
        key, weight, token, inside = _chunk(
            start, count, source, keys, weights, tokens, bound, peak, cooled, UNUSED, FULL, CHUNK
        )
        same = (inside & (key == border)).to(tl.int32)
        kept = inside & (weight >= min_p) & ((key > border) | ((same > 0) & (seen + tl.cumsum(same, 0) <= equals)))
        held = tl.where(kept, weight, 0.0).to(tl.float64)
        cumulative = reached + tl.cumsum(held, 0)
        chosen = tl.minimum(chosen, tl.min(tl.where(kept & (cumulative > target), token, vocabulary), 0))
        last = tl.maximum(last, tl.max(tl.where(kept & (weight > 0), token, 0), 0))
        reached += tl.sum(held, 0)
        seen += tl.sum(same, 0)
    # Rounding can put the target on the total: then the last token with weight.
    return tl.minimum(chosen, last)


@triton.jit
def _finish(logits, draws, maxima, bounds, totals, counts, keys, weights, tokens, picked, history, vocabulary,
            logit_stride, history_stride, parts, COLUMNS: tl.constexpr, SLOT: tl.constexpr, POSITION: tl.constexpr,
            TEMPERATURE: tl.constexpr, SEED_LOW: tl.constexpr, SEED_HIGH: tl.constexpr, SAMPLE_INDEX: tl.constexpr,
            TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, UNUSED: tl.constexpr, PARTS: tl.constexpr,
            CANDIDATES: tl.constexpr, CHUNK: tl.constexpr, FULL_CHUNK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    bound = tl.load(bounds + row)
    if bound != NO_CUT:
        draw = draws + row * COLUMNS
        k, p, min_p = _cuts(draw, vocabulary, TOP_K, TOP_P, MIN_P)
        cooled = 1.0 / tl.load(draw + TEMPERATURE).to(tl.float32, bitcast=True)
        number = uniform(tl.load(draw + SEED_LOW), tl.load(draw + SEED_HIGH), tl.load(draw + SAMPLE_INDEX),
                         tl.load(draw + POSITION))  # fmt: skip
        index = tl.arange(0, PARTS)
        count = tl.sum(tl.load(counts + row * parts + index, mask=index < parts, other=0), 0)
        peak = tl.max(tl.load(maxima + row * parts + index, mask=index < parts, other=float("-inf")), 0)
        top = _key(peak, UNUSED)
        total = tl.load(totals + row)
        source = logits + row.to(tl.int64) * logit_stride
        keys += row.to(tl.int64) * CANDIDATES
        weights += row.to(tl.int64) * CANDIDATES
        tokens += row.to(tl.int64) * CANDIDATES
        full = count > CANDIDATES
        if (count <= CANDIDATES) & (k >= vocabulary) & (p < 1):
            held = _above(bound - 1, count, source, keys, weights, tokens, bound, peak, cooled, True, UNUSED, False,
                          CHUNK)  # fmt: skip
            if held < p.to(tl.float64) * total * 1.00001:  # the bound was too high
                full = True
                bound = _key(tl.full((), -3.4028234663852886e38, tl.float32), UNUSED)
        if full:
            # Sums differ with their order: a bound that is too high by less than that must not cut anything off.
            if (k >= vocabulary) & (p < 1):
                bound = _key(tl.full((), -3.4028234663852886e38, tl.float32), UNUSED)
            token = _draw(number, k, p, min_p, total, top, vocabulary, vocabulary, source, keys, weights, tokens, bound,
                          peak, cooled, UNUSED, True, FULL_CHUNK)  # fmt: skip
        else:
            token = _draw(number, k, p, min_p, total, top, count, vocabulary, source, keys, weights, tokens, bound,
                          peak, cooled, UNUSED, False, CHUNK)  # fmt: skip
        tl.store(picked + row, token)
        slot = tl.load(draw + SLOT).to(tl.int64)
        if slot >= 0:
            tl.store(history + slot * history_stride + tl.load(draw + POSITION), token)

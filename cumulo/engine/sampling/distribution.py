"""From rows of logits to picked tokens: temperature, cuts, and the arithmetic over a large vocabulary.

The sampler calls it. The vocabulary is large and what survives the cuts is small, so the cuts run on a
*superset of candidates* that is provably large enough and cheap to find; the exact rule is then applied to
the candidates in float64. How generous the superset was never shows in the result.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# SplitMix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators"): the increment is
# 2^64 / golden ratio, the multipliers of the finaliser are Stafford's variant 13.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_SEED_MASK = (1 << 64) - 1


def seed_bits(seed: int) -> np.uint64:
    """A seed of any size or sign as the 64 bits that are used of it."""
    return np.uint64(seed & _SEED_MASK)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function: a bijection of 64 bits in which every input bit flips half the output."""
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIER_1
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIER_2
    return values ^ (values >> np.uint64(31))


def uniform(seeds: NDArray[np.uint64], sample_indices: Ints, positions: Ints) -> Floats:
    """One number in [0, 1) per element: three chained rounds, one for each coordinate.

    h = mix(seed + g); h = mix(h + (sample + 1) g); h = mix(h + (position + 1) g), all modulo 2^64; the upper
    53 bits of h are the number, so every value is an exact multiple of 2^-53.
    """
    state = mix(_whole(seeds) + _GOLDEN)
    state = mix(state + (_whole(sample_indices) + np.uint64(1)) * _GOLDEN)
    state = mix(state + (_whole(positions) + np.uint64(1)) * _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _whole(values: Ints | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The number as an array even for one element: numpy wraps arrays silently around 2^64 and warns about
    scalars."""
    return np.atleast_1d(np.asarray(values)).astype(np.uint64)


# Sums and maxima over the vocabulary are taken in blocks of this many tokens first.
_BLOCK = 64
# Sums of the same weights in another order, or in float32, differ by less than this share.
ROUNDING = 1e-5


@dataclass(slots=True)
class Candidates:
    """Tokens of several rows as flat columns, row by row, in token order within a row."""

    rows: Ints
    tokens: Ints
    weights: Floats  # exp((logit - peak) / temperature): the most likely token weighs 1


# Rows and tokens that include every one a cut could keep, and of a top-p over all tokens, each row's total weight.
Found = tuple[Ints, Ints, Floats | None]


def pick_tokens(logits: Tensor, peaks: Floats, columns: NDArray[np.void], numbers: Floats) -> Ints:
    """One token per row. Rows are grouped by which cuts they have; a row's group depends on itself only."""
    vocabulary = logits.shape[-1]
    top_k = (columns["top_k"] > 0) & (columns["top_k"] < vocabulary)
    top_p = ~top_k & (columns["top_p"] < 1)
    min_p = ~top_k & ~top_p & (columns["min_p"] > 0)
    whole = ~(top_k | top_p | min_p)
    tokens = np.empty(len(columns), dtype=np.int64)
    for members, find in ((top_k, _by_top_k), (top_p, _by_top_p), (min_p, _by_min_p)):
        if members.any():
            rows = np.flatnonzero(members)
            part, given = take_rows(logits, rows), (peaks[rows], columns[rows])
            tokens[rows] = _pick(_cut(part, *given, find(part, *given)), numbers[rows])
    if whole.any():
        rows = np.flatnonzero(whole)
        weights = exponentials(take_rows(logits, rows), peaks[rows], columns["temperature"][rows])
        tokens[rows] = pick_from_all(weights, numbers[rows])
    return tokens


# -- picking ----------------------------------------------------------------------------------------------
def _pick(candidates: Candidates, numbers: Floats) -> Ints:
    """Invert each row's cumulative distribution. In token order, so that rounding can move the border between
    two tokens but never swap them.
    """
    rows = candidates.rows
    sizes = np.bincount(rows, minlength=len(numbers))
    ends = np.cumsum(sizes)
    cumulative = _running_sums(candidates.weights, sizes)
    totals = cumulative[ends - 1]
    not_above = np.bincount(rows, weights=cumulative <= (numbers * totals)[rows], minlength=len(numbers))
    # Rounding can put the target on the total: then the last candidate, which all have weight.
    chosen = np.minimum(not_above.astype(np.int64), sizes - 1)
    picked: Ints = candidates.tokens[ends - sizes + chosen]
    return picked


def pick_from_all(weights: Tensor, numbers: Floats) -> Ints:
    """The same over the whole vocabulary: first the block, then the token in it."""
    vocabulary = weights.shape[-1]
    cumulative = np.cumsum(block_sums(weights), axis=1)
    targets = numbers * cumulative[:, -1]
    block = _first_above(cumulative, targets)
    before = np.where(block > 0, cumulative[np.arange(len(block)), block - 1], 0.0)
    inside = block[:, None] * _BLOCK + np.arange(_BLOCK)
    rows = np.arange(len(block))[:, None]
    chosen = values_at(weights, rows, np.minimum(inside, vocabulary - 1)).astype(np.float64)
    chosen[inside >= vocabulary] = 0  # the last block may be short
    return block * _BLOCK + _first_above(np.cumsum(chosen, axis=1), targets - before)


def _first_above(cumulative: Floats, targets: Floats) -> Ints:
    """Per row the first index whose cumulative weight is above the target; never an element of weight 0."""
    index = (cumulative <= targets[:, None]).sum(axis=1)
    # Rounding can put the target on the total: then the last element with weight, where the total is reached.
    last = (cumulative < cumulative[:, -1:]).sum(axis=1)
    first: Ints = np.minimum(index, last)
    return first


def _running_sums(values: Floats, sizes: Ints) -> Floats:
    """Cumulative sums that begin anew in every row. One long sum less each row's beginning would be shorter,
    but would round differently with other rows before it.
    """
    rows = np.split(values, np.cumsum(sizes)[:-1])
    return np.concatenate([np.cumsum(row) for row in rows])


# -- cuts -------------------------------------------------------------------------------------------------
def _cut(
    logits: Tensor,
    peaks: Floats,
    columns: NDArray[np.void],
    found: Found,
) -> Candidates:
    """Of what was found, the top_k likeliest tokens of each row, and of those the likeliest that together reach
    top_p of their mass, or of `totals`: a token stays if the likelier ones do not. Of equally likely tokens the
    lower id counts as likelier. None is lighter than min_p."""
    rows, tokens, totals = found
    values = values_at(logits, rows, tokens).astype(np.float64)
    weights = np.exp((values - peaks[rows]) / columns["temperature"][rows])
    sizes = np.bincount(rows, minlength=len(columns))
    begins = np.cumsum(sizes) - sizes
    # Stable: equally likely ones stay in token order.
    in_rows = [np.argsort(-one, kind="stable") for one in np.split(values, begins[1:])]
    order = np.concatenate(in_rows) + np.repeat(begins, sizes)
    most = np.where(columns["top_k"] > 0, columns["top_k"], logits.shape[-1])
    order = order[np.arange(len(rows)) - np.repeat(begins, sizes) < most[rows]]
    cumulative = _running_sums(weights[order], np.minimum(sizes, most))
    if totals is None:
        totals = cumulative[np.cumsum(np.minimum(sizes, most)) - 1]
    masses = np.where(columns["top_p"] < 1, columns["top_p"] * totals, np.inf)[rows[order]]
    kept = (cumulative - weights[order] < masses) & (weights[order] >= columns["min_p"][rows[order]])
    chosen = np.sort(order[kept])
    return Candidates(rows[chosen], tokens[chosen], weights[chosen])


def _by_top_k(logits: Tensor, peaks: Floats, columns: NDArray[np.void]) -> Found:
    return *at_least(logits, top_k_bounds(logits, columns["top_k"])), None


def _by_min_p(logits: Tensor, peaks: Floats, columns: NDArray[np.void]) -> Found:
    reach = columns["temperature"] * np.log(columns["min_p"])
    return *at_least(logits, peaks + reach - ROUNDING * (np.abs(peaks) + np.abs(reach))), None


def _by_top_p(logits: Tensor, peaks: Floats, columns: NDArray[np.void]) -> Found:
    """Few tokens hold most of the mass, so a high bound is tried first: it is right where those above it reach
    the mass. The other rows get the bound that is always right: tokens lighter than (1 - p) total / V weigh
    less than (1 - p) total together.
    """
    weights = exponentials(logits, peaks, columns["temperature"])
    totals = block_sums(weights).sum(axis=1)
    masses = columns["top_p"] * totals
    rest = totals - masses
    rows, tokens = at_least(weights, rest / 1024)
    held = np.bincount(rows, weights=values_at(weights, rows, tokens), minlength=len(totals))
    short = held < masses * (1 + ROUNDING)
    if not short.any():
        return rows, tokens, totals
    again = np.flatnonzero(short)
    more_rows, more_tokens = at_least(
        take_rows(weights, again), rest[again] / weights.shape[-1] * (1 - ROUNDING)
    )
    enough = ~short[rows]
    rows = np.concatenate((rows[enough], again[more_rows]))
    tokens = np.concatenate((tokens[enough], more_tokens))
    by_row = np.argsort(rows, kind="stable")
    return rows[by_row], tokens[by_row], totals


# -- candidates -------------------------------------------------------------------------------------------
def most_likely(logits: Tensor, counts: Ints) -> tuple[list[list[int]], list[list[float]]]:
    """Per row the counts[row] most likely tokens and their logits, likeliest first, ties by token id; fewer
    where fewer are possible at all.
    """
    rows, tokens = at_least(logits, top_k_bounds(logits, counts))
    values = values_at(logits, rows, tokens).astype(np.float64)
    order = np.lexsort((tokens, -values, rows))
    ends = np.cumsum(np.bincount(rows, minlength=len(counts))).tolist()
    spans = [
        slice(begin, min(begin + count, end))
        for begin, end, count in zip([0, *ends[:-1]], ends, counts.tolist(), strict=True)
    ]
    ordered_tokens, ordered_values = tokens[order].tolist(), values[order].tolist()
    return [ordered_tokens[span] for span in spans], [ordered_values[span] for span in spans]


def top_k_bounds(logits: Tensor, counts: Ints) -> Floats:
    """Per row a finite value that counts[row] logits reach, or all that can be drawn if those are fewer: the
    k-th largest of the block maxima.

    Each of the k best blocks holds one logit as large as that, so the k best logits are among those above.
    """
    vocabulary = logits.shape[-1]
    largest = int(counts.max())
    whole = vocabulary // _BLOCK * _BLOCK
    if largest <= whole // _BLOCK:
        maxima = logits[:, :whole].reshape(len(logits), -1, _BLOCK).amax(dim=-1)
    else:
        maxima = logits
    best = as_float64(maxima.topk(largest, dim=-1).values)
    # Where a guide or a bias leaves fewer than k tokens, the impossible ones (-infinity) stay out.
    return np.maximum(best[np.arange(len(counts)), counts - 1], torch.finfo(logits.dtype).min)


def at_least(values: Tensor, bounds: Floats) -> tuple[Ints, Ints]:
    """(row, column) of every value that reaches its row's bound, row by row, columns ascending."""
    flat = np.flatnonzero(compare(operator.ge, values, bounds))
    return flat // values.shape[-1], flat % values.shape[-1]


def values_at(values: Tensor, rows: Ints, columns: Ints) -> NDArray[Any]:
    if values.device.type == "cpu":
        result: NDArray[Any] = values.numpy()[rows, columns]
        return result
    return values[as_tensor(rows, values), as_tensor(columns, values)].cpu().numpy()


# -- between numpy and torch ------------------------------------------------------------------------------
def peaks_of(logits: Tensor) -> tuple[Floats, Ints]:
    """Per row the largest logit and its token, the lowest of equals; both numpy and torch promise that."""
    if logits.device.type == "cpu":  # numpy's argmax takes a quarter of the time of torch's
        array = logits.numpy()
        tokens = array.argmax(axis=-1)
        return np.take_along_axis(array, tokens[:, None], axis=-1)[:, 0].astype(np.float64), tokens
    values, indices = logits.max(dim=-1)
    return as_float64(values), indices.cpu().numpy()


def exponentials(logits: Tensor, peaks: Floats, temperatures: Floats) -> Tensor:
    """exp((logit - peak) / temperature), through exp2, which is about twice as fast."""
    weights = logits - _column(peaks, logits)
    weights *= _column(math.log2(math.e) / temperatures, logits)
    return weights.exp2_()


def compare(relation: Callable[[Any, Any], Any], values: Tensor, bounds: Floats) -> NDArray[np.bool_]:
    """Each value against its row's bound. On a CPU by numpy: an eighth of the time of torch's comparison."""
    result: NDArray[np.bool_]
    if values.device.type == "cpu":
        array = values.numpy()
        result = relation(array, bounds.astype(array.dtype)[:, None])
    else:
        result = relation(values, _column(bounds, values)).cpu().numpy()
    return result


def block_sums(weights: Tensor) -> Floats:
    """Sums over blocks of the vocabulary, the last block possibly short."""
    rows, vocabulary = weights.shape
    whole = vocabulary // _BLOCK * _BLOCK
    sums = weights[:, :whole].reshape(rows, -1, _BLOCK).sum(dim=-1)
    if whole < vocabulary:
        sums = torch.cat((sums, weights[:, whole:].sum(dim=-1, keepdim=True)), dim=1)
    return as_float64(sums)


def take_rows(values: Tensor, rows: Ints) -> Tensor:
    """The given rows, ascending: a view where they are neighbours, which they mostly are."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return values[first : last + 1]
    return values.index_select(0, as_tensor(rows, values))


def _column(values: Floats, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like)[:, None]


def as_tensor(indices: Ints, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(indices)).to(like.device)


def as_float64(values: Tensor) -> Floats:
    return values.double().cpu().numpy()

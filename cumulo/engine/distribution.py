"""From rows of logits to picked tokens: temperature, cuts, and the arithmetic over a large vocabulary.

The sampler calls it. The vocabulary is large and what survives the cuts is small, so the cuts run on a
*superset of candidates* that is provably large enough and cheap to find; the exact rule is then applied to
the candidates in float64. How generous the superset was never shows in the result.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Sums and maxima over the vocabulary are taken in blocks of this many tokens first.
_BLOCK = 64


def pick_tokens(
    logits: Tensor, peaks: NDArray[np.float64], columns: NDArray[np.void], numbers: NDArray[np.float64]
) -> NDArray[np.int64]:
    """One token per row. Rows are grouped by which cuts they have; a row's group depends on itself only."""
    vocabulary = logits.shape[-1]
    top_k = (columns["top_k"] > 0) & (columns["top_k"] < vocabulary)
    top_p = ~top_k & (columns["top_p"] < 1)
    min_p = ~top_k & ~top_p & (columns["min_p"] > 0)
    whole = ~top_k & ~top_p & ~min_p
    tokens = np.empty(len(columns), dtype=np.int64)

    if whole.any() or top_p.any():
        rows = np.flatnonzero(whole | top_p)
        weights = exponentials(take_rows(logits, rows), peaks[rows], columns["temperature"][rows])
        sums = block_sums(weights)
        is_whole = whole[rows]
        if is_whole.any():
            picked = np.flatnonzero(is_whole)
            tokens[rows[picked]] = _pick_from_all(weights, sums, picked, numbers[rows[picked]])
        if not is_whole.all():
            picked = np.flatnonzero(~is_whole)
            totals = sums[picked].sum(axis=1)
            # Tokens lighter than (1 - p) total / V weigh less than (1 - p) total together, so those at least
            # as heavy reach p. The factor covers rounding.
            bounds = (1 - columns["top_p"][rows[picked]]) * totals / vocabulary * 0.999
            found = _at_least(take_rows(weights, picked), bounds)
            where = rows[picked]
            tokens[where] = _cut_and_pick(
                logits, where, found, peaks[where], columns[where], numbers[where], totals
            )
    if top_k.any():
        rows = np.flatnonzero(top_k)
        found = _at_least(
            take_rows(logits, rows), _top_k_bounds(take_rows(logits, rows), columns["top_k"][rows])
        )
        tokens[rows] = _cut_and_pick(logits, rows, found, peaks[rows], columns[rows], numbers[rows], None)
    if min_p.any():
        rows = np.flatnonzero(min_p)
        reach = columns["temperature"][rows] * np.log(columns["min_p"][rows])
        bounds = peaks[rows] + reach - 1e-5 * (np.abs(peaks[rows]) + np.abs(reach))
        found = _at_least(take_rows(logits, rows), bounds)
        tokens[rows] = _cut_and_pick(logits, rows, found, peaks[rows], columns[rows], numbers[rows], None)
    return tokens


def _pick_from_all(
    weights: Tensor,
    sums: NDArray[np.float64],
    rows: NDArray[np.int64],
    numbers: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Invert the cumulative distribution over the whole vocabulary: first the block, then the token in it."""
    cumulative = np.cumsum(sums[rows], axis=1)
    targets = numbers * cumulative[:, -1]
    block = _first_above(cumulative, targets)
    index = np.arange(len(rows))
    before = np.where(block > 0, cumulative[index, block - 1], 0.0)
    inside = np.minimum(block[:, None] * _BLOCK + np.arange(_BLOCK), weights.shape[-1] - 1)
    chosen = as_float64(weights[as_tensor(rows, weights)[:, None], as_tensor(inside, weights)])
    # The last block may be short: what is past the vocabulary weighs nothing.
    chosen[block[:, None] * _BLOCK + np.arange(_BLOCK) >= weights.shape[-1]] = 0
    return block * _BLOCK + _first_above(np.cumsum(chosen, axis=1), targets - before)


def _cut_and_pick(
    logits: Tensor,
    rows: NDArray[np.int64],
    found: tuple[NDArray[np.int64], NDArray[np.int64]],
    peaks: NDArray[np.float64],
    columns: NDArray[np.void],
    numbers: NDArray[np.float64],
    totals: NDArray[np.float64] | None,
) -> NDArray[np.int64]:
    """Apply top-k, top-p and min-p exactly to candidates and pick. `totals`: mass top-p is a share of."""
    tokens, candidate_logits = _padded(logits, rows, found)
    weights = np.exp((candidate_logits - peaks[:, None]) / columns["temperature"][:, None])
    # Stable, and candidates come in token order: of equally likely tokens the lower id counts as likelier.
    order = np.argsort(-candidate_logits, axis=1, kind="stable")
    ordered = np.take_along_axis(weights, order, axis=1)
    top_k = np.where(columns["top_k"] > 0, columns["top_k"], logits.shape[-1])
    keep = np.arange(ordered.shape[1]) < top_k[:, None]
    top_p = columns["top_p"]
    if (top_p < 1).any():
        cumulative = np.cumsum(ordered * keep, axis=1)
        mass = cumulative[:, -1] if totals is None else totals
        before = np.zeros_like(cumulative)  # a token stays if the likelier ones have not reached p
        before[:, 1:] = cumulative[:, :-1]
        keep &= (before < (top_p * mass)[:, None]) | (top_p >= 1)[:, None]
    keep &= ordered >= columns["min_p"][:, None]  # the most likely token weighs 1
    kept = np.empty_like(keep)
    np.put_along_axis(kept, order, keep, axis=1)
    # Picked in token order, so that rounding can move a border between two tokens but never swap them.
    cumulative = np.cumsum(weights * kept, axis=1)
    chosen = _first_above(cumulative, numbers * cumulative[:, -1])
    picked: NDArray[np.int64] = tokens[np.arange(len(rows)), chosen]
    return picked


def _first_above(cumulative: NDArray[np.float64], targets: NDArray[np.float64]) -> NDArray[np.int64]:
    """Per row the first index whose cumulative weight is above the target; never an element of weight 0."""
    index = (cumulative <= targets[:, None]).sum(axis=1)
    # Rounding can put the target on the total: then the last element with weight, where the total is reached.
    last = (cumulative < cumulative[:, -1:]).sum(axis=1)
    first: NDArray[np.int64] = np.minimum(index, last)
    return first


# -- candidates -------------------------------------------------------------------------------------------
def most_likely(logits: Tensor, counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Tokens and logits of at least counts[row] most likely tokens, likeliest first, ties by token id."""
    found = _at_least(logits, _top_k_bounds(logits, counts))
    tokens, values = _padded(logits, np.arange(len(counts)), found)
    order = np.argsort(-values, axis=1, kind="stable")
    return np.take_along_axis(tokens, order, axis=1), np.take_along_axis(values, order, axis=1)


def _top_k_bounds(logits: Tensor, counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Per row a value that at least counts[row] logits reach: the k-th largest of the block maxima.

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
    return best[np.arange(len(counts)), counts - 1]


def _at_least(values: Tensor, bounds: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(row, column) of every value that reaches its row's bound, row by row, columns ascending."""
    flat = np.flatnonzero(compare(operator.ge, values, bounds))
    return flat // values.shape[-1], flat % values.shape[-1]


def _padded(
    logits: Tensor, rows: NDArray[np.int64], found: tuple[NDArray[np.int64], NDArray[np.int64]]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Candidates as rectangles [rows, most candidates]: token ids, and logits with -infinity as padding."""
    row, token = found
    counts = np.bincount(row, minlength=len(rows))
    offset = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    tokens = np.zeros((len(rows), int(counts.max())), dtype=np.int64)
    values = np.full(tokens.shape, -np.inf)
    tokens[row, offset] = token
    values[row, offset] = as_float64(logits[as_tensor(rows[row], logits), as_tensor(token, logits)])
    return tokens, values


# -- between numpy and torch ------------------------------------------------------------------------------
def peaks_of(logits: Tensor) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Per row the largest logit and its token, the lowest of equals; both numpy and torch promise that."""
    if logits.device.type == "cpu":  # numpy's argmax takes a quarter of the time of torch's
        array = logits.numpy()
        tokens = array.argmax(axis=-1)
        return np.take_along_axis(array, tokens[:, None], axis=-1)[:, 0].astype(np.float64), tokens
    values, indices = logits.max(dim=-1)
    return as_float64(values), indices.cpu().numpy()


def exponentials(logits: Tensor, peaks: NDArray[np.float64], temperatures: NDArray[np.float64]) -> Tensor:
    """exp((logit - peak) / temperature), through exp2, which is about twice as fast."""
    weights = logits - _column(peaks, logits)
    weights *= _column(math.log2(math.e) / temperatures, logits)
    return weights.exp2_()


def compare(
    relation: Callable[[Any, Any], Any], values: Tensor, bounds: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Each value against its row's bound. On a CPU by numpy: an eighth of the time of torch's comparison."""
    result: NDArray[np.bool_]
    if values.device.type == "cpu":
        array = values.numpy()
        result = relation(array, bounds.astype(array.dtype)[:, None])
    else:
        result = relation(values, _column(bounds, values)).cpu().numpy()
    return result


def block_sums(weights: Tensor) -> NDArray[np.float64]:
    """Sums over blocks of the vocabulary, the last block possibly short."""
    rows, vocabulary = weights.shape
    whole = vocabulary // _BLOCK * _BLOCK
    sums = weights[:, :whole].reshape(rows, -1, _BLOCK).sum(dim=-1)
    if whole < vocabulary:
        sums = torch.cat((sums, weights[:, whole:].sum(dim=-1, keepdim=True)), dim=1)
    return as_float64(sums)


def take_rows(values: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """The given rows, ascending: a view where they are neighbours, which they mostly are."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return values[first : last + 1]
    return values.index_select(0, as_tensor(rows, values))


def _column(values: NDArray[np.float64], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like)[:, None]


def as_tensor(indices: NDArray[np.int64], like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(indices)).to(like.device)


def as_float64(values: Tensor) -> NDArray[np.float64]:
    return values.double().cpu().numpy()

"""Within one row of logits: where all its cuts end, and the token a number picks of what they leave. `sample_cuts`
calls it for the candidates it copied out, or for the whole row.

A cut's logit is found by bisection over the logits' bits: each pass counts, or weighs, what lies above the middle.
"""

import triton
import triton.language as tl


@triton.jit
def order_key(x, UNUSED: tl.constexpr):
    """An integer in the order of the logits; both zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> UNUSED


@triton.jit
def _chunk(start, row, UNUSED: tl.constexpr, FULL: tl.constexpr, CHUNK: tl.constexpr):
    """Keys, weights and tokens from `start` on, and which of them count: of the row's candidates, or with FULL of
    the row itself. `row` is (number of elements, logits, bound, peak, 1 / temperature, keys, weights, tokens).
    """
    count, logits, bound, peak, cooled, keys, weights, tokens = row
    index = start + tl.arange(0, CHUNK)
    inside = index < count
    if FULL:
        x = tl.load(logits + index, mask=inside, other=float("-inf")).to(tl.float32)
        key = order_key(x, UNUSED)
        weight = tl.exp((x - peak) * cooled)
        token = index
        inside = key >= bound
    else:
        key = tl.load(keys + index, mask=inside, other=0)
        weight = tl.load(weights + index, mask=inside, other=0.0)
        token = tl.load(tokens + index, mask=inside, other=0)
    return key, weight, token, inside


@triton.jit
def held_above(pivot, row, MASS: tl.constexpr, UNUSED: tl.constexpr, FULL: tl.constexpr, CHUNK: tl.constexpr):
    """The mass of the tokens above a key, or their number."""
    held = tl.zeros((CHUNK,), tl.float64)
    for start in range(0, row[0], CHUNK):
        key, weight, _, inside = _chunk(start, row, UNUSED, FULL, CHUNK)
        if MASS:
            held += tl.where(inside & (key > pivot), weight, 0.0).to(tl.float64)
        else:
            held += tl.where(inside & (key > pivot), 1.0, 0.0).to(tl.float64)
    return tl.sum(held, 0)


@triton.jit
def _equal(pivot, row, UNUSED: tl.constexpr, FULL: tl.constexpr, CHUNK: tl.constexpr):
    """How many tokens have exactly this key, and the weight of each of them."""
    number = tl.zeros((CHUNK,), tl.int32)
    each = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, row[0], CHUNK):
        key, weight, _, inside = _chunk(start, row, UNUSED, FULL, CHUNK)
        same = inside & (key == pivot)
        number += same.to(tl.int32)
        each = tl.maximum(each, tl.where(same, weight, 0.0))
    return tl.sum(number, 0), tl.max(each, 0).to(tl.float64)


@triton.jit
def _threshold(limit, low, high, row, MASS: tl.constexpr, UNUSED: tl.constexpr, FULL: tl.constexpr,
               CHUNK: tl.constexpr):  # fmt: skip
    """The smallest key from low to high above which less than `limit` lies (of mass, or of tokens)."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        enough = held_above(middle.to(tl.int32), row, MASS, UNUSED, FULL, CHUNK) < limit
        low = tl.where(enough, low, middle + 1)
        high = tl.where(enough, middle, high)
    return low.to(tl.int32)


@triton.jit
def _left(
    start, seen, border, equals, min_p, row, UNUSED: tl.constexpr, FULL: tl.constexpr, CHUNK: tl.constexpr
):
    """The weights that the cuts leave of a chunk, 0 for the others; its tokens; how many lie on the border."""
    key, weight, token, inside = _chunk(start, row, UNUSED, FULL, CHUNK)
    same = (inside & (key == border)).to(tl.int32)
    kept = (key > border) | ((same > 0) & (seen + tl.cumsum(same, 0) <= equals))
    held = tl.where(inside & kept & (weight >= min_p), weight, 0.0).to(tl.float64)
    return held, token, tl.sum(same, 0)


@triton.jit
def draw_row(number, k, p, min_p, total, top, vocabulary, row, UNUSED: tl.constexpr, FULL: tl.constexpr,
             CHUNK: tl.constexpr):  # fmt: skip
    """The token that `number` picks from what the cuts leave."""
    border = row[2]  # every key above it stays, and of those equal to it the first `equals` tokens
    equals = vocabulary
    if k < vocabulary:
        border = _threshold(k.to(tl.float64), border, top, row, False, UNUSED, FULL, CHUNK)
        equals = k - held_above(border, row, False, UNUSED, FULL, CHUNK).to(tl.int32)
    if p < 1:
        if k < vocabulary:  # of what top-k has left
            found, each = _equal(border, row, UNUSED, FULL, CHUNK)
            total = (
                held_above(border, row, True, UNUSED, FULL, CHUNK)
                + tl.minimum(found, equals).to(tl.float64) * each
            )
        mass = p.to(tl.float64) * total
        lower = border
        border = _threshold(mass, lower, top, row, True, UNUSED, FULL, CHUNK)
        found, each = _equal(border, row, UNUSED, FULL, CHUNK)
        rest = mass - held_above(border, row, True, UNUSED, FULL, CHUNK)
        # A token stays if the likelier ones do not reach the mass: of equals, as many as it takes to reach it.
        wanted = tl.zeros((), tl.int32)
        while wanted < found:
            middle = (wanted + found) >> 1
            reaches = middle.to(tl.float64) * each >= rest
            found = tl.where(reaches, middle, found)
            wanted = tl.where(reaches, wanted, middle + 1)
        equals = tl.where(border == lower, tl.minimum(equals, wanted), wanted)
    # In token order, as on a CPU: first what is left weighs, then where the number falls.
    mass_left = tl.zeros((CHUNK,), tl.float64)
    seen = tl.zeros((), tl.int32)
    for start in range(0, row[0], CHUNK):
        held, _, same = _left(start, seen, border, equals, min_p, row, UNUSED, FULL, CHUNK)
        mass_left += held
        seen += same
    target = number * tl.sum(mass_left, 0)
    reached = tl.zeros((), tl.float64)
    seen = tl.zeros((), tl.int32)
    chosen = vocabulary
    last = tl.zeros((), tl.int32)
    for start in range(0, row[0], CHUNK):
        held, token, same = _left(start, seen, border, equals, min_p, row, UNUSED, FULL, CHUNK)
        cumulative = reached + tl.cumsum(held, 0)
        chosen = tl.minimum(
            chosen, tl.min(tl.where((held > 0) & (cumulative > target), token, vocabulary), 0)
        )
        last = tl.maximum(last, tl.max(tl.where(held > 0, token, 0), 0))
        reached += tl.sum(held, 0)
        seen += same
    # Rounding can put the target on the total: then the last token with weight.
    return tl.minimum(chosen, last)

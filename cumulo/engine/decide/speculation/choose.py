"""How many tokens to draft for whom, so that the step yields the most tokens per second. Pure arithmetic.

A row with k drafts yields 1 + r + r² + … + r^k tokens on average, if each drafted token is right with probability r
given that those before it were (Leviathan et al. 2023, eq. 1), and makes the step k tokens longer. Since a draft
never yields more than the one before it, taking the best next draft as long as it raises the rate is optimal for a
cost that is a straight line.
"""

from collections.abc import Sequence as ListLike
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

MOST_DRAFTED = 16  # tokens for one row
_SUREST = 0.98  # no draft is certain, however long the luck held


def most_draws(max_running: int, speculates: bool) -> int:
    """Tokens that one step may draw: so many logits are held. Few sequences may draft all the same."""
    return max(max_running, 4 * MOST_DRAFTED) if speculates else max_running


class Offer(NamedTuple):
    """What could be drafted for a row."""

    length: int  # tokens at most
    rate: float  # how often one is right, its predecessors being right


class DraftChoice(NamedTuple):
    counts: list[int]  # drafted tokens, by offer
    gain: float  # tokens per second, as a multiple of those without drafts


def choose(
    offers: ListLike[Offer], rows: int, tokens: int, fixed_s: float, token_s: float, budget: int
) -> DraftChoice:
    """`rows` draw a token each in a step of `tokens`; `budget`: drafts in all, at most."""
    counts = [0] * len(offers)
    yielded, seconds = float(rows), fixed_s + token_s * tokens
    before = yielded / seconds
    # Largest first: what the next draft of each offer yields.
    heap = [(-min(offer.rate, _SUREST), index) for index, offer in enumerate(offers) if offer.length > 0]
    heapify(heap)
    while heap and budget > 0:
        negative, index = heap[0]
        if -negative * seconds <= yielded * token_s:
            break
        yielded -= negative
        seconds += token_s
        counts[index] += 1
        budget -= 1
        if counts[index] < min(offers[index].length, MOST_DRAFTED):
            heapreplace(heap, (negative * min(offers[index].rate, _SUREST), index))
        else:
            heappop(heap)
    return DraftChoice(counts, yielded / seconds / before)

"""How many tokens to draft for whom, so that the step yields the most tokens per second. Pure arithmetic.

A row with k drafts yields 1 + r + r² + … + r^k tokens on average, if each drafted token is right with probability r
given that those before it were (Leviathan et al. 2023, eq. 1), and makes the step k tokens longer. Since a draft
never yields more than the one before it, taking the best next draft as long as it raises the rate is optimal for a
cost that is a straight line.
"""

from collections.abc import Sequence as ListLike
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

# Common past of a draft and the text, in tokens, from which on a draft is of the next class: a longer one is a
# better omen.
_CLASSES = (3, 5, 9)
CLASSES = len(_CLASSES) + 1
# The same for a draft model, which says how sure it is. One that does not is always of the last class. Narrow ones:
# a draft pays from a chance on of about a token's share of a step, and many are near it.
_CHANCES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)
CHANCE_CLASSES = len(_CHANCES) + 1
_PRIOR = 4.0  # so many observations of its own weigh as much as everybody's
_OWN_MEMORY = 0.95  # weight of an observation after the next one
_ALL_MEMORY = 0.995


def class_of(matched: int) -> int:
    return sum(matched >= bound for bound in _CLASSES)


def class_of_chance(chance: float) -> int:
    return sum(chance >= bound for bound in _CHANCES)


class Acceptance:
    __slots__ = ("_hits", "_memory", "_prior", "_tried")

    def __init__(self, prior: "Acceptance | None" = None, by_chance: bool = False) -> None:
        """`by_chance`: of a draft model, with its classes; those with a prior have the prior's."""
        self._prior = prior
        self._memory = _ALL_MEMORY if prior is None else _OWN_MEMORY
        # Before anything was seen: right as often as not, a little more where the past agrees for longer; or as
        # often as the least sure of a class says.
        self._tried = [3.0 + 0.5 * index for index in range(CLASSES)]
        self._hits = [tried - 2.0 for tried in self._tried]
        if by_chance:
            self._tried = [4.0] * CHANCE_CLASSES
            self._hits = [4.0 * chance for chance in (0.1, *_CHANCES)]
        if prior is not None:
            self._tried, self._hits = [0.0] * prior.classes, [0.0] * prior.classes

    @property
    def classes(self) -> int:
        return len(self._hits)

    def observe(self, kind: int, hits: int, misses: int) -> None:
        for outcome in (1.0,) * hits + (0.0,) * misses:
            self._hits[kind] = self._hits[kind] * self._memory + outcome
            self._tried[kind] = self._tried[kind] * self._memory + 1.0
        if self._prior is not None:
            self._prior.observe(kind, hits, misses)

    def rate(self, kind: int) -> float:
        """How often a token is right whose predecessors were all right."""
        if self._prior is None:
            return self._hits[kind] / self._tried[kind]
        return (self._hits[kind] + _PRIOR * self._prior.rate(kind)) / (self._tried[kind] + _PRIOR)


MOST_DRAFTED = 16  # tokens for one row
_SUREST = 0.98  # no draft is certain, however long the luck held


def most_draws(max_running: int, speculates: bool) -> int:
    """Tokens that one step may draw: so many logits are held. Few sequences may draft all the same."""
    return max(max_running, 4 * MOST_DRAFTED) if speculates else max_running


class Offer(NamedTuple):
    """What could be drafted for a row."""

    length: int  # tokens at most
    rate: float  # how often one is right, its predecessors being right
    rates: ListLike[float] = ()  # ... of each token, where they differ

    def rate_of(self, place: int) -> float:
        return min(self.rates[place] if self.rates else self.rate, _SUREST)


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
    heap = [(-offer.rate_of(0), index) for index, offer in enumerate(offers) if offer.length > 0]
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
            heapreplace(heap, (negative * offers[index].rate_of(counts[index]), index))
        else:
            heappop(heap)
    return DraftChoice(counts, yielded / seconds / before)


class AskedGain(NamedTuple):
    """What asking a drafter for a token behind every row would bring."""

    row: list[float]  # by row: expected tokens more, less those that its time is worth
    gain: float  # of all rows: tokens per second, as a multiple of those without


def worth_asking(
    shares: ListLike[float],
    rates: ListLike[ListLike[float]],
    fixed_s: float,
    token_s: float,
    proposal_s: float,
) -> AskedGain:
    """A drafter says how sure it is: a token is of kind k in `shares[k]` of cases, and then right with probability
    `rates[row][k]`. It is verified only where that pays; it costs `proposal_s` in any case."""
    count = len(rates)
    seconds = fixed_s + token_s * count
    base = count / seconds
    yielded, row_values = float(count), []
    for row in rates:
        seconds += proposal_s
        value = -base * proposal_s
        for share, rate in zip(shares, row, strict=True):
            if rate > base * token_s:
                value += share * (rate - base * token_s)
                yielded += share * rate
                seconds += share * token_s
        row_values.append(value)
    return AskedGain(row_values, yielded / seconds / base)

"""Acceptance: how often drafted tokens turned out right, per request, with everybody's average to begin with."""

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
        """Of a token whose predecessors were all right."""
        if self._prior is None:
            return self._hits[kind] / self._tried[kind]
        return (self._hits[kind] + _PRIOR * self._prior.rate(kind)) / (self._tried[kind] + _PRIOR)

"""Which rank should hold which expert, so that all have about as many tokens. Pure arithmetic over measured loads.

Ranks hold equal runs of experts, so a placement is an order: a new numbering of a layer's experts. The model
computes the same under any numbering that its router shares; `cumulo.train.parallel.expert_balance` renumbers one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cumulo.errors import ConfigError


def place_experts(loads: Sequence[float], ranks: int, groups: int = 1) -> tuple[int, ...]:
    """An order of experts whose `ranks` equal runs have loads as even as a greedy choice makes them.

    Heaviest first, each to the lightest rank that has room: longest processing time first (Graham 1969), here with
    places. With group-limited routing (`groups` > 1) the experts of a group stay in one group, whose number may
    change.
    """
    count = len(loads)
    if count % ranks or count % groups:
        raise ConfigError(f"{count} experts do not divide into {ranks} ranks and {groups} groups")
    if groups == 1:
        return tuple(expert for run in _fill(loads, ranks) for expert in run)
    size = count // groups
    members = [range(group * size, (group + 1) * size) for group in range(groups)]
    if groups % ranks == 0:
        by_rank = _fill([sum(loads[expert] for expert in group) for group in members], ranks)
        return tuple(expert for run in by_rank for group in run for expert in members[group])
    if ranks % groups == 0:
        return tuple(
            group[0] + place
            for group in members
            for place in place_experts([loads[expert] for expert in group], ranks // groups)
        )
    raise ConfigError(
        f"{groups} groups of experts cannot be placed whole on {ranks} ranks; take {groups} ranks"
    )


def heaviest_share(loads: Sequence[float], order: Sequence[int], ranks: int) -> float:
    """The load of the busiest rank under an order, in units of the mean: 1 when even."""
    size, total = len(loads) // ranks, sum(loads)
    runs = (order[begin : begin + size] for begin in range(0, len(loads), size))
    return max(sum(loads[expert] for expert in run) for run in runs) * ranks / total if total else 1.0


def _fill(weights: Sequence[float], bins: int) -> list[list[int]]:
    """Numbers of the weights in `bins` equally long lists, each ascending: as little moves as the choice allows."""
    room = len(weights) // bins
    filled: list[list[int]] = [[] for _ in range(bins)]
    sums = [0.0] * bins
    for number in sorted(range(len(weights)), key=lambda one: (-weights[one], one)):
        lightest = min(
            (bin for bin in range(bins) if len(filled[bin]) < room), key=lambda one: (sums[one], one)
        )
        filled[lightest].append(number)
        sums[lightest] += weights[number]
    return [sorted(numbers) for numbers in filled]


# Where copies of experts go, so that all ranks of expert-parallel serving have about as many tokens: experts that
# get most tokens are held by several ranks (DeepSeek-V3's EPLB, 2025). Pure arithmetic over measured loads.
#
# Every rank has as many places as any other. Which copy computes a token follows from the token's row in the
# step, so ranks agree on it without a word.

EMPTY = -1
_WORTH_MOVING = 0.95  # of the busiest rank's load: less is gained than moving weights costs


class HeldCopy(NamedTuple):
    """One place of a rank: copy number `copy` of an expert that has `copies`."""

    place: int
    expert: int
    copy: int
    copies: int


class CopyMove(NamedTuple):
    """The weights of an expert go from one rank to a place of another."""

    expert: int
    source: int
    target: int
    place: int


@dataclass(frozen=True, slots=True)
class ExpertCopies:
    """The copies of one layer: the expert in each place, by rank."""

    places: tuple[tuple[int, ...], ...]

    def ranks_of(self, expert: int) -> list[int]:
        """Those with a copy, one entry for each."""
        return [rank for rank, held in enumerate(self.places) for one in held if one == expert]

    def held(self, rank: int) -> list[HeldCopy]:
        """What a rank computes. Copies are numbered by rank, and within a rank by place."""
        found, seen = [], dict[int, int]()
        for number, experts in enumerate(self.places[: rank + 1]):
            for place, expert in enumerate(experts):
                if expert != EMPTY:
                    if number == rank:
                        copies = len(self.ranks_of(expert))
                        found.append(HeldCopy(place, expert, seen.get(expert, 0), copies))
                    seen[expert] = seen.get(expert, 0) + 1
        return found

    def busiest(self, loads: Sequence[float]) -> float:
        """The load of the busiest rank, in units of the mean: 1 when even."""
        copies = {expert: len(self.ranks_of(expert)) for held in self.places for expert in held}
        sums = [sum(loads[one] / copies[one] for one in held if one != EMPTY) for held in self.places]
        return max(sums) * len(sums) / sum(sums) if sum(sums) else 1.0

    def moves_to(self, after: "ExpertCopies") -> list[CopyMove]:
        """What ranks must send each other, in an order that all of them know."""
        found = []
        for rank, (before, wanted) in enumerate(zip(self.places, after.places, strict=True)):
            for place, expert in enumerate(wanted):
                if expert not in (before[place], EMPTY):
                    holders = self.ranks_of(expert)
                    found.append(CopyMove(expert, rank if rank in holders else holders[0], rank, place))
        return found


def copies_problem(experts: int, ranks: int, redundant: int) -> str | None:
    """Why so many copies cannot be placed, with what could be; None if they can."""
    if (experts + redundant) % ranks == 0 and redundant <= experts * (ranks - 1):
        return None
    least = -experts % ranks
    works = [str(count) for count in range(least, experts * (ranks - 1) + 1, ranks) if count][:3]
    return (
        f"{redundant} redundant experts next to {experts} cannot be shared evenly by ep {ranks}; "
        f"{', '.join(works)} can"
    )


def first_places(experts: int, ranks: int, redundant: int) -> ExpertCopies:
    """In order, as they are loaded; places for copies are empty."""
    if problem := copies_problem(experts, ranks, redundant):
        raise ConfigError(problem)
    size = (experts + redundant) // ranks
    runs = [range(experts * rank // ranks, experts * (rank + 1) // ranks) for rank in range(ranks)]
    return ExpertCopies(tuple((*run, *[EMPTY] * (size - len(run))) for run in runs))


def place_copies(loads: Sequence[float], before: ExpertCopies) -> ExpertCopies:
    """All places filled by measured loads; as before where that would gain little.

    Each further copy goes to the expert with the most load per copy. Copies are then dealt out, heaviest first,
    each to the lightest rank that has room and none of them yet; experts with several copies come before single
    ones, while there is room on several ranks.
    """
    ranks, size = len(before.places), len(before.places[0])
    copies = [1] * len(loads)
    for _ in range(ranks * size - len(loads)):
        most = max(
            (one for one in range(len(loads)) if copies[one] < ranks),
            key=lambda one: (loads[one] / copies[one], -one),
        )
        copies[most] += 1
    chosen: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0.0] * ranks
    by_load = sorted(range(len(loads)), key=lambda one: (copies[one] == 1, -loads[one] / copies[one], one))
    for expert in by_load:
        for _ in range(copies[expert]):
            rank = min(
                (one for one in range(ranks) if len(chosen[one]) < size),
                key=lambda one: (expert in chosen[one], sums[one], one),
            )
            chosen[rank].append(expert)
            sums[rank] += loads[expert] / copies[expert]
    after = ExpertCopies(
        tuple(_arranged(held, wanted) for held, wanted in zip(before.places, chosen, strict=True))
    )
    return after if after.busiest(loads) < _WORTH_MOVING * before.busiest(loads) else before


def _arranged(held: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """The wanted experts in places: who is here already stays where it is."""
    left = list(wanted)
    places = [EMPTY] * len(held)
    for place, expert in enumerate(held):
        if expert in left:
            places[place] = expert
            left.remove(expert)
    others = iter(sorted(left))
    return tuple(next(others) if expert == EMPTY else expert for expert in places)

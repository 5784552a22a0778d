"""Which rank should hold which expert, so that all have about as many tokens. Pure arithmetic over measured loads.

Ranks hold equal runs of experts, so a placement is an order: a new numbering of a layer's experts. The model
computes the same under any numbering that its router shares; `cumulo.train.parallel.expert_moves` renumbers one.
"""

from collections.abc import Sequence

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

"""How many GPUs each elastic job gets: again and again the step to a larger size that saves most per GPU. Done for
all jobs at once: the steps of a job, each the best from where the last one led, save less and less, so that the
best steps of all jobs are the first in one sorted list."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cumulo.cluster.decide.nodes import Ints

Floats = NDArray[np.float64]
_Steps = tuple[Floats, Ints, Ints, Ints]
SizedGroup = tuple[Ints, Floats]  # rows of jobs, and what each of their sizes costs
_WIDTHS = (6, 10, 18, 1 << 30)  # possible sizes of the jobs that are looked at together
_SAVES = 1e-9  # a step must save more
_FEW = 256  # steps that are sorted
# The length of a step that is not possible: finite, because inf / inf would be better than every other.
_NO_STEP = 1e300
_ALL_NODES = (
    16  # up to so many nodes every number of them is a possible size; beyond, the next is a quarter more
)


def possible_sizes(node_gpus: int, most: Ints, current: Ints, inside: tuple[int, ...] = ()) -> Ints:
    """0, sizes within a node, then whole nodes, and whatever a job has now."""
    largest = int(max(most.max(), current.max()))
    found = {0, *(inside or range(1, node_gpus + 1)), *np.unique(current).tolist()}
    nodes = 2
    while nodes * node_gpus <= largest:
        found.add(nodes * node_gpus)
        nodes = nodes + 1 if nodes < _ALL_NODES else -(-nodes * 5 // 4)
    return np.array(sorted(size for size in found if size <= max(largest, node_gpus)), dtype=np.int64)


def size_groups(options: Ints, largest: Ints) -> list[tuple[Ints, int]]:
    """Jobs with few possible sizes, and then those with more, because most jobs are small: rows, and how many
    options are looked at. `largest`: of each job."""
    widths = np.searchsorted(options, largest, side="right")
    found, narrower = [], 0
    for width in _WIDTHS:
        rows = np.flatnonzero((widths > narrower) & (widths <= width))
        narrower = width
        if len(rows):
            found.append((rows, min(width, len(options))))
    return found


def choose_sizes(groups: Sequence[SizedGroup], options: Ints, gpus: int) -> Ints:
    """Of each job: its size. A group is rows of jobs, and their costs [jobs, options]; the first option is 0."""
    at = np.zeros(sum(len(rows) for rows, _ in groups), dtype=np.int64)  # the option that each job has
    found = [step for rows, costs in groups for step in _steps(costs, options[: costs.shape[1]], rows)]
    if not found:
        return options[at]
    gains, jobs, targets, lengths = (np.concatenate(column) for column in zip(*found, strict=True))
    taken, left = _best_that_fit(gains, lengths, gpus)
    np.maximum.at(at, jobs[taken], targets[taken])
    if len(taken) < len(lengths) and left > 0:
        _fill_up(groups, options, at, left)
    return options[at]


def _best_that_fit(gains: Floats, lengths: Ints, left: int) -> tuple[Ints, int]:
    """The steps that save most, up to the first for which too few GPUs are left, and how many are left then. About
    half of the rest is looked at together, again and again: nothing is sorted but the last few."""
    found, rest = [], np.arange(len(gains))
    while len(rest) > _FEW:
        some = gains.take(rest)
        better = some > np.median(some[:: len(some) // _FEW])
        if not better.any():
            break
        chosen = rest[better]
        needed = int(lengths.take(chosen).sum())
        if needed <= left:
            found.append(chosen)
            left -= needed
            rest = rest[~better]
        else:
            rest = chosen
    rest = rest.take(np.argsort(-gains.take(rest), kind="stable"))
    needs = np.cumsum(lengths.take(rest))
    fitting = int(np.searchsorted(needs, left, side="right"))
    found.append(rest[:fitting])
    return np.concatenate(found), left - int(needs[fitting - 1] if fitting else 0)


def _steps(costs: Floats, options: Ints, jobs: Ints) -> list[_Steps]:
    """Every step that saves something: what it saves per GPU, of which job, to which option, by how many GPUs."""
    at: Ints = np.zeros(len(costs), dtype=np.int64)
    lengths = _lengths(options)
    found: list[_Steps] = []
    for first in range(1, len(options)):  # no step leads to an option before this one
        now = costs[np.arange(len(at)), at]
        gain, target = _best_step(costs[:, first:], lengths[:, first:].take(at, 0), now)
        target += first
        more = np.flatnonzero(gain > _SAVES)
        if len(more) < len(jobs):
            gain, target, at = gain.take(more), target.take(more), at.take(more)
            costs, jobs = costs.take(more, 0), jobs.take(more)
        found.append((gain, jobs, target, options.take(target) - options.take(at)))
        at = target
        if not len(jobs):
            break
    return found


def _lengths(options: Ints) -> Floats:
    """[options, options]: by how many GPUs the second is larger; so many where it is not that no step there saves
    anything."""
    found = options.astype(np.float64) - options[:, None]
    found[found <= 0] = _NO_STEP
    return found


def _best_step(costs: Floats, lengths: Floats, now: Floats) -> tuple[Floats, Ints]:
    """The best step of each job from what it costs now, and what it saves per GPU."""
    gains = now[:, None] - costs
    gains /= lengths
    best = gains.argmax(axis=1)
    return gains[np.arange(len(gains)), best], best


def _fill_up(groups: Sequence[SizedGroup], options: Ints, at: Ints, left: int) -> None:
    """The last few GPUs, step by step: the best step that still fits. Changes `at`."""
    gain, target = np.empty(len(at)), np.zeros(len(at), dtype=np.int64)
    again = np.ones(len(at), dtype=np.bool_)
    all_lengths = _lengths(options)
    while left > 0:
        for rows, costs in groups:
            some = np.flatnonzero(again[rows])
            if len(some):
                those = rows[some]
                lengths = all_lengths[:, : costs.shape[1]].take(at[those], 0)
                lengths[lengths > left] = _NO_STEP
                gain[those], target[those] = _best_step(costs[some], lengths, costs[some, at[those]])
        row = int(gain.argmax())
        if gain[row] <= _SAVES:
            return
        left -= int(options[target[row]] - options[at[row]])
        at[row] = target[row]
        again = options[target] - options[at] > left
        again[row] = True

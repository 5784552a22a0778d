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
    gains, jobs, targets, lengths = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.argsort(-gains, kind="stable")
    jobs, targets, lengths = jobs[order], targets[order], lengths[order]
    fitting = int(np.searchsorted(np.cumsum(lengths), gpus, side="right"))
    np.maximum.at(at, jobs[:fitting], targets[:fitting])
    left = gpus - int(lengths[:fitting].sum())
    if fitting < len(lengths) and left > 0:
        _fill_up(groups, options, at, left)
    return options[at]


def _steps(costs: Floats, options: Ints, jobs: Ints) -> list[_Steps]:
    """Every step that saves something: what it saves per GPU, of which job, to which option, by how many GPUs."""
    at = np.zeros(len(costs), dtype=np.int64)
    found: list[_Steps] = []
    while len(jobs):
        gain, target = _best_step(costs, options, at)
        more = gain > _SAVES
        before, at = at[more], target[more]
        if len(at) < len(jobs):
            costs, jobs = costs[more], jobs[more]
        found.append((gain[more], jobs, at, options[at] - options[before]))
    return found


def _best_step(costs: Floats, options: Ints, at: Ints, left: int | None = None) -> tuple[Floats, Ints]:
    """The best step of each job from the option it has, and what it saves per GPU."""
    rows = np.arange(len(costs))
    length = options.astype(np.float64) - options[at][:, None]
    gains = costs[rows, at][:, None] - costs
    behind = length <= 0
    length[behind] = 1.0
    gains /= length
    gains[behind] = -np.inf
    if left is not None:
        gains[length > left] = -np.inf
    best = gains.argmax(axis=1)
    return gains[rows, best], best


def _fill_up(groups: Sequence[SizedGroup], options: Ints, at: Ints, left: int) -> None:
    """The last few GPUs, step by step: the best step that still fits. Changes `at`."""
    gain, target = np.empty(len(at)), np.zeros(len(at), dtype=np.int64)
    again = np.ones(len(at), dtype=np.bool_)
    while left > 0:
        for rows, costs in groups:
            some = np.flatnonzero(again[rows])
            if len(some):
                those = rows[some]
                gain[those], target[those] = _best_step(
                    costs[some], options[: costs.shape[1]], at[those], left
                )
        row = int(gain.argmax())
        if gain[row] <= _SAVES:
            return
        left -= int(options[target[row]] - options[at[row]])
        at[row] = target[row]
        again = options[target] - options[at] > left
        again[row] = True

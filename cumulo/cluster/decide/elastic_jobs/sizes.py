"""How many GPUs each elastic job gets: again and again the step to a larger size that saves most per GPU. Done for
all jobs at once: the steps of a job, each the best from where the last one led, save less and less, so that the
best steps of all jobs are the first in one sorted list."""

import numpy as np
from numpy.typing import NDArray

from cumulo.cluster.decide.nodes import Ints

Floats = NDArray[np.float64]
_Steps = tuple[Floats, Ints, Ints, Ints]
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


def choose_sizes(costs: Floats, options: Ints, gpus: int) -> Ints:
    """Of each job: its size. `costs` is [jobs, options]; the first option is 0."""
    at = np.zeros(len(costs), dtype=np.int64)  # the option that each job has
    gains, jobs, targets, lengths = (
        np.concatenate(column) for column in zip(*_all_steps(costs, options), strict=True)
    )
    order = np.argsort(-gains, kind="stable")
    jobs, targets, lengths = jobs[order], targets[order], lengths[order]
    fitting = int(np.searchsorted(np.cumsum(lengths), gpus, side="right"))
    np.maximum.at(at, jobs[:fitting], targets[:fitting])
    left = gpus - int(lengths[:fitting].sum())
    if fitting < len(lengths) and left > 0:
        _fill_up(costs, options, at, left)
    return options[at]


def _all_steps(costs: Floats, options: Ints) -> list[_Steps]:
    """Of jobs with few possible sizes, and then of those with more: most jobs are small."""
    possible = np.isfinite(costs)
    widths = possible.shape[1] - possible[:, ::-1].argmax(axis=1)  # up to the largest that is possible
    found: list[_Steps] = []
    narrower = 0
    for width in _WIDTHS:
        rows = np.flatnonzero((widths > narrower) & (widths <= width))
        narrower = width
        if len(rows):
            found += _steps(costs[rows, :width], options[:width], rows)
    return found


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


def _fill_up(costs: Floats, options: Ints, at: Ints, left: int) -> None:
    """The last few GPUs, step by step: the best step that still fits. Changes `at`."""
    gain, target = _best_step(costs, options, at, left)
    while left > 0:
        row = int(gain.argmax())
        if gain[row] <= _SAVES:
            return
        left -= int(options[target[row]] - options[at[row]])
        at[row] = target[row]
        again = np.flatnonzero((options[target] - options[at] > left) | (np.arange(len(at)) == row))
        gain[again], target[again] = _best_step(costs[again], options, at[again], left)

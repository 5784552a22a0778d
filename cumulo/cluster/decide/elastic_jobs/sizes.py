"""How many GPUs each elastic job gets: again and again the step to a larger size that saves most per GPU. Done for
all jobs at once: the steps of a job, each the best from where the last one led, save less and less, so that the
best steps of all jobs are the first in one sorted list."""

import numpy as np
from numpy.typing import NDArray

from cumulo.cluster.decide.nodes import Ints

Floats = NDArray[np.float64]
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
    gains, jobs, targets, lengths = _steps(costs, options)
    order = np.argsort(-gains, kind="stable")
    jobs, targets, lengths = jobs[order], targets[order], lengths[order]
    fitting = int(np.searchsorted(np.cumsum(lengths), gpus, side="right"))
    np.maximum.at(at, jobs[:fitting], targets[:fitting])
    left = gpus - int(lengths[:fitting].sum())
    if fitting < len(lengths) and left > 0:
        _fill_up(costs, options, at, left)
    return options[at]


def _steps(costs: Floats, options: Ints) -> tuple[Floats, Ints, Ints, Ints]:
    """Every step that saves something: what it saves per GPU, of which job, to which option, by how many GPUs."""
    rows = np.arange(len(costs))
    at = np.zeros(len(costs), dtype=np.int64)
    found: list[tuple[Floats, Ints, Ints, Ints]] = []
    while len(rows):
        gain, target = _best_step(costs[rows], options, at)
        more = gain > _SAVES
        rows, before, at = rows[more], at[more], target[more]
        found.append((gain[more], rows, at, options[at] - options[before]))
    gains, jobs, targets, lengths = (np.concatenate(column) for column in zip(*found, strict=True))
    return gains, jobs, targets, lengths


def _best_step(costs: Floats, options: Ints, at: Ints, left: int | None = None) -> tuple[Floats, Ints]:
    """The best step of each job from the option it has, and what it saves per GPU."""
    now = np.take_along_axis(costs, at[:, None], axis=1)
    length = options - options[at][:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        gains = (now - costs) / length
    gains[length <= 0] = -np.inf
    if left is not None:
        gains[length > left] = -np.inf
    best = gains.argmax(axis=1)
    return gains[np.arange(len(best)), best], best


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

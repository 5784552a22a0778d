"""How many GPUs each elastic job gets: again and again the step to a larger size that saves most per GPU. Done for
all jobs at once: the steps of a job, each the best from where the last one led, save less and less, so that the
best steps of all jobs are the first in one sorted list. Tenants with limits have such a list each."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cumulo.cluster.decide.nodes import Flags, Ints

Floats = NDArray[np.float64]

_SAVES = 1e-9  # a step must save more per GPU
# The length of a step that is not possible: finite, because inf / inf would be better than every other.
_NO_STEP = 1e300
# Up to so many nodes every number of them is a possible size; beyond, the next is a quarter more.
_ALL_NODES = 16


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The number of each job's tenant, and how many GPUs each tenant's jobs may have together."""

    tenant: Ints
    room: Ints

    def left(self, sizes: Ints) -> Ints:
        """What is left to each tenant when each job has so many GPUs."""
        return self.room - np.bincount(self.tenant, sizes, len(self.room)).astype(np.int64)


def possible_sizes(node_gpus: int, most: Ints, current: Ints, inside: tuple[int, ...] = ()) -> Ints:
    """0, sizes within a node, then whole nodes, and whatever a job has now."""
    largest = int(max(most.max(), current.max()))
    found = {0, *(inside or range(1, node_gpus + 1)), *np.unique(current).tolist()}
    nodes = 2
    while nodes * node_gpus <= largest:
        found.add(nodes * node_gpus)
        nodes = nodes + 1 if nodes < _ALL_NODES else -(-nodes * 5 // 4)
    return np.array(sorted(size for size in found if size <= max(largest, node_gpus)), dtype=np.int64)


def choose_sizes(costs: Floats, options: Ints, gpus: int, limits: TenantLimits) -> Ints:
    """The size of each job. `costs`: [jobs, options], what each size costs; the first option is 0."""
    gains, jobs, targets, lengths = _steps(costs, options)
    order = np.argsort(-gains, kind="stable")  # the first job's step first among equals
    order = order[_within_limits(lengths[order], limits.tenant[jobs[order]], limits.room)]
    fitting = int(np.searchsorted(np.cumsum(lengths[order]), gpus, side="right"))
    taken = order[:fitting]
    at = np.zeros(len(costs), dtype=np.int64)
    np.maximum.at(at, jobs[taken], targets[taken])
    if fitting < len(gains):
        _fill_up(costs, options, at, gpus, limits)
    return options[at]


def _steps(costs: Floats, options: Ints) -> tuple[Floats, Ints, Ints, Ints]:
    """Every step that saves something: what it saves per GPU, of which job, to which option, by how many GPUs."""
    found: list[tuple[Floats, Ints, Ints, Ints]] = []
    longer = _longer(options)
    jobs, at = np.arange(len(costs)), np.zeros(len(costs), dtype=np.int64)
    while len(jobs):
        gain, target = _best_step(costs[jobs], longer[at], at)
        more = gain > _SAVES
        gain, target, jobs, at = gain[more], target[more], jobs[more], at[more]
        found.append((gain, jobs, target, options[target] - options[at]))
        at = target
    gains, rows, targets, lengths = (np.concatenate(column) for column in zip(*found, strict=True))
    return gains, rows, targets, lengths


def _longer(options: Ints) -> Floats:
    """[options, options]: by how many GPUs the second is larger; so many where it is not that no step there saves
    anything."""
    found = options.astype(np.float64) - options[:, None]
    found[found <= 0] = _NO_STEP
    return found


def _best_step(costs: Floats, longer: Floats, at: Ints) -> tuple[Floats, Ints]:
    """The best step of each job from the option it has, and what it saves per GPU."""
    rows = np.arange(len(costs))
    gains = (costs[rows, at][:, None] - costs) / longer
    best = gains.argmax(axis=1)
    return gains[rows, best], best


def _within_limits(lengths: Ints, tenant: Ints, room: Ints) -> Flags:
    """Which of these steps remain, of which the first is the best: of each tenant those up to the first for which
    it has too few GPUs left."""
    order = np.argsort(tenant, kind="stable")
    needs, of = np.cumsum(lengths[order]), tenant[order]
    first = np.flatnonzero(np.diff(of, prepend=-1))
    before = np.zeros(len(room), dtype=np.int64)
    before[of[first]] = needs[first] - lengths[order[first]]
    kept = np.zeros(len(lengths), dtype=np.bool_)
    kept[order] = needs - before[of] <= room[of]
    return kept


def _fill_up(costs: Floats, options: Ints, at: Ints, gpus: int, limits: TenantLimits) -> None:
    """The last few GPUs, step by step: the best step that still fits. Changes `at`."""
    tenant, longer = limits.tenant, _longer(options)
    left, room = gpus - int(options[at].sum()), limits.left(options[at])
    gain, target = np.zeros(len(at)), at.copy()

    def look(jobs: Ints) -> None:
        """For the best steps of these jobs that fit."""
        far = longer[at[jobs]]
        far[far > np.minimum(room[tenant[jobs]], left)[:, None]] = _NO_STEP
        gain[jobs], target[jobs] = _best_step(costs[jobs], far, at[jobs])

    look(np.flatnonzero(room[tenant] > 0))
    while left > 0 and len(gain):
        best = int(gain.argmax())
        if gain[best] <= _SAVES:
            return
        needs = int(options[target[best]] - options[at[best]])
        if needs > min(int(room[tenant[best]]), left):
            # A step that must be shorter saves less: who would still be the best?
            long = options[target] - options[at] > np.minimum(room[tenant], left)
            look(np.flatnonzero(long & (gain > gain[~long].max(initial=0.0))))
            continue
        left -= needs
        room[tenant[best]] -= needs
        at[best] = target[best]
        look(np.array([best]))

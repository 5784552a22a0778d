"""How many GPUs each elastic job gets: again and again the step to a larger size that saves most per GPU. Done for
all jobs at once: the steps of a job, each the best from where the last one led, save less and less, so that the
best steps of all jobs are the first in one sorted list. Tenants with limits have such a list each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cumulo.cluster.decide.nodes import Ints

Floats = NDArray[np.float64]
_Steps = tuple[Floats, Ints, Ints, Ints]
SizedGroup = tuple[Ints, Floats]  # rows of jobs, and what each of their sizes costs
_WIDTHS = (6, 10, 18, 1 << 30)  # possible sizes of the jobs that are looked at together
_SAVES = 1e-9  # a step must save more
_FEW = 256  # steps that are sorted
_MORE = 1.25  # steps are priced again when there are so many times more of them
_NEAR = 1.2  # times or divided by the last price
_NO_PRICE = 1e30  # at which nobody wants a GPU
# The length of a step that is not possible: finite, because inf / inf would be better than every other.
_NO_STEP = 1e300
_ALL_NODES = (
    16  # up to so many nodes every number of them is a possible size; beyond, the next is a quarter more
)


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The number of each job's tenant, and how many GPUs each tenant's jobs may have together."""

    tenant: Ints
    room: Ints

    def those(self, which: NDArray[np.bool_]) -> "TenantLimits":
        """Of some jobs alone."""
        return TenantLimits(self.tenant[which], self.room)

    def without(self, gpus: Ints) -> "TenantLimits":
        """What is left when each job has got so many GPUs."""
        has = np.bincount(self.tenant, gpus, len(self.room)).astype(np.int64)
        return TenantLimits(self.tenant, self.room - has)


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


class Prices:
    """What a GPU was worth at the last decision, to everybody and within each tenant's limit; 0: nobody knows. The
    next decision begins near it: without, its result is the same after more steps."""

    def __init__(self) -> None:
        self.of_all = 0.0
        self.of_tenant: Floats = np.zeros(0)

    def of_jobs(self, jobs: int, limits: TenantLimits | None) -> Floats:
        if limits is None:
            return np.full(jobs, self.of_all)
        return np.maximum(self.of_all, self.of_tenants(len(limits.room))[limits.tenant])

    def of_tenants(self, tenants: int) -> Floats:
        if len(self.of_tenant) != tenants:
            known = self.of_tenant[:tenants]
            self.of_tenant = np.append(known, np.zeros(tenants - len(known)))
        return self.of_tenant


def choose_sizes(
    groups: Sequence[SizedGroup],
    options: Ints,
    gpus: int,
    limits: TenantLimits | None = None,
    prices: Prices | None = None,
) -> Ints:
    """Of each job: its size. A group is rows of jobs, and their costs [jobs, options]; the first option is 0."""
    prices = prices or Prices()
    at = _best_at(groups, options, np.full(sum(len(rows) for rows, _ in groups), _SAVES))
    tight = _too_many(options[at], gpus, limits)
    if not tight.any():
        return options[at]
    if not tight.all():  # the jobs of other tenants are as large as it pays
        groups = [(rows[tight[rows]], costs[tight[rows]]) for rows, costs in groups]
        groups = [(rows, costs) for rows, costs in groups if len(rows)]
    at[tight] = 0
    gpus -= int(options[at].sum())
    found = _chosen(groups, options, gpus, limits, prices, prices.of_jobs(len(at), limits))
    if found is None:
        found = _chosen(groups, options, gpus, limits, prices, np.zeros(len(at)))
        assert found is not None
    at[tight] = found[tight]
    return options[at]


def _chosen(
    groups: Sequence[SizedGroup],
    options: Ints,
    gpus: int,
    limits: TenantLimits | None,
    prices: Prices,
    price: Floats,
) -> Ints | None:
    """The option of each job. `price`: near what a GPU is worth to it; None: it is worth more."""
    at, worth = _near(price, groups, options, gpus, limits)
    least = float((_NEAR * price[at > 0]).min(initial=np.inf))  # that the steps up to here save
    left = gpus - int(options[at].sum())
    limits = limits and limits.without(options[at])
    found = _worthwhile_steps(groups, options, at, left, limits, worth)
    if not found:
        return at
    gains, jobs, targets, lengths = (np.concatenate(column) for column in zip(*found, strict=True))
    steps = len(gains)
    if limits is not None:
        kept = _within_limits(gains, lengths, jobs, limits, prices)
        gains, jobs, targets, lengths = gains[kept], jobs[kept], targets[kept], lengths[kept]
    taken, left = _best_that_fit(gains, lengths, left)
    worth_now = float(np.delete(gains, taken).max(initial=0.0))
    prices.of_all = (
        worth_now or prices.of_all / 2
    )  # not 0 at once: often they are too few at every other decision
    if worth_now > least:
        return None
    before = options[at]
    np.maximum.at(at, jobs[taken], targets[taken])
    if len(taken) < steps and left > 0:
        _fill_up(groups, options, at, left, limits and limits.without(options[at] - before))
    return at


def _best_at(groups: Sequence[SizedGroup], options: Ints, price: Floats) -> Ints:
    """Of each job: the option that is best for it where a GPU costs so much: its steps that save more lead there.
    With the price of the least step that counts, that is where its steps end if nobody else wants GPUs."""
    at = np.zeros(len(price), dtype=np.int64)
    for rows, costs in groups:
        at[rows] = (costs + price[rows][:, None] * options[: costs.shape[1]]).argmin(axis=1)
    return at


def _near(
    price: Floats, groups: Sequence[SizedGroup], options: Ints, gpus: int, limits: TenantLimits | None
) -> tuple[Ints, Floats]:
    """Options that jobs have reached for sure, because all steps that save far more than these prices fit; and what
    a GPU is worth for sure to each job, because the steps that save little less do not fit."""
    worth = np.full(len(price), _SAVES)
    if not price.any():
        return np.zeros(len(price), dtype=np.int64), worth
    begin = _best_at(groups, options, np.where(price > 0, _NEAR * price, _NO_PRICE))
    low = np.maximum(price / _NEAR, _SAVES)
    more = options[_best_at(groups, options, low)]
    if limits is None:
        worth = low if more.sum() > gpus else worth
    else:
        wanted = np.bincount(limits.tenant, more, len(limits.room))
        worth = np.where((wanted > limits.room)[limits.tenant], low, worth)
        if np.minimum(wanted, limits.room).sum() > gpus:
            np.maximum(worth, low.min(), out=worth)
        fits = np.bincount(limits.tenant, options[begin], len(limits.room)) <= limits.room
        begin[~fits[limits.tenant]] = 0
    if options[begin].sum() > gpus:
        begin[:] = 0
    return begin, worth


def _too_many(sizes: Ints, gpus: int, limits: TenantLimits | None) -> NDArray[np.bool_]:
    """Which jobs cannot all be so large: those of tenants beyond their limits, or all."""
    if sizes.sum() > gpus:
        return np.ones(len(sizes), dtype=np.bool_)
    if limits is None:
        return np.zeros(len(sizes), dtype=np.bool_)
    beyond: NDArray[np.bool_] = np.bincount(limits.tenant, sizes, len(limits.room)) > limits.room
    return beyond[limits.tenant]


def _worthwhile_steps(
    groups: Sequence[SizedGroup],
    options: Ints,
    at: Ints,
    gpus: int,
    limits: TenantLimits | None,
    worth: Floats,
) -> list[_Steps]:
    """All steps from these options that may be among the best. What a GPU is worth grows with the steps that are
    known: those that save less are not looked for."""
    found: list[_Steps] = []
    total, priced = 0, float(gpus if limits is None else min(gpus, limits.room[limits.tenant].min()))
    for rows, costs in groups:
        for step in _steps(costs, options[: costs.shape[1]], rows, at[rows], worth):
            found.append(step)
            total += int(step[3].sum())
            if total > _MORE * priced:
                priced = total
                _raise_worth(worth, found, gpus, limits)
    return found


def _raise_worth(worth: Floats, found: list[_Steps], gpus: int, limits: TenantLimits | None) -> None:
    """To what the first step saves per GPU for which too few GPUs are left."""
    gains, jobs, lengths = (np.concatenate([step[column] for step in found]) for column in (0, 1, 3))
    if limits is not None:
        prices = Prices()
        kept = _within_limits(gains, lengths, jobs, limits, prices)
        gains, lengths = gains[kept], lengths[kept]
        np.maximum(worth, prices.of_tenant[limits.tenant], out=worth)
    if lengths.sum() > gpus:
        order = np.argsort(-gains, kind="stable")
        first = int(np.searchsorted(np.cumsum(lengths[order]), gpus, side="right"))
        np.maximum(worth, gains[order[first]], out=worth)


def _by_tenant(gains: Floats, lengths: Ints, tenant: Ints, room: Ints) -> tuple[Ints, Ints]:
    """The steps of tenants for whom they are too many, of each tenant the best first; and how many GPUs its steps
    up to each one need."""
    tight = np.bincount(tenant, lengths, len(room)) > room
    rest = np.flatnonzero(tight[tenant])
    rest = rest[np.lexsort((-gains[rest], tenant[rest]))]
    needs, of = np.cumsum(lengths[rest]), tenant[rest]
    first = np.flatnonzero(np.diff(of, prepend=-1))
    before = np.zeros(len(room), dtype=np.int64)
    before[of[first]] = needs[first] - lengths[rest[first]]
    return rest, needs - before[of]


def _within_limits(
    gains: Floats, lengths: Ints, jobs: Ints, limits: TenantLimits, prices: Prices
) -> NDArray[np.bool_]:
    """Which steps remain: of each tenant the best, up to the first for which it has too few GPUs left. It tells
    what a GPU is worth there."""
    tenant, room = limits.tenant[jobs], limits.room
    order, needs = _by_tenant(gains, lengths, tenant, room)
    beyond = order[needs > room[tenant[order]]]
    prices.of_tenants(len(room))[tenant[beyond[::-1]]] = gains[beyond[::-1]]  # the first is written last
    kept = np.ones(len(gains), dtype=np.bool_)
    kept[beyond] = False
    return kept


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


def _steps(costs: Floats, options: Ints, jobs: Ints, at: Ints, worth: Floats) -> Iterator[_Steps]:
    """Every step that saves as much as GPUs are worth: what it saves per GPU, of which job, to which option, by how
    many GPUs."""
    lengths = _lengths(options)
    while len(jobs):
        first = int(at.min()) + 1  # no step leads to an option before this one
        if first == len(options):
            return
        now = costs[np.arange(len(at)), at]
        gain, target = _best_step(costs[:, first:], lengths[:, first:].take(at, 0), now)
        target += first
        more = np.flatnonzero((gain >= worth.take(jobs)) & (gain > _SAVES))
        if len(more) < len(jobs):
            gain, target, at = gain.take(more), target.take(more), at.take(more)
            costs, jobs = costs.take(more, 0), jobs.take(more)
        yield gain, jobs, target, options.take(target) - options.take(at)
        at = target


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


def _fill_up(
    groups: Sequence[SizedGroup], options: Ints, at: Ints, left: int, limits: TenantLimits | None
) -> None:
    """The last few GPUs, step by step: the best step that still fits. Changes `at`."""
    if limits is None:
        limits = TenantLimits(np.zeros(len(at), dtype=np.int64), np.array([left]))
    tenant, room = limits.tenant, limits.room
    there = np.unique(np.concatenate([tenant[rows] for rows, _ in groups]))
    apart = len(there) > 1 and room[there].sum() <= left  # what one tenant gets, no other lacks
    gain, target = np.zeros(len(at)), np.zeros(len(at), dtype=np.int64)
    all_lengths, fits = _lengths(options), np.minimum(room, left)
    again = fits[tenant] > 0
    while left > 0:
        for rows, costs in groups:
            some = np.flatnonzero(again[rows])
            if len(some):
                those = rows[some]
                lengths = all_lengths[:, : costs.shape[1]].take(at[those], 0)
                lengths[lengths > fits[tenant[those]][:, None]] = _NO_STEP
                gain[those], target[those] = _best_step(costs[some], lengths, costs[some, at[those]])
        best = _best_of_tenants(gain, tenant) if apart else np.array([gain.argmax()])
        best = best[np.cumsum(options[target[best]] - options[at[best]]) <= left]
        if not len(best) or gain[best[0]] <= _SAVES:
            return
        needs = options[target[best]] - options[at[best]]
        left -= int(needs.sum())
        room[tenant[best]] -= needs
        at[best] = target[best]
        fits = np.minimum(room, left)
        again = options[target] - options[at] > fits[tenant]
        again[best] = True


def _best_of_tenants(gain: Floats, tenant: Ints) -> Ints:
    """The row with the best step of each tenant, the best of all first."""
    rows = np.flatnonzero(gain > _SAVES)
    rows = rows[np.argsort(-gain[rows], kind="stable")]
    return rows[np.sort(np.unique(tenant[rows], return_index=True)[1])]

"""How many GPUs each elastic job gets: again and again the step to a larger size that saves most per GPU. Done for
all jobs at once: the steps of a job, each the best from where the last one led, save less and less, so that the
best steps of all jobs are the first in one sorted list. Tenants with limits have such a list each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cumulo.cluster.decide.elastic_jobs.prices import NEAR, SAVES, Flags, Floats, Prices, price_brackets
from cumulo.cluster.decide.nodes import Ints

_Steps = tuple[Floats, Ints, Ints, Ints]
SizedGroup = tuple[Ints, Floats]  # rows of jobs, and what each of their sizes costs
_WIDTHS = (6, 10, 18, 1 << 30)  # possible sizes of the jobs that are looked at together
_FEW = 256  # steps that are sorted
# One GPU of so many is not worth a search among thousands of jobs: it waits for the next decision.
_CRUMBS = 1000
# The length of a step that is not possible: finite, because inf / inf would be better than every other.
_NO_STEP = 1e300
_ALL_NODES = (
    16  # up to so many nodes every number of them is a possible size; beyond, the next is a quarter more
)


NO_LIMIT = 1 << 40
_CHEAPEST = 1.5  # part of the price at which all fits that is tried


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The number of each job's tenant, and how many GPUs each tenant's jobs may have together."""

    tenant: Ints
    room: Ints

    def those(self, which: Flags) -> "TenantLimits":
        """Of some jobs alone."""
        return TenantLimits(self.tenant[which], self.room)

    def without(self, gpus: Ints) -> "TenantLimits":
        """What is left when each job has got so many GPUs."""
        has = np.bincount(self.tenant, gpus, len(self.room)).astype(np.int64)
        return TenantLimits(self.tenant, self.room - has)


def possible_sizes(node_gpus: int, most: Ints, current: Ints, inside: tuple[int, ...] = ()) -> Ints:
    """0, sizes within a node, then whole nodes, and whatever a job has now."""
    largest = int(max(most.max(), current.max()))
    found = {0, *(inside or range(1, node_gpus + 1)), *np.flatnonzero(np.bincount(current)).tolist()}
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


def choose_sizes(
    groups: Sequence[SizedGroup],
    options: Ints,
    gpus: int,
    limits: TenantLimits | None = None,
    prices: Prices | None = None,
) -> Ints:
    """Of each job: its size. A group is rows of jobs, and their costs [jobs, options]; the first option is 0."""
    prices = prices or Prices()
    at = _best_at(groups, options, np.full(sum(len(rows) for rows, _ in groups), SAVES))
    tight = _too_many(options[at], gpus, limits)
    if not tight.any():
        return options[at]
    if not tight.all():  # the jobs of other tenants are as large as it pays
        groups = _some_of(groups, tight)
    cheapest = np.where(tight, at, 0)
    at[tight] = 0
    gpus -= int(options[at].sum())
    near = _near(groups, options, gpus, limits or _no_limits(len(at)), prices, cheapest)
    found = _chosen(groups, options, gpus, limits, near)
    if found is None:  # a price was off by a rounding error
        far = np.zeros(len(at), dtype=np.int64), np.full(len(at), SAVES), np.inf
        found = _chosen(groups, options, gpus, limits, far)
        assert found is not None
    at[tight] = found[tight]
    return options[at]


def _some_of(groups: Sequence[SizedGroup], which: Flags) -> list[SizedGroup]:
    """Some jobs of these groups."""
    found = [(rows[which[rows]], costs[which[rows]]) for rows, costs in groups]
    return [(rows, costs) for rows, costs in found if len(rows)]


def _no_limits(jobs: int) -> TenantLimits:
    return TenantLimits(np.zeros(jobs, dtype=np.int64), np.array([NO_LIMIT]))


def _chosen(
    groups: Sequence[SizedGroup],
    options: Ints,
    gpus: int,
    limits: TenantLimits | None,
    near: tuple[Ints, Floats, float],
) -> Ints | None:
    """The option of each job. `near`: where to begin; None: a step is left that saves more than one up to there."""
    at, worth, least = near
    left = gpus - int(options[at].sum())
    limits = limits and limits.without(options[at])
    found = [
        step
        for rows, costs in groups
        for step in _steps(costs, options[: costs.shape[1]], rows, at[rows], worth)
    ]
    if not found:
        return at
    gains, jobs, targets, lengths = (np.concatenate(column) for column in zip(*found, strict=True))
    steps = len(gains)
    if limits is not None:
        kept = _within_limits(gains, lengths, jobs, limits)
        gains, jobs, targets, lengths = gains[kept], jobs[kept], targets[kept], lengths[kept]
    taken, left = _best_that_fit(gains, lengths, left)
    if float(np.delete(gains, taken).max(initial=0.0)) > least:
        return None
    before = options[at]
    np.maximum.at(at, jobs[taken], targets[taken])
    if len(taken) < steps and left > gpus // _CRUMBS:
        _fill_up(groups, options, at, left, limits and limits.without(options[at] - before))
    return at


def _best_at(groups: Sequence[SizedGroup], options: Ints, price: Floats) -> Ints:
    """Of each job: the option that is best for it where a GPU costs so much: its steps that save more lead there.
    With the price of the least step that counts, that is where its steps end if nobody else wants GPUs."""
    at = np.zeros(len(price), dtype=np.int64)
    for rows, costs in groups:
        paid = np.einsum("i,j->ij", price[rows], options[: costs.shape[1]])  # twice as fast as broadcasting
        paid += costs
        at[rows] = paid.argmin(axis=1)
    return at


def _near(
    groups: Sequence[SizedGroup],
    options: Ints,
    gpus: int,
    limits: TenantLimits,
    prices: Prices,
    cheapest: Ints,
) -> tuple[Ints, Floats, float]:
    """Options that jobs have reached for sure, because all steps that save more fit; what a GPU is worth for sure
    to each job, because not all steps that save more fit; and what the steps up to here save at least. `cheapest`:
    what jobs would have if GPUs cost nothing."""
    tenant, room = limits.tenant, limits.room
    at_price = {SAVES: cheapest}
    those = limited = groups  # of the jobs whose tenants' prices are looked for
    left = len(room)

    def at_one(price: Floats) -> Ints:
        """The options of all jobs, at one price for all."""
        key = float(price[0])
        if key not in at_price:
            at_price[key] = _best_at(groups, options, np.full(len(tenant), key))
        return at_price[key]

    def wanted(at: Ints) -> Ints:
        """GPUs of each tenant."""
        return np.bincount(tenant, options[at], len(room))

    def by_all(price: Floats, _: Flags) -> Ints:
        return np.array([np.minimum(wanted(at_one(price)), room).sum()])

    def by_some(price: Floats, which: Flags) -> Ints:
        nonlocal those, left
        which = which & tight
        if 2 * which.sum() < left:  # the jobs of the others are not looked at any more
            those, left = _some_of(limited, which[tenant]), int(which.sum())
        return wanted(_best_at(those, options, price[tenant]))

    cheap = dear = np.array([SAVES])
    if np.minimum(wanted(cheapest), room).sum() > gpus:
        cheap, dear = price_brackets(by_all, np.array([gpus]), np.array([prices.of_all]), dear)
    has = wanted(at_one(dear))
    tight = has > room  # their limits bind even at this price
    known, low = prices.of_tenants(len(room)), np.full(len(room), dear)
    high, at, among = low, at_one(dear), tight[tenant]
    if tight.any():
        those = limited = _some_of(groups, among)
        left = int(tight.sum())
        low, high = price_brackets(by_some, room, np.where(tight, known, low), low)
        at = np.where(among, _best_at(limited, options, high[tenant]), at)
    while cheap > SAVES:  # for sure only if the least that tenants get then does not fit
        then = wanted(np.where(among, at, at_one(cheap)))
        if np.where(then > room, has, then).sum() > gpus:
            break
        cheap = cheap / NEAR if cheap > dear / _CHEAPEST else np.array([SAVES])
    prices.learn(float(dear[0]), np.where(tight, high, known))
    return at, np.where(tight, low, cheap)[tenant], float(high[tenant[at > 0]].min(initial=np.inf))


def _too_many(sizes: Ints, gpus: int, limits: TenantLimits | None) -> Flags:
    """Which jobs cannot all be so large: those of tenants beyond their limits, or all."""
    if sizes.sum() > gpus:
        return np.ones(len(sizes), dtype=np.bool_)
    if limits is None:
        return np.zeros(len(sizes), dtype=np.bool_)
    beyond: Flags = np.bincount(limits.tenant, sizes, len(limits.room)) > limits.room
    return beyond[limits.tenant]


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


def _within_limits(gains: Floats, lengths: Ints, jobs: Ints, limits: TenantLimits) -> Flags:
    """Which steps remain: of each tenant the best, up to the first for which it has too few GPUs left."""
    tenant, room = limits.tenant[jobs], limits.room
    order, needs = _by_tenant(gains, lengths, tenant, room)
    beyond = order[needs > room[tenant[order]]]
    kept = np.ones(len(gains), dtype=np.bool_)
    kept[beyond] = False
    return kept


def _best_that_fit(gains: Floats, lengths: Ints, left: int) -> tuple[Ints, int]:
    """The steps that save most, up to the first for which too few GPUs are left, and how many are left then. About
    half of the rest is looked at together, again and again: nothing is sorted but the last few."""
    found, rest = [], np.arange(len(gains))
    while len(rest) > _FEW:
        some = gains.take(rest)
        better = some > np.sort(some[:: len(some) // _FEW])[_FEW // 2]
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
        more = np.flatnonzero((gain >= worth.take(jobs)) & (gain > SAVES))
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
    there = np.flatnonzero(np.bincount(np.concatenate([tenant[rows] for rows, _ in groups])))
    apart = len(there) > 1 and room[there].sum() <= left  # what one tenant gets, no other lacks
    gain, target, lengths = np.zeros(len(at)), at.copy(), _lengths(options)
    group, row = np.full(len(at), -1), np.zeros(len(at), dtype=np.int64)
    for number, (rows, _) in enumerate(groups):
        group[rows], row[rows] = number, np.arange(len(rows))

    def look(jobs: Ints) -> None:
        """For the best steps of these jobs that fit."""
        fits = np.minimum(room[tenant[jobs]], left)
        of = group[jobs]
        for number in np.flatnonzero(np.bincount(of + 1)[1:]).tolist():
            costs, some = groups[number][1], of == number
            those = jobs[some]
            far = lengths[:, : costs.shape[1]].take(at[those], 0)
            far[far > fits[some][:, None]] = _NO_STEP
            own = costs[row[those]]
            gain[those], target[those] = _best_step(own, far, own[np.arange(len(own)), at[those]])

    look(np.flatnonzero(room[tenant] > 0))
    while left > 0:
        best = _best_of_tenants(gain, tenant) if apart else np.array([gain.argmax()])
        if not len(best) or gain[best[0]] <= SAVES:
            return
        needs = options[target[best]] - options[at[best]]
        if (needs > np.minimum(room[tenant[best]], left)).any():
            # A step that must be shorter saves less: who would still be the best?
            long = options[target] - options[at] > np.minimum(room, left)[tenant]
            if not apart:
                long &= gain > gain[~long].max(initial=0.0)
            look(np.flatnonzero(long))
            continue
        some = np.cumsum(needs) <= left
        best, needs = best[some], needs[some]
        left -= int(needs.sum())
        room[tenant[best]] -= needs
        at[best] = target[best]
        look(best)


def _best_of_tenants(gain: Floats, tenant: Ints) -> Ints:
    """The row with the best step of each tenant, the best of all first."""
    rows = np.flatnonzero(gain > SAVES)
    rows = rows[np.argsort(-gain[rows], kind="stable")]
    return rows[np.sort(np.unique(tenant[rows], return_index=True)[1])]

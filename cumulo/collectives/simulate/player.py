"""The network player: traffic over a fabric in virtual time. Jobs start messages, links are shared max-min
fair, and every end of a message may start others. Commands, reports and tests call `play_network`.

Flow level: a message has a path and a rate, and rates are worked out anew whenever a message starts or
ends or a link changes. A message is delivered when its last byte is sent and the path's latency has passed.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cumulo.collectives.simulate.fabrics.links import FabricGraph, Floats, Ints, Routing
from cumulo.collectives.simulate.link_use import LinkUse
from cumulo.collectives.simulate.rounds import MessageRound
from cumulo.errors import CumuloError

_CLOSE = 1 + 1e-12


def max_min(paths: Ints, capacity: Floats, most: Floats | None = None) -> Floats:
    """Max-min fair rates: bytes/s of each message. `paths`: a row of links each, padded with -1. `most`: what a
    message can send at best.

    Water filling (Bertsekas and Gallager 1992, section 6.5.2), many links at a time: a link is decided as soon as
    none of its messages has a narrower link elsewhere, which is exact and takes few rounds where the classic form
    takes one for each link.
    """
    messages = len(paths)
    rates = np.full(messages, np.inf) if most is None else most.astype(float).copy()
    used, flat = np.unique(paths, return_inverse=True)
    links = flat.reshape(paths.shape)
    left = np.where(used < 0, np.inf, capacity[used])
    rows, _ = np.nonzero(paths >= 0)
    inside = paths.ravel() >= 0
    entries = flat.ravel()[inside]
    order = np.argsort(entries, kind="stable")
    entries, rows = entries[order], rows[order]
    if not len(entries):
        return rates
    starts = np.flatnonzero(np.r_[True, entries[1:] != entries[:-1]])
    touched = entries[starts]
    open_: NDArray[np.bool_] = np.ones(messages, bool)
    open_[~(paths >= 0).any(axis=1)] = False
    caps = rates.copy()
    while open_.any():
        share = np.full(len(used), np.inf)
        users = np.bincount(entries, open_[rows], len(used))
        busy = users > 0
        share[busy] = np.maximum(left[busy], 0.0) / users[busy]
        narrowest = np.where(open_, np.minimum(share[links].min(axis=1), caps), np.inf)
        lowest = np.full(len(used), np.inf)
        lowest[touched] = np.minimum.reduceat(narrowest[rows], starts)
        decided_links = busy & (lowest * _CLOSE >= share)
        decided = open_ & ((decided_links[links] & (share[links] <= narrowest[:, None] * _CLOSE)).any(axis=1))
        decided |= open_ & (narrowest >= caps)
        rates[decided] = narrowest[decided]
        left -= np.bincount(entries, np.where(decided, rates, 0.0)[rows], len(used))
        open_ &= ~decided
    return rates


_DONE = 1e-9  # of a message's bytes: what is left by rounding
# Where thousands of messages end at times of their own, those that end within this share of the time since
# they began end together: a run is late by at most as much, and quick.
_TOGETHER, _MANY = 2e-3, 2000
_TOGETHER_AT_MOST, _VERY_MANY = 2e-2, 50_000


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages that start together. `tags` come back when they are delivered."""

    source: Ints
    target: Ints
    size_bytes: Floats
    tags: Ints
    repeat: int = 1  # one after another over the same path: bytes and latency count so often


class NetworkTraffic(Protocol):
    """What the player plays."""

    name: str
    start_s: float
    background: bool  # the run does not wait for it

    def begin(self) -> Iterator[Messages]: ...

    def sent(self, tags: Ints) -> Iterator[Messages]:
        """The last byte has left."""
        ...

    def delivered(self, tags: Ints) -> Iterator[Messages]:
        """... and has arrived."""
        ...


class RoundTraffic:
    """A job that plays rounds, each after the one before has ended everywhere."""

    def __init__(
        self, name: str, rounds: Iterable[MessageRound], start_s: float = 0.0, background: bool = False
    ) -> None:
        self.name, self.start_s, self.background = name, start_s, background
        self._rounds, self._open = iter(rounds), 0

    def begin(self) -> Iterator[Messages]:
        one = next(self._rounds, None)
        if one is not None:
            self._open = len(one.source)
            tags = np.arange(len(one.source))
            yield Messages(one.source, one.target, one.size_bytes, tags, one.repeat)

    def sent(self, tags: Ints) -> Iterator[Messages]:
        return iter(())

    def delivered(self, tags: Ints) -> Iterator[Messages]:
        self._open -= len(tags)
        if not self._open:
            yield from self.begin()


@dataclass(frozen=True, slots=True)
class LinkChange:
    """A link fails (capacity 0), recovers or slows down."""

    at_s: float
    link: int
    bytes_per_s: float


@dataclass
class NetworkRun:
    ends_s: dict[str, float]  # of each job that is no background
    use: LinkUse | None
    solves: int = 0  # how often rates were worked out
    messages: int = 0
    rerouted: int = 0  # messages that took another path because a link failed

    @property
    def end_s(self) -> float:
        return max(self.ends_s.values(), default=0.0)


def play_network(
    graph: FabricGraph,
    jobs: Sequence[NetworkTraffic],
    routing: Routing = Routing(),
    changes: Sequence[LinkChange] = (),
    step_overhead_s: float = 0.0,
    window_bytes: float | None = None,
    record: bool = False,
) -> NetworkRun:
    """`step_overhead_s`: software's latency of each message. `window_bytes`: what a queue pair may have on
    its way, so that a long link's delay bounds its rate."""
    return _Play(graph, jobs, routing, changes, step_overhead_s, window_bytes, record).run()


class _Play:
    def __init__(
        self,
        graph: FabricGraph,
        jobs: Sequence[NetworkTraffic],
        routing: Routing,
        changes: Sequence[LinkChange],
        step_overhead_s: float,
        window_bytes: float | None,
        record: bool,
    ) -> None:
        self.graph, self.jobs, self.routing = graph, jobs, routing
        self.overhead_s, self.window_bytes = step_overhead_s, window_bytes
        self.events: list[tuple[float, int, str, Any]] = []
        self.sequence = self.started = 0
        self.now = self.began_s = 0.0
        hops = graph.paths(np.zeros(0, int), np.zeros(0, int), np.zeros(0, int), routing).shape[1]
        self.paths = np.zeros((0, hops), np.int64)
        self.size, self.left, self.rate, self.most = (np.zeros(0) for _ in range(4))
        self.delay = np.zeros(0)
        self.job, self.tags = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.ends = np.zeros((3, 0), np.int64)  # source, target and key of each message, to route it again
        self.open = [0] * len(jobs)  # messages under way, of each job
        # Of jobs that play a repeated round: when it began, and its messages. Its rounds follow each other, so that
        # its links are busy evenly, not all at first: its use is recorded when it has ended.
        self.repeated: dict[int, tuple[float, Ints, Floats]] = {}
        self.parts: dict[tuple[int, int], int] = {}  # queue pairs of a message that have not ended
        self.run_ = NetworkRun({}, LinkUse(graph.links) if record else None)
        for number, job in enumerate(jobs):
            self._push(job.start_s, "job", number)
        for change in changes:
            self._push(change.at_s, "link", change)

    def _push(self, at_s: float, kind: str, what: Any) -> None:
        heapq.heappush(self.events, (at_s, self.sequence, kind, what))
        self.sequence += 1

    def run(self) -> NetworkRun:
        waiting = {number for number, job in enumerate(self.jobs) if not job.background}
        while waiting:
            self._handle_due()
            for number in [number for number in waiting if not self._busy(number)]:
                self.run_.ends_s[self.jobs[number].name] = self.now
                waiting.discard(number)
            if waiting:
                self._advance()
        return self.run_

    def _busy(self, number: int) -> bool:
        return self.open[number] > 0 or self.jobs[number].start_s > self.now

    def _handle_due(self) -> None:
        changed = False
        while self.events and self.events[0][0] <= self.now:
            _, _, kind, what = heapq.heappop(self.events)
            if kind == "job":
                number = int(what)
                self._take(number, self.jobs[number].begin())
            elif kind == "link":
                assert isinstance(what, LinkChange)
                self.graph.fail(what.link, what.bytes_per_s)
                self._route_again()
            elif kind == "sent":
                number, tags = what
                self._take(number, self.jobs[number].sent(tags))
            else:
                number, tags = what
                self.open[number] -= len(tags)
                if not self.open[number] and number in self.repeated:
                    self._record_repeated(*self.repeated.pop(number))
                self._take(number, self.jobs[number].delivered(tags))
            changed = True
        if changed or self.started:
            self._share()

    def _take(self, number: int, batches: Iterator[Messages]) -> None:
        for messages in batches:
            self.open[number] += len(messages.tags)
            self._start(number, messages)

    def _start(self, number: int, messages: Messages) -> None:
        pairs = self.routing.queue_pairs if self.routing.kind == "ecmp" else 1
        count = len(messages.source)
        source, target = np.repeat(messages.source, pairs), np.repeat(messages.target, pairs)
        keys = np.tile(np.arange(pairs), count)
        size = np.repeat(messages.size_bytes * messages.repeat / pairs, pairs)
        paths = self.graph.paths(source, target, keys, self.routing)
        latency = np.where(paths >= 0, self.graph.links.latency[paths], 0.0).sum(axis=1)
        delay = latency + self.overhead_s
        if messages.repeat > 1:
            # MessageRound after round, a rank waits for its own neighbour only, so that short hops make up
            # for long ones: the mean counts, not the longest (the cycle time of the max-plus system).
            delay = np.full(len(delay), messages.repeat * float(delay.mean()))
        most = np.full(len(size), np.inf)
        if self.window_bytes is not None:
            most = self.window_bytes / np.maximum(2 * latency, 1e-12)
        tags = np.repeat(messages.tags, pairs)
        if pairs > 1:
            self.parts.update({(number, int(tag)): pairs for tag in messages.tags})
        if not len(self.left):
            self.began_s = self.now
        if messages.repeat > 1:
            self.repeated[number] = (self.now, paths, size)
        self.started += len(size)
        self.run_.messages += len(size) * messages.repeat
        self.ends = np.concatenate([self.ends, [source, target, keys]], axis=1)
        self._append(paths, size, delay, most, np.full(len(size), number), tags)

    def _append(self, paths: Ints, size: Floats, delay: Floats, most: Floats, job: Ints, tags: Ints) -> None:
        self.paths = np.concatenate([self.paths, paths])
        self.size, self.left = np.concatenate([self.size, size]), np.concatenate([self.left, size])
        self.delay, self.most = np.concatenate([self.delay, delay]), np.concatenate([self.most, most])
        self.job, self.tags = np.concatenate([self.job, job]), np.concatenate([self.tags, tags])

    def _route_again(self) -> None:
        """Messages on a dead link take another path where there is one; others stay where they are."""
        dead = ((self.paths >= 0) & (self.graph.links.capacity[self.paths] <= 0)).any(axis=1)
        if dead.any():
            source, target, keys = self.ends[:, dead]
            found = self.graph.paths(source, target, keys, self.routing)
            self.paths[dead] = found
            still = ((found >= 0) & (self.graph.links.capacity[found] <= 0)).any(axis=1)
            self.run_.rerouted += int((~still).sum())

    def _share(self) -> None:
        self.started = 0
        if len(self.left):
            end_s = self._round_s()
            if np.isfinite(end_s):
                self.rate = self.left / end_s
            else:
                self.rate = max_min(self.paths, self.graph.links.capacity, self.most)
            self.run_.solves += 1

    def _round_s(self) -> float:
        """How long a large round lasts, if it is alone and its messages are of one size: as long as its busiest
        link needs. Infinite: it must be worked out message by message.

        Max-min rates are at least the busiest link's share, and only grow while messages end: so no message takes
        longer than that link, whose own take exactly as long. Nobody waits for those that end earlier."""
        if (
            len(self.left) <= _MANY
            or self.events
            or not isinstance(self.jobs[int(self.job[0])], RoundTraffic)
        ):
            return np.inf
        size = self.left[0]
        alike = np.allclose(self.left, size, rtol=1e-9) and (self.job == self.job[0]).all()
        if not alike or np.isfinite(self.most).any():
            return np.inf
        users = np.bincount(self.paths[self.paths >= 0], minlength=len(self.graph.links.capacity))
        used = users > 0
        capacity = self.graph.links.capacity[used]
        return float((users[used] * size / capacity).max()) if used.any() and capacity.min() > 0 else np.inf

    def _advance(self) -> None:
        """Advances to the next event, or to the next end of a message."""
        step_s = self.events[0][0] - self.now if self.events else np.inf
        if len(self.left):
            with np.errstate(divide="ignore", invalid="ignore"):
                ends = np.where(self.left > 0, self.left / self.rate, 0.0)
            first = float(ends.min())
            if len(ends) > _MANY:
                share = _TOGETHER if len(ends) < _VERY_MANY else _TOGETHER_AT_MOST
                close = first + share * (self.now + first - self.began_s)
                first = float(ends[ends <= close].max())
            step_s = min(step_s, first)
        if not np.isfinite(step_s):
            raise self._stalled()
        if self.run_.use is not None and len(self.left) and step_s > 0:
            once = ~np.isin(self.job, list(self.repeated))
            self.run_.use.add(self.now, self.now + step_s, self.paths[once], self.rate[once])
        self.now += step_s
        if len(self.left):
            with np.errstate(invalid="ignore"):
                sent = np.where(np.isinf(self.rate), self.left, self.rate * step_s)
            self.left = self.left - sent
            self._deliver(self.left <= _DONE * self.size)

    def _record_repeated(self, began_s: float, paths: Ints, size: Floats) -> None:
        if self.run_.use is not None and self.now > began_s:
            self.run_.use.add(began_s, self.now, paths, size / (self.now - began_s))

    def _deliver(self, done: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> None:
        if not done.any():
            return
        for number in np.unique(self.job[done]):
            mine = done & (self.job == number)
            for delay in np.unique(self.delay[mine]):
                tags = self._whole(int(number), self.tags[mine & (self.delay == delay)])
                if len(tags):
                    self._push(self.now, "sent", (int(number), tags))
                    self._push(self.now + float(delay), "delivered", (int(number), tags))
        keep = ~done
        self.paths, self.size, self.left = self.paths[keep], self.size[keep], self.left[keep]
        self.delay, self.most, self.rate = self.delay[keep], self.most[keep], self.rate[keep]
        self.job, self.tags, self.ends = self.job[keep], self.tags[keep], self.ends[:, keep]
        self.started = 1  # rates change

    def _whole(self, number: int, tags: Ints) -> Ints:
        """Messages whose last queue pair has ended."""
        if not self.parts:
            return tags
        ended = []
        for tag in tags.tolist():
            self.parts[number, tag] -= 1
            if not self.parts[number, tag]:
                del self.parts[number, tag]
                ended.append(tag)
        return np.array(ended, np.int64)

    def _stalled(self) -> CumuloError:
        stuck = int(np.flatnonzero(self.rate <= 0)[0]) if (self.rate <= 0).any() else 0
        path = self.paths[stuck]
        dead = [link for link in path[path >= 0] if self.graph.links.capacity[link] <= 0]
        where = self.graph.links.name(int(dead[0])) if dead else "no link"
        name = self.jobs[int(self.job[stuck])].name
        return CumuloError(
            f"after {self.now:.4g} s a message of {name} cannot go on: the link {where} is down and never "
            f"recovers; "
            "give the time at which it does, or a fabric with another path"
        )

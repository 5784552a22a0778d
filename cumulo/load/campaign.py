"""Runs levels of load one after another: single runs, sweeps, replays, and the search for the highest rate.

Called by the command line with `Settings`; results pile up in `Campaign.results`, so that an interrupted
campaign still has a report.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from cumulo.base.quantities import quantity
from cumulo.load.client import Target, discover_model, probe
from cumulo.load.connection import Pool
from cumulo.load.player import Level, LoadPlayer
from cumulo.load.prompts import Ruler
from cumulo.load.schedule import Arrivals, Schedule, Workload, plan
from cumulo.load.slo import Verdict, is_lost, requests_needed, verdict
from cumulo.load.summary import RequestRecord, Summary, summarise
from cumulo.load.trace import TraceRow, plan_trace
from cumulo.spec.slo import Slo


@dataclass
class RateSearch:
    """The search for the highest rate that holds an objective. `found` is None until a rate has held twice and
    the next one failed twice. The campaign asks `next_rate`, runs a trial there, and tells the result. The rule:

    1. From the starting rate, double while it holds (halve while it fails) until the limit is enclosed.
    2. Halve the enclosed ratio (geometric mean) until it is within the tolerance.
    3. Nothing is believed on one trial's word: a failure is tried again at once (a hiccup of the machine must not
       bound the search), and the best rate must hold twice. Where two trials disagree, a third decides.

    A trial holds only where the share of good requests is shown with 95% confidence (`slo.verdict`), so the answer
    errs on the side of too low.
    """

    start: float
    tolerance: float = 0.1  # how far apart, as a ratio, the holding and the failing rate may stay
    most: float = 1e6
    least: float = 1e-3
    most_trials: int = 40
    trials: list[tuple[float, bool]] = field(default_factory=list)

    @property
    def failing(self) -> float:
        """The lowest rate that has failed twice."""
        return min((rate for rate in self._rates if self._count(rate, False) >= 2), default=math.inf)

    @property
    def holding(self) -> float | None:
        """The highest rate that has held and not been contradicted, below every failing rate."""
        return max((rate for rate in self._rates if self._holds(rate) and rate < self.failing), default=None)

    @property
    def found(self) -> float | None:
        best = self.holding
        return best if best is not None and best == self.confirmed and self._is_enclosed(best) else None

    @property
    def confirmed(self) -> float | None:
        """The highest rate that has held twice, even where the trials ran out before the limit was enclosed."""
        twice = (rate for rate in self._rates if self._count(rate, True) >= 2 and rate < self.failing)
        return max(twice, default=None)

    def next_rate(self) -> float | None:
        """Where to try next; None when there is nothing left to learn."""
        if self.found is not None or len(self.trials) >= self.most_trials:
            return None
        for rate in self._rates:
            if self._count(rate, False) == 1 and self._count(rate, True) < 2:
                return rate
        best, limit = self.holding, self.failing
        if best is None:
            lower = self.start if limit == math.inf else limit / 2
            return lower if lower >= self.least else None
        if self._is_enclosed(best):
            return best
        return min(best * 2, self.most) if limit == math.inf else math.sqrt(best * limit)

    def tell(self, rate: float, held: bool) -> None:
        self.trials.append((rate, held))

    @property
    def _rates(self) -> set[float]:
        return {rate for rate, _ in self.trials}

    def _count(self, rate: float, held: bool) -> int:
        return self.trials.count((rate, held))

    def _holds(self, rate: float) -> bool:
        held, failed = self._count(rate, True), self._count(rate, False)
        return failed < 2 and (held >= 2 or (held == 1 and failed == 0))

    def _is_enclosed(self, best: float) -> bool:
        return best >= self.most or self.failing / best <= 1 + self.tolerance


MOST_EXTENSIONS = 3  # how often a trial whose result is unclear is made longer
SHORTEST_TRIAL_S = 10.0
OPEN_WARMUP = 4
LONE_REQUESTS = 5
SPARSE_SHARE = 0.1  # of the time a request is under way: at lower rates requests hardly ever meet
MOST_RECOVERY_TRIES = 30


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace as a level of load."""

    rows: list[TraceRow]
    speed: float = 1.0

    @property
    def label(self) -> str:
        return "trace" if self.speed == 1 else f"trace × {self.speed:g}"


Load = Arrivals | Replay | int  # an int is a closed loop's concurrency


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a campaign needs to know."""

    url: str
    target: Target  # an empty model name: ask the server
    loads: Sequence[Load]
    workload: Workload = field(default_factory=Workload)
    conversations: int | None = None
    duration_s: float | None = None
    warmup: int | None = None  # conversations left out at the beginning of a level; None: chosen
    slo: Slo | None = None
    search: bool = False  # for the highest rate that holds the objective, starting at the first load
    tolerance: float = 0.1
    seed: str = "0"
    timeout_s: float = 600.0
    retries: int = 0
    settle_s: float = 1.0  # between levels
    search_s: float = 1800.0  # the longest a search may take


@dataclass(frozen=True, slots=True)
class LevelResult:
    """One level, played and summed up."""

    label: str
    load: Load
    summary: Summary
    records: list[RequestRecord]
    wall_s: float
    cpu_share: float  # of one core, taken by the generator
    most_running: int
    stopped: bool = False
    verdict: Verdict | None = None

    @property
    def failed(self) -> int:
        return self.summary.requests - self.summary.succeeded


class Watcher(Protocol):
    """Whoever shows the progress."""

    def begin(self, label: str, number: int, levels: int | None) -> None: ...
    def look(self, level: Level) -> None: ...
    def end(self, result: LevelResult) -> None: ...


class Campaign:
    """Owns the player; `run` does everything."""

    def __init__(self, settings: Settings, watcher: Watcher) -> None:
        self.settings = settings
        self.results: list[LevelResult] = []
        self.search: RateSearch | None = None
        self.search_end = ""  # why a search ended before it had found the limit
        self.ruler = Ruler()
        self.target = settings.target
        self._watcher = watcher
        self._pool = Pool(settings.url)
        self.url = self._pool.url

    async def run(self) -> None:
        settings = self.settings
        target = settings.target
        try:
            if not target.model:
                target = replace(target, model=await discover_model(self._pool, target.api_key))
            self.target, self.ruler = await probe(self._pool, target, settings.timeout_s, settings.seed)
            player = LoadPlayer(self._pool, self.target, self.ruler, settings.timeout_s, settings.retries)
            if settings.search:
                await self._search(player)
            else:
                for number, load in enumerate(settings.loads):
                    if number:
                        await asyncio.sleep(settings.settle_s)
                    # Another seed for every level: it must not find the last one's prompts in a cache.
                    schedule = self._plan(load, f"{settings.seed}/{number}")
                    await self._play(player, schedule, load, label(load), len(settings.loads))
        finally:
            self._pool.close()

    def _plan(self, load: Load, seed: str) -> Schedule:
        settings = self.settings
        if isinstance(load, Replay):
            return plan_trace(
                load.rows, seed, load.speed, settings.conversations, settings.duration_s, self._warmup(load)
            )
        return plan(
            settings.workload, load, seed, settings.conversations, settings.duration_s, self._warmup(load)
        )

    def _warmup(self, load: Load) -> int:
        """Unless told: until every place of a closed loop has been through one, none of a recorded trace."""
        if self.settings.warmup is not None:
            return self.settings.warmup
        if isinstance(load, int):
            return load
        return 0 if isinstance(load, Replay) else OPEN_WARMUP

    async def _play(
        self,
        player: LoadPlayer,
        schedule: Schedule,
        load: Load,
        name: str,
        levels: int | None,
        trial: bool = False,
    ) -> LevelResult:
        level = Level(schedule)
        judge = _Judge(self.settings.slo, schedule) if trial and self.settings.slo else None

        def watch(level: Level) -> bool:
            self._watcher.look(level)
            return judge is None or not judge.is_lost(level)

        self._watcher.begin(name, len(self.results), levels)
        try:
            await player.play(level, watch)
        finally:  # a run the user ends has a result too
            summary = summarise(level.records, self.settings.slo)
            result = LevelResult(
                name, load, summary, level.records, level.wall_s, level.cpu_s / max(level.wall_s, 1e-9),
                level.most_running, level.stopped,
            )  # fmt: skip
            if summary.requests or trial:
                self.results.append(result)
            self._watcher.end(result)
        return result

    async def _search(self, player: LoadPlayer) -> None:
        first = self.settings.loads[0]
        assert isinstance(first, Arrivals)
        self.search = RateSearch(first.rate, self.settings.tolerance)
        lone = await self._lone(player)
        if lone.slo_met == 0:
            self.search_end = f"a request alone does not keep the objective ({_missed(lone)}), so no rate can"
            return
        if lone.e2e_s is not None:
            self.search.least = min(first.rate, SPARSE_SHARE / lone.e2e_s.p50)
        deadline_s = asyncio.get_running_loop().time() + self.settings.search_s
        trials = 0
        while (rate := self.search.next_rate()) is not None:
            least_s = self._trial_requests(rate) / rate
            if asyncio.get_running_loop().time() + least_s > deadline_s:
                self.search_end = (
                    f"the next trial, at {rate:.3g}/s, would take {quantity(least_s, 's')} and the search may "
                    f"take {quantity(self.settings.search_s, 's')}: allow more, or start nearer the limit"
                )
                return
            held, trials = await self._trial(player, replace(first, rate=rate), trials)
            self.search.tell(rate, held)
        if len(self.search.trials) >= self.search.most_trials:
            self.search_end = f"the trials contradict each other after {len(self.search.trials)} of them"
        elif self.search.confirmed is None:
            lowest = min(rate for rate, _ in self.search.trials)
            self.search_end = (
                f"missed down to {lowest:.3g}/s, where requests hardly meet: fewer would not help"
            )

    async def _lone(self, player: LoadPlayer) -> Summary:
        """Requests one at a time: what the server does at its best."""
        seed = f"{self.settings.seed}/lone"
        level = Level(plan(self.settings.workload, 1, seed, 1 + LONE_REQUESTS, warmup=1))
        self._watcher.begin("one at a time", 0, None)
        await player.play(level, self._watcher.look)
        return summarise(level.records, self.settings.slo)

    def _trial_requests(self, rate: float) -> int:
        settings = self.settings
        assert settings.slo is not None
        shortest_s = SHORTEST_TRIAL_S if settings.duration_s is None else settings.duration_s
        return max(
            requests_needed(settings.slo.share), settings.conversations or 0, math.ceil(rate * shortest_s)
        )

    async def _recover(self, player: LoadPlayer, slo: Slo, seed: str) -> None:
        """Wait until the last trial's queue is gone: until a lone request keeps the objective again.

        Not every server drops the work of clients that have left. One that never recovers fails what follows.
        """
        for attempt in range(MOST_RECOVERY_TRIES):
            await asyncio.sleep(self.settings.settle_s)
            level = Level(plan(self.settings.workload, 1, f"{seed}/{attempt}", conversations=1))
            await player.play(level)
            if all(slo.met_by(record) for record in level.records):
                return

    async def _trial(self, player: LoadPlayer, load: Arrivals, trials: int) -> tuple[bool, int]:
        """Play a rate until it is clear whether it holds; still unclear in the end counts as not shown."""
        settings, slo = self.settings, self.settings.slo
        assert slo is not None
        requests = self._trial_requests(load.rate)
        met = total = 0
        finding: Verdict = "unclear"
        for _ in range(MOST_EXTENSIONS):
            if trials:
                await self._recover(player, slo, f"{settings.seed}/between/{trials}")
            seed = f"{settings.seed}/trial/{trials}"
            schedule = plan(settings.workload, load, seed, requests, None, self._warmup(load))
            trials += 1
            result = await self._play(player, schedule, load, label(load), None, trial=True)
            met += result.summary.slo_met or 0
            total += result.summary.requests
            finding = "fails" if result.stopped else verdict(met, total, slo.share)
            self.results[-1] = replace(result, verdict=finding)
            if finding != "unclear":
                break
        return finding == "holds", trials


class _Judge:
    """Watches a trial: one that can no longer hold the objective is not worth its queue."""

    def __init__(self, slo: Slo, schedule: Schedule) -> None:
        self._slo = slo
        self._planned = sum(len(c.turns) for c in schedule.conversations if c.measured)
        self._judged = 0
        self._missed = 0

    def is_lost(self, level: Level) -> bool:
        for record in level.records[self._judged :]:
            self._missed += record.measured and not self._slo.met_by(record)
        self._judged = len(level.records)
        now_s = asyncio.get_running_loop().time() - level.began_s
        hopeless = sum(
            record.measured and self._slo.cannot_be_met(now_s - record.due_s, bool(answer.chunk_times_s))
            for record, answer in level.running.values()
        )
        return is_lost(self._missed + hopeless, self._planned, self._slo.share)


def _missed(lone: Summary) -> str:
    """The latencies or errors that lone requests got, in words."""
    if not lone.succeeded:
        return ", ".join(f"{count} × {kind}" for kind, count in lone.errors.items())
    return ", ".join(
        f"{name} {quantity(spread.p50, 's')}" for name, spread in lone.spreads.items() if spread is not None
    )


def label(load: Load) -> str:
    """How a level is called in tables and plots."""
    if isinstance(load, int):
        return f"{load} at once"
    return load.label

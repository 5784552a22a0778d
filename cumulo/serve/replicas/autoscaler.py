"""FleetAutoscaler: the live player of an autoscaling rule. It tells the rule what the fleet's engines do, and
starts, drains and ends engines as the rule says. Made by Service for `cumulo serve --autoscale`.

No request is lost by it: an engine ends when it has no request left, and requests that come while there is no
engine wait in the fleet for one.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cumulo.fleet.decide.autoscale_settings import AutoscaleSettings
from cumulo.fleet.decide.forecast_rule import ForecastRule
from cumulo.fleet.decide.scaling import (
    FleetSeen,
    ReplicaSpeed,
    RoleSeen,
    ScaleTo,
    ScalingLimits,
    changes,
)
from cumulo.serve.replicas.fleet import Fleet
from cumulo.serve.replicas.prefill_engines import PrefillEngines
from cumulo.spec.slo import ServedTimes, Slo

log = logging.getLogger(__name__)

_USUAL_TTFT_S = 2.0
_SHARE_OF_SPEED = 0.7  # of what an engine computes at most; beyond it queues grow
_BATCH = 16  # sequences that decode together, for the speed of answers
_KEPT = 100  # changes that are shown


@dataclass(frozen=True, slots=True)
class ScaleEvent:
    """A change of the number of engines."""

    time_s: float  # since the epoch
    role: str
    before: int
    after: int
    why: str


class FleetAutoscaler:
    def __init__(self, fleet: Fleet, settings: AutoscaleSettings, promised: Slo | None) -> None:
        self.fleet, self.settings = fleet, settings
        self.slo = settings.slo or promised or Slo(ttft_s=_USUAL_TTFT_S)
        self.events: deque[ScaleEvent] = deque(maxlen=_KEPT)
        self.replica_s = 0.0  # seconds of engines so far, from their order to their end
        self.judged = self.kept = 0  # requests that ended, and those within the SLO
        self.role = "both" if fleet.prefill is None else "decode"
        self.scaled: dict[str, Fleet | PrefillEngines] = {self.role: fleet}
        if fleet.prefill is not None and settings.prefill is not None:
            self.scaled["prefill"] = fleet.prefill
        self.wanted: dict[str, ScaleTo] = {}  # by role
        self._rules: dict[str, ForecastRule] = {}
        # Answered since the last look are judged by the bounds that each role can keep.
        self._slo_of = {role: self.slo.of_role(role) for role in self.scaled}
        if "prefill" not in self.scaled:
            self._slo_of[self.role] = self.slo
        self._kept_by = dict.fromkeys(self.scaled, 0)
        self._arrived = self._arrived_tokens = self._ended = self._output_tokens = 0
        self._counted_s = time.perf_counter()
        self._woken = asyncio.Event()
        fleet.holds_requests = settings.limits.fewest == 0
        fleet.on_arrival, fleet.scaling_report = self.note_arrival, self.report

    # -- what is heard ------------------------------------------------------------------------------------
    def note_arrival(self, tokens: int, unplaced: bool) -> None:
        self._arrived += 1
        self._arrived_tokens += tokens
        if unplaced:
            self._woken.set()  # nobody takes requests: do not wait for the next look

    def note_end(self, ttft_s: float, rest_s: float, output_tokens: int, itls_s: Sequence[float]) -> None:
        """A request was answered. `rest_s`: from its first token to its last; `itls_s`: between streamed tokens."""
        late_gaps = self.slo.late_gaps(itls_s)
        times = ServedTimes.from_answer(ttft_s, rest_s, output_tokens, len(itls_s), late_gaps)
        for role, slo in self._slo_of.items():
            self._kept_by[role] += slo is None or slo.missed(times) is None
        self._ended += 1
        self.judged += 1
        self.kept += self.slo.missed(times) is None
        self._output_tokens += output_tokens

    # -- the loop -----------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Looks at the fleet at every interval, until it is cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), self.settings.interval_s)
            self._woken.clear()
            try:
                self.look()
            except Exception:
                log.exception("autoscaling failed at this look; the next one tries again")

    def look(self) -> None:
        self._count()
        now_s, speed = time.perf_counter(), self._speed()
        seen = self._seen()
        answers: list[ScaleTo] = []
        for role in self.scaled:
            answers += self._rule(role, speed).decide(FleetSeen(now_s, {role: seen[role]}))
        if self.settings.most_devices is not None:
            most = max(self.settings.limits.most, *(one.replicas for one in answers))
            fewest = min(self.settings.limits.fewest, 1)
            answers = ScalingLimits(fewest, most, most_devices=self.settings.most_devices).apply(answers)
        for answer in answers:
            self._obey(answer)

    def _obey(self, wanted: ScaleTo) -> None:
        self.wanted[wanted.role], engines = wanted, self.scaled[wanted.role]
        lives = engines.lives()
        todo = changes(lives, wanted.replicas)
        for name in todo.take_back:
            engines.take_back(name)
        for _ in range(todo.start):
            engines.start_another()
        for name in (*todo.drain, *todo.cancel):
            engines.retire(name)
        before = sum(one.state != "draining" for one in lives)
        after = before + todo.start + len(todo.take_back) - len(todo.drain) - len(todo.cancel)
        if after != before:
            what = "prefill engines" if wanted.role == "prefill" else "replicas"
            log.info("autoscaling: %d -> %d %s: %s", before, after, what, wanted.why)
            self.events.append(ScaleEvent(time.time(), wanted.role, before, after, wanted.why))

    def _count(self) -> None:
        """Adds the seconds of engines since the last time."""
        now_s = time.perf_counter()
        engines = len(self.fleet.lives()) + (len(self.fleet.prefill.lives()) if self.fleet.prefill else 0)
        self.replica_s += engines * (now_s - self._counted_s)
        self._counted_s = now_s

    # -- what the rules see -------------------------------------------------------------------------------
    def _rule(self, role: str, speed: ReplicaSpeed) -> ForecastRule:
        """Each role has a rule of its own: prompts are the work of one role, answers of the other."""
        limits = self.settings.prefill if role == "prefill" else None
        if role not in self._rules:
            self._rules[role] = self.settings.rule(speed, self.fleet.start_up_s, self.slo, limits)
        rule = self._rules[role]
        rule.speed = self.settings.rule(speed, rule.start_up_s, self.slo, limits).speed
        return rule

    def _speed(self) -> ReplicaSpeed:
        """The speed of one replica, as the engines measure themselves."""
        views = self.fleet.views()
        if not views and self.role in self._rules:
            return self._rules[self.role].speed
        prompt = max((one.prompt_tok_s for one in views), default=1000.0)
        output = max((min(_BATCH, one.max_running) / one.step_s for one in views), default=100.0)
        return ReplicaSpeed(_SHARE_OF_SPEED * prompt, _SHARE_OF_SPEED * output, 1 / _SHARE_OF_SPEED)

    def _seen(self) -> dict[str, RoleSeen]:
        """What each role is told, by role, since the last look."""
        views = self.fleet.views()
        begun, waiting = self.fleet.begun_and_waiting()
        whole = RoleSeen(
            ready=0,
            arrived=self._arrived,
            arrived_prompt_tokens=self._arrived_tokens,
            waiting=waiting,
            waiting_prompt_tokens=sum(one.waiting_tokens for one in views) + self.fleet.unplaced_tokens,
            running=begun,
            mean_output_tokens=self._output_tokens / self.judged if self.judged else 0.0,
            busy=min(1.0, sum(one.running > 0 for one in views) / max(1, len(views))),
            ended=self._ended,
        )
        found = {}
        for role, engines in self.scaled.items():
            states = [one.state for one in engines.lives()]
            found[role] = replace(
                whole,
                ready=states.count("ready"),
                starting=states.count("starting"),
                running=0 if role == "prefill" else begun,
                ended_in_slo=self._kept_by[role],
            )
        self._arrived = self._arrived_tokens = self._ended = 0
        self._kept_by = dict.fromkeys(self.scaled, 0)
        return found

    def report(self) -> dict[str, Any]:
        """Returns what /v1/fleet and the console show of autoscaling."""
        self._count()
        told = self._limits_and_wanted(self.settings.limits, self.role) | {
            "replica_s": round(self.replica_s, 3),
            "start_ups_s": [round(one, 3) for one in self.fleet.start_ups_s],
            "slo_attainment": self.kept / self.judged if self.judged else None,
            "events": [asdict(one) for one in self.events],
        }
        if self.settings.prefill is not None and "prefill" in self.scaled:
            told["prefill"] = self._limits_and_wanted(self.settings.prefill, "prefill")
        return told

    def _limits_and_wanted(self, limits: ScalingLimits, role: str) -> dict[str, Any]:
        wanted = self.wanted.get(role)
        return {
            "min": limits.fewest,
            "max": limits.most,
            "wanted": None if wanted is None else wanted.replicas,
            "why": "" if wanted is None else wanted.why,
        }

"""FleetAutoscaler: the live player of an autoscaling rule. It tells the rule what the fleet's replicas do, and
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
from dataclasses import dataclass, replace
from typing import Any, Literal

from cumulo.fleet.decide.autoscale_settings import AutoscaleSettings
from cumulo.fleet.decide.forecast_rule import ForecastRule
from cumulo.fleet.decide.scaling import (
    FleetSeen,
    ReplicaLife,
    ReplicaSpeed,
    RoleSeen,
    ScaleTo,
    ScalingLimits,
    changes,
)
from cumulo.serve.engine_link.fleet import Fleet
from cumulo.serve.engine_link.prefill_scaling import PrefillScaling
from cumulo.serve.engine_link.replica import FleetReplica
from cumulo.spec.slo import ServedTimes, Slo

log = logging.getLogger(__name__)

_LOOK_S = 0.02  # between two looks at a replica that drains
_USUAL_TTFT_S = 2.0
_SHARE_OF_SPEED = 0.7  # of what an engine computes at most; beyond it queues grow
_BATCH = 16  # sequences that decode together, for the speed of answers
_KEPT = 100  # changes that are shown


@dataclass(frozen=True, slots=True)
class ScaleEvent:
    """One change of the number of replicas."""

    time_s: float  # since the epoch
    before: int
    after: int
    why: str
    role: str = "both"


class FleetAutoscaler:
    def __init__(self, fleet: Fleet, settings: AutoscaleSettings, promised: Slo | None) -> None:
        self.fleet, self.settings = fleet, settings
        self.slo = settings.slo or promised or Slo(ttft_s=_USUAL_TTFT_S)
        self.events: deque[ScaleEvent] = deque(maxlen=_KEPT)
        self.replica_s = 0.0  # seconds of replicas so far, from their order to their end
        self.judged = self.kept = 0  # requests that ended, and those within the SLO
        self.start_ups_s: deque[float] = deque(maxlen=_KEPT)  # that new replicas took
        self.wanted: ScaleTo | None = None
        self._rule: ForecastRule | None = None
        self._arrived = self._arrived_tokens = 0
        self._ended = self._in_slo = self._begun = 0
        self._prefill_rule: ForecastRule | None = None
        self._prefill = (
            PrefillScaling(fleet.prefill, fleet.keep) if fleet.prefill and settings.prefill else None
        )
        self.role = "both" if fleet.prefill is None else "decode"
        self._outputs = self._output_tokens = 0
        self._ordered_s: dict[str, float] = {}
        self._counted_s = self._looked_s = time.perf_counter()
        self._woken = asyncio.Event()
        fleet.holds_requests = settings.limits.fewest == 0
        fleet.on_arrival, fleet.scaling_report = self.note_arrival, self.report

    # -- what is heard ------------------------------------------------------------------------------------
    def note_arrival(self, tokens: int, homeless: bool) -> None:
        self._arrived += 1
        self._arrived_tokens += tokens
        if homeless:
            self._woken.set()  # nobody takes requests: do not wait for the next look

    def note_end(self, ttft_s: float, rest_s: float, output_tokens: int, itls_s: Sequence[float]) -> None:
        """A request was answered. `rest_s`: from its first token to its last; `itls_s`: between streamed tokens."""
        late_gaps = self.slo.late_gaps(itls_s)
        times = ServedTimes.from_answer(ttft_s, rest_s, output_tokens, len(itls_s), late_gaps)
        self._ended += 1
        self._in_slo += _keeps(self.slo.of_role("both" if self._prefill is None else "decode"), times)
        self._begun += _keeps(self.slo.of_role("prefill"), times)
        self.judged += 1
        self.kept += _keeps(self.slo, times)
        self._outputs += 1
        self._output_tokens += output_tokens

    # -- the loop -----------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Until cancelled."""
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
        now_s, begun = time.perf_counter(), self._begun
        seen = self._seen(now_s)
        answers = self._rule_now().decide(FleetSeen(now_s, {self.role: seen}))
        if self._prefill is not None:
            self._begun = 0
            answers += self._wanted_prefill(self._prefill, replace(seen, ended_in_slo=begun), now_s)
        if self.settings.most_devices is not None:
            both = max(self.settings.limits.most, *(one.replicas for one in answers))
            least = min(self.settings.limits.fewest, 1)
            answers = ScalingLimits(least, both, most_devices=self.settings.most_devices).apply(answers)
        self.wanted = answers[0]
        if self._prefill is not None:
            before, after = self._prefill.obey(answers[1])
            if before != after:
                self._note(before, after, answers[1])
        lives = [self._life(one) for one in self.fleet.replicas.values()]
        todo = changes(lives, self.wanted.replicas)
        before = sum(one.state != "draining" for one in lives)
        for name in todo.take_back:
            self.fleet.replicas[name].draining = False
        if todo.take_back:
            self.fleet.place_homeless()
        for _ in range(todo.start):
            replica = self.fleet.make_replica()
            self.fleet.keep(self._start(replica))
        for name in (*todo.drain, *todo.cancel):
            replica = self.fleet.replicas[name]
            replica.draining = True
            self.fleet.keep(self._end_when_empty(replica))
        after = before + todo.start + len(todo.take_back) - len(todo.drain) - len(todo.cancel)
        if after != before:
            self._note(before, after, self.wanted)

    def _note(self, before: int, after: int, wanted: ScaleTo) -> None:
        what = "prefill engines" if wanted.role == "prefill" else "replicas"
        log.info("autoscaling: %d -> %d %s: %s", before, after, what, wanted.why)
        self.events.append(ScaleEvent(time.time(), before, after, wanted.why, wanted.role))

    def _wanted_prefill(self, prefill: PrefillScaling, seen: RoleSeen, now_s: float) -> list[ScaleTo]:
        """Decided by a rule of its own: prompts are the work of one role, answers of the other."""
        rule = self._rule_now()
        if self._prefill_rule is None:
            limits = self.settings.prefill
            self._prefill_rule = self.settings.rule(rule.speed, rule.start_up_s, self.slo, limits)
        self._prefill_rule.speed = rule.speed
        lives = prefill.lives()
        own = replace(
            seen,
            ready=sum(one.state == "ready" for one in lives),
            starting=sum(one.state == "starting" for one in lives),
            running=0,
        )
        return self._prefill_rule.decide(FleetSeen(now_s, {"prefill": own}))

    async def _start(self, replica: FleetReplica) -> None:
        began_s = time.perf_counter()
        await replica.client.start_until_up()
        self.start_ups_s.append(time.perf_counter() - began_s)

    async def _end_when_empty(self, replica: FleetReplica) -> None:
        while replica.draining and (replica.client.in_flight or replica.client.state == "starting"):
            await asyncio.sleep(_LOOK_S)
        if replica.draining and replica.name in self.fleet.replicas:  # it may have been taken back
            self._count()
            await self.fleet.dismiss(replica)

    def _count(self) -> None:
        """Seconds of replicas since the last time."""
        now_s = time.perf_counter()
        engines = len(self.fleet.replicas) + (
            0 if self.fleet.prefill is None else len(self.fleet.prefill.clients)
        )
        self.replica_s += engines * (now_s - self._counted_s)
        self._counted_s = now_s

    # -- what the rule sees -------------------------------------------------------------------------------
    def _rule_now(self) -> ForecastRule:
        speed = self._speed()
        if self._rule is None:
            self._rule = self.settings.rule(speed, self.fleet.start_up_s, self.slo)
        elif self.settings.prompt_tok_s is None or self.settings.output_tok_s is None:
            self._rule.speed = self.settings.rule(speed, self._rule.start_up_s, self.slo).speed
        return self._rule

    def _speed(self) -> ReplicaSpeed:
        """As the engines measure themselves."""
        views = self.fleet.views()
        if not views and self._rule is not None:
            return self._rule.speed
        prompt = max((one.prompt_tok_s for one in views), default=1000.0)
        output = max((min(_BATCH, one.max_running) / one.step_s for one in views), default=100.0)
        return ReplicaSpeed(_SHARE_OF_SPEED * prompt, _SHARE_OF_SPEED * output, 1 / _SHARE_OF_SPEED)

    def _seen(self, now_s: float) -> RoleSeen:
        lives = [self._life(one) for one in self.fleet.replicas.values()]
        requests = list(self.fleet.in_flight.values())
        begun = sum(one.last_token_s is not None for one in requests)
        views = self.fleet.views()
        seen = RoleSeen(
            ready=sum(one.state == "ready" for one in lives),
            starting=sum(one.state == "starting" for one in lives),
            arrived=self._arrived,
            arrived_prompt_tokens=self._arrived_tokens,
            waiting=len(requests) - begun,
            waiting_prompt_tokens=sum(one.waiting_tokens for one in views) + self.fleet.homeless_tokens,
            running=begun,
            mean_output_tokens=self._output_tokens / self._outputs if self._outputs else 0.0,
            busy=min(1.0, sum(one.running > 0 for one in views) / max(1, len(views))),
            ended=self._ended,
            ended_in_slo=self._in_slo,
        )
        self._arrived = self._arrived_tokens = self._ended = self._in_slo = 0
        self._looked_s = now_s
        return seen

    def _life(self, replica: FleetReplica) -> ReplicaLife:
        state: Literal["starting", "ready", "draining"] = "ready"
        if replica.draining or replica.busy_with:
            state = "draining"
        elif replica.client.state != "ready":
            state = "starting"
        since_s = self._ordered_s.setdefault(replica.name, time.perf_counter())
        return ReplicaLife(replica.name, state, len(replica.client.in_flight), since_s)

    def _prefill_report(self) -> dict[str, Any]:
        if self._prefill is None or self.settings.prefill is None:
            return {}
        limits, wanted = self.settings.prefill, self._prefill.wanted
        return {
            "prefill": {
                "min": limits.fewest,
                "max": limits.most,
                "wanted": None if wanted is None else wanted.replicas,
                "why": "" if wanted is None else wanted.why,
            }
        }

    def report(self) -> dict[str, Any]:
        """For /v1/fleet and the console."""
        self._count()
        return {
            "min": self.settings.limits.fewest,
            "max": self.settings.limits.most,
            "wanted": None if self.wanted is None else self.wanted.replicas,
            "why": "" if self.wanted is None else self.wanted.why,
            "replica_s": round(self.replica_s, 3),
            "start_ups_s": [round(one, 3) for one in self.start_ups_s],
            "slo_attainment": self.kept / self.judged if self.judged else None,
            "events": [
                {
                    "time_s": one.time_s,
                    "role": one.role,
                    "before": one.before,
                    "after": one.after,
                    "why": one.why,
                }
                for one in self.events
            ],
            **self._prefill_report(),
        }


def _keeps(slo: Slo | None, times: ServedTimes) -> bool:
    """`slo`: the bounds of one role; None: it has none, and every request keeps them."""
    return slo is None or slo.missed(times) is None

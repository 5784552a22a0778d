"""What a simulated run amounts to: latencies, throughput, what bounds it. Commands and search read it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

import numpy as np

from cumulo.base.quantities import quantity
from cumulo.engine.simulate.run import Run
from cumulo.plan.serve.step_cost import PARTS
from cumulo.spec.slo import Slo


@dataclass(frozen=True, slots=True)
class Percentiles:
    mean: float
    p50: float
    p90: float
    p99: float
    most: float
    at_slo: float  # the objective's own percentile

    def times(self, factor: float) -> "Percentiles":
        return Percentiles(*(factor * value for value in astuple(self)))

    @staticmethod
    def from_values(
        values: Sequence[float], counts: Sequence[int] | None = None, percentile: float = 99.0
    ) -> "Percentiles | None":
        """With linear interpolation, as numpy's default; `counts` says how often each value occurs."""
        if not len(values):
            return None
        data = np.repeat(np.asarray(values, dtype=np.float64), 1 if counts is None else counts)
        p50, p90, p99, at_slo = np.percentile(data, (50, 90, 99, percentile)).tolist()
        return Percentiles(float(data.mean()), p50, p90, p99, float(data.max()), at_slo)


@dataclass(frozen=True, slots=True)
class ServeReport:
    requests: int
    finished: int
    refused: int
    why_refused: str | None
    simulated_s: float
    output_tok_s: float
    request_s: float  # requests finished per second
    ttft_s: Percentiles | None
    itl_s: Percentiles | None
    e2e_s: Percentiles | None
    steps: int
    mean_step_s: float
    device_busy: float  # share of the time
    most_running: int
    kv_used: float  # most of the blocks at a time
    cached_share: float  # of prompt tokens
    preemptions: int
    recomputed_tokens: int
    waiting_grows: bool  # later requests take ever longer: more comes than can be served
    time_by_part: Mapping[str, float] = field(hash=False)  # share of the device's time
    drafted_tokens: int = 0  # by speculation
    accepted_tokens: int = 0

    def holds(self, slo: Slo) -> bool:
        return self.finished == self.requests and not self.waiting_grows and not self.misses(slo)

    def misses(self, slo: Slo) -> list[str]:
        """Which bounds are not kept."""
        found = []
        for name, bound, spread in (("ttft", slo.ttft_s, self.ttft_s), ("itl", slo.itl_s, self.itl_s)):
            if bound is not None and spread is not None and spread.at_slo > bound:
                found.append(name)
        return found

    @property
    def bound_by(self) -> str:
        part = max(self.time_by_part, key=lambda name: self.time_by_part[name])
        return PARTS[part]

    def stretched(self, factor: float) -> "ServeReport":
        """The same run if everything in it, arrivals too, took so many times as long."""
        if factor == 1:
            return self
        return replace(
            self,
            simulated_s=self.simulated_s * factor,
            output_tok_s=self.output_tok_s / factor,
            request_s=self.request_s / factor,
            ttft_s=self.ttft_s and self.ttft_s.times(factor),
            itl_s=self.itl_s and self.itl_s.times(factor),
            e2e_s=self.e2e_s and self.e2e_s.times(factor),
            mean_step_s=self.mean_step_s * factor,
        )

    def limit(self, slo: Slo) -> str:
        """Which bound gives way first, or nearly does, and what steps spend their time on."""
        bounds = slo.bounds
        words = [
            f"{name.upper()} p{slo.percentile:g} passes {quantity(bounds[name], 's')}"
            for name in self.misses(slo)
        ]
        if self.waiting_grows and not words:
            words.append("requests queue up")
        if self.preemptions or self.kv_used > 0.98:
            words.append("the KV cache is full")
        share = self.time_by_part[max(self.time_by_part, key=lambda name: self.time_by_part[name])]
        first = " and ".join(words) or "no higher rate was simulated, and every bound is still kept"
        return f"{first}; steps are bound by {self.bound_by} ({share:.0%} of their time)"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"time_by_part": dict(self.time_by_part)}


def report(
    run: Run,
    blocks: int,
    spent_s: Mapping[str, float],
    percentile: float = 99.0,
    front_door_s: float = 0.0,
) -> ServeReport:
    """`front_door_s`: what every request spends outside the engine, before its first token is read."""
    done = [one for one in run.served if one.finished]
    refused = [one for one in run.served if one.refused is not None]
    prompts = sum(one.arrival.prompt_tokens for one in done)
    began_s = run.served[0].arrival.arrived_s if run.served else 0.0
    span_s = max(run.ended_s - began_s, 1e-12)
    total_s = sum(spent_s.values()) or 1.0
    return ServeReport(
        requests=len(run.served),
        finished=len(done),
        refused=len(refused),
        why_refused=refused[0].refused if refused else None,
        simulated_s=span_s,
        output_tok_s=sum(one.arrival.output_tokens for one in done) / span_s,
        request_s=len(done) / span_s,
        ttft_s=Percentiles.from_values([one.ttft_s + front_door_s for one in done], percentile=percentile),
        itl_s=Percentiles.from_values(run.itl_s, run.itl_counts, percentile),
        e2e_s=Percentiles.from_values([one.e2e_s + front_door_s for one in done], percentile=percentile),
        steps=run.steps,
        mean_step_s=run.device_busy_s / max(1, run.steps),
        device_busy=min(1.0, run.device_busy_s / span_s),
        most_running=run.most_running,
        kv_used=run.most_blocks / blocks,
        cached_share=sum(one.cached_tokens for one in done) / max(1, prompts),
        preemptions=sum(one.preemptions for one in done),
        recomputed_tokens=sum(one.recomputed_tokens for one in done),
        waiting_grows=grows(
            [one.arrival.arrived_s for one in done], [one.last_token_s or 0.0 for one in done]
        ),
        time_by_part={name: seconds / total_s for name, seconds in spent_s.items()},
        drafted_tokens=run.drafted_tokens,
        accepted_tokens=run.accepted_tokens,
    )


def grows(began_s: Sequence[float], ended_s: Sequence[float]) -> bool:
    """Whether more and more are under way while they keep coming: in the last quarter of that time far more than in
    the second. A queue that fills up has 7/3 as many then; three standard deviations of a Poisson number are let
    pass."""
    first, last = min(began_s, default=0.0), max(began_s, default=0.0)
    if last <= first:
        return False
    quarter = (last - first) / 4
    begins, ends = np.asarray(began_s), np.asarray(ended_s)

    def under_way(from_s: float) -> float:
        overlap = np.minimum(ends, from_s + quarter) - np.maximum(begins, from_s)
        return float(np.maximum(overlap, 0.0).sum() / quarter)

    before, after = under_way(first + quarter), under_way(first + 3 * quarter)
    return bool(after > 1.5 * before + 3 * before**0.5 + 1)

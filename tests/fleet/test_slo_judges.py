"""Whether a request kept its SLO is one rule: whoever judges random requests comes to the same answer."""

from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.cluster.drivers.metrics_seen import MetricsWatch
from cumulo.engine.decide.story import Promise, Story
from cumulo.engine.simulate.run import Arrival, Served
from cumulo.fleet.decide.autoscale_settings import parse_autoscale
from cumulo.fleet.simulate.autoscaled_fleet import RequestJudge, ScaledRun
from cumulo.load.summary import RequestRecord
from cumulo.plan.serve.goodput import _outcome
from cumulo.serve.observe.metrics import Metrics
from cumulo.serve.observe.stories import Record
from cumulo.serve.replicas.autoscaler import FleetAutoscaler
from cumulo.spec.slo import Slo, kept_itl_s

# In parts of a second that floats add exactly, so that rounding decides nothing.
_GAPS = st.lists(st.integers(1, 400).map(lambda parts: parts / 4096), max_size=320)
_TTFT = st.integers(1, 12_000).map(lambda parts: parts / 4096)


@st.composite
def slos(draw: st.DrawFn) -> Slo:
    """Bounds are those of buckets in /metrics, whose histograms then count exactly."""
    bounds = {
        "ttft_s": draw(st.sampled_from([None, 0.1, 0.5, 1.0])),
        "itl_s": draw(st.sampled_from([None, 0.02, 0.05, 0.075])),
        "tpot_s": draw(st.sampled_from([None, 0.02, 0.05, 0.075])),
        "e2e_s": draw(st.sampled_from([None, 1.0, 5.0, 10.0])),
    }
    return Slo(**bounds) if any(bounds.values()) else Slo(ttft_s=1.0)


def token_times_s(ttft_s: float, gaps_s: list[float]) -> list[float]:
    return list(accumulate(gaps_s, initial=ttft_s))


def by_load_generator(slo: Slo, times_s: list[float]) -> bool:
    record = RequestRecord(0, 0, 0, True, due_s=0.0, end_s=times_s[-1])
    record.chunk_times_s.extend(times_s)
    return slo.met_by(record)


def by_rehearsal(slo: Slo, times_s: list[float]) -> bool:
    run = ScaledRun("forecast")
    judge = RequestJudge(slo, "both", run)
    list(judge.note([simulated(slo, times_s)]))
    assert judge.since_look() == (1, run.in_slo)
    return bool(run.in_slo)


def simulated(slo: Slo, times_s: list[float]) -> Served:
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    late = sum(gap_s > slo.itl_s for gap_s in gaps_s) if slo.itl_s is not None else 0
    return Served(
        Arrival(0.0, 10, len(times_s)),
        first_token_s=times_s[0],
        last_token_s=times_s[-1],
        finished=True,
        tokens=len(gaps_s),
        late_tokens=late,
    )


def by_planner(slo: Slo, times_s: list[float]) -> bool:
    return _outcome(simulated(slo, times_s), slo) == "kept"


def record_of(times_s: list[float]) -> Record:
    story = Story(0.0, admitted_s=0.0, first_token_s=times_s[0], finished_s=times_s[-1])
    story.output_tokens = len(times_s)
    record = Record("r", "c", "anyone", "m", 0.0, 0.0, 10, 1, True, ended_s=times_s[-1], story=story)
    record.outcome = "stop"
    record.token_times_s.extend(times_s)
    return record


def by_live_autoscaler(slo: Slo, times_s: list[float]) -> bool:
    fleet = cast(Any, SimpleNamespace(prefill=None))
    scaler = FleetAutoscaler(fleet, parse_autoscale("1..2"), slo)
    record = record_of(times_s)
    scaler.note_end(times_s[0], times_s[-1] - times_s[0], len(times_s), record.itls_s)
    return bool(scaler.kept)


def by_metrics(slo: Slo, times_s: list[float]) -> bool:
    metrics, watch = Metrics("m"), MetricsWatch(slo)
    watch.seen({"r0": metrics.text().decode()})
    metrics.on_end(record_of(times_s))
    seen = watch.seen({"r0": metrics.text().decode()})
    assert seen.ended == 1
    return bool(seen.ended_in_slo)


def by_engine(slo: Slo, times_s: list[float]) -> bool:
    promise = Promise.from_slo(slo)
    for time_s in times_s:
        promise.note_token(time_s)
    return promise.outcome(times_s[0]) == "kept"


@settings(max_examples=50, deadline=None)
@given(slos(), _TTFT, _GAPS)
def test_every_judge_of_an_slo_agrees(slo: Slo, ttft_s: float, gaps_s: list[float]) -> None:
    times_s = token_times_s(ttft_s, gaps_s)
    judges = (by_load_generator, by_rehearsal, by_planner, by_live_autoscaler, by_metrics)
    answers = {judge.__name__: judge(slo, times_s) for judge in judges}
    assert len(set(answers.values())) == 1, answers
    promised = {f"{name}_s": bound for name, bound in slo.bounds.items() if name in ("ttft", "itl")}
    if promised:  # an engine promises nothing else
        engines = Slo(**promised)
        assert by_engine(engines, times_s) == by_load_generator(engines, times_s)


@given(_GAPS)
def test_the_itl_that_a_request_keeps_is_the_smallest_bound_that_it_does_not_miss(
    gaps_s: list[float],
) -> None:
    kept_s = kept_itl_s(gaps_s)
    if kept_s is None:
        assert not gaps_s
        return
    times_s = token_times_s(1.0, gaps_s)
    assert by_load_generator(Slo(itl_s=kept_s), times_s)
    assert not by_load_generator(Slo(itl_s=kept_s - 1e-6), times_s)


def test_roles_are_judged_by_the_bounds_that_they_can_keep() -> None:
    slo = Slo(ttft_s=1.0, itl_s=0.05, e2e_s=9.0, share=0.9)
    assert slo.of_role("both") == slo
    assert slo.of_role("prefill") == Slo(ttft_s=1.0, share=0.9)
    assert slo.of_role("decode") == Slo(itl_s=0.05, share=0.9)
    assert Slo(ttft_s=1.0).of_role("decode") is None

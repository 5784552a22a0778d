"""Autoscaling rules are pure: the same looks give the same answers, within the limits; a fleet that obeys them in
virtual time loses no request."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.engine.simulate.engine import SimulatedEngine
from cumulo.engine.simulate.run import Arrival
from cumulo.errors import ConfigError
from cumulo.fleet.decide.autoscale_settings import parse_autoscale
from cumulo.fleet.decide.forecast_rule import BurstMemory, Following, ForecastRule
from cumulo.fleet.decide.hpa_rule import METRICS, HpaRule
from cumulo.fleet.decide.scaling import (
    FleetSeen,
    ReplicaLife,
    ReplicaSpeed,
    RoleSeen,
    ScaleTo,
    ScalingLimits,
    ScalingRule,
    changes,
)
from cumulo.fleet.simulate.rehearsal import Rehearsal, best_of, copied, parse_rule, parted
from cumulo.fleet.simulate.replica_speed import replica_speed
from cumulo.plan.serve.replica import Replica
from cumulo.plan.serve.traffic import Traffic
from cumulo.spec.catalog import shipped
from cumulo.spec.slo import Slo

SLO = Slo(ttft_s=1.0, share=0.95)
SPEED = ReplicaSpeed(1000.0, 100.0)  # a request of 500 and 50 tokens is one second of a replica


def rules(limits: ScalingLimits) -> list[ScalingRule]:
    rivals = [HpaRule(metric, 0.7, limits, keda=True) for metric in METRICS]
    return [ForecastRule(SPEED, 60.0, SLO, limits), *rivals]


def steady(rule: ForecastRule, requests_s: float, looks: int, replicas: int, role: str = "both") -> list[int]:
    """What the rule wants when so many requests come per second."""
    wanted = []
    for look in range(1, looks + 1):
        arrived = round(requests_s * rule.interval_s)
        seen = RoleSeen(
            replicas, arrived=arrived, arrived_prompt_tokens=500 * arrived, mean_output_tokens=50.0
        )
        (answer,) = rule.decide(FleetSeen(look * rule.interval_s, {role: seen}))
        wanted.append(answer.replicas)
        replicas = answer.replicas
    return wanted


def test_steady_load_gets_the_replicas_that_it_needs_and_a_little_more() -> None:
    wanted = steady(ForecastRule(SPEED, 60.0, SLO, ScalingLimits(1, 20)), 5.0, 60, 1)
    assert wanted[0] in (5, 6, 7)
    assert set(wanted[30:]) <= {5, 6}


def test_a_rising_load_is_answered_before_it_is_there() -> None:
    rule = ForecastRule(SPEED, 120.0, SLO, ScalingLimits(1, 50))
    rates = [2.0] * 40 + [2.0 + 0.2 * step for step in range(30)]
    wanted = 2
    for look, rate in enumerate(rates, 1):
        arrived = round(rate * rule.interval_s)
        seen = RoleSeen(wanted, arrived=arrived, arrived_prompt_tokens=500 * arrived, mean_output_tokens=50.0)
        (answer,) = rule.decide(FleetSeen(look * rule.interval_s, {"both": seen}))
        wanted = answer.replicas
    assert wanted > rates[-1]  # more than the load of now


def test_missed_objectives_make_the_rule_more_generous_and_kept_ones_less() -> None:
    def after(in_slo: int) -> float:
        rule = ForecastRule(SPEED, 60.0, SLO, ScalingLimits(1, 50))
        for look in range(1, 40):
            seen = RoleSeen(
                5,
                arrived=50,
                arrived_prompt_tokens=25_000,
                ended=50,
                ended_in_slo=in_slo,
                mean_output_tokens=50,
            )
            (answer,) = rule.decide(FleetSeen(10.0 * look, {"both": seen}))
        return answer.replicas

    assert after(25) > after(50)


def test_prefill_and_decode_are_scaled_apart() -> None:
    rule = ForecastRule(SPEED, 60.0, SLO, ScalingLimits(1, 50))
    for look in range(1, 30):
        seen = RoleSeen(5, arrived=50, arrived_prompt_tokens=100_000, mean_output_tokens=10.0)
        answers = rule.decide(FleetSeen(10.0 * look, {"prefill": seen, "decode": seen}))
    wanted = {one.role: one.replicas for one in answers}
    assert wanted["prefill"] >= 10  # 10,000 prompt tokens per second
    assert wanted["decode"] <= 2  # 50 output tokens per second


def test_an_idle_role_scales_to_zero_and_one_request_brings_it_back() -> None:
    rule = ForecastRule(SPEED, 60.0, SLO, ScalingLimits(0, 4), idle_s=100.0)
    busy = RoleSeen(1, arrived=1, arrived_prompt_tokens=500)
    (answer,) = rule.decide(FleetSeen(10.0, {"both": busy}))
    assert answer.replicas >= 1
    answers = [rule.decide(FleetSeen(10.0 * look, {"both": RoleSeen(1)}))[0] for look in range(2, 14)]
    assert answers[0].replicas == 1
    assert answers[-1].replicas == 0
    assert answers[-1].why == "no request for 120 s"
    (answer,) = rule.decide(
        FleetSeen(500.0, {"both": RoleSeen(0, arrived=1, waiting=1, waiting_prompt_tokens=500)})
    )
    assert answer.replicas >= 1


def test_a_role_does_not_sleep_before_it_was_idle() -> None:
    rule = ForecastRule(SPEED, 60.0, SLO, ScalingLimits(0, 4), idle_s=100.0)
    (answer,) = rule.decide(
        FleetSeen(1.7e9, {"both": RoleSeen(0, starting=1)})
    )  # its clock need not begin at 0
    assert answer.replicas == 1


def test_a_budget_takes_from_the_role_that_keeps_most_of_what_it_wants() -> None:
    limits = ScalingLimits(1, 20, most_devices=16, devices_per_replica={"prefill": 1, "decode": 2})
    answers = limits.apply([ScaleTo("prefill", 8, "load"), ScaleTo("decode", 8, "load")])
    counts = {one.role: one.replicas for one in answers}
    assert counts["prefill"] + 2 * counts["decode"] <= 16
    assert min(counts.values()) >= 4
    assert "the budget of 16 devices allows" in answers[0].why


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), fewest=st.integers(0, 3), more=st.integers(0, 9))
def test_no_rule_ever_leaves_its_limits_or_sleeps_on_a_request(seed: int, fewest: int, more: int) -> None:
    rng = random.Random(seed)
    limits = ScalingLimits(fewest, max(1, fewest + more))
    for rule in rules(limits):
        replicas, asked_s = 1, math.inf
        for look in range(1, 60):
            arrived = rng.choice((0, 0, rng.randrange(40), rng.randrange(400)))
            waiting = rng.randrange(20) if arrived else 0
            seen = RoleSeen(
                ready=replicas, arrived=arrived, arrived_prompt_tokens=arrived * rng.randrange(1, 4000),
                waiting=waiting, waiting_prompt_tokens=waiting * 300, running=rng.randrange(9) if arrived else 0,
                mean_output_tokens=rng.choice((0.0, 80.0)), busy=rng.random(), ended=arrived,
                ended_in_slo=rng.randrange(arrived + 1),
            )  # fmt: skip
            now_s = look * rule.interval_s
            (answer,) = rule.decide(FleetSeen(now_s, {"both": seen}))
            assert limits.fewest <= answer.replicas <= limits.most
            assert answer.why
            asked_s = min(asked_s, now_s) if seen.requests else math.inf
            if answer.replicas == 0:
                assert now_s - asked_s <= 60.0  # KEDA looks every 30 s only
            replicas = answer.replicas


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(
    states=st.lists(
        st.tuples(st.sampled_from(("starting", "ready", "draining")), st.integers(0, 5)), max_size=10
    ),
    wanted=st.integers(0, 12),
)
def test_changes_lead_to_the_wanted_number_and_start_nothing_while_a_replica_drains(
    states: list[tuple[str, int]], wanted: int
) -> None:
    lives = [
        ReplicaLife(f"r{number}", state, requests, float(number))  # type: ignore[arg-type]
        for number, (state, requests) in enumerate(states)
    ]
    todo = changes(lives, wanted)
    active = sum(one.state != "draining" for one in lives)
    after = active + todo.start + len(todo.take_back) - len(todo.cancel) - len(todo.drain)
    assert after == wanted
    if todo.start:
        assert len(todo.take_back) == len(lives) - active
    by_name = {one.name: one for one in lives}
    assert all(by_name[name].state == "starting" for name in todo.cancel)
    assert all(by_name[name].state == "ready" for name in todo.drain)


def bursty(memory: BurstMemory, minutes: int) -> None:
    """Every five minutes, twenty seconds that need six replicas; nothing else."""
    for look in range(minutes * 12):
        burst = look % 60 < 4
        memory.note(30.0 if burst else 0.0, 60 if burst else 0)


def test_bursts_shorter_than_a_start_up_are_served_by_replicas_that_stand_ready() -> None:
    memory = BurstMemory(5.0, 60.0)
    bursty(memory, 60)
    way = memory.best([Following(60.0, 120.0)], SPEED.needed, 0.97, 2.0, 20)
    assert way.floor == 6
    quick = BurstMemory(5.0, 0.0)  # a replica starts at once: nothing has to stand ready
    bursty(quick, 60)
    assert quick.best([Following(5.0, 5.0)], SPEED.needed, 0.97, 2.0, 20).floor < 6


def test_a_rule_remembers_the_bursts_of_yesterday() -> None:
    def first_answer(looks: list[tuple[int, int, int]]) -> ScaleTo:
        rule = ForecastRule(SPEED, 60.0, SLO, ScalingLimits(1, 20))
        rule.remember("both", looks)
        return rule.decide(FleetSeen(5.0, {"both": RoleSeen(1)}))[0]

    burst = [(30, 15_000, 1_500) if look % 60 < 4 else (0, 0, 0) for look in range(720)]
    assert first_answer([]).replicas == 1
    answer = first_answer(burst)
    assert answer.replicas >= 6
    assert "stand ready for bursts" in answer.why


def test_replicas_together_need_less_slack_than_each_alone() -> None:
    speed = ReplicaSpeed(1000.0, 100.0, saturated=2.0)
    assert speed.needed(0.5) == pytest.approx(1.0)  # what one serves within the SLO
    assert 6.0 < speed.needed(5.0) < 10.0


# -- in virtual time ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def replica() -> Replica:
    catalog = shipped(None)
    cluster = catalog.cluster(1, "l40s")
    made = Replica(catalog.model("llama-3.1-8b"), cluster.node, cluster.fabric)
    return replace(made, max_context=2048)


def waves() -> Traffic:
    """A busy minute, a pause of ten, and a busy minute again."""
    rng = random.Random(5)
    times = sorted([rng.uniform(0, 60) for _ in range(150)] + [rng.uniform(660, 720) for _ in range(150)])
    return Traffic(tuple(Arrival(time_s, 600, 40) for time_s in times))


@pytest.mark.parametrize("rule", ["forecast", "keda-queue=1"])
def test_a_fleet_scales_to_zero_and_back_without_a_lost_request(rule: str, replica: Replica) -> None:
    plan = Rehearsal(replica, SLO, 20.0, ScalingLimits(0, 4))
    run = plan.play(parse_rule(rule), waves(), ReplicaSpeed(1500.0, 100.0))
    assert run.answered == run.requests == 300
    counts = [look.ready + look.starting for look in run.looks]
    assert 0 in counts
    assert counts[counts.index(0) :] != [0] * len(counts[counts.index(0) :])
    whole_h = run.ended_s / 3600
    assert run.replica_hours < 4 * whole_h
    again = plan.play(parse_rule(rule), waves(), ReplicaSpeed(1500.0, 100.0))
    assert [look.wanted for look in again.looks] == [look.wanted for look in run.looks]


def test_a_run_tells_with_how_many_replicas_it_began(replica: Replica) -> None:
    plan = Rehearsal(replica, SLO, 20.0, ScalingLimits(1, 4), begin_with=3)
    run = plan.play(parse_rule("forecast"), Traffic(waves().arrivals[:10]), ReplicaSpeed(1500.0, 100.0))
    assert run.began_with == {"both": 3}


def test_what_waits_at_a_replica_is_counted_once_however_many_requests_come_before_its_next_step(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A burst that was larger than expected took minutes: every arrival counted the whole queue again."""
    engine = SimulatedEngine(replica.scheduler(), replica.cost())
    cached = [min(16 * number, 580) for number in range(40)]
    for number, known in enumerate(cached):
        engine.give(Arrival(0.001 * number, 600, 4), known)
        engine.advance(0.02 * number)
        requests = engine.scheduler.requests.values()
        left = sum(max(0, 600 - max(one.sequences[0].computed, cached[int(one.id)])) for one in requests)
        left += sum(600 - cached[at] for at in range(number + 1 - len(engine.waiting_arrivals()), number + 1))
        assert engine.prompt_tokens_to_compute() == left
    monkeypatch.setattr(engine.scheduler, "requests", None)  # nobody looks at it
    engine.give(Arrival(1e6, 600, 4), 100)
    assert engine.prompt_tokens_to_compute() == left + 500


def test_an_oracle_has_replicas_before_the_load_comes(replica: Replica) -> None:
    plan = Rehearsal(replica, SLO, 60.0, ScalingLimits(1, 6))
    speed = ReplicaSpeed(1500.0, 100.0)
    run = plan.play(parse_rule("oracle"), waves(), speed)
    before = [look.ready for look in run.looks if 640 < look.time_s < 660]
    assert before[-1] > 1  # the second wave begins at 660 s


def test_prefill_and_decode_replicas_are_scaled_apart_and_lose_no_request(replica: Replica) -> None:
    plan = Rehearsal(
        replica, Slo(ttft_s=1.0, tpot_s=0.05), 20.0, ScalingLimits(0, 4), {"prefill": 1, "decode": 1}
    )
    run = plan.play(parse_rule("forecast"), waves(), ReplicaSpeed(1500.0, 300.0))
    assert run.answered == run.requests == 300
    assert set(run.replica_s) == {"prefill", "decode"}
    most = {role: max(look.wanted for look in run.looks if look.role == role) for role in run.replica_s}
    assert most["prefill"] > most["decode"] >= 1
    assert 0 in [look.ready + look.starting for look in run.looks if look.role == "decode"]


@pytest.mark.long
def test_the_speed_of_a_replica_is_what_it_serves_within_the_objective(replica: Replica) -> None:
    traffic = Traffic(tuple(Arrival(float(second), 600, 40) for second in range(100)))
    tight, loose = (replica_speed(replica, traffic, Slo(ttft_s=bound)) for bound in (0.15, 0.6))
    assert loose.prompt_tok_s > tight.prompt_tok_s > 100
    assert loose.output_tok_s > tight.output_tok_s


def test_a_rehearsal_judges_by_the_itl_that_a_server_promises(replica: Replica) -> None:
    """A prompt of 8,000 tokens holds up the answers beside it for one step: no mean shows it, the ITL does."""
    large = replace(replica, max_context=16384)
    answers = [Arrival(0.0, 100, 60) for _ in range(10)]
    traffic = Traffic((*answers, *(Arrival(0.4 + 0.2 * at, 8000, 2) for at in range(3))))
    missed = {}
    for name in ("itl", "tpot"):
        slo = Slo(**{"ttft_s": 60.0, f"{name}_s": 0.2})
        plan = Rehearsal(large, slo, 20.0, ScalingLimits(1, 1))
        run = plan.play(parse_rule("forecast"), traffic, SPEED)
        missed[name] = run.answered - run.in_slo
    assert missed["itl"] >= 10
    assert missed["tpot"] < missed["itl"]


def test_a_trace_is_parted_in_time_and_copied_without_a_loss() -> None:
    traffic = waves()
    first, rest = parted(traffic, 0.5)
    assert first is not None
    assert (len(first.arrivals), len(rest.arrivals)) == (150, 150)
    assert rest.arrivals[0].arrived_s < 360
    assert len(copied(traffic, 3).arrivals) == 900


def test_tuning_takes_the_cheapest_that_keeps_the_objective(replica: Replica) -> None:
    plan = Rehearsal(replica, SLO, 20.0, ScalingLimits(1, 4))
    names = [parse_rule(text) for text in ("hpa-queue=1", "hpa-queue=2")]
    runs = [(plan.play(name, Traffic(waves().arrivals[:40]), SPEED), name) for name in names]
    runs[0][0].in_slo, runs[1][0].in_slo = 40, 10
    assert best_of(runs, 0.95) is names[0]
    runs[0][0].in_slo = 5
    assert best_of(runs, 0.95) is names[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("forcast", "did you mean forecast?"),
        ("hpa-queue=x", "must be a number"),
        ("forecast=2", "has no target"),
    ],
)
def test_rules_that_do_not_exist_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_rule(text)


def test_settings_of_a_server_make_the_rule() -> None:
    chosen = parse_autoscale("0..3,idle=60s,interval=500ms,ttft=1s,prompt-tok-s=500")
    rule = chosen.rule(SPEED, 7.0, SLO)
    assert (rule.limits.fewest, rule.limits.most, rule.idle_s, rule.interval_s) == (0, 3, 60.0, 0.5)
    assert (rule.speed.prompt_tok_s, rule.speed.output_tok_s, rule.start_up_s) == (500.0, 100.0, 7.0)
    assert rule.slo.ttft_s == 1.0

"""Failures, checkpoints and spares: cumulo/plan/cluster/checkpoints.py."""

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.errors import ConfigError
from cumulo.plan.cluster.checkpoints import (
    Recovery,
    Spares,
    best_interval_s,
    daly_interval_s,
    ettr,
    simulate,
    spares_needed,
    young_interval_s,
)
from tests import thorough

PLENTY = Spares(nodes=10**6, repair_s=3600, broken_share=0.5)


def test_young_and_daly_agree_where_checkpoints_are_short():
    recovery = Recovery(mttf_s=86400, checkpoint_s=10, restart_s=300)
    assert young_interval_s(recovery) == pytest.approx(math.sqrt(2 * 10 * 86400))
    assert daly_interval_s(recovery) == pytest.approx(young_interval_s(recovery), rel=0.01)


@given(st.floats(600, 1e6), st.floats(0.001, 0.2), st.floats(0, 1800))
def test_dalys_interval_is_the_best_of_the_formula(mttf_s, share, restart_s):
    recovery = Recovery(mttf_s, checkpoint_s=share * mttf_s, restart_s=restart_s)
    best = daly_interval_s(recovery)
    others = [ettr(recovery, best * factor) for factor in (0.25, 0.5, 0.8, 1.25, 2, 4)]
    assert ettr(recovery, best) > max(others) * 0.9999


def test_the_formula_is_metas_to_first_order():
    """E[ETTR] ≈ (1 − N·r·(u₀ + Δt/2)) ÷ (1 + w/Δt) (Kokolis et al. 2024)."""
    nodes, rate_per_day, restart_s, interval_s, write_s = 2048, 3.79e-3, 300.0, 600.0, 6.0
    mttf_s = 86400 / (nodes * rate_per_day)
    theirs = (1 - (restart_s + interval_s / 2) / mttf_s) / (1 + write_s / interval_s)
    ours = ettr(Recovery(mttf_s, write_s, restart_s), interval_s)
    assert ours == pytest.approx(theirs, abs=0.003)


@settings(max_examples=thorough.examples(8), deadline=None)
@given(st.floats(1200, 20000), st.floats(1, 60), st.floats(0, 900), st.floats(0, 30), st.integers(0, 99))
def test_simulation_and_formula_agree(mttf_s, checkpoint_s, restart_s, delay_s, seed):
    recovery = Recovery(mttf_s, checkpoint_s, restart_s, delay_s=delay_s)
    interval_s = best_interval_s(recovery)
    played = simulate(recovery, interval_s, PLENTY, days=30, runs=12, seed=seed)
    assert played.ettr == pytest.approx(ettr(recovery, interval_s), abs=0.02)
    parts = (played.ettr, played.checkpoints, played.lost, played.restarts, played.no_spare)
    assert sum(parts) == pytest.approx(1, abs=1e-6)


def test_the_llama_3_run_trained_more_than_nine_tenths_of_its_time():
    """16,384 GPUs, 419 failures in 54 days; they report more than 90% (Grattafiori et al. 2024, section 3.3.4)."""
    recovery = Recovery(mttf_s=54 * 86400 / 419, checkpoint_s=5, restart_s=600)
    played = simulate(recovery, best_interval_s(recovery), PLENTY, days=54, runs=20)
    assert 0.9 < played.ettr < 0.96
    assert played.failures == pytest.approx(419, rel=0.05)


def test_an_hour_between_checkpoints_gives_what_metas_jobs_had():
    """Above 1,024 GPUs: a mean time to failure of 7.9 h and an ETTR of about 0.9 (Kokolis et al. 2024)."""
    assert ettr(Recovery(7.9 * 3600, checkpoint_s=60, restart_s=600), 3600) == pytest.approx(0.9, abs=0.01)


def test_a_job_without_spares_waits_for_repairs():
    recovery = Recovery(mttf_s=3600, checkpoint_s=1, restart_s=60)
    none = simulate(recovery, 60, Spares(0, repair_s=7200, broken_share=1.0), days=10, runs=5)
    some = simulate(recovery, 60, Spares(10, repair_s=7200, broken_share=1.0), days=10, runs=5)
    assert none.no_spare > 0.5 > 0.01 > some.no_spare
    assert some.ettr > 2 * none.ettr


def test_simulated_runs_repeat_themselves():
    recovery = Recovery(3600, 5, 300)
    assert simulate(recovery, 100, PLENTY, 5, 3, seed=1) == simulate(recovery, 100, PLENTY, 5, 3, seed=1)
    assert simulate(recovery, 100, PLENTY, 5, 3, seed=1) != simulate(recovery, 100, PLENTY, 5, 3, seed=2)


@given(st.floats(0.1, 200))
def test_spares_are_the_fewest_with_the_risk_asked_for(mean):
    """Against the Poisson distribution summed up from its definition."""
    spares = spares_needed(1, mean, 1.0, risk=0.01)

    def at_most(count):
        return math.fsum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count + 1))

    assert at_most(spares) >= 0.99 - 1e-9
    assert spares == 0 or at_most(spares - 1) < 0.99 + 1e-9


def test_very_many_nodes_need_no_endless_sum():
    mean = 5000
    assert spares_needed(mean, 1.0, 1.0) == pytest.approx(
        mean + statistics.NormalDist().inv_cdf(0.99) * math.sqrt(mean), abs=1
    )
    assert spares_needed(100, 0.0, 3.0) == 0


def test_a_job_that_always_fails_never_trains():
    assert ettr(Recovery(mttf_s=1, checkpoint_s=0, restart_s=600), 60) == 0
    with pytest.raises(ConfigError, match="mean time to failure"):
        Recovery(0, 1, 1)
    with pytest.raises(ConfigError, match="restart_s"):
        Recovery(1, 1, -1)

"""`cumulo bench cluster`: results are told as they come, on workloads of many shapes."""

import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from cumulo.cli.app import app
from cumulo.cluster.decide.policies import policy_named
from cumulo.cluster.simulate import decision_cost
from cumulo.cluster.simulate.play import PlayOptions, play
from cumulo.cluster.simulate.workloads import WORKLOADS, WorkloadSize, workload_named

SMALL = WorkloadSize(nodes=20, jobs=200, load=1.5)
FEW = replace(SMALL, jobs=80)
BENCH = ["bench", "cluster", "--nodes", "10", "--jobs", "40", "--loads", "0.9"]


def test_each_policy_is_told_before_the_next_one_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_one, seen = decision_cost.cost, []

    def watched(policy, *rest):
        seen.append(sys.stdout.buffer.getvalue().decode())  # what was flushed until now
        return measure_one(policy, *rest)

    monkeypatch.setattr(decision_cost, "cost", watched)
    found = CliRunner().invoke(app, [*BENCH, "--policy", "fifo,backfill"], catch_exceptions=False)
    assert found.exit_code == 0
    assert seen[0] == "" and seen[1].startswith("fifo, load 0.9: whole trace") and "backfill" not in seen[1]
    # The table comes at the end, and progress is not among the results.
    table = found.stdout[found.stdout.index("40 jobs on 10 nodes") :]
    assert "fifo, load 0.9: slowest decision" in table and "backfill, load 0.9: slowest decision" in table
    assert "fifo, load 0.9" in found.stderr


def test_with_json_on_stdout_nothing_else_is_there() -> None:
    found = CliRunner().invoke(app, [*BENCH, "--policy", "fifo", "--json", "-"], catch_exceptions=False)
    assert found.stdout.lstrip().startswith("{") and "whole trace" in found.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    (
        (["--policy", "fifo,backfil"], "did you mean backfill"),
        (["--workload", "usual,bursts"], "did you mean burst"),
        (["--workload", "tenants+bursts"], "did you mean burst"),
    ),
)
def test_a_wrong_name_is_told_before_anything_is_measured(words: list[str], told: str) -> None:
    found = CliRunner().invoke(app, [*BENCH, *words])
    assert found.exit_code != 0 and found.stdout == ""
    assert told in str(found.exception)


@pytest.mark.long
@pytest.mark.parametrize("name", (*WORKLOADS, "tenants+burst", "shares+cores+devices+tenants+failures"))
def test_every_job_of_every_workload_ends(name: str) -> None:
    for policy in map(policy_named, ("backfill", "fair", "priority+defrag+cordon", "las", "goodput")):
        played = decision_cost.workload_for(policy, name, FEW)
        options = PlayOptions(
            interval_s=600.0 if policy.in_rounds else 0.0, always_decide=policy.always_decide, quotas=played.quotas,
            failures=played.failures,
        )  # fmt: skip
        run = play(played.nodes, played.trace, policy.decide, None, options)
        assert len(run.outcomes) + len(run.impossible) == FEW.jobs and len(run.impossible) < 3, policy.name


def test_workloads_have_what_their_names_say() -> None:
    def requests(name):
        return [job.request for job in workload_named(name, SMALL).trace]

    usual = requests("usual")
    assert sum(job.fractional for job in requests("shares")) > 60
    assert all(job.cpu_milli for job in requests("cores"))
    assert 70 < sum(bool(job.devices) for job in requests("devices")) < 130
    assert len({job.tenant for job in requests("tenants")}) > 50
    assert len({job.priority for job in requests("priorities")}) > 60
    assert requests("burst")[-1].arrival_s == pytest.approx(usual[-1].arrival_s / 100)
    assert 40 < sum(job.predicted_s is None for job in requests("unpredicted")) < 95
    assert workload_named("failures", SMALL).failures is not None
    large = WorkloadSize(nodes=10_240, jobs=1000, load=1.0)
    assert max(job.request.tasks for job in workload_named("wide", large).trace) == 512


def test_shapes_put_together_have_what_each_of_them_has() -> None:
    both = workload_named("tenants+failures+burst", SMALL)
    tenants, burst = workload_named("tenants", SMALL), workload_named("burst", SMALL)
    assert both.quotas == tenants.quotas and both.failures is not None
    assert [job.request.tenant for job in both.trace] == [job.request.tenant for job in tenants.trace]
    assert [job.request.arrival_s for job in both.trace] == [job.request.arrival_s for job in burst.trace]

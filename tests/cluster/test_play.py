"""The simulator: outcomes known by hand, nobody starves, failures, and the published workloads."""

import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from cumulo.cluster.decide.decisions import JobPlacement
from cumulo.cluster.decide.jobs import JobRequest, RunningJob, StepProfile, TaskPlace
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.cluster.decide.policies import policy_named
from cumulo.cluster.decide.snapshot import TenantQuota, snapshot_of
from cumulo.cluster.decide.step_time import leaf_fabric
from cumulo.cluster.simulate import page as pages
from cumulo.cluster.simulate.fill import PUBLISHED, fill
from cumulo.cluster.simulate.job_speed import JobSpeed, LeafSpeed, TraceJob
from cumulo.cluster.simulate.outcome import ClusterRun, Segment
from cumulo.cluster.simulate.page import gantt, page
from cumulo.cluster.simulate.play import BrokenPolicy, PlayOptions, play
from cumulo.cluster.simulate.pollux import read_pollux
from cumulo.cluster.simulate.synthetic import FailureRates, mispredicted, synthetic_trace, uniform_nodes
from cumulo.cluster.simulate.traces import read_nodes, read_trace
from cumulo.errors import ConfigError

TRACES = Path(__file__).parents[3] / "shared/data/cluster/traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the published traces are not at hand")


def job(name, at_s, work, gpus, tasks=1, **more):
    return TraceJob(JobRequest(name, tasks, gpus, arrival_s=at_s, predicted_s=work, **more), work)


# One node with 4 GPUs: a long small job, a gang that needs all, a short small one behind it, and one too long.
TRACE = [job("long", 0, 100, 2), job("all", 1, 10, 4), job("short", 2, 50, 2), job("too-long", 3, 200, 2)]


def ends(policy, trace=TRACE, **options):
    run = play(uniform_nodes(1, 4), trace, policy_named(policy).decide, options=PlayOptions(**options))
    return {one.job_id: one.end_s for one in run.outcomes}


def test_fifo_lets_nobody_overtake():
    assert ends("fifo") == {"long": 100, "all": 110, "short": 160, "too-long": 310}


def test_backfill_starts_what_does_not_delay_the_reserved_job():
    assert ends("backfill") == {"long": 100, "all": 110, "short": 52, "too-long": 310}


def test_a_percentile_of_completion_times_is_one_that_99_of_100_jobs_do_not_exceed():
    run = play(
        uniform_nodes(100, 1), [job(f"j{n}", 0, n + 1, 1) for n in range(100)], policy_named("fifo").decide
    )
    assert run.percentile_jct_s(99) == 99 and run.percentile_jct_s(50) == 50


def test_the_urgent_preempt_where_the_checkpoint_is_worth_it():
    trace = [job("low", 0, 100, 4, checkpoint_s=5), job("high", 10, 20, 4, priority=1)]
    assert ends("priority", trace) == {"high": 30, "low": 30 + 5 + 90}
    dear = [job("low", 0, 100, 4, checkpoint_s=500), job("high", 10, 20, 4, priority=1)]
    assert ends("priority", dear) == {"low": 100, "high": 120}


def test_a_tenant_gets_back_what_others_borrowed():
    trace = [
        job("a1", 0, 100, 2, tenant="a"),
        job("a2", 1, 100, 2, tenant="a"),
        job("b1", 10, 20, 2, tenant="b"),
    ]
    quotas = (TenantQuota("a", 2, 2), TenantQuota("b", 2))
    found = ends("fair", trace, quotas=quotas)
    assert found["b1"] == 30 and found["a1"] == 100 and found["a2"] == 30 + 91


@pytest.mark.parametrize("name", ("backfill", "shortest", "fair", "las", "priority", "backfill+topology"))
def test_nobody_starves_on_a_full_cluster(name):
    trace = synthetic_trace(150, 64, load=1.5, seed=3)
    policy = policy_named(name)
    run = play(uniform_nodes(8, 8, 4), trace, policy.decide)
    assert len(run.outcomes) == len(trace) and not run.unfinished
    assert all(one.jct_s >= 0.999 * one.alone_s for one in run.outcomes)


class _Third(JobSpeed):
    """Steps that no binary number counts exactly."""

    asked = 0

    def rate(self, job, places, done):
        self.asked += 1
        assert self.asked < 100, "it comes closer to its end for ever"
        return 3.0, float("inf")


def test_a_job_ends_where_the_clock_is_coarser_than_what_is_left():
    trace = [job("late", 1e9, 1.0, 2), job("later", 1e9 + 0.1, 1e-9, 2)]
    run = play(uniform_nodes(1, 4), trace, policy_named("fifo").decide, speed=_Third())
    assert sorted(one.job_id for one in run.outcomes) == ["late", "later"]


def test_failures_cost_work_and_bad_nodes_are_cordoned():
    trace = [job(f"j{number}", 100.0 * number, 20_000, 8) for number in range(40)]
    rates = FailureRates(2000.0, repair_s=600, bad_nodes=0.05, bad_share=0.9)  # per 1,000 node-days
    run = play(
        uniform_nodes(20), trace, policy_named("backfill+cordon").decide, options=PlayOptions(failures=rates)
    )
    assert len(run.outcomes) == 40
    assert run.node_failures >= 3 and run.cordoned == ["node-0"] and run.lost_work > 0
    assert sum(one.restarts for one in run.outcomes) > 0


def test_a_job_waits_for_the_cores_of_one_that_names_a_share_of_a_gpu_and_has_none():
    trace = [job("cores", 0, 100, 0, gpu_milli=500, cpu_milli=6000), job("gpus", 1, 10, 4, cpu_milli=4000)]
    run = play([ClusterNode("only", 4, cpu_milli=8000)], trace, policy_named("backfill").decide)
    assert {one.job_id: one.end_s for one in run.outcomes} == {"cores": 100, "gpus": 110}


def test_a_broken_policy_is_stopped_and_named():
    def twice(snapshot):
        return [JobPlacement(snapshot.waiting[0].job_id, (TaskPlace("node-0", (0, 1)),))]

    with pytest.raises(BrokenPolicy, match="at 2 s: second is placed on node-0, which has too little free"):
        play(uniform_nodes(1, 4), [job("first", 0, 100, 2), job("second", 2, 50, 2)], twice)


def test_a_gang_goes_under_one_leaf_where_its_step_is_fastest_and_says_so():
    nodes = uniform_nodes(16, 8, 4, oversubscription=4)
    gangs = [job(f"g{number}", number, 3600, 8, 4, step=StepProfile(0.5, 4e9, 4e9)) for number in range(4)]
    steps = {}
    for name in ("fifo", "fifo+topology"):
        speed = LeafSpeed(leaf_fabric(nodes))
        run = play(nodes, gangs, policy_named(name).decide, speed, PlayOptions(keep_log=True))
        steps[name] = [step / best for step, best in speed.steps.values()]
    assert max(steps["fifo+topology"]) == pytest.approx(1.0)
    assert max(steps["fifo"]) > 1.1  # packed by name, the gangs lie over all leaves and share their uplinks
    reasons = [one.reason for _, decisions in run.log for one in decisions]
    assert "under leaf-" in reasons[0] and "packed without looking would take" in reasons[0]


def test_a_gang_that_fits_and_must_wait_takes_no_uplinks_from_those_behind_it():
    """Backfill asks where the long gang would lie, and refuses it: the short one behind it is priced without it."""
    nodes = uniform_nodes(8, 8, 2, oversubscription=4)
    half = {node.leaf: node.name for node in nodes}.values()  # a node under each leaf
    runs = RunningJob(
        JobRequest("runs", 4, 8, predicted_s=100),
        tuple(TaskPlace(name, (*range(8),)) for name in half),
        0,
        100,
    )
    step = StepProfile(0.5, 4e9, 4e9)
    first = JobRequest("first", 8, 8, arrival_s=1, predicted_s=100)
    long = JobRequest("long", 2, 8, arrival_s=2, predicted_s=1000, step=step)
    short = JobRequest("short", 2, 8, arrival_s=3, predicted_s=50, step=step)
    also = replace(short, job_id="also", arrival_s=4)
    told = []
    for queue in ((first, long, short, also), (first, short, also)):
        decided = policy_named("backfill+topology").decide(snapshot_of(5, nodes, queue, [runs]))
        told.append([(one.job_id, one.reason) for one in decided if isinstance(one, JobPlacement)])
    assert [name for name, _ in told[0]] == ["short", "also"] and told[0] == told[1]
    steps = [float(reason.split("a step of ")[1].split(" ms")[0]) for _, reason in told[0]]
    assert steps[0] == steps[1]  # each crosses two leaves of its own


def test_a_gang_that_is_evicted_takes_no_uplinks_from_those_that_start_instead():
    """Where they lie is where they would lie if it exchanged nothing."""
    nodes, step = uniform_nodes(8, 8, 2, oversubscription=4), StepProfile(0.5, 4e9, 4e9)
    two = [node.name for node in nodes if node.leaf in ("leaf-0", "leaf-1")]
    places = tuple(TaskPlace(name, (*range(8),)) for name in two)
    queue = [
        JobRequest(name, 3, 8, arrival_s=9e5, predicted_s=100, step=step) for name in ("first", "second")
    ]
    told = []
    for old_step in (step, None):
        old = RunningJob(JobRequest("old", 4, 8, predicted_s=1e6, step=old_step), places, 0, 1e6)
        decided = policy_named("las+topology").decide(snapshot_of(9e5, nodes, queue, [old]))
        assert [one.job_id for one in decided] == ["old", "first", "second"]
        told.append([one.places for one in decided if isinstance(one, JobPlacement)])
    assert told[0] == told[1]


def test_the_page_has_a_bar_for_every_run_and_a_square_for_every_node():
    run = play(uniform_nodes(1, 4), TRACE, policy_named("backfill").decide)
    text = page([("backfill", run)])
    assert text.count("<rect") == 4 + 1 and "too-long: 3.33 min, 1 task<" in text


def test_the_page_says_which_jobs_and_nodes_it_leaves_out():
    jobs = [*TRACE, TraceJob(JobRequest("wide", 3000, 1), 10.0)]
    run = play(uniform_nodes(130, 4), jobs, policy_named("fifo").decide)
    text = page([("fifo", run)])
    assert f"{len(jobs)} jobs on 130 nodes with 520 GPUs; 1 of them is too large for the cluster" in text
    assert "The chart shows the first 128 of 130 nodes." in text


def test_a_job_on_gpus_apart_does_not_cover_those_between():
    run = ClusterRun(uniform_nodes(1, 4))
    for name, gpus in (("apart", (0, 3)), ("between", (1, 2))):
        run.segments.append(Segment(name, 0.0, 10.0, (TaskPlace("node-0", gpus),)))
    heights = re.findall(r'y="([0-9.]+)"[^>]*height="([0-9.]+)" fill="hsl[(][0-9]+ 55', gantt(run))
    assert [(float(y), float(high)) for y, high in heights] == [(0, 3), (9, 3), (3, 6)]


def test_a_chart_has_fewer_nodes_and_not_less_time_where_too_much_ran(monkeypatch):
    monkeypatch.setattr(pages, "_MOST_BARS", 250)
    run = play(
        uniform_nodes(3, 1),
        [job(f"j{number}", 0, 10, 1) for number in range(300)],
        policy_named("fifo").decide,
    )
    text = page([("fifo", run)])
    assert len(run.segments) == 300 and "The chart shows the first 2 of 3 nodes." in text
    assert gantt(run).count("<title>") == 200
    assert text.count("100 % of its GPU time") == 3


def test_predictions_are_wrong_by_the_same_factor_every_time():
    trace = synthetic_trace(50, 64)
    once, again = mispredicted(trace, 0.5), mispredicted(trace, 0.5)
    assert once == again and mispredicted(trace, 0.0) == trace
    assert all(one.work == other.work for one, other in zip(trace, once, strict=True))
    assert sum(one.request != other.request for one, other in zip(trace, once, strict=True)) == 50


HEAD = "job_id,arrival_s,duration_s,gpus"


@pytest.mark.parametrize(
    ("lines", "said"),
    (
        ("a,b\n1,2", "is no job trace: its columns are a,b"),
        (
            "job_id,arrival,duration_s,gpus\nx,0,1,1",
            r"column arrival_s is missing \(did you mean it by arrival",
        ),
        (f"{HEAD},prioritty\nx,0,1,1,5", "there is no column prioritty; did you mean priority"),
        (f"{HEAD}\nx,0,ten,1", ":2: duration_s must be a number of 0 or more, got 'ten'"),
        (f"{HEAD}\nx,0,nan,1", ":2: duration_s must be a number"),
        (f"{HEAD}\nx,0,1,1\ny,0,-5,1", ":3: duration_s must be a number of 0 or more, got '-5'"),
        (f"{HEAD}\nx,0,1e300,1", "1e\\+12 at most"),
        (f"{HEAD}\nx,0,1,1.5", ":2: gpus must be a whole number"),
        (f"{HEAD}\nx,0", ":2: this line has no value for duration_s"),
        (f"{HEAD}\nx,0,1,1,7", ":2: this line has more values than there are columns"),
        (f"{HEAD}\nx,0,1,1\nx,5,1,1", ":3: job_id 'x' is already in line 2"),
        (f"{HEAD}\n,0,1,1", ":2: job_id is missing"),
        (f"{HEAD},gpu_milli\nx,0,1,1,1500", ":2: job x: a share of a GPU is 1 to 1000"),
        (HEAD, "has no lines"),
        ("\x00\udcff", "no CSV file"),
    ),
)
def test_an_odd_trace_is_refused_with_its_line_and_column(tmp_path, lines, said):
    file = tmp_path / "t.csv"
    file.write_bytes(lines.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=said):
        read_trace(file)


def test_a_job_that_is_too_large_for_the_cluster_holds_up_nobody(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text(
        f"\ufeff{HEAD.upper().replace(',', '; ')};Devices\nlast;9;0;1;\nwide;0;5;16;\nother;0;5;1;H100\n"
    )
    run = play(uniform_nodes(2, 8), read_trace(file), policy_named("backfill").decide)
    assert [one.job_id for one in run.outcomes] == ["last"]
    assert [job.job_id for job in run.impossible] == ["wide", "other"]


@needs_traces
@pytest.mark.thorough
@pytest.mark.parametrize("workload", (1, 6))
def test_pollux_workloads_come_out_as_published(workload):
    published = {1: (2088.77, 2473.65), 6: (2446.13, 3469.69)}[workload]
    found = []
    for name, adaptive in (("elastic", True), ("las+emptiest", False)):
        jobs, speed = read_pollux(TRACES / f"pollux_workload-{workload}.csv", adaptive)
        options = PlayOptions(interval_s=60, always_decide=True, check=False)
        found.append(play(uniform_nodes(16, 4), jobs, policy_named(name).decide, speed, options).mean_jct_s)
    assert found == pytest.approx(published, rel=0.15)
    assert found[0] / found[1] == pytest.approx(published[0] / published[1], rel=0.15)


@needs_traces
@pytest.mark.thorough
@pytest.mark.parametrize(("workload", "pollux_s"), ((2, 3322.94), (6, 2446.13)))
def test_goodput_is_shorter_than_pollux_also_where_predictions_are_wrong(workload, pollux_s):
    jobs, speed = read_pollux(TRACES / f"pollux_workload-{workload}.csv", True, 0.5)
    options = PlayOptions(interval_s=60, always_decide=True)
    run = play(uniform_nodes(16, 4), jobs, policy_named("goodput").decide, speed, options)
    assert run.mean_jct_s < 0.97 * pollux_s


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("per_leaf", "oversubscription", "load", "seed"), ((4, 2, 0.9, 2), (16, 8, 0.9, 3), (8, 1, 1.5, 4))
)
def test_on_other_fabrics_topology_is_never_slower_than_packing_blind(per_leaf, oversubscription, load, seed):
    nodes = uniform_nodes(64, 8, per_leaf, oversubscription=oversubscription)
    trace = synthetic_trace(300, 512, load, seed, steps=True)
    means = []
    for name in ("backfill", "backfill+topology"):
        speed = LeafSpeed(leaf_fabric(nodes))
        play(nodes, trace, policy_named(name).decide, speed)
        means.append(sum(step / best for step, best in speed.steps.values()) / len(speed.steps))
    assert means[1] <= means[0] + 0.002


@needs_traces
@pytest.mark.thorough
def test_looking_ahead_allocates_more_of_openb_than_fgd():
    nodes = read_nodes(TRACES / "openb_node_list_gpu_node.csv")
    jobs = [one.request for one in read_trace(TRACES / "openb_pod_list_default.csv")]
    found = {name: fmean(fill(nodes, jobs, name, [0, 1]).at_100) for name in ("fgd", "lookahead")}
    assert found["lookahead"] > found["fgd"]


@needs_traces
@pytest.mark.thorough
def test_openb_fills_up_as_published():
    nodes = read_nodes(TRACES / "openb_node_list_gpu_node.csv")
    jobs = [one.request for one in read_trace(TRACES / "openb_pod_list_default.csv")]
    found = {name: fill(nodes, jobs, name, [7]) for name in PUBLISHED}
    for name, (at_100, at_130) in PUBLISHED.items():
        assert fmean(found[name].at_100) == pytest.approx(at_100, abs=1.5)
        assert fmean(found[name].at_130) == pytest.approx(at_130, abs=1.5)
    order = [
        fmean(found[name].at_130) for name in ("random", "dot-product", "gpu-packing", "best-fit", "fgd")
    ]
    assert order == sorted(order)

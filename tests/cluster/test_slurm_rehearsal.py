"""Slurm's own scheduling, rehearsed: on small clusters known by hand, and on runs recorded on a real Slurm."""

from dataclasses import replace
from pathlib import Path

import pytest

from cumulo.cluster.decide.decisions import JobPlacement, Waits
from cumulo.cluster.decide.jobs import JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.slurm import SlurmScheduling, slurm_policy
from cumulo.cluster.decide.snapshot import snapshot_of
from cumulo.cluster.simulate.play import PlayOptions
from cumulo.cluster.simulate.slurm_record import SlurmRehearsal, read_slurm_record, rehearse, slurm_settings
from cumulo.cluster.simulate.synthetic import uniform_nodes
from cumulo.errors import ConfigError
from tests.cluster.record_slurm import RECORDS, RUNS, record
from tests.cluster.slurm_cluster import needs_slurm

NODES = uniform_nodes(2, 4)
A, B = (node.name for node in NODES)
USUAL = SlurmScheduling(resolution_s=1.0)


def job(name: str, tasks: int, gpus: int, limit_s: float | None, **more: object) -> JobRequest:
    return JobRequest(name, tasks, gpus, predicted_s=limit_s, **more)  # type: ignore[arg-type]


def busy(limit_s: float) -> RunningJob:
    """A job that has the first node from the beginning."""
    return RunningJob(job("busy", 1, 4, limit_s), (TaskPlace(A, (0, 1, 2, 3)),), 0.0, limit_s)


def decided(now_s: float, jobs: list[JobRequest], settings: SlurmScheduling = USUAL, *running: RunningJob):
    found = slurm_policy(settings)(snapshot_of(now_s, NODES, jobs, running))
    starts = [one.job_id for one in found if isinstance(one, JobPlacement)]
    return starts, {one.job_id: one.until_s for one in found if isinstance(one, Waits)}


GANG = job("gang", 2, 4, 100)


def test_jobs_start_by_priority_and_then_by_arrival() -> None:
    jobs = [job("a", 1, 4, 10), job("b", 1, 4, 10, arrival_s=1), job("c", 1, 4, 10, arrival_s=2, priority=5)]
    starts, _ = decided(7, jobs)
    assert starts == ["c", "a"]


def test_priority_grows_with_age_as_far_as_the_settings_say() -> None:
    settings = SlurmScheduling(age_weight=10, max_age_s=100)
    old, new = job("old", 2, 4, 10), job("new", 2, 4, 10, arrival_s=500, priority=5)
    assert decided(501, [old, new], settings)[0] == ["old"]
    assert decided(501, [old, replace(new, priority=11)], settings)[0] == ["new"]
    assert decided(501, [old, new], USUAL)[0] == ["new"]


def test_the_main_loop_lets_nobody_overtake_and_backfill_does() -> None:
    jobs = [GANG, job("short", 1, 4, 50, arrival_s=1)]
    assert decided(31, jobs, USUAL, busy(90))[0] == []  # backfill does not look
    assert decided(30, jobs, USUAL, busy(90))[0] == ["short"]
    assert decided(30, jobs, replace(USUAL, backfill=False), busy(90))[0] == []
    assert decided(31, jobs, replace(USUAL, phase_s=1), busy(90))[0] == ["short"]


def test_a_planned_start_is_kept_and_told() -> None:
    long = job("long", 1, 4, 70, arrival_s=1)  # until 100 s, ten seconds too long
    starts, waits = decided(30, [GANG, long], USUAL, busy(90))
    assert starts == [] and waits == {"gang": 90, "long": 190}


def test_a_plan_takes_whole_nodes_and_whole_slots_of_time() -> None:
    half = job("half", 2, 1, 100)
    beside = job("beside", 1, 2, 70, arrival_s=1)  # its GPUs would be free next to the first job's
    assert decided(30, [half, beside], USUAL, busy(90)) == ([], {"half": 90, "beside": 190})
    short = job("short", 1, 4, 40, arrival_s=1)
    assert (
        decided(30, [GANG, short], replace(USUAL, resolution_s=60), busy(90))[0] == []
    )  # planned from 60 s on
    assert decided(30, [GANG, short], USUAL, busy(90))[0] == ["short"]


def test_backfill_looks_at_so_many_jobs_and_so_far_ahead() -> None:
    jobs = [GANG, job("short", 1, 4, 50, arrival_s=1)]
    assert decided(30, jobs, replace(USUAL, most_tested=1), busy(90))[0] == []
    long = job("long", 1, 4, 70, arrival_s=1)
    assert decided(30, [GANG, long], replace(USUAL, window_s=50), busy(90))[0] == ["long"]  # no plan so late


def test_a_job_beyond_its_limit_keeps_its_nodes() -> None:
    assert decided(120, [GANG], USUAL, busy(90)) == ([], {"gang": 121})


CONFIG = """Configuration data as of 2026-11-19T08:00:00
AccountingStorageType   = accounting_storage/slurmdbd
PriorityMaxAge          = 1-00:00:00
PriorityType            = priority/multifactor
PriorityWeightAge       = 500
SchedulerParameters     = bf_interval=5,bf_window=60,bf_resolution=10,default_queue_depth=7,bf_max_job_test=9
SchedulerType           = sched/backfill
"""


def test_settings_are_those_of_the_cluster() -> None:
    assert slurm_settings(CONFIG) == SlurmScheduling(True, 5, 3600, 10, 9, 7, 3, 500, 86400)
    assert slurm_settings("SchedulerType = sched/builtin\nSchedulerParameters = (null)\n").backfill is False
    assert slurm_settings(CONFIG.replace("bf_interval=5", "bf_interval=-1")).backfill is False
    assert slurm_settings(CONFIG.replace("slurmdbd", "none")).age_weight == 0
    with pytest.raises(ConfigError, match="scontrol show config"):
        slurm_settings("slurm_load_ctl_conf error: Unable to contact slurm controller")


SACCT = """JobID|Submit|Eligible|Start|End|Timelimit|ReqTRES|Priority|User
7|2026-11-19T08:00:05|2026-11-19T08:00:30|2026-11-19T08:01:00|2026-11-19T09:00:00|1-02:00:00|billing=4,cpu=4,gres/gpu=8,node=2|300|ada
8|2026-11-19T08:00:10|2026-11-19T08:00:10|2026-11-19T08:00:10|Unknown|UNLIMITED|cpu=1,gres/gpu:a100=1,node=1|1|bob
9|2026-11-19T08:00:20|Unknown|2026-11-19T08:00:20|2026-11-19T08:00:40|UNLIMITED|cpu=1,node=1|1|bob
"""


def test_jobs_are_read_as_sacct_lists_them(tmp_path: Path) -> None:
    path = tmp_path / "jobs.txt"
    path.write_text(SACCT)
    found = read_slurm_record(path, SlurmScheduling(age_weight=86400, max_age_s=86400))
    assert found.left_out == 1 and found.waits_s == {"7": 30, "9": 0}
    second, first = found.jobs
    assert first.request == JobRequest("7", 2, 4, arrival_s=30, predicted_s=93600, priority=270, tenant="ada")
    assert first.work == 3540 and second.request.gpus_per_task == 0 and second.request.predicted_s is None


def test_jobs_are_read_as_squeue_lists_them(tmp_path: Path) -> None:
    path = tmp_path / "jobs.txt"
    path.write_text(
        "JOBID|SUBMIT_TIME|START_TIME|END_TIME|TIME_LIMIT|NODES|CPUS|TRES_PER_NODE|PRIORITY|USER\n"
        "3_1|2026-11-19T08:00:05|2026-11-19T08:00:06|2026-11-19T08:00:16|2:00|3|3|gres/gpu:a100:2|9|ada\n"
        "4|2026-11-19T08:00:09|N/A|N/A|2:00|1|1|N/A|8|ada\n"
    )
    found = read_slurm_record(path, USUAL)
    assert found.jobs[0].request == JobRequest(
        "3_1", 3, 2, arrival_s=0, predicted_s=120, priority=9, tenant="ada"
    )


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("2026-11-19T08:01:00", "yesterday", r"jobs.txt:2: start must be a time such as .*, got 'yesterday'"),
        ("1-02:00:00", "soon", "jobs.txt:2: timelimit must be a time such as 1-12:00:00, got 'soon'"),
        ("300", "high", "jobs.txt:2: priority must be a number"),
        ("\n9|", "\n7|", "jobs.txt:4: jobid '7' is already in line 2"),
        ("Start|End", "Begin|End", "the column start is missing"),
    ],
)
def test_a_list_that_cannot_be_read_is_told_with_its_line(
    tmp_path: Path, old: str, new: str, told: str
) -> None:
    path = tmp_path / "jobs.txt"
    path.write_text(SACCT.replace(old, new))
    with pytest.raises(ConfigError, match=told):
        read_slurm_record(path, USUAL)


def rehearsed(name: str, config: Path, jobs: Path) -> SlurmRehearsal:
    settings = slurm_settings(config.read_text("utf-8"))
    nodes = uniform_nodes(RUNS[name].nodes, RUNS[name].gpus)
    return rehearse(read_slurm_record(jobs, settings), nodes, PlayOptions())


@pytest.mark.parametrize("name", RUNS)
def test_the_mean_wait_on_a_real_slurm_is_predicted_within_15_percent(name: str) -> None:
    found = rehearsed(name, *RECORDS[name])
    assert len(found.run.outcomes) == 50 and found.real_wait_s > 10
    assert abs(found.error) < 0.15


@needs_slurm
@pytest.mark.thorough
def test_the_mean_wait_of_a_new_run_is_predicted_within_15_percent(tmp_path: Path) -> None:
    files = tmp_path / "config.txt", tmp_path / "jobs.txt"
    for path, text in zip(files, record(RUNS["first"]), strict=True):
        path.write_text(text)
    assert abs(rehearsed("first", *files).error) < 0.15

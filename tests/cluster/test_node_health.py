"""What is heard of nodes: what becomes of them, that jobs go elsewhere, and that healthy ones stay."""

import os
import random
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cumulo.cluster import launching
from cumulo.cluster.decide.health import (
    HealthSignal,
    NodeCheck,
    SignalKind,
    chance,
    check_signals,
    compared,
    judged,
)
from cumulo.cluster.decide.jobs import TaskPlace
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.cluster.decide.policies import policy_named
from cumulo.cluster.decide.recovery import UNHEALTHY, AttemptEnd, after_attempt
from cumulo.cluster.decision_log import replay
from cumulo.cluster.drivers import local_supervisor
from cumulo.cluster.drivers.command import checked, output_file
from cumulo.cluster.drivers.local_attempt import Attempt
from cumulo.cluster.drivers.local_supervisor import Supervisor
from cumulo.cluster.drivers.slurm_script import batch_script
from cumulo.cluster.job_file import job_from
from cumulo.cluster.job_store import JobRecord, JobStore
from cumulo.cluster.node_health import NodeHealth, end_signals, log_signals
from cumulo.ranks.hang import Standing, verdict
from tests.cluster.test_local import job, store, until
from tests.serve.running_server import wait_for

__all__ = ["store"]  # a fixture
NODES = tuple(ClusterNode(f"n{number}", gpus=0, cpu_milli=2000) for number in (1, 2, 3))
FALLEN = "[ 812.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=1423, GPU has fallen off the bus."


@pytest.fixture
def three_nodes(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> JobStore:
    monkeypatch.setattr(local_supervisor, "this_machine", lambda store: NODES)
    return store


def record(places: tuple[str, ...] = ("n1",), folder: str = "") -> JobRecord:
    job = job_from({"name": "tiny", "train": {"config": "a.yaml"}, "devices": {"count": len(places)}})
    return JobRecord("tiny-1", "k", "local", job, folder, "/", 0.0, places=tuple(map(TaskPlace, places)))


# -- the rule -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("log", "act"),
    [
        (FALLEN, "drain"),
        ("NVRM: Xid (PCI:0000:3b:00): 64, Row remapper failure", "drain"),
        ("NVRM: Xid (PCI:0000:3b:00): 94, Contained ECC error", "cordon"),
        ("NVRM: Xid (PCI:0000:3b:00): 63, Row remapping pending\nNVRM: Xid (PCI:0000:3b:00): 74, NVLink", "cordon"),
        ("NVRM: Xid (PCI:0000:3b:00): 119, Timeout waiting for RPC from GSP", "cordon"),
        ("NVRM: Xid (PCI:0000:3b:00): 63, Row remapping pending", "watch"),
        ("NVRM: Xid (PCI:0000:3b:00): 45, Preemptive cleanup", "watch"),
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid=88, MMU Fault", None),  # of the program
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", None),
        ("eth1: link becomes ready\nusb 1-1: new device", None),
    ],
)  # fmt: skip
def test_a_log_asks_for_what_its_worst_xid_deserves(log: str, act: str | None) -> None:
    assert [one.asks for one in log_signals("n1", log, 0.0)] == ([] if act is None else [act])


def test_failures_cordon_a_node_only_where_chance_does_not_explain_them() -> None:
    ran = {f"n{number}": 10 for number in range(20)}
    failures = [HealthSignal("n3", "failure", "was killed", float(at), job=f"j{at}") for at in range(4)]
    acts = [judged(one, failures[:at], ran)[0] for at, one in enumerate(failures)]
    assert acts == ["watch", "watch", "watch", "cordon"]
    elsewhere = [HealthSignal(f"n{at}", "failure", "bug", 0.0, job=f"b{at}") for at in range(20)]
    assert judged(failures[3], [*failures[:3], *elsewhere], ran)[0] == "watch"  # others fail as well
    same = [HealthSignal("n3", "failure", "bug", float(at), job="mine") for at in range(9)]
    assert judged(same[8], same[:8], ran)[0] == "watch"  # one program, again and again
    assert judged(failures[3], failures[:3], {"n3": 10})[0] == "watch"  # nothing to compare with
    late = HealthSignal("n3", "failure", "was killed", 90_000.0, job="later")
    assert judged(late, failures[:3], ran)[0] == "watch"  # those were the day before


def test_the_chance_is_that_of_dealing_failures_out_at_random() -> None:
    draw, nodes, here, trials = random.Random(1), 4, 3, 20_000
    jobs = [node for node in range(nodes) for _ in range(6)]
    hits = sum(draw.sample(jobs, 4).count(0) >= here for _ in range(trials))
    assert chance(here, 6, 4, len(jobs), nodes) == pytest.approx(nodes * hits / trials, rel=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_that_clean_runs_say_ever_cordons_a_node(seed: int) -> None:
    """Users' bugs at random ranks, ranks that hang by a bug, checks with noise of a tenth, and clean logs."""
    draw = random.Random(seed)
    names = [f"n{number}" for number in range(draw.choice((1, 2, 4, 16, 100)))]
    ran, heard, checks = dict.fromkeys(names, 0), list[HealthSignal](), list[NodeCheck]()
    for number in range(120):
        used = draw.sample(names, draw.randint(1, len(names)))
        ran |= {name: ran[name] + 1 for name in used}
        at_s, signals = 600.0 * number, list[HealthSignal]()
        if draw.random() < 0.1:  # its program fails
            kind: SignalKind = draw.choice(("failure", "hang"))
            signals.append(HealthSignal(draw.choice(used), kind, "a bug", at_s, job=f"j{number}"))
        check = NodeCheck(draw.choice(used), "cpu", {"memory bandwidth": 1e10 * draw.uniform(0.9, 1.1)})
        signals += check_signals(check, compared(check, checks), at_s)
        checks.append(check)
        signals += log_signals(used[0], draw.choice(("all is well", "CUDA out of memory", "Xid: 45")), at_s)
        for one in signals:
            assert judged(one, heard, ran)[0] in ("ignore", "watch"), one
            heard.append(one)


def test_a_slow_node_is_named_by_the_median_of_its_peers() -> None:
    peers = [
        NodeCheck(f"n{at}", "cpu", {"memory bandwidth": rate}) for at, rate in enumerate((9e9, 10e9, 11e9))
    ]
    other_kind = NodeCheck("n9", "gpu", {"memory bandwidth": 4e12})
    slow = NodeCheck("n5", "cpu", {"memory bandwidth": 7.9e9})
    (row,) = compared(slow, [*peers, other_kind])
    assert not row.ok and row.note == "0.79 of 10 GB/s, the median of other nodes (3)"
    (signal,) = check_signals(slow, [row], 0.0)
    assert (signal.node, signal.asks) == ("n5", "cordon") and "0.79" in signal.text
    slow.disturbed = "other programs took 40% of the CPUs meanwhile"
    assert check_signals(slow, compared(slow, peers), 0.0) == []
    own = NodeCheck("n5", "cpu", {"memory bandwidth": 4e12})
    assert compared(slow, [own])[0].note == slow.disturbed
    wrong = NodeCheck("n5", "cpu", {}, wrong=["a matrix product is wrong"])
    assert [one.asks for one in check_signals(wrong, [], 0.0)] == ["drain"]
    gpu = NodeCheck("n5", "h", {"matrix product": 1e14}, {"matrix product": 6e14})
    assert "the catalogue" in compared(gpu, [])[0].note and not compared(gpu, [])[0].ok


# -- the store ------------------------------------------------------------------------------------------------
def test_the_store_says_who_was_cordoned_why_and_what_brought_it_back(tmp_path: Path) -> None:
    health = NodeHealth(JobStore(tmp_path))
    health.tell(HealthSignal("n1", "log", "Xid 94", 10.0, "cordon"))
    health.path.write_bytes(health.path.read_bytes() + b'{"event": "back", "no')  # a crash
    health.tell(HealthSignal("n1", "check", "memory bandwidth is 0.5 of", 20.0, "cordon"))
    state = health.states()["n1"]
    assert (state.shown, state.since_s, state.reason, state.kind) == ("cordoned", 10.0, "Xid 94", "log")
    health.tell(HealthSignal("n1", "log", "Xid 79", 30.0, "drain"))
    assert [one.health for one in health.seen(NODES)] == ["draining", "ready", "ready"]
    health.bring_back("n1", "it passed its check")
    state = health.states()["n1"]
    assert (state.shown, state.back) == ("ready", "it passed its check")
    assert health.seen(NODES) == NODES


def test_this_machine_is_closed_by_its_hosts_name(tmp_path: Path) -> None:
    health = NodeHealth(JobStore(tmp_path))
    health.tell(HealthSignal(socket.gethostname(), "check", "slow", 0.0, "cordon"))
    assert health.seen([ClusterNode("here")])[0].health == "cordoned"


def test_a_hang_report_names_the_node_of_the_rank(tmp_path: Path) -> None:
    waits = [Standing(rank, 13, True, "model.py:7 (all_reduce)", "") for rank in (0, 1)]
    said = f"{verdict(waits, 4, 10.0).splitlines()[0]}, after 3 restarts already"
    end, ranks = AttemptEnd(1, False, 13, 0, said), ("n1", "n1", "n2", "n2")
    (signal,) = end_signals(record(), ranks, end)
    assert (signal.node, signal.kind, signal.job) == ("n2", "hang", "tiny-1")
    assert end_signals(record(), ("n1", "n1", "n2", "n3"), end) == []  # it does not name one


def test_an_xid_in_the_output_counts_for_the_only_node_and_a_programs_fault_for_none(tmp_path: Path) -> None:
    one = record(folder=str(tmp_path))
    killed = AttemptEnd(None, False, 5, 0)
    output_file(one).write_text(f"--- attempt 1 ---\n{FALLEN}\n--- attempt 2 ---\nstep 5\n")
    assert [(found.kind, found.asks) for found in end_signals(one, ["n1"], killed)] == [("failure", "watch")]
    output_file(one).write_text(f"--- attempt 1 ---\n{FALLEN}\n")
    assert [(found.kind, found.asks) for found in end_signals(one, ["n1"], killed)] == [("log", "drain")]
    assert end_signals(one, ["n1", "n2"], killed) == []
    assert [found.node for found in end_signals(one, ["n1", "n2"], killed, began=["n2"])] == ["n2"]
    output_file(one).write_text(
        "--- attempt 1 ---\nRuntimeError: CUDA error: an illegal memory access was encountered\n"
    )
    assert end_signals(one, ["n1"], killed) == []
    output_file(one).write_text("")
    assert end_signals(one, ["n1"], AttemptEnd(2, False, 5, 0)) == []


# -- the scheduler --------------------------------------------------------------------------------------------
def test_a_job_goes_to_another_node_where_its_own_has_an_xid_or_is_slow(three_nodes: JobStore) -> None:
    health, supervisor = NodeHealth(three_nodes), Supervisor(three_nodes)
    for signal in log_signals("n1", FALLEN, time.time()):
        health.tell(signal)
    health.tell(HealthSignal("n2", "check", "memory bandwidth is 0.6 of", time.time(), "cordon"))
    launching.launch(job("tiny"), "local", three_nodes)
    launching.launch(job("more"), "local", three_nodes)
    supervisor.turn()
    assert {place.node for place in three_nodes.find("tiny").places} == {"n3"}
    waits = three_nodes.find("more")
    assert waits.state == "queued" and "n1 is draining; n2 is cordoned" in waits.reason
    health.bring_back("n2", "it passed its check")
    supervisor.turn()
    assert {place.node for place in three_nodes.find("more").places} == {"n2"}
    turns, differing = replay(three_nodes.decisions, lambda name: policy_named(name).decide)
    assert turns >= 2 and differing == []


def test_a_job_leaves_a_drained_node_and_goes_on_elsewhere(three_nodes: JobStore) -> None:
    launching.launch(job("tiny", check_nodes=False), "local", three_nodes)
    supervisor = Supervisor(three_nodes)
    supervisor.turn()
    assert {place.node for place in three_nodes.find("tiny").places} == {"n1"}
    wait_for(lambda: len(supervisor.attempts()[0].processes()) > 1, "the job")  # type: ignore[attr-defined]
    NodeHealth(three_nodes).tell(HealthSignal("n1", "log", "Xid 79", time.time(), "drain"))
    supervisor.turn()
    assert three_nodes.find("tiny").state == "stopping"
    until(three_nodes, supervisor, lambda: three_nodes.find("tiny").attempt == 2, "the second attempt")
    now = three_nodes.find("tiny")
    assert {place.node for place in now.places} == {"n2"} and now.failures == 0


@pytest.mark.long
def test_an_xid_in_the_kernels_log_stops_a_start_until_the_node_passes_its_check(
    store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for dmesg; the check is the real one."""
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    (tmp_path / "dmesg").write_text(f"#!/bin/sh\necho '[{uptime_s:.3f}] {FALLEN[9:]}'\n")
    (tmp_path / "dmesg").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    launching.launch(job("tiny"), "local", store)
    supervisor = Supervisor(store)
    until(store, supervisor, lambda: "draining" in store.find("tiny").reason, "the verdict on the node")
    stopped = store.find("tiny")
    assert (stopped.state, stopped.attempt) == ("queued", 1)
    assert "Xid 79" in NodeHealth(store).states()[socket.gethostname()].reason
    back = ["cumulo", "check", "node", "--quick", "--uncordon", "--store", str(store.folder)]
    words = ["import sys", "from cumulo.bench import node_check", "from cumulo.cli import main",
             "node_check._OTHERS = 2.0", f"sys.argv = {back}", "main()"]  # fmt: skip
    subprocess.run([sys.executable, "-c", "; ".join(words)], check=True)  # the log is older than the cordon
    until(store, supervisor, lambda: store.find("tiny").attempt == 2, "the second attempt")
    attempt = supervisor.attempts()[0]
    assert isinstance(attempt, Attempt)
    wait_for(lambda: "sleep" in "".join(map(command_of, attempt.processes())), "the job, after its check")


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text() if Path(f"/proc/{pid}").exists() else ""


def test_a_start_on_an_unhealthy_node_is_given_back(tmp_path: Path) -> None:
    """The check stands before the command; one that breaks holds up nobody."""
    of, _ = JobStore(tmp_path).submit(job("tiny"), "local")
    script = checked(of, ["echo", "it runs"])
    assert "--quick --cordon" in script[2] and of.folder.rpartition("/")[0] in script[2]
    for code, expected in ((UNHEALTHY, UNHEALTHY), (0, 0), (1, 0), (127, 0)):
        words = [*script[:2], script[2].replace(script[2].partition(";")[0], f"(exit {code})"), *script[3:]]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (done.returncode, "it runs" in done.stdout) == (expected, expected == 0)
    assert checked(job_record_without_check(), ["true"]) == ["true"]
    after = after_attempt(AttemptEnd(UNHEALTHY, False), 0, 3)
    assert after.state == "again" and "failed its check" in after.reason
    assert (
        after_attempt(AttemptEnd(UNHEALTHY, False), 3, 3).state == "failed"
    )  # it does not go round for ever


def job_record_without_check() -> JobRecord:
    plain = job_from({"name": "tiny", "train": {"config": "a.yaml"}, "check_nodes": False})
    return JobRecord("tiny-1", "k", "slurm", plain, "/jobs/tiny-1", "/", 0.0)


def test_slurms_batch_script_checks_its_nodes_first_and_queues_the_job_again(tmp_path: Path) -> None:
    """Played with stand-ins for srun and scontrol."""
    of = record(folder=str(tmp_path / "tiny-1"))
    Path(of.folder).mkdir()
    (Path(of.folder) / "job.yaml").write_text("name: tiny\ntrain: {config: a.yaml}\n")
    for name, does in (("srun", f"exit {UNHEALTHY}"), ("scontrol", f'echo "$@" >> {tmp_path}/told')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755 | stat.S_IXUSR)
    script = batch_script(of)
    assert "check node --quick --cordon" in script and "--on slurm" in script
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "1",
                   "SLURM_JOB_NODELIST": "n1", "PYTHONPATH": ":".join(sys.path)}  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "failed its check" in done.stdout
    assert "requeue 17" in (tmp_path / "told").read_text()
    assert "check node" not in batch_script(job_record_without_check())


def test_other_schedulers_are_told_in_their_words(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    runs, _ = store.submit(job("runs"), "slurm")
    store.change(runs, state="running", handle="17", places=(TaskPlace("n3"), TaskPlace("n4")))
    health = NodeHealth(store)
    drain = ["scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=Xid 79"]
    assert health.commands("slurm", "n3", "drain", "Xid 79") == [drain, ["scancel", "--signal=TERM", "17"]]
    assert health.commands("slurm", "n3", "cordon", "Xid 79") == [drain]
    assert health.commands("slurm", "n3", "ignore") == [["scontrol", "update", "NodeName=n3", "State=RESUME"]]
    assert health.commands("kubernetes", "n3", "cordon") == [["kubectl", "cordon", "n3"]]
    assert health.commands("kubernetes", "n3", "ignore") == [["kubectl", "uncordon", "n3"]]
    assert health.commands("local", "n3", "cordon") == []

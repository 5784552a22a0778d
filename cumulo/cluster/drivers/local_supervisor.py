"""Supervisor: looks at the store and the target, asks the policy, and has its player carry out what that decides.
The process that runs local jobs has one, and so has the queue of a Ray cluster (`ray_queue.py`).

    python -m cumulo.cluster.drivers.local_supervisor STORE

That process is started by whoever submits, one per store, and gone when nothing is left to do. A supervisor keeps
nothing in memory that is not in the store or in an attempt's folder: killed at any moment, the next one goes on,
adopts the jobs that run, and starts nothing twice.
"""

import fcntl
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from cumulo.cluster.decide.check import violations
from cumulo.cluster.decide.decisions import Cordon, JobPlacement, Resize, Waits, untold_reason
from cumulo.cluster.decide.fit import slots
from cumulo.cluster.decide.health import drained
from cumulo.cluster.decide.jobs import JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import ClusterNode, FreeCapacity
from cumulo.cluster.decide.policies import NamedPolicy, policy_named
from cumulo.cluster.decide.recovery import AttemptEnd, after_attempt, recovery
from cumulo.cluster.decide.snapshot import Snapshot, snapshot_of
from cumulo.cluster.decision_log import DecisionLog
from cumulo.cluster.drivers.command import (
    checked,
    last_error,
    mark_attempt,
    output_file,
    ranks_command,
    run_folder,
    served_url,
    speed_table,
)
from cumulo.cluster.drivers.local import LOCK, WAKE, this_machine
from cumulo.cluster.drivers.local_attempt import Attempt
from cumulo.cluster.job_progress import run_progress
from cumulo.cluster.job_store import JobRecord, JobStore, Target
from cumulo.cluster.node_health import NodeHealth, end_signals
from cumulo.cluster.queue_settings import queue_settings
from cumulo.errors import CumuloError

_LOOK_S = 2.0  # where no event tells: a service that became ready, a wake that was lost
_STOP_S = 60.0  # between asking a job to end and ending it


@dataclass(slots=True)
class Stopping:
    since_s: float
    then: str  # the state it has afterwards
    reason: str
    places: tuple[TaskPlace, ...] = ()  # where it goes on at once, after a resize


class LiveAttempt(Protocol):
    """One start of a job."""

    @property
    def alive(self) -> bool: ...
    @property
    def exit_code(self) -> int | None:
        """None: it was killed, or it still runs."""

    @property
    def lost(self) -> str:
        """Why it ended, if its node or the target was lost: that is no failure of the job. Else empty."""

    @property
    def failed_on(self) -> Sequence[str]:
        """Nodes on which ranks failed first, where that is known."""

    def ask_to_end(self) -> None: ...
    def end(self) -> None:
        """End at once what is left of it."""


class JobPlayer(Protocol):
    """What the supervisor knows of a target."""

    target: Target

    def owns(self, record: JobRecord) -> bool: ...
    def nodes(self) -> tuple[ClusterNode, ...]: ...
    def others(self) -> Sequence[RunningJob]:
        """What runs on the nodes and is not the supervisor's to stop."""

    def request(self, record: JobRecord, left_s: float | None) -> JobRequest: ...
    def attempt(self, record: JobRecord) -> LiveAttempt:
        """The job's last start."""

    def start(self, record: JobRecord) -> None:
        """Start this attempt of the job in its places."""


class LocalPlayer:
    target: Target = "local"

    def __init__(self, store: JobStore) -> None:
        self.store = store

    def owns(self, record: JobRecord) -> bool:
        return record.target == self.target

    def nodes(self) -> tuple[ClusterNode, ...]:
        return this_machine(self.store)

    def others(self) -> Sequence[RunningJob]:
        return ()

    def request(self, record: JobRecord, left_s: float | None) -> JobRequest:
        return record.job.request(record.job_id, record.submitted_s, left_s)

    def attempt(self, record: JobRecord) -> Attempt:
        return Attempt(Path(record.folder, f"attempt-{record.attempt}"))

    def start(self, record: JobRecord) -> None:
        command = checked(record, ranks_command(record, len(record.places) * record.job.devices[0].each))
        gpus = [str(gpu) for place in record.places for gpu in place.gpus]
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
        self.attempt(record).start(command, Path(record.working_folder), output_file(record), environment)


class Supervisor:
    def __init__(self, store: JobStore, player: JobPlayer | None = None) -> None:
        self.store, self.player = store, player or LocalPlayer(store)
        self.decisions = DecisionLog(store.decisions)
        self.health = NodeHealth(store)
        self.stopping: dict[str, Stopping] = {}

    def turn(self) -> bool:
        """One look at everything; False: nothing is left to do."""
        for record in self.jobs():
            self._settle(record)
        waiting = [record for record in self.jobs() if record.state in ("submitting", "queued")]
        placed = {one.job_id: one.places for one in self.jobs() if one.state == "running"}
        for leaves in drained(self.health.seen(self.player.nodes()), placed):
            self._stop(self.store.jobs()[leaves.job_id], "queued", leaves.reason)
        policy = policy_named(queue_settings(self.store, self.player.target).policy)
        if waiting or policy.always_decide:
            self._decide(policy, waiting)
        return bool(self.jobs())

    def attempts(self) -> list[LiveAttempt]:
        return [self.player.attempt(one) for one in self.jobs() if one.state in ("running", "stopping")]

    def jobs(self) -> list[JobRecord]:
        return [one for one in self.store.jobs().values() if not one.ended and self.player.owns(one)]

    # -- what has happened ----------------------------------------------------------------------------------
    def _settle(self, record: JobRecord) -> None:
        if record.state in ("submitting", "queued"):
            if record.cancel_asked:
                self.store.change(record, state="cancelled", reason="cancelled before it started")
            return
        attempt = self.player.attempt(record)
        if record.state == "stopping" and record.job_id not in self.stopping:  # for an earlier supervisor
            self.stopping[record.job_id] = Stopping(time.time(), "queued", record.reason)
        if not attempt.alive:
            self._ended(record, attempt)
            return
        if record.cancel_asked and record.job_id not in self.stopping:
            self._stop(record, "cancelled", "cancelled by its user")
        if (stopping := self.stopping.get(record.job_id)) and time.time() - stopping.since_s > _STOP_S:
            attempt.end()
        if record.job.serve is not None and not record.url and (url := served_url(output_file(record))):
            self.store.change(record, url=url)

    def _stop(self, record: JobRecord, then: str, reason: str, places: tuple[TaskPlace, ...] = ()) -> None:
        self.stopping[record.job_id] = Stopping(time.time(), then, reason, places)
        self.store.change(record, state="stopping", reason=reason)
        self.player.attempt(record).ask_to_end()

    def _ended(self, record: JobRecord, attempt: LiveAttempt) -> None:
        attempt.end()  # what outlived its first process must not meet the next attempt
        stopping, code = self.stopping.pop(record.job_id, None), attempt.exit_code
        if record.cancel_asked or (stopping is not None and stopping.then == "cancelled"):
            self._change(record, "cancelled", "cancelled by its user; a training run keeps its checkpoint")
        elif lost := attempt.lost:
            step = run_progress(run_folder(record)).step
            self._change(record, "queued", f"a node was lost after step {step} ({lost})")
        elif stopping is not None and not (code == 0 and run_progress(run_folder(record)).finished):
            self._change(record, "queued", stopping.reason)
            record = self.store.jobs()[record.job_id]
            goes_on = JobPlacement(record.job_id, stopping.places)
            if stopping.places and not violations(self._snapshot([record]), [goes_on]):
                self._start(record, stopping.places, stopping.reason)
        else:
            self._after(record, code, attempt.failed_on)

    def _after(self, record: JobRecord, code: int | None, failed_on: Sequence[str]) -> None:
        progress = run_progress(run_folder(record))
        serves = record.job.serve is not None
        error = last_error(output_file(record))
        end = AttemptEnd(code, serves or progress.finished, progress.step, record.first_step, error)
        after = after_attempt(end, record.failures, record.job.restart.most)
        each = record.job.devices[0].each
        ranks = [place.node for place in record.places for _ in range(each)]
        for told in end_signals(record, ranks, end, failed_on):
            self.health.tell(told)
        state = "queued" if after.state == "again" else after.state
        failures = record.failures + after.counts
        self.store.change(record, state=state, places=(), failures=failures, reason=after.reason)

    def _change(self, record: JobRecord, state: str, reason: str) -> None:
        self.store.change(record, state=state, places=(), reason=reason)

    # -- what is to happen ----------------------------------------------------------------------------------
    def _snapshot(self, waiting: list[JobRecord]) -> Snapshot:
        now_s, nodes = time.time(), self.health.seen(self.player.nodes())
        running = [*self.player.others()]
        for one in self.jobs():
            if one.state in ("running", "stopping"):
                request, left_s = self._request(one), run_progress(run_folder(one)).left_s
                end_s = None if left_s is None else now_s + left_s
                running.append(RunningJob(request, one.places, one.phases[-1].begin_s, end_s, one.failures))
        there = {node.name for node in nodes}
        gone = [place for one in running for place in one.places if place.node not in there]
        gpus = 1 + max((gpu for place in gone for gpu in place.gpus), default=-1)
        names = dict.fromkeys(place.node for place in gone)
        nodes = (*nodes, *(ClusterNode(name, gpus, health="down") for name in names))
        return snapshot_of(
            now_s, nodes, [self._asks(one, nodes) for one in waiting], running,
            queue_settings(self.store, self.player.target).quotas,
        )  # fmt: skip

    def _request(self, record: JobRecord) -> JobRequest:
        left_s = run_progress(run_folder(record)).left_s if record.job.train is not None else None
        return replace(self.player.request(record, left_s), speed=speed_table(record.job))

    def _asks(self, record: JobRecord, nodes: Sequence[ClusterNode]) -> JobRequest:
        """What a waiting job asks for: an elastic one as many tasks as the recovery policy says, where nodes are
        missing."""
        request = self._request(record)
        if not request.elastic:
            return request
        fitting = slots(request, FreeCapacity(nodes))
        _, tasks, _ = recovery(
            tasks=request.tasks, least_tasks=max(1, request.min_tasks or 0), fitting_tasks=fitting,
            left_s=request.predicted_s, ways=record.job.restart.ways,
        )  # fmt: skip
        return replace(request, tasks=tasks)

    def _decide(self, policy: NamedPolicy, waiting: list[JobRecord]) -> None:
        snapshot = self._snapshot(waiting)
        decided = policy.decide(snapshot)
        self.decisions.add(policy.name, snapshot, decided)
        records = {record.job_id: record for record in self.jobs()}
        if wrong := violations(snapshot, decided):
            for record in waiting:
                self._tell(record, f"the policy {policy.name} decided what cannot be: {wrong[0]}")
            return
        # While jobs save and stop, others start, but none is stopped for what is being carried out already.
        stops, told = any(one.then == "queued" for one in self.stopping.values()), set[str]()
        for one in decided:
            if isinstance(one, Cordon):
                continue
            told.add(one.job_id)
            record = records[one.job_id]
            if isinstance(one, Waits):
                self._tell(record, one.reason)
            elif isinstance(one, JobPlacement):
                if violations(snapshot, [one]):  # its places are not free yet
                    self._tell(record, f"{one.reason}, as soon as the jobs that stop for it have saved")
                else:
                    self._start(record, one.places, one.reason)
            elif not stops:
                self._stop(record, "queued", one.reason, one.places if isinstance(one, Resize) else ())
        for record in waiting:
            if record.job_id not in told:
                self._tell(record, untold_reason(decided))

    def _tell(self, record: JobRecord, reason: str) -> None:
        if (record.state, record.reason) != ("queued", reason):
            self.store.change(record, state="queued", reason=reason)

    def _start(self, record: JobRecord, places: tuple[TaskPlace, ...], reason: str) -> None:
        number, step = record.attempt + 1, run_progress(run_folder(record)).step
        # Written down first: a supervisor that dies here leaves an attempt that never began.
        self.store.change(
            record, state="running", places=places, reason=reason, attempt=number, first_step=step, url=""
        )
        mark_attempt(output_file(record), number)
        try:
            self.player.start(self.store.jobs()[record.job_id])
        except CumuloError as error:  # its configuration was removed or changed meanwhile
            self._change(record, "failed", str(error))


def main(folder: Path) -> None:
    store = JobStore(folder)
    with (store.folder / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another one is there
        signal.signal(
            signal.SIGCHLD, signal.SIG_IGN
        )  # nobody need wait for a child: its folder says how it ended
        wake = store.folder / WAKE
        wake.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.bind(str(wake))
            supervisor = Supervisor(store)
            while True:
                while supervisor.turn():
                    _wait(line, [one for one in supervisor.attempts() if isinstance(one, Attempt)])
                with store.locked():
                    if not any(one.target == "local" and not one.ended for one in store.jobs().values()):
                        fcntl.flock(lock, fcntl.LOCK_UN)
                        return


def _wait(line: socket.socket, attempts: list[Attempt]) -> None:
    """Waits until somebody wakes the supervisor or a job ends."""
    watched = [line.fileno()]
    try:
        for attempt in attempts:
            if attempt.alive and (pid := attempt.pid) is not None:
                try:
                    watched.append(os.pidfd_open(pid))
                except OSError:  # it has just ended; or its shell has, and the rest of it lives
                    if not attempt.alive:
                        return
        ready, _, _ = select.select(watched, [], [], _LOOK_S)
        if line.fileno() in ready:
            line.recv(64)
    finally:
        for number in watched[1:]:
            os.close(number)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

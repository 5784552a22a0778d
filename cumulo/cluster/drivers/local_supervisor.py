"""The process that runs local jobs: it looks at the store and the machine, asks the policy, and carries out what it
decides. One per store; started by whoever submits, and gone when nothing is left to do.

    python -m cumulo.cluster.drivers.local_supervisor STORE

It keeps nothing in memory that is not in the store or in an attempt's folder: killed at any moment, the next one
goes on, adopts the jobs that run, and starts nothing twice.
"""

import fcntl
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from cumulo.cluster.decide.decisions import Eviction, JobPlacement, Resize, Waits
from cumulo.cluster.decide.jobs import JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.policies import NamedPolicy, policy_named
from cumulo.cluster.decide.recovery import AttemptEnd, after_attempt
from cumulo.cluster.decide.snapshot import Snapshot, snapshot_of
from cumulo.cluster.decision_log import DecisionLog
from cumulo.cluster.drivers.command import (
    last_error,
    mark_attempt,
    output_file,
    ranks_command,
    run_folder,
    served_url,
)
from cumulo.cluster.drivers.local import LOCK, WAKE, policy_name, this_machine
from cumulo.cluster.drivers.local_attempt import Attempt
from cumulo.cluster.job_progress import run_progress
from cumulo.cluster.job_store import JobRecord, JobStore
from cumulo.errors import CumuloError

_LOOK_S = 2.0  # where no event tells: a service that became ready, a wake that was lost
_STOP_S = 60.0  # between asking a job to end and ending it


@dataclass(slots=True)
class Stopping:
    since_s: float
    then: str  # the state it has afterwards
    reason: str
    places: tuple[TaskPlace, ...] = ()  # where it goes on at once, after a resize


class Supervisor:
    def __init__(self, store: JobStore) -> None:
        self.store = store
        self.decisions = DecisionLog(store.decisions)
        self.stopping: dict[str, Stopping] = {}

    def turn(self) -> bool:
        """One look at everything; False: nothing is left to do."""
        for record in self._jobs():
            self._settle(record)
        waiting = [record for record in self._jobs() if record.state in ("submitting", "queued")]
        policy = policy_named(policy_name(self.store))
        if waiting or policy.always_decide:
            self._decide(policy, waiting)
        return bool(self._jobs())

    def attempts(self) -> list[Attempt]:
        return [_attempt(record) for record in self._jobs() if record.state in ("running", "stopping")]

    def _jobs(self) -> list[JobRecord]:
        return [one for one in self.store.jobs().values() if one.target == "local" and not one.ended]

    # -- what has happened ----------------------------------------------------------------------------------
    def _settle(self, record: JobRecord) -> None:
        if record.state in ("submitting", "queued"):
            if record.cancel_asked:
                self.store.change(record, state="cancelled", reason="cancelled before it started")
            return
        attempt = _attempt(record)
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
        _attempt(record).ask_to_end()

    def _ended(self, record: JobRecord, attempt: Attempt) -> None:
        attempt.end()  # what outlived its first process must not meet the next attempt
        stopping, code = self.stopping.pop(record.job_id, None), attempt.exit_code
        if record.cancel_asked or (stopping is not None and stopping.then == "cancelled"):
            self._change(record, "cancelled", "cancelled by its user; a training run keeps its checkpoint")
        elif stopping is not None:
            self._change(record, "queued", stopping.reason)
            if stopping.places:
                self._start(self.store.jobs()[record.job_id], stopping.places, stopping.reason)
        else:
            self._after(record, code)

    def _after(self, record: JobRecord, code: int | None) -> None:
        progress = run_progress(run_folder(record))
        serves = record.job.serve is not None
        error = last_error(output_file(record))
        end = AttemptEnd(code, serves or progress.finished, progress.step, record.first_step, error)
        after = after_attempt(end, record.failures, record.job.restart.most)
        state = "queued" if after.state == "again" else after.state
        failures = record.failures + after.counts
        self.store.change(record, state=state, places=(), failures=failures, reason=after.reason)

    def _change(self, record: JobRecord, state: str, reason: str) -> None:
        self.store.change(record, state=state, places=(), reason=reason)

    # -- what is to happen ----------------------------------------------------------------------------------
    def _snapshot(self, waiting: list[JobRecord]) -> Snapshot:
        running = [
            RunningJob(_request(one), one.places, one.phases[-1].begin_s, restarts=one.failures)
            for one in self._jobs() if one.state in ("running", "stopping")
        ]  # fmt: skip
        requests = [_request(record) for record in waiting]
        return snapshot_of(time.time(), this_machine(self.store), requests, running)

    def _decide(self, policy: NamedPolicy, waiting: list[JobRecord]) -> None:
        snapshot = self._snapshot(waiting)
        decided = policy.decide(snapshot)
        self.decisions.add(policy.name, snapshot, decided)
        records = {record.job_id: record for record in self._jobs()}
        behind = next((one.job_id for one in decided if isinstance(one, Waits)), None)
        told = set()
        for one in decided:
            if isinstance(one, JobPlacement):
                self._start(records[one.job_id], one.places, one.reason)
            elif isinstance(one, Waits):
                self.store.change(records[one.job_id], state="queued", reason=one.reason)
            elif isinstance(one, Eviction | Resize):
                if one.job_id not in self.stopping:
                    places = one.places if isinstance(one, Resize) else ()
                    self._stop(records[one.job_id], "queued", one.reason, places)
            else:
                continue
            told.add(one.job_id)
        for record in waiting:
            if record.job_id not in told:
                self.store.change(record, state="queued", reason=f"waits behind {behind}")

    def _start(self, record: JobRecord, places: tuple[TaskPlace, ...], reason: str) -> None:
        number, step = record.attempt + 1, run_progress(run_folder(record)).step
        try:
            command = ranks_command(record, len(places) * record.job.devices[0].each)
        except CumuloError as error:  # its configuration was removed or changed meanwhile
            self._change(record, "failed", str(error))
            return
        # Written down first: a supervisor that dies here leaves an attempt that never began.
        self.store.change(
            record, state="running", places=places, reason=reason, attempt=number, first_step=step, url=""
        )
        gpus = [str(gpu) for place in places for gpu in place.gpus]
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        folder = Path(record.folder, f"attempt-{number}")
        mark_attempt(output_file(record), number)
        Attempt(folder).start(command, Path(record.working_folder), output_file(record), os.environ | devices)


def _attempt(record: JobRecord) -> Attempt:
    return Attempt(Path(record.folder, f"attempt-{record.attempt}"))


def _request(record: JobRecord) -> JobRequest:
    left_s = run_progress(run_folder(record)).left_s if record.job.train is not None else None
    return record.job.request(record.job_id, record.submitted_s, left_s)


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
                    _wait(line, supervisor.attempts())
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

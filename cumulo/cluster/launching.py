"""Launch, look at and cancel jobs, on any target. The command line and the console call this, and Python programs:

from cumulo.cluster.launching import launch
from cumulo.cluster.job_file import read_job

record = launch(read_job(Path("examples/job-train.yaml")), "local")
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from cumulo.base.strict import read_yaml
from cumulo.cluster.drivers.command import check_work, run_folder
from cumulo.cluster.drivers.driver import Driver, Facts, TargetLost, may_be_there
from cumulo.cluster.job_file import JobFile
from cumulo.cluster.job_progress import JobProgress, run_progress
from cumulo.cluster.job_store import TARGETS, JobRecord, JobStore, Target, default_store
from cumulo.errors import ConfigError, CumuloError


def driver_for(target: Target, store: JobStore) -> Driver:
    """Imported here, so that nobody needs the packages of a target that is not used."""
    if target == "local":
        from cumulo.cluster.drivers.local import LocalDriver

        return LocalDriver(store)
    if target == "slurm":
        from cumulo.cluster.drivers.slurm import SlurmDriver

        return SlurmDriver()
    if target == "ray":
        from cumulo.cluster.drivers.ray import RayDriver

        return RayDriver(store)
    from cumulo.cluster.drivers.kubernetes.driver import KubernetesDriver

    return KubernetesDriver()


def launch(
    job: JobFile, target: Target, store: JobStore | None = None, key: str | None = None
) -> tuple[JobRecord, bool]:
    """The submitted job, and whether it is new: a job of this key that has not ended is returned instead."""
    store = store or JobStore(default_store())
    check_work(job, here=target == "local")
    job = _with_run_folder(job, target, store, key)
    record, is_new = store.submit(job, target, key)
    if record.state == "submitting":
        hand_over(store, record, wait=True)
    return store.jobs()[record.job_id], is_new


def _with_run_folder(job: JobFile, target: Target, store: JobStore, key: str | None) -> JobFile:
    """A run is kept where its configuration says, as by `cumulo train`, unless the job file says where. Two runs
    are never kept in one folder by accident."""
    train = job.train
    if train is None or train.config is None or train.folder is not None or target == "kubernetes":
        return job
    name = (read_yaml(Path(train.config)) or {}).get("folder")
    if name is None:
        return job
    folder = Path(name).expanduser().absolute()
    changed = dataclasses.replace(job, train=dataclasses.replace(train, folder=str(folder)))
    users = [one for one in store.jobs().values() if one.job.train and one.job.train.folder == str(folder)]
    submitted = any(one.key == key or (one.job == changed and not one.ended) for one in users)
    if not submitted and ((folder / "log.csv").exists() or not all(one.ended for one in users)):
        of = f" of the job {users[-1].job_id}" if users else ""
        raise ConfigError(
            f"{folder}, the folder in {train.config}, contains a run{of}: write `train: {{folder: ...}}` in the "
            "job file, with the folder of a new run, or with this one to resume it"
        )
    return changed


def hand_over(store: JobStore, record: JobRecord, wait: bool = False) -> None:
    """Submit what is in the store and not at the target yet. A target that does not answer changes nothing: the job
    stays in the store, and the next look tries again. One command does it at a time: another one waits for it, or
    leaves it to that one."""
    with store.handing_over(record, wait) as mine:
        record = store.jobs()[record.job_id]
        if not mine or record.state != "submitting":
            return
        try:
            driver = driver_for(record.target, store)
            if record.cancel_asked and not may_be_there(record):
                facts: Facts = {"state": "cancelled", "reason": "cancelled before it was submitted"}
            else:
                facts = driver.cancel(record) if record.cancel_asked else driver.submit(record)
            store.change(record, **facts)
        except TargetLost as error:
            what = "cancelled, if it is there" if record.cancel_asked else "not submitted yet"
            store.change(record, reason=f"{what}: {error}")
            raise
        except CumuloError as error:
            store.change(record, state="failed", reason=str(error))
            raise


def explain(job: JobFile, target: Target, store: JobStore | None = None) -> str:
    """What `launch` would submit, and nothing is written down."""
    store = store or JobStore(default_store())
    check_work(job, here=target == "local")
    folder = store.folder / f"{job.name}-0"
    record = JobRecord(f"{job.name}-0", "0" * 16, target, job, str(folder), str(Path.cwd()), 0.0)
    return driver_for(target, store).explain(record)


def refreshed(store: JobStore, targets: Sequence[Target] = TARGETS) -> tuple[list[JobRecord], list[str]]:
    """All jobs as they are now, and what could not be asked. `targets`: those that are asked at all."""
    silent: dict[str, str] = {}
    lost: dict[tuple[str, str | None], str] = {}  # places that do not answer, and why: they are asked once
    for record in store.jobs().values():
        where = record.target, record.job.ray.address if record.target == "ray" else None
        if record.ended or record.target not in targets:
            continue
        if where in lost:
            _note_lost(store, record, lost[where])
            continue
        try:
            if record.state == "submitting":
                hand_over(store, record)
            else:
                store.change(record, **driver_for(record.target, store).look(record))
        except TargetLost as error:
            silent[record.job_id] = str(error)
            if not error.of_job:
                lost[where] = error.why
            if record.state != "submitting":
                _note_lost(store, record, str(error))
        except CumuloError as error:
            silent.setdefault(record.job_id, str(error))
    return list(store.jobs().values()), list(silent.values())


def _note_lost(store: JobStore, record: JobRecord, why: str) -> None:
    what = "not submitted yet" if record.state == "submitting" else "contact lost"
    what = "cancelled, if it is there" if record.state == "submitting" and record.cancel_asked else what
    if record.reason != f"{what}: {why}":
        store.change(record, reason=f"{what}: {why}")


def cancel(store: JobStore, name: str) -> JobRecord:
    record = store.find(name)
    if record.ended:
        raise ConfigError(f"{record.job_id} has ended already: it is {record.state}")
    store.append("cancel", record.job_id)
    record = store.jobs()[record.job_id]
    if record.state == "submitting" and record.target != "local":
        # An answer may have been lost on the way: the target is asked, too, now or when it answers again.
        with contextlib.suppress(TargetLost):
            hand_over(store, record, wait=True)
    else:
        store.change(record, **driver_for(record.target, store).cancel(record))
    return store.jobs()[record.job_id]


def progress_of(record: JobRecord) -> JobProgress | None:
    """The progress of a training job; None: a service has no steps."""
    return run_progress(run_folder(record)) if record.job.train is not None else None

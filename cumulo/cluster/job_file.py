"""JobFile: what `cumulo launch` is told: what to run, on how many of which devices, and what to do when it fails.

    job = read_job(Path("examples/job-train.yaml"))
    job.ranks           # 2
    job.request("tiny-1", arrival_s=0.0)    # as a policy sees it

The same file runs on this machine, Ray, Slurm and Kubernetes. Every setting is documented where it is defined,
in `job_settings`.
"""

import dataclasses
from pathlib import Path
from typing import Any

from cumulo.base.strict import build, read_yaml
from cumulo.cluster.job_check import JobFileError, check_job, in_file
from cumulo.cluster.job_settings import JobFile as JobFile  # callers name it together with read_job
from cumulo.errors import ConfigError

_ROOT = "the job"


def read_job(path: Path) -> JobFile:
    content = read_yaml(path, "the job file")
    try:
        job = build(JobFile, content, _ROOT)
        check_job(job)
        return resolved(job, path.resolve().parent)
    except ConfigError as error:
        raise in_file(error, path, _ROOT) from None


def job_from(content: Any, where: str = _ROOT, checked: bool = True) -> JobFile:
    """`checked`: also its names and amounts. A job that is stored already is read without that."""
    try:
        job = build(JobFile, content, where)
        if checked:
            check_job(job)
        return job
    except ConfigError as error:
        text = str(error)
        raise error if where in text else ConfigError(f"{where}: {text}") from None


def resolved(job: JobFile, folder: Path) -> JobFile:
    """Paths relative to the job file become absolute, so that the job runs anywhere; missing ones are named."""

    def found(setting: str, name: str | None, must: bool = True) -> str | None:
        if name is None:
            return None
        path = folder / name
        try:
            exists = path.exists()
        except (OSError, ValueError) as error:  # such as a name that is too long
            why = getattr(error, "strerror", None) or str(error)
            raise JobFileError([(setting, f"{setting} cannot be {name[:60]!r}: {why}")]) from None
        if not exists and not must:
            return name
        if not exists:
            raise JobFileError([(setting, f"{job.name}: there is no {path}, which {setting} names")])
        if must and not path.is_file():
            text = f"{job.name}: {path} is a folder, and the job file needs a file there"
            raise JobFileError([(setting, text)])
        return str(path.resolve())

    train, serve = job.train, job.serve
    if train is not None:
        train = dataclasses.replace(
            train,
            config=found("train.config", train.config),
            plan=found("train.plan", train.plan),
            folder=None if train.folder is None else str((folder / train.folder).resolve()),
        )
    if serve is not None:
        plan, model = found("serve.plan", serve.plan), found("serve.model", serve.model, must=False)
        serve = dataclasses.replace(serve, plan=plan, model=model)
    return dataclasses.replace(job, train=train, serve=serve)


def plain_job(job: JobFile) -> dict[str, Any]:
    """A table that `job_from` reads back, without what is as usual."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            kept = {}
            for one in dataclasses.fields(value):
                usual = (
                    one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default
                )
                if (content := getattr(value, one.name)) != usual:
                    kept[one.name] = plain(content)
            return kept
        return [plain(item) for item in value] if isinstance(value, tuple) else value

    table = plain(job)
    assert isinstance(table, dict)
    for work in ("train", "serve"):
        if getattr(job, work) is not None:
            table.setdefault(work, {})
    return table

"""A job to be planned as a file: its layout and everything that is known of how it is carried out, as YAML.
`cumulo plan train --save-job FILE` writes one, `--fixed FILE.yaml` reads it."""

from pathlib import Path

import yaml

from cumulo.base.strict import build
from cumulo.errors import ConfigError
from cumulo.plan.job import TrainJob
from cumulo.spec.model import ModelSpec
from cumulo.spec.model_file import plain

SUFFIXES = (".yaml", ".yml")


def job_text(job: TrainJob) -> str:
    """All but the model, which the command names; what has its default is left out."""
    content = {name: value for name, value in plain(job).items() if name != "model"}
    return yaml.safe_dump(content, sort_keys=False)


def job_from(text: str, model: ModelSpec, where: str) -> TrainJob:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{where} has no table of settings; write one with: cumulo plan train --save-job FILE"
        )
    if "model" in content:
        raise ConfigError(f"{where} has a model; the command names it, so remove it there")
    return build(TrainJob, {**content, "model": plain(model)}, where)


def read_job(path: Path, model: ModelSpec, gpus: int) -> TrainJob:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the job {path}: {error}") from error
    job = job_from(text, model, str(path))
    if job.layout.world != gpus:
        raise ConfigError(
            f"{path} has a layout of {job.layout.world:,} GPUs, but the cluster has {gpus:,}; use --gpus "
            f"{job.layout.world}"
        )
    return job

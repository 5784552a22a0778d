"""The batch script of a job: what `sbatch` is given, from templates/batch.sh.j2. `cumulo launch --dry-run` prints
it.

The gang is one allocation, so Slurm starts all of it or nothing. A lost node requeues the job (`--requeue`), and a
training run resumes from its last checkpoint, because its command is the same at every start. Before the time limit
Slurm signals the ranks (`--signal`), which save and end; `slurm_end.py` then queues the job again.
"""

import re
import shlex
import sys
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from cumulo.cluster.decide.recovery import UNHEALTHY
from cumulo.cluster.drivers.command import (
    SERVICE,
    check_command,
    output_file,
    server_arguments,
    work_command,
)
from cumulo.cluster.job_file import JobFile
from cumulo.cluster.job_settings import seconds
from cumulo.cluster.job_store import JobRecord
from cumulo.cluster.served_shape import served_shape, server_tasks
from cumulo.errors import ConfigError
from cumulo.ranks.launch import LOST, STARTER

COMMENT = "cumulo:"  # with the submission key: how a job is found again


def batch_script(record: JobRecord) -> str:
    job = record.job
    command, each = (work_command(record), 1) if job.serve is None else _server(job)
    return _template().render(
        record=record,
        job=job,
        comment=f"{COMMENT}{_word(record.key, '--key')}",
        output=_word(str(output_file(record)), "the path of --store").replace("%", "%%"),
        working_folder=_word(record.working_folder, "the path of this folder"),
        time=job.time_limit and _minutes(job.time_limit),
        save_before_s=f"{seconds(job.save_before, 'save_before'):.0f}",
        deadline_s=job.deadline and f"{seconds(job.deadline, 'deadline'):.0f}",
        each=each,
        devices=job.ranks if job.elastic is None else f"$((SLURM_JOB_NUM_NODES * {job.devices[0].each}))",
        per_node=job.devices[0].per_node or 1,
        python=shlex.quote(sys.executable),
        command=shlex.join(command),
        check=shlex.join(check_command(record, "--on", "slurm"))
        if job.check_nodes and len(job.devices) == 1
        else "",
        SERVICE=SERVICE,
        UNHEALTHY=UNHEALTHY,
        LOST=LOST,
        STARTER=STARTER,
    )


@cache
def _template() -> Template:
    """With {## comments ##}: {# is a word of the shell's."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), undefined=StrictUndefined, autoescape=False,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, comment_start_string="{##",
        comment_end_string="##}",
    )  # fmt: skip
    made.filters["quote"] = shlex.quote
    return made.get_template("batch.sh.j2")


def _server(job: JobFile) -> tuple[list[str], int]:
    """The command of a server, and the devices of its task: a server starts the ranks of its replica itself."""
    assert job.serve is not None
    if job.elastic is not None:
        raise ConfigError(f"{job.name}: a service --on slurm has a fixed number of servers; remove elastic")
    whole = served_shape(job).prefill  # a plan of several roles is one server
    arguments = ["--plan", str(job.serve.plan), *job.serve.options] if whole else server_arguments(job.serve)
    each = 1 if len(job.devices) > 1 else server_tasks(job).devices
    return [sys.executable, "-m", "cumulo", "serve", *arguments], each


def _word(text: str, what: str) -> str:
    """One word of a #SBATCH line, which ends with the line whatever quotes it."""
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise ConfigError(
            f"{what} is {text!r}, and a batch script of Slurm cannot contain a line end or another control "
            "character: choose another one"
        )
    return re.sub(r"""([\s"'#\\])""", r"\\\1", text)


def _minutes(limit: str) -> str:
    """The limit as Slurm writes times: in whole minutes."""
    minutes = max(1, -(-int(seconds(limit, "time_limit")) // 60))
    return f"{minutes // 1440}-{minutes % 1440 // 60:02}:{minutes % 60:02}:00"

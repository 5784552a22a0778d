"""`cumulo launch`: submit a job to this machine, Ray, Slurm or Kubernetes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cumulo.base.nearest import did_you_mean
from cumulo.cli.shared.terminal import note, out
from cumulo.errors import ConfigError

if TYPE_CHECKING:
    from cumulo.cluster.job_file import JobFile

EXAMPLE = (
    "Example: [bold]cumulo launch examples/job-train.yaml --on local[/bold], then `cumulo jobs` and "
    "`cumulo logs tiny -f`"
)
StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store", metavar="DIR", help="Folder of the jobs. Default: cumulo/jobs in your state directory."
    ),
]


def launch(
    job_file: Path = typer.Argument(..., metavar="JOB.yaml", help="The job file."),
    on: str = typer.Option("local", help="Where the job runs: local, ray, slurm or kubernetes."),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Print exactly what would be submitted, and submit nothing."
    ),
    key: str | None = typer.Option(
        None,
        help="Submission key: a second launch with it returns the same job. Default: made from the job file; "
        "a file can be launched again when its job has ended.",
    ),
    slots: int | None = typer.Option(
        None, help="With --on local: cores that jobs may take together. Default: all."
    ),
    policy: str | None = typer.Option(
        None,
        help="With --on local or ray: the policy of the queue, or FILE.py:FUNCTION. It is kept. Default: fifo.",
    ),
    quota: list[str] = typer.Option(
        [],
        help="With --on local or ray: GPUs that a tenant is guaranteed and may borrow: TENANT=GPUS+BORROWED. It is "
        "kept; TENANT=none takes it away. Repeat it.",
    ),
    wait: bool = typer.Option(False, "--wait", help="Wait until the job has ended; fail if it fails."),
    out_folder: Path | None = typer.Option(
        None,
        "--out",
        metavar="DIR",
        help="With --on kubernetes: write the manifests there, and submit nothing.",
    ),
    form: str = typer.Option("yaml", "--format", help="With --out: yaml or helm.", metavar="FORMAT"),
    store: StoreOption = None,
) -> None:
    """Submit a job: what to train or serve, on how many of which devices. It continues when this command ends."""
    from cumulo.cli.jobs_report import follow
    from cumulo.cluster import launching
    from cumulo.cluster.job_file import read_job
    from cumulo.cluster.job_store import TARGETS, JobStore, default_store
    from cumulo.cluster.queue_settings import set_policy, set_quotas, set_slots

    target = next((one for one in TARGETS if one == on), None)
    if target is None:
        raise ConfigError(f"--on cannot be {on}{did_you_mean(on, TARGETS)}")
    job = read_job(job_file)
    _check_options(job_file, job)
    if out_folder is not None:
        if target != "kubernetes":
            raise ConfigError(f"--out writes manifests, so it needs --on kubernetes, not --on {target}")
        from cumulo.cluster.drivers.command import check_work
        from cumulo.cluster.drivers.kubernetes.manifests import write_manifests

        check_work(job)
        for path in write_manifests(job, out_folder, form):
            out.print(str(path), soft_wrap=True)
        return
    if (policy or quota) and target not in ("local", "ray"):
        raise ConfigError(f"--policy and --quota need --on local or ray: {target} has a scheduler of its own")
    kept = JobStore(store or default_store())
    if dry_run:
        out.print(launching.explain(job, target, kept), soft_wrap=True)
        return
    if slots is not None:
        set_slots(kept, slots)
    if policy is not None:
        set_policy(kept, policy, target)
    if quota:
        set_quotas(kept, quota, target)
    record, is_new = launching.launch(job, target, kept, key)
    if not is_new:
        note(
            f"this job was submitted before, as {record.job_id}; it is {record.state}, and nothing was submitted"
        )
    out.print(record.job_id)
    if not wait:
        note(f"`cumulo jobs` shows how it is, `cumulo logs -f {record.job_id}` what it prints")
    if wait and not follow(kept, record.job_id, show_output=False):
        raise typer.Exit(1)


def _check_options(job_file: Path, job: "JobFile") -> None:
    """Refuse options that `cumulo train` or `cumulo serve` does not take, by its own parser."""
    from cumulo.cli.serve import serve
    from cumulo.cli.train import train
    from cumulo.cluster.job_check import line_of

    for work, verb in ((job.train, train), (job.serve, serve)):
        if work is not None and (refused := refused_by(verb, ["CONFIG", *work.options])):
            setting = f"{verb.__name__}.options"
            raise ConfigError(
                f"{job_file}:{line_of(job_file.read_text('utf-8'), setting)}: {setting}: {refused}"
            )


def refused_by(verb: Callable[..., None], words: Sequence[str]) -> str | None:
    """What a verb's parser says of these words; None: it takes them."""
    alone = typer.Typer()
    alone.command()(verb)
    command: Any = typer.main.get_command(alone)
    try:
        context = command.make_context(verb.__name__, [*words])
    except Exception as error:  # typer's own copy of click has no public name
        if not hasattr(error, "format_message"):
            raise
        return str(error.format_message())
    data = (context.params.get("what") or [])[
        1:
    ]  # `cumulo train` takes data; a job names it in its configuration
    return f"Got unexpected extra argument ({data[0]})" if data else None

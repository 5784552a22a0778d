"""`cumulo jobs`, `cumulo logs` and `cumulo cancel`: one view over the jobs of all targets."""

from typing import Annotated

import typer

from cumulo.cli.launch import StoreOption
from cumulo.cli.shared import options
from cumulo.cli.shared.terminal import note
from cumulo.errors import ConfigError

JOBS_EXAMPLE = "Example: [bold]cumulo jobs --all[/bold], then `cumulo jobs show tiny`"
LOGS_EXAMPLE = "Example: [bold]cumulo launch examples/job-train.yaml && cumulo logs tiny -f[/bold]"
CANCEL_EXAMPLE = "Example: [bold]cumulo launch examples/job-train.yaml && cumulo cancel tiny[/bold]"
JobArgument = Annotated[
    str,
    typer.Argument(metavar="JOB", help="Id of the job, or the name in its file: the last job of that name."),
]


def jobs(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="show JOB | nodes",
            help="Show one job's attempts: why each ended, and what was lost with it; or the nodes that were "
            "cordoned, and why.",
        ),
    ] = None,
    everything: bool = typer.Option(
        False, "--all", help="Also show all jobs that have ended. Without it: those that failed within a day."
    ),
    replay: bool = typer.Option(
        False, "--replay", help="Ask the policies again for every recorded decision, and compare."
    ),
    store: StoreOption = None,
    json_file: options.JsonOption = None,
) -> None:
    """Show the jobs of all targets: state, placement, why a job waits, predicted next to measured speed."""
    from cumulo.cli.jobs_report import failed_lately, print_history, print_jobs, print_nodes, print_replay
    from cumulo.cluster.job_store import JobStore, default_store
    from cumulo.cluster.launching import refreshed

    kept = JobStore(store or default_store())
    if replay:
        if not print_replay(kept, json_file):
            raise typer.Exit(1)
        return
    if words == ["nodes"]:
        print_nodes(kept, json_file)
        return
    if words and (len(words) != 2 or words[0] != "show"):
        raise ConfigError(f"cumulo jobs {' '.join(words)}: write cumulo jobs, cumulo jobs show JOB or nodes")
    records, troubles = refreshed(kept)
    if words:
        print_history(kept.find(words[1]), json_file)
    else:
        shown = [one for one in records if everything or not one.ended or failed_lately(one)]
        print_jobs(shown, records, json_file)
    for trouble in troubles:
        note(trouble)


def logs(
    job: JobArgument,
    follow: bool = typer.Option(
        False, "--follow", "-f", help="Keep printing what the job prints, until it ends."
    ),
    store: StoreOption = None,
) -> None:
    """Print the output of a job."""
    from cumulo.cli import jobs_report as view
    from cumulo.cluster.job_store import JobStore, default_store

    kept = JobStore(store or default_store())
    record = kept.find(job)
    if follow:
        if not view.follow(kept, record.job_id, show_output=True):
            raise typer.Exit(1)
    else:
        view.print_output(record)


def cancel(job: JobArgument, store: StoreOption = None) -> None:
    """Cancel a job; a training run saves a checkpoint first."""
    from cumulo.cluster import launching
    from cumulo.cluster.job_store import JobStore, default_store

    record = launching.cancel(JobStore(store or default_store()), job)
    note(f"{record.job_id}: {record.state if record.ended else 'asked to end'}")

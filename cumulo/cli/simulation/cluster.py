"""`cumulo simulate cluster`: a trace of jobs under scheduling policies, in virtual time."""

import contextlib
import math
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cumulo.base.figures import figure_rows, figure_table
from cumulo.base.nearest import names_in
from cumulo.base.report import Row
from cumulo.cli.shared import options
from cumulo.cli.shared.declare import Panel, takes_options, typed_flags
from cumulo.cli.shared.terminal import marked, present, read_text, save, working
from cumulo.cli.simulation import cluster_report as view
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.cluster.decide.policies import NamedPolicy, policy_named
from cumulo.cluster.decide.quotas import read_quota
from cumulo.cluster.decide.slurm import slurm_policy
from cumulo.cluster.decide.step_time import leaf_fabric
from cumulo.cluster.drivers.driver import run_tool
from cumulo.cluster.simulate.fill import RULES, fill
from cumulo.cluster.simulate.job_speed import ElasticSpeed, JobSpeed, LeafSpeed, TraceJob, elastic_jobs
from cumulo.cluster.simulate.page import FIGURES, page
from cumulo.cluster.simulate.play import ROUND_S, PlayOptions, play, usual_interval_s
from cumulo.cluster.simulate.pollux import is_pollux, read_pollux
from cumulo.cluster.simulate.slurm_record import (
    SlurmRecord,
    SlurmRehearsal,
    read_slurm_record,
    rehearse,
    slurm_settings,
)
from cumulo.cluster.simulate.synthetic import (
    PUBLISHED_RATES,
    FailureRates,
    mispredicted,
    synthetic_trace,
    uniform_nodes,
)
from cumulo.cluster.simulate.traces import read_nodes, read_trace
from cumulo.errors import ConfigError, CumuloError

EXAMPLE = (
    "Example: [bold]cumulo simulate cluster --synthetic 500 --nodes 64 --policy fifo,backfill,shortest "
    "--html cluster.html[/bold]"
)
_UPDATES = 1000  # of the progress, for one policy
_LEAST_INTERVAL_S = 0.001
_CLUSTER, _JOBS, _REPORT = map(Panel, ("Cluster", "Jobs", "Report"))


@dataclass(frozen=True, kw_only=True)
class ClusterRunOptions:
    trace: Annotated[
        Path | None,
        typer.Argument(
            metavar="TRACE",
            help="CSV of jobs: our own form, openb, Tiresias, Gavel or Pollux; or a list of Slurm's jobs.",
        ),
    ] = None
    nodes: int = _CLUSTER("Number of nodes.", 16, min=1, max=1_000_000)
    gpus_per_node: int = _CLUSTER("GPUs of each node.", 8, min=1, max=1024)
    nodes_per_leaf: int = _CLUSTER("Nodes on one leaf switch; 0: one switch.", 0, min=0)
    node_list: Path | None = _CLUSTER(
        "CSV of nodes instead of --nodes: name,gpus[,device,leaf], or openb's.", None
    )
    oversubscription: float = _CLUSTER(
        "What the nodes of a leaf can send over what its uplinks carry.", 2.0, min=1
    )
    failures: str = _CLUSTER(
        "Node failures: rsc-1, rsc-2, llama-3 (published rates), or failures per 1,000 node-days.", ""
    )
    synthetic: int = _JOBS("Draw this many jobs instead of reading a trace.", 0, min=0)
    steps: bool = _JOBS.flag(
        "With --synthetic: jobs of several tasks exchange data in every step, so that their placement decides how "
        "fast they run."
    )
    load: float = _JOBS("With --synthetic: GPU time asked for over GPU time there is.", 0.9)
    seed: int = _JOBS("Seed of --synthetic, --failures and --fill.", 0)
    prediction_error: float = _JOBS(
        "Make predicted durations wrong: standard deviation of the logarithm of the factor. 0.5: most are right "
        "within a factor of 1.6.",
        0.0,
        min=0,
    )
    quota: list[str] = _JOBS(
        "A tenant's quota, as TENANT=GPUS or TENANT=GPUS+BORROWED. Repeat it.", (), metavar="QUOTA"
    )
    policy: str = _JOBS(
        "Policies to compare, separated by commas: ORDER[+PLACEMENT][+cordon], or FILE.py:FUNCTION. "
        "Orders: fifo, backfill, conservative, shortest, las, fair, priority, elastic, goodput. "
        "Placements: pack, topology, emptiest. slurm: what Slurm itself would do, for a list of its jobs.",
        "fifo,backfill",
    )
    interval: float | None = _JOBS(
        "Decide every so many seconds; 0: at every event. Without it: 60 for Pollux' workloads, and for las, "
        "elastic and goodput with 10,000 jobs or more; else 0.",
        None,
        min=0,
    )
    slurm_config: Path | None = _JOBS(
        "For the policy slurm: a file with the output of `scontrol show config`. Without it, scontrol is run.",
        None,
    )
    fill: bool = _JOBS.flag(
        "Instead of time: how full the cluster gets when tasks arrive and stay, as the FGD paper measures it."
    )
    seeds: int = _JOBS("With --fill: number of random orders.", 3, min=1)
    explain: str = _REPORT(
        "Explain one job: where it ran and why, what its step takes there and elsewhere.", "", metavar="JOB"
    )
    html: Path | None = _REPORT("Write a report with a Gantt chart and a map of the cluster.", None)
    log: Path | None = _REPORT("Write every decision of the last policy, one JSON line each.", None)
    json_file: options.JsonOption = None


@takes_options
def cluster(chosen: ClusterRunOptions) -> None:
    """Simulate a cluster under scheduling policies: the same policies that `cumulo launch` obeys, on a trace.

    Reports job completion time (JCT), waiting, makespan, utilization, and fairness between tenants.
    """
    _check(chosen)
    nodes = _nodes(chosen)
    pollux = chosen.trace is not None and chosen.trace.is_file() and is_pollux(chosen.trace)
    names = names_in(chosen.policy) or [chosen.policy]
    slurm = _slurm_record(chosen) if "slurm" in names else None
    rehearsal: SlurmRehearsal | None = None
    given = slurm.jobs if slurm is not None else [] if pollux else _jobs(chosen, nodes)
    jobs = mispredicted(given, chosen.prediction_error)
    if chosen.fill:
        _fill(chosen, nodes, jobs)
        return
    named = [
        policy_named(name)
        if slurm is None or name != "slurm"
        else NamedPolicy(name, slurm_policy(slurm.settings))
        for name in names
    ]
    found, steps, cpu_rows = [], [], []
    with working("simulating") as tell:
        for policy in named:
            began_s = time.process_time()
            speed: JobSpeed | None = None
            if pollux:
                assert chosen.trace is not None
                jobs, speed = read_pollux(chosen.trace, policy.resizes, chosen.prediction_error)
            elif policy.resizes and any(job.request.elastic for job in jobs):
                jobs, speed = elastic_jobs(jobs, leaf_fabric(nodes)), ElasticSpeed()
            elif any(job.request.step is not None for job in jobs):
                speed = LeafSpeed(leaf_fabric(nodes))
            if (interval_s := chosen.interval) is None:
                interval_s = ROUND_S if pollux else usual_interval_s(policy, len(jobs))
            settings = PlayOptions(
                interval_s=interval_s,
                quotas=tuple(map(read_quota, chosen.quota)),
                failures=_failures(chosen),
                seed=chosen.seed,
                keep_log=chosen.log is not None or bool(chosen.explain),
                always_decide=policy.always_decide,
                told=partial(_tell, tell, policy.name),
            )
            with _own_mistakes(policy.name):
                if slurm is not None and policy.name == "slurm":
                    rehearsal = rehearse(replace(slurm, jobs=jobs), nodes, settings)
                    run = rehearsal.run
                else:
                    run = play(nodes, jobs, policy.decide, speed, settings)
            cpu_s = time.process_time() - began_s
            found.append((policy.name, run))
            cpu_rows.append(Row(f"{policy.name}: CPU time of the simulation", cpu_s, "s", "lower"))
            if isinstance(speed, LeafSpeed):
                steps.append((policy.name, dict(speed.steps)))
    last, last_run = found[-1]
    save(chosen.html, lambda: page(found), "report")
    save(chosen.log, lambda: view.log_text(last_run), f"decisions of {last}")
    rows = [row for name, run in found for row in figure_rows(name, run, FIGURES)] + cpu_rows
    rows += [row for name, some in steps for row in figure_rows(name, some, view.STEPS)]
    counts = f"{len(jobs):,} jobs", f"{len(nodes):,} nodes", f"{sum(node.gpus for node in nodes):,} GPUs"
    title = marked("[bold]{}[/bold] on [bold]{}[/bold] with {}", *counts)
    shown: list[Any] = [title, view.comparison(found)]
    shown += view.never_ended(found)
    if steps:
        shown.append(figure_table("policy", steps, view.STEPS, "step time over the best possible"))
    if rehearsal is not None:
        shown.append(view.predicted(rehearsal))
        rows += view.prediction_rows(rehearsal)
    if chosen.explain:
        shown.append(view.explanation(chosen.explain, found, steps))
    elif len(last_run.per_tenant) > 1:
        shown.append(view.tenants(last, last_run))
    present(rows, chosen.json_file, *shown, runs={name: run.as_dict() for name, run in found})


def _check(chosen: ClusterRunOptions) -> None:
    """What cannot be meant, and files that could not be written after a long run."""
    if chosen.trace is not None and chosen.synthetic:
        raise ConfigError("give a trace or --synthetic, not both")
    if not 0 < chosen.load < math.inf:
        raise ConfigError(f"--load must be more than 0, such as 0.9, got {chosen.load:g}")
    if chosen.interval and not chosen.interval >= _LEAST_INTERVAL_S:
        text = f"--interval must be 0 or {_LEAST_INTERVAL_S:g} seconds or more, got {chosen.interval:g}"
        raise ConfigError(text)
    for name, path in (("--html", chosen.html), ("--log", chosen.log)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            why = "is a folder" if path.is_dir() else "is in a folder that does not exist"
            raise ConfigError(f"{name} {path}: {path} {why}")


@contextlib.contextmanager
def _own_mistakes(name: str) -> Iterator[None]:
    """An exception of a user's own policy is told with its line, and not with ours."""
    file = name.partition(":")[0]
    try:
        yield
    except CumuloError:
        raise
    except Exception as error:
        if not file.endswith(".py"):
            raise
        lines = [
            one.lineno
            for one in traceback.extract_tb(error.__traceback__)
            if Path(one.filename).samefile(file)
        ]
        where = f"{file}:{lines[-1]}" if lines else f"{name} returned something that is no list of decisions"
        raise ConfigError(f"the policy failed, {where}: {type(error).__name__}: {error}") from error


def _tell(tell: Callable[[str], None], name: str, done: int, jobs: int) -> None:
    if done % max(1, jobs // _UPDATES) == 0:
        tell(f"{name}: {done:,} of {jobs:,} jobs")


def _nodes(chosen: ClusterRunOptions) -> list[ClusterNode]:
    if chosen.node_list is not None:
        return read_nodes(chosen.node_list)
    return uniform_nodes(
        chosen.nodes, chosen.gpus_per_node, chosen.nodes_per_leaf, oversubscription=chosen.oversubscription
    )


def _jobs(chosen: ClusterRunOptions, nodes: list[ClusterNode]) -> list[TraceJob]:
    if chosen.trace is not None:
        return read_trace(chosen.trace)
    gpus = sum(node.gpus for node in nodes)
    return synthetic_trace(
        chosen.synthetic or 200,
        gpus,
        chosen.load,
        chosen.seed,
        min(node.gpus for node in nodes),
        chosen.steps,
    )


def _slurm_record(chosen: ClusterRunOptions) -> SlurmRecord:
    if chosen.trace is None:
        raise ConfigError("the policy slurm needs a list of Slurm's jobs as TRACE, from sacct or squeue")
    if chosen.slurm_config is not None:
        return read_slurm_record(chosen.trace, slurm_settings(read_text(chosen.slurm_config)))
    try:
        said = run_tool(["scontrol", "show", "config"], "give its output with --slurm-config FILE")
    except FileNotFoundError:
        raise ConfigError("there is no scontrol here: give its output with --slurm-config FILE") from None
    if said.returncode:
        raise ConfigError(f"scontrol show config failed: {said.stderr.strip()}")
    return read_slurm_record(chosen.trace, slurm_settings(said.stdout))


def _failures(chosen: ClusterRunOptions) -> FailureRates | None:
    if not chosen.failures:
        return None
    rate = PUBLISHED_RATES.get(chosen.failures)
    if rate is None:
        try:
            rate = float(chosen.failures)
        except ValueError:
            rate = math.nan
        if not 0 <= rate < math.inf:
            raise ConfigError(
                f"--failures {chosen.failures}: known are {', '.join(PUBLISHED_RATES)}, or failures per "
                "1,000 node-days"
            )
    return FailureRates(rate) if rate else None


def _fill(chosen: ClusterRunOptions, nodes: list[ClusterNode], jobs: list[TraceJob]) -> None:
    names = [*RULES]
    if "policy" in typed_flags():
        names = names_in(chosen.policy, "with --fill, --policy", RULES)
    requests = [job.request for job in jobs]
    if any(job.tasks > 1 for job in requests):
        raise ConfigError("--fill needs jobs of one task each: gangs are not packed")
    found = []
    with working("filling") as tell:
        for name in names:
            tell(name)
            found.append(fill(nodes, requests, name, range(chosen.seed, chosen.seed + chosen.seeds)))
    named = [(one.policy, one) for one in found]
    rows = [row for name, one in named for row in figure_rows(name, one, view.FILLINGS)]
    present(rows, chosen.json_file, figure_table("packing rule", named, view.FILLINGS))

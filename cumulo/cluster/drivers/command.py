"""The `cumulo` command that a job is, wherever it runs, and what it printed. All drivers start it."""

import json
import re
import shlex
import sys
import time
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from cumulo.cluster.decide.jobs import SpeedTable
from cumulo.cluster.decide.recovery import UNHEALTHY
from cumulo.cluster.job_check import check_job
from cumulo.cluster.job_settings import ElasticRange, JobFile, ServeWork
from cumulo.cluster.job_store import JobRecord
from cumulo.errors import ConfigError, CumuloError
from cumulo.train.data.dataset_build import find_files
from cumulo.train.decide.config import load_config
from cumulo.train.decide.elastic import fitted

_READY = re.compile(r"(.*) is ready at (https?://\S+?)/v1")
_ERROR = re.compile(r"error: |\w*(Error|Exception|Interrupt)\b")
SERVICE = "the service"  # what a script says is ready, where it stands before several servers


_ATTEMPT = "--- attempt {number} ---"
ATTEMPTS = "attempts.jsonl"  # in the job's folder: a line where an attempt begins, and one where it ends
# Who failed first, as the watch for hangs, srun and `cumulo train` say it. Ranks with exit code 3 lost another one.
_FAILED_FIRST = re.compile(
    r"(ranks? [\d, ]*\d) held it up|srun: error: (\S+): task (\d+): (?!Exited with exit code 3\b)|"
    r"(rank \d+) (?:was ended by|ended with)"
)


def mark_attempt(output: Path, number: int) -> None:
    """A line between the output of one attempt and the next."""
    with output.open("a", encoding="utf-8") as stream:
        stream.write(_ATTEMPT.format(number=number) + "\n")


def attempts_begun(record: JobRecord) -> int:
    """The number of attempts that its batch script has written down."""
    path = Path(record.folder, ATTEMPTS)
    return path.read_text("utf-8").count('"begin_s"') if path.exists() else 0


def last_begin(folder: Path) -> dict[str, Any] | None:
    """What a job's last attempt wrote down when it began, while its end is not written down."""
    path = folder / ATTEMPTS
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    facts: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return facts if "begin_s" in facts else None


def end_attempt(folder: Path, cause: str, lost: str = "", end_s: float | None = None) -> None:
    """Write down why a job's last attempt ended, and who failed first: `lost` nodes, or who its output says."""
    first = lost or failed_first_in(output_tail(folder / "output.log").rpartition("--- attempt ")[2])
    facts = {"end_s": round(end_s or time.time(), 3), "cause": cause, "failed_first": first}
    with (folder / ATTEMPTS).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(facts) + "\n")


def failed_first_in(text: str) -> str:
    found = _FAILED_FIRST.search(text)
    if found is None:
        return ""
    return f"rank {found[3]} on {found[2]}" if found[3] else found[1] or found[4]


def served_url(output: Path, who: str = "") -> str:
    """The URL that the last attempt printed; empty: it is not ready yet."""
    try:
        text = output.read_text("utf-8", "replace")
    except OSError:
        return ""
    found = _READY.findall(text.rpartition("--- attempt ")[2])
    return next((url for name, url in found if who in ("", name)), "")


def last_error(output: Path) -> str:
    """The last error that the last attempt printed: a line of the command, or the end of a traceback."""
    lines = output_tail(output).rpartition("--- attempt ")[2].splitlines()
    return next((one.removeprefix("error: ").strip() for one in lines[::-1] if _ERROR.match(one)), "")


def output_tail(output: Path) -> str:
    """The last 100 kB of what a job printed."""
    try:
        with output.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - 100_000))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""


def run_folder(record: JobRecord) -> Path:
    """Where a training job keeps its checkpoints and its log."""
    train = record.job.train
    return Path(record.folder, "run") if train is None or train.folder is None else Path(train.folder)


def output_file(record: JobRecord) -> Path:
    """What the job prints, all attempts one after the other."""
    return Path(record.folder, "output.log")


def work_command(record: JobRecord) -> list[str]:
    """The command; the same at every start, because a training run resumes from what is in its folder."""
    python = [sys.executable, "-m", "cumulo"]
    if (train := record.job.train) is not None:
        folder = str(run_folder(record))
        return [*python, "train", str(train.source), "--folder", folder, "--resume", *train.options]
    serve = record.job.serve
    assert serve is not None
    model = [serve.model] if serve.model is not None else []
    plan = ["--plan", serve.plan] if serve.plan is not None else []
    replicas = ["--replicas", str(serve.replicas)] if serve.replicas > 1 else []
    return [*python, "serve", *model, *plan, *replicas, "--port", str(serve.port), *serve.options]


def check_command(record: JobRecord, *more: str) -> list[str]:
    """The quick check of the node that a gang is about to start on, which reports to the job's store."""
    store = str(Path(record.folder).parent)
    words = ["check", "node", "--quick", "--cordon", "--exit-code", str(UNHEALTHY), "--store", store]
    without_gpus = ["env", "CUDA_VISIBLE_DEVICES="] if record.job.devices[0].on_cpu else []
    return [*without_gpus, sys.executable, "-m", "cumulo", *words, *more]


def checked(record: JobRecord, command: list[str]) -> list[str]:
    """The command after the check, unless the job file leaves it out. A check that breaks holds up nobody."""
    if not record.job.check_nodes:
        return command
    script = f'{shlex.join(check_command(record))}; [ $? -ne {UNHEALTHY} ] || exit {UNHEALTHY}; exec "$@"'
    return ["/bin/sh", "-c", script, "checked", *command]


def server_arguments(work: ServeWork) -> list[str]:
    """Of `cumulo serve`, where the cluster starts each replica. A plan's own number of replicas is the cluster's to
    start."""
    plan = ["--plan", work.plan, "--replicas", "1"] if work.plan else []
    return [*([work.model] if work.model else []), *plan, *work.options]


def ranks_command(record: JobRecord, ranks: int) -> list[str]:
    """On one machine. With another number of ranks than the layout has, torchrun starts them, and the run fits its
    data parallelism to it."""
    command = work_command(record)
    if record.job.train is None or ranks == planned_ranks(record.job):
        return command
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *command[1:],
    ]  # fmt: skip


def planned_ranks(job: JobFile) -> int:
    """Processes that the work is made for."""
    if (train := job.train) is not None:
        if _is_head(train.source):
            return 1
        changes = dict(_changes(train.options))
        return load_config(Path(str(train.source)), changes).layout.world
    assert job.serve is not None
    return job.ranks


def speed_table(job: JobFile) -> SpeedTable | None:
    """How fast an elastic run is with every number of GPUs, in copies of the model that compute at once; None: it
    is not elastic, or a task of it is more than one GPU."""
    group, train = job.devices[0], job.train
    if job.elastic is None or train is None or group.on_cpu or group.per_node or _is_head(train.source):
        return None
    return _copies(str(train.source), train.options, job.elastic)


@cache
def _copies(source: str, options: tuple[str, ...], elastic: ElasticRange) -> SpeedTable | None:
    try:
        config = load_config(Path(source), dict(_changes(options)))
        possible = [float(fitted(config, gpus).dp) for gpus in range(elastic.min, elastic.max + 1)]
    except CumuloError:  # whoever starts it says what is wrong
        return None
    copies = (*([0.0] * (elastic.min - 1)), *possible)
    return SpeedTable(copies, copies)


def check_work(job: JobFile, here: bool = False) -> None:
    """Refuse what the devices cannot run before anything is submitted. `here`: this machine runs it, and has the
    data."""
    check_job(job)
    train = job.train
    if train is None or _is_head(train.source):
        return
    config = load_config(Path(str(train.source)), dict(_changes(train.options)))
    if config.layout.world != job.ranks:
        raise ConfigError(
            f"{job.name}: the layout {config.layout} in {train.source} has {config.layout.world} ranks, and the "
            f"job asks for {job.ranks} device{'' if job.ranks == 1 else 's'}; change one of them"
        )
    if job.elastic is not None:
        fitted(config, job.elastic.min)
    if here and not (train.folder and Path(train.folder, "config.yaml").exists()):
        find_files(config.data.sources)


def _is_head(source: str | None) -> bool:
    try:
        content = yaml.safe_load(Path(str(source)).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False  # whoever reads it next says what is wrong with it
    return isinstance(content, dict) and content.get("kind") == "eagle"


def _changes(options: tuple[str, ...]) -> list[tuple[str, str]]:
    """What `--set NAME=VALUE` and `--steps` change in a configuration."""
    words = [
        part
        for option in options
        for part in (option.split("=", 1) if option.startswith("--set=") else [option])
    ]
    found = []
    for name, value in pairwise(words):
        if name == "--set" and "=" in value:
            key, _, content = value.partition("=")
            found.append((key, content))
        elif name == "--steps":
            found.append(("steps", value))
    return found

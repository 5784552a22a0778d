"""SlurmDriver: jobs as batch jobs of a Slurm cluster. Slurm places and requeues them; this hands them over once,
and reads back from `squeue`, `sacct` and the job's own folder where they are and why they wait.

A submission is idempotent by its key, which stands in the job's comment: before `sbatch` is called (again), Slurm
is asked for a job with that comment.
"""

import re
import subprocess
from pathlib import Path

from cumulo.base.strict import package_yaml
from cumulo.cluster.decide.jobs import TaskPlace
from cumulo.cluster.drivers.command import (
    SERVICE,
    attempts_begun,
    last_begin,
    output_file,
    served_url,
)
from cumulo.cluster.drivers.driver import Facts, TargetLost, note_submission, run_tool
from cumulo.cluster.drivers.slurm_end import read_end, settle
from cumulo.cluster.drivers.slurm_script import COMMENT, batch_script
from cumulo.cluster.job_store import JobRecord
from cumulo.errors import ConfigError, CumuloError

_BAD = ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED")
_KILLED = ("FAILED", "NODE_FAIL", "OUT_OF_MEMORY")
_LOST = re.compile(
    r"unable to contact slurm controller|connection refused|connection timed out|communication|"
    r"zero bytes were transmitted|socket timed out|slurm backup controller",
    re.I,
)
_IDENTITY = re.compile(r"authenticat|credential|munge|protocol authentication", re.I)


class SlurmDriver:
    def explain(self, record: JobRecord) -> str:
        return "# sbatch <<EOF\n" + batch_script(record)

    def submit(self, record: JobRecord) -> Facts:
        if handle := self._existing(record):
            return {"handle": handle, **self.look_at(record, handle)}
        script = Path(record.folder, "batch.sh")
        script.write_text(batch_script(record), "utf-8")
        note_submission(record)
        # The key has been written down; whatever happens to this answer, the comment finds the job again.
        printed = self._call("sbatch", "--parsable", str(script), job=record)
        handle = printed.strip().splitlines()[-1].split(";")[0]
        return {"handle": handle, "state": "queued", "reason": _why("None")}

    def look(self, record: JobRecord) -> Facts:
        starts = {
            "attempt": attempts_begun(record),
            "failures": read_end(Path(record.folder)).get("failures", 0),
        }
        return {**self.look_at(record, record.handle), **starts}

    def cancel(self, record: JobRecord) -> Facts:
        handle = record.handle or self._existing(record)
        if not handle:
            return {"state": "cancelled", "reason": "cancelled before it was submitted"}
        self._call("scancel", handle, job=record)
        return {"handle": handle, "state": "stopping", "reason": "cancelled by its user"}

    def _existing(self, record: JobRecord) -> str:
        """The job of this key that Slurm, or the job itself, knows of. An earlier job of the same file has the same
        key, and another name."""
        for line in self._call(
            "squeue", "--noheader", "--states=all", "--format=%i|%j|%k", job=record
        ).splitlines():
            number, name, comment = [*line.strip().split("|", 2), "", ""][:3]
            if (name, comment) == (record.job_id, COMMENT + record.key):
                return re.split(r"[+_]", number)[0]
        handle = Path(record.folder, "handle")
        return handle.read_text("utf-8").strip() if handle.exists() else ""

    def look_at(self, record: JobRecord, handle: str) -> Facts:
        try:
            text = self._call("squeue", "--noheader", "--states=all", f"--jobs={handle}", "--format=%i|%T|%r|%N",
                              job=record)  # fmt: skip
        except _UnknownJob:
            text = ""
        lines = [line.split("|") for line in text.splitlines() if line.strip()]
        if not lines:
            return self._ended(record, handle)
        _, state, why, _ = lines[0]
        names = [name for line in lines for name in self._hosts(line[3])]
        each = record.job.devices[0].each if record.job.devices[0].per_node else 1
        places = tuple(TaskPlace(name) for name in names for _ in range(each))
        if state == "COMPLETED" or state in _BAD or state == "CANCELLED":
            return self._judged(record, state)
        if state == "PENDING":
            return {"state": "queued", "places": (), "reason": _why(why)}
        running = "stopping" if record.cancel_asked else "running"
        url = served_url(output_file(record), SERVICE) if record.job.serve is not None else ""
        return {"state": running, "places": places, "reason": "its whole gang is allocated", "url": url}

    def _ended(self, record: JobRecord, handle: str) -> Facts:
        """Slurm forgets jobs some minutes after their end; accounting and the job's folder do not."""
        try:
            printed = self._call("sacct", "-n", "-X", "-P", "-j", handle, "-o", "State", job=record)
        except CumuloError:
            printed = ""
        words = printed.split()
        return self._judged(record, words[0] if words else "")

    def _judged(self, record: JobRecord, state: str) -> Facts:
        end = read_end(Path(record.folder))
        if state == "CANCELLED" or (record.cancel_asked and state != "COMPLETED"):
            return {"state": "cancelled", "places": (), "reason": "cancelled"}
        if state == "COMPLETED" or (not state and end.get("state") == "done"):
            return {"state": "done", "places": (), "reason": "finished"}
        if state in _KILLED and record.job.train and last_begin(Path(record.folder)) is not None:
            return self._again(record)
        told = str(end.get("reason") or "") if end.get("state") == "failed" else ""
        reason = told or (f"Slurm says {state}" if state else "Slurm no longer knows the job")
        return {"state": "failed", "places": (), "reason": reason}

    def _again(self, record: JobRecord) -> Facts:
        """The job's script was killed before it could say what becomes of the job."""
        after = settle(Path(record.folder), None)
        if after.state == "failed":
            return {"state": "failed", "places": (), "reason": after.reason}
        self._call("scontrol", "requeue", record.handle, job=record)
        return {"state": "queued", "places": (), "reason": after.reason}

    def _hosts(self, names: str) -> list[str]:
        if not names or "[" not in names:
            return [name for name in names.split(",") if name]
        return self._call("scontrol", "show", "hostnames", names).split()

    def _call(self, program: str, *arguments: str, job: JobRecord | None = None) -> str:
        done = _run(program, *arguments)
        if done.returncode == 0:
            return done.stdout
        raise refusal(program, done.stderr.strip() or done.stdout.strip(), job)


def _why(word: str) -> str:
    """Why a job is pending, of which Slurm gives a word."""
    reasons = package_yaml("cumulo.cluster", "data/slurm_reasons.yaml")
    return str(reasons.get(word, f"Slurm says {word}"))


def _run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return run_tool([program, *arguments], "the job is kept")
    except FileNotFoundError:
        raise ConfigError(
            f"Slurm's command {program} was not found here: launch from a login node, or install slurm-client"
        ) from None


class _UnknownJob(CumuloError):
    """Slurm has forgotten it."""


def refusal(program: str, said: str, record: JobRecord | None) -> CumuloError:
    last = _plain(said)
    if re.search("invalid job id", last, re.I):
        return _UnknownJob(last)
    if re.search("configuration source", last, re.I):
        return TargetLost(
            "Slurm is installed here, and has no configuration: set SLURM_CONF or launch from a login node",
            "the job is kept",
        )
    if _IDENTITY.search(last):
        return TargetLost(
            f"Slurm does not accept who you are ({last}): check that munged runs here with the cluster's key and "
            "that the clocks agree",
            _kept(record, "the next `cumulo jobs` submits it, once"),
        )
    if _LOST.search(last):
        again = "the next `cumulo jobs` or the same `cumulo launch` submits it, once"
        return TargetLost(f"Slurm's controller does not answer ({last})", _kept(record, again))
    slurm = None if record is None else record.job.slurm
    if slurm is not None and re.search("partition", last, re.I) and not re.search("account", last, re.I):
        which = "its default partition" if slurm.partition is None else f"partition {slurm.partition!r}"
        return ConfigError(f"Slurm refused {which}: {last}; {_partitions()}")
    if slurm is not None and re.search("account", last, re.I):
        which = "your default account" if slurm.account is None else f"account {slurm.account!r}"
        return ConfigError(f"Slurm refused {which}: {last}; set slurm.account in the job file")
    if re.search("node configuration|can not be satisfied|feature", last, re.I):
        more = f"{_nodes()}. Check devices and slurm.options in the job file"
        return ConfigError(f"{program} refused: {last}; {more}")
    return ConfigError(f"{program} refused: {last}")


def _plain(said: str) -> str:
    """What a command of Slurm said, each thing once, without its own name and advice on threads before it."""
    lines = [re.sub(r"^\w+: (error|fatal): ", "", line.strip()) for line in said.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line and "--num-threads" not in line))


def _kept(record: JobRecord | None, again: str) -> str:
    """What becomes of the job: one that Slurm has already is not submitted again."""
    if record is not None and record.handle:
        return f"{record.job_id} was {record.state} when it was last asked, and Slurm goes on with it"
    return f"the job is kept, and {again}"


def _nodes() -> str:
    """What the nodes have, as sinfo groups them."""
    try:
        lines = _run("sinfo", "-h", "-o", "%D|%c|%G|%f").stdout.splitlines()
    except CumuloError as error:
        return f"the nodes are not known ({error})"
    found = []
    for line in lines:
        count, cores, gres, features = [*line.strip().split("|"), "", "", ""][:4]
        some = [f"{cores} cores"] + [text for text in (gres, features) if text and text != "(null)"]
        found.append(f"{count} nodes have {', '.join(some)}")
    return "; ".join(dict.fromkeys(found)) or "sinfo lists no nodes"


def _partitions() -> str:
    try:
        names = ", ".join(sorted(set(_run("sinfo", "-h", "-o", "%R").stdout.split())))
    except CumuloError as error:
        return f"the partitions are not known ({error})"
    return f"there are: {names}" if names else "sinfo lists none"

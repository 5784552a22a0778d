"""Job traces: the published ones and our own form, read into jobs and nodes. `cumulo simulate cluster` reads
them.

A file is known by its columns. Our own form is a CSV with `job_id,arrival_s,duration_s,gpus` and optionally
`tasks, tenant, priority, gpu_milli, predicted_s, min_tasks, max_tasks, checkpoint_s, compute_s, all_reduce_gb,
all_to_all_gb, devices`. `devices`: names separated by |, as in the list of nodes.
"""

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cumulo.base.nearest import nearest
from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, StepProfile
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.cluster.simulate.job_speed import TraceJob
from cumulo.errors import ConfigError

_MOST = 1e12  # of any number: with larger ones, a second more would be lost by rounding


@dataclass(frozen=True, slots=True)
class TraceLine:
    file: Path
    number: int  # from 1, with the heading
    fields: Mapping[str, str]

    def text(self, name: str, otherwise: str | None = None) -> str:
        found = self.fields.get(name, "").strip()
        if not found and otherwise is None:
            raise self.wrong(name, "is missing")
        return found or otherwise or ""

    def real(self, name: str, otherwise: float | None = None, least: float = 0.0) -> float:
        text = self.text(name, "" if otherwise is not None else None)
        if not text and otherwise is not None:
            return otherwise
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not least <= value <= _MOST:
            wanted = "a number" if least == -math.inf else f"a number of {least:g} or more"
            wanted += f", {_MOST:g} at most" if value > _MOST else ""
            raise self.wrong(name, f"must be {wanted}, got {text!r}")
        return value

    def whole(self, name: str, otherwise: int | None = None, least: int | None = 0) -> int:
        value = self.real(name, otherwise, -math.inf if least is None else least)
        if value != int(value):
            raise self.wrong(name, f"must be a whole number, got {self.text(name)!r}")
        return int(value)

    def wrong(self, name: str, why: str) -> ConfigError:
        return ConfigError(f"{self.file}:{self.number}: {name} {why}")


def read_lines(path: Path) -> list[TraceLine]:
    """Column names in any case, maybe with spaces around them; values are separated by commas, semicolons or |."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            heading = file.readline()
            file.seek(0)
            reader = csv.DictReader(file, delimiter=_separator(heading))
            names = [(name or "").strip().lower() for name in reader.fieldnames or ()]
            reader.fieldnames = names
            found = [
                TraceLine(path, reader.line_num, _whole(fields, path, reader.line_num)) for fields in reader
            ]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is no CSV file with UTF-8 text ({error})") from error
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise ConfigError(f"{path}: the column {twice[0]} is there twice")
    if not found:
        raise ConfigError(f"{path} has no lines")
    return found


def _separator(heading: str) -> str:
    return next((one for one in ";|" if one in heading and "," not in heading), ",")


def _whole(fields: Mapping[str, str | list[str] | None], path: Path, number: int) -> dict[str, str]:
    if None in fields:
        raise ConfigError(f"{path}:{number}: this line has more values than there are columns")
    missing = [name for name, value in fields.items() if value is None]
    if missing:
        raise ConfigError(f"{path}:{number}: this line has no value for {missing[0]}: it ends too early")
    return {name: value for name, value in fields.items() if isinstance(value, str)}


def no_slips(path: Path, columns: Iterable[str], known: Iterable[str]) -> None:
    """Other columns are allowed; one that looks like a known one is a slip."""
    names, columns = set(known), list(columns)
    for column in columns:
        close = nearest(column, sorted(names - set(columns))) if column not in names else []
        if close:
            raise ConfigError(f"{path}: there is no column {column}; did you mean {close[0]}?")


def once(lines: Iterable[TraceLine], names: Iterable[str], column: str) -> None:
    """Names must differ: a second one would replace the first."""
    seen: dict[str, int] = {}
    for line, name in zip(lines, names, strict=True):
        if name in seen:
            raise line.wrong(column, f"{name!r} is already in line {seen[name]}; each needs its own")
        seen[name] = line.number


# Steps per second on a V100 of the job types of Gavel's traces (Narayanan et al., OSDI 2020), rounded: they only
# turn its steps into seconds.
_GAVEL_STEPS_PER_S = {
    "ResNet-18": 25.0, "ResNet-50": 5.0, "Transformer": 8.0, "LM": 25.0, "Recommendation": 5.0, "CycleGAN": 3.0,
    "A3C": 6.0,
}  # fmt: skip


def read_trace(path: Path) -> list[TraceJob]:
    """Jobs in the order of arrival."""
    lines = read_lines(path)
    columns = set(lines[0].fields)
    found = next(((column, reader) for known, column, reader in _READERS if known <= columns), None)
    if found is None:
        raise ConfigError(_unknown(path, columns))
    column, reader = found
    if reader is _own:
        no_slips(path, columns, _OWN_COLUMNS)
    jobs = []
    for line in lines:
        try:
            jobs.append(reader(line))
        except ConfigError as error:
            raise (
                error if str(error).startswith(str(path)) else ConfigError(f"{path}:{line.number}: {error}")
            ) from error
    once(lines, (job.request.job_id for job in jobs), column)
    return sorted(jobs, key=lambda job: job.request.arrival_s)


def _unknown(path: Path, columns: set[str]) -> str:
    """Which form it nearly has, and what is missing."""
    near = max(_READERS, key=lambda one: len(one[0] & columns) / len(one[0]))[0]
    missing = sorted(near - columns)
    if len(missing) < len(near):
        slips = [close[0] for name in missing if (close := nearest(name, sorted(columns - near)))]
        had = f" (did you mean it by {slips[0]}?)" if slips else ""
        return f"{path} is no job trace: the column {' and '.join(missing)} is missing{had}"
    wanted = "; ".join(",".join(sorted(known)) for known, _, _ in _READERS)
    return f"{path} is no job trace: its columns are {','.join(sorted(columns))}; known are {wanted}"


def read_nodes(path: Path) -> list[ClusterNode]:
    """A list of nodes: the columns of Alibaba's `openb`, or `name,gpus` and optionally `device,leaf`."""
    lines = read_lines(path)
    columns = set(lines[0].fields)
    published = {"sn", "gpu", "model", "cpu_milli", "memory_mib"} <= columns
    if not published and not {"name", "gpus"} <= columns:
        raise ConfigError(
            f"{path} is no list of nodes: it needs the columns name,gpus or sn,gpu,model,cpu_milli,memory_mib; "
            f"it has {','.join(sorted(columns))}"
        )
    if not published:
        no_slips(path, columns, ("name", "gpus", "device", "leaf"))
    name, gpus, device = ("sn", "gpu", "model") if published else ("name", "gpus", "device")
    nodes = []
    for line in lines:
        node = ClusterNode(line.text(name), line.whole(gpus), line.text(device, ""))
        if published:
            node = replace(node, cpu_milli=line.whole("cpu_milli"), memory_mib=line.whole("memory_mib"))
        else:
            node = replace(node, leaf=line.text("leaf", ""))
        nodes.append(node)
    once(lines, (node.name for node in nodes), name)
    if not any(node.gpus for node in nodes):
        raise ConfigError(f"{path}: no node has a GPU")
    return nodes


def _job(line: TraceLine, job_id: str, arrival: str, seconds: float, **asked: Any) -> TraceJob:
    """A job that runs so long, which is predicted where nothing else is; `arrival` is a column."""
    arrival_s = line.real(arrival)
    return TraceJob(JobRequest(job_id, arrival_s=arrival_s, **{"predicted_s": seconds, **asked}), seconds)


def _openb(line: TraceLine) -> TraceJob:
    arrival_s, end_s = line.real("creation_time"), line.real("deletion_time")
    if end_s < arrival_s:
        raise line.wrong("deletion_time", f"is before creation_time, {arrival_s:g}")
    return _job(
        line,
        line.text("name"),
        "creation_time",
        max(1.0, end_s - arrival_s),
        gpus_per_task=line.whole("num_gpu"),
        gpu_milli=line.whole("gpu_milli", 0) or WHOLE_GPU,
        cpu_milli=line.whole("cpu_milli", 0),
        memory_mib=line.whole("memory_mib", 0),
        devices=_devices(line.text("gpu_spec", "")),
        tenant=line.text("qos", "default"),
        predicted_s=end_s - arrival_s,
    )


def _devices(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(device.strip() for device in text.split("|") if device.strip()))


def _tiresias(line: TraceLine) -> TraceJob:
    name, gpus = f"job-{line.text('job_id')}", line.whole("num_gpu", least=1)
    return _job(line, name, "submit_time", line.real("duration"), tasks=gpus)


def _gavel(line: TraceLine) -> TraceJob:
    kind = line.text("job_type").split(" ")[0]
    rate = _GAVEL_STEPS_PER_S.get(kind)
    if rate is None:
        raise line.wrong("job_type", f"{kind} is not known; known are {', '.join(_GAVEL_STEPS_PER_S)}")
    tenant, gpus = line.text("vc"), line.whole("scale_factor_gpus", least=1)
    name, seconds = f"{tenant}-{line.text('idx')}", line.real("total_steps") / rate
    return _job(line, name, "arrival_s", seconds, tasks=gpus, tenant=tenant, checkpoint_s=60.0)


_OWN_COLUMNS = (
    "job_id", "arrival_s", "duration_s", "gpus", "tasks", "tenant", "priority", "gpu_milli", "predicted_s",
    "min_tasks", "max_tasks", "checkpoint_s", "compute_s", "all_reduce_gb", "all_to_all_gb", "devices",
)  # fmt: skip


def _own(line: TraceLine) -> TraceJob:
    seconds, step = line.real("duration_s"), None
    if compute_s := line.real("compute_s", 0.0):
        step = StepProfile(
            compute_s, 1e9 * line.real("all_reduce_gb", 0.0), 1e9 * line.real("all_to_all_gb", 0.0)
        )
    return _job(
        line,
        line.text("job_id"),
        "arrival_s",
        seconds,
        tasks=line.whole("tasks", 1, least=1),
        gpus_per_task=line.whole("gpus"),
        gpu_milli=line.whole("gpu_milli", WHOLE_GPU),
        devices=_devices(line.text("devices", "")),
        tenant=line.text("tenant", "default"),
        priority=line.whole("priority", 0, least=None),
        predicted_s=line.real("predicted_s", seconds),
        min_tasks=line.whole("min_tasks", 0) or None,
        max_tasks=line.whole("max_tasks", 0) or None,
        checkpoint_s=line.real("checkpoint_s", 0.0),
        step=step,
    )


# Columns by which a form is known, the one that names a job, and its reader.
_READERS: Sequence[tuple[set[str], str, Callable[[TraceLine], TraceJob]]] = (
    ({"job_id", "arrival_s", "duration_s", "gpus"}, "job_id", _own),
    ({"num_gpu", "gpu_milli", "creation_time", "deletion_time", "name"}, "name", _openb),
    ({"num_gpu", "submit_time", "duration", "job_id"}, "job_id", _tiresias),
    ({"vc", "job_type", "total_steps", "idx", "scale_factor_gpus", "arrival_s"}, "idx", _gavel),
)

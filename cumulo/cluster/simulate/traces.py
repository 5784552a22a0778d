"""Job traces: the published ones and our own form, read into jobs and nodes. `cumulo simulate cluster` reads
them.

A file is known by its columns. Our own form is a CSV with `job_id,arrival_s,duration_s,gpus` and optionally
`tasks, tenant, priority, gpu_milli, predicted_s, min_tasks, max_tasks, checkpoint_s, compute_s, all_reduce_gb`.
"""

import csv
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, StepProfile
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.cluster.simulate.play import TraceJob
from cumulo.errors import ConfigError

Line = Mapping[str, str]
# Steps per second on a V100 of the job types of Gavel's traces (Narayanan et al., OSDI 2020), rounded: they only
# turn its steps into seconds.
_GAVEL_STEPS_PER_S = {
    "ResNet-18": 25.0, "ResNet-50": 5.0, "Transformer": 8.0, "LM": 25.0, "Recommendation": 5.0, "CycleGAN": 3.0,
    "A3C": 6.0,
}  # fmt: skip


def read_trace(path: Path) -> list[TraceJob]:
    """Jobs in the order of arrival."""
    lines = _lines(path)
    columns = set(lines[0])
    for known, reader in _READERS:
        if known <= columns:
            jobs = [reader(line, number) for number, line in enumerate(lines)]
            return sorted((job for job in jobs if job is not None), key=lambda job: job.request.arrival_s)
    wanted = "; ".join(",".join(sorted(known)) for known, _ in _READERS)
    raise ConfigError(
        f"{path} is no job trace: its columns are {','.join(sorted(columns))}; known are {wanted}"
    )


def read_nodes(path: Path) -> list[ClusterNode]:
    """A list of nodes: the columns of Alibaba's `openb`, or `name,gpus` and optionally `device,leaf,domain`."""
    lines = _lines(path)
    if {"sn", "gpu"} <= set(lines[0]):
        return [
            ClusterNode(
                line["sn"], int(line["gpu"]), line["model"], int(line["cpu_milli"]), int(line["memory_mib"])
            )
            for line in lines
        ]
    if {"name", "gpus"} <= set(lines[0]):
        return [
            ClusterNode(
                line["name"], int(line["gpus"]), line.get("device", ""), nvlink_domain=line.get("domain", ""),
                leaf=line.get("leaf", ""),
            )
            for line in lines
        ]  # fmt: skip
    raise ConfigError(
        f"{path} is no list of nodes: it needs the columns name,gpus or sn,gpu,model,cpu_milli,memory_mib"
    )


def uniform_nodes(
    nodes: int, gpus: int = 8, nodes_per_leaf: int = 0, device: str = "", oversubscription: float = 2.0
) -> list[ClusterNode]:
    """Equal nodes, so many to a leaf switch (0: one leaf). Consecutive numbers are under different leaves: a name
    says nothing about where a node hangs, so that packing by name is really blind."""
    leaves = -(-nodes // nodes_per_leaf) if nodes_per_leaf else 1
    return [
        ClusterNode(
            f"node-{number}",
            gpus,
            device,
            leaf=f"leaf-{number % leaves}",
            leaf_oversubscription=oversubscription,
        )
        for number in range(nodes)
    ]


def synthetic_trace(
    jobs: int, gpus: int, load: float = 0.9, seed: int = 0, gpus_per_node: int = 8, steps: bool = False
) -> list[TraceJob]:
    """Jobs as production clusters see them: most ask for one GPU and end within minutes, few ask for hundreds and
    run for days (the shares of Helios, Hu et al., SC 2021). `load`: GPU time asked for over GPU time there is.
    `steps`: jobs of several tasks exchange gradients, and some tokens of experts, in every step."""
    draw = random.Random(f"synthetic {seed}")
    sizes, weights = (1, 2, 4, 8, 16, 32, 64, 128, 256), (58, 12, 8, 14, 4, 2, 1.2, 0.6, 0.2)
    found: list[tuple[int, float, int]] = []
    for _ in range(jobs):
        size = draw.choices(sizes, weights)[0]
        seconds = min(86400.0, draw.lognormvariate(6.8 + 0.2 * size**0.4, 1.5))
        found.append((min(size, max(1, gpus // 4)), max(10.0, seconds), draw.randrange(16)))
    span_s = sum(size * seconds for size, seconds, _ in found) / (gpus * load)
    at_s = 0.0
    trace = []
    for number, (size, seconds, tenant) in enumerate(found):
        at_s += draw.expovariate(jobs / span_s)
        per_task = min(size, gpus_per_node)
        request = JobRequest(
            f"job-{number}", size // per_task, per_task, tenant=f"tenant-{tenant}", arrival_s=at_s,
            predicted_s=seconds * draw.lognormvariate(0, 0.3), checkpoint_s=120.0,
        )  # fmt: skip
        if steps and request.tasks > 1:
            request = replace(request, step=_drawn_step(f"step {seed} {number}"))
        trace.append(TraceJob(request, seconds))
    return trace


def _drawn_step(seed: str) -> StepProfile:
    draw = random.Random(seed)
    return StepProfile(
        draw.uniform(0.2, 1.5),
        1e9 * draw.choice((1, 2, 4, 8, 16)),
        1e9 * draw.choice((0, 0, 0, 1, 4)),
    )


def _lines(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    if not lines:
        raise ConfigError(f"{path} has no lines")
    return lines


def _openb(line: Line, number: int) -> TraceJob:
    gpus = int(line["num_gpu"])
    arrival_s, end_s = float(line["creation_time"]), float(line["deletion_time"])
    request = JobRequest(
        line["name"], 1, gpus, int(line["gpu_milli"]) or WHOLE_GPU, int(line["cpu_milli"]), int(line["memory_mib"]),
        tuple(device for device in line["gpu_spec"].split("|") if device), line["qos"], arrival_s=arrival_s,
        predicted_s=end_s - arrival_s,
    )  # fmt: skip
    return TraceJob(request, max(1.0, end_s - arrival_s))


def _tiresias(line: Line, number: int) -> TraceJob:
    seconds = float(line["duration"])
    request = JobRequest(f"job-{line['job_id']}", int(line["num_gpu"]), 1, arrival_s=float(line["submit_time"]),
                         predicted_s=seconds)  # fmt: skip
    return TraceJob(request, seconds)


def _gavel(line: Line, number: int) -> TraceJob | None:
    kind = line["job_type"].split(" ")[0]
    rate = _GAVEL_STEPS_PER_S.get(kind)
    if rate is None:
        raise ConfigError(f"the trace has a job of type {kind}; known are {', '.join(_GAVEL_STEPS_PER_S)}")
    seconds = float(line["total_steps"]) / rate
    request = JobRequest(
        f"{line['vc']}-{line['idx']}", int(line["scale_factor_gpus"]), 1, tenant=line["vc"],
        arrival_s=float(line["arrival_s"]), predicted_s=seconds, checkpoint_s=60.0,
    )  # fmt: skip
    return TraceJob(request, seconds)


def _own(line: Line, number: int) -> TraceJob:
    def given(name: str, otherwise: str = "0") -> str:
        return (line.get(name) or "").strip() or otherwise

    try:
        seconds = float(line["duration_s"])
        low, high = int(given("min_tasks")), int(given("max_tasks"))
        step = None
        if float(given("compute_s")):
            step = StepProfile(
                float(given("compute_s")),
                1e9 * float(given("all_reduce_gb")),
                1e9 * float(given("all_to_all_gb")),
            )
        request = JobRequest(
            line["job_id"], int(given("tasks", "1")), int(line["gpus"]), int(given("gpu_milli", "1000")),
            tenant=given("tenant", "default"), priority=int(given("priority")), arrival_s=float(line["arrival_s"]),
            predicted_s=float(given("predicted_s", str(seconds))), min_tasks=low or None, max_tasks=high or None,
            checkpoint_s=float(given("checkpoint_s")), step=step,
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"line {number + 2} of the trace: {error}") from error
    return TraceJob(request, seconds)


_READERS: Sequence[tuple[set[str], Callable[[Line, int], TraceJob | None]]] = (
    ({"num_gpu", "gpu_milli", "creation_time"}, _openb),
    ({"num_gpu", "submit_time", "duration"}, _tiresias),
    ({"vc", "job_type", "total_steps"}, _gavel),
    ({"job_id", "arrival_s", "duration_s", "gpus"}, _own),
)


def error_of(job_id: str, sigma: float) -> float:
    """By what factor this job's prediction is wrong: log-normal, always the same for one job."""
    return random.Random(f"error of {job_id}").lognormvariate(0.0, sigma) if sigma else 1.0


def mispredicted(trace: Sequence[TraceJob], sigma: float) -> list[TraceJob]:
    """The same jobs, with predictions that are wrong by random factors."""
    return [
        job if job.request.predicted_s is None
        else replace(job, request=replace(
            job.request, predicted_s=job.request.predicted_s * error_of(job.request.job_id, sigma)))
        for job in trace
    ]  # fmt: skip


def unpredicted(trace: Sequence[TraceJob]) -> list[TraceJob]:
    """The same jobs, with nothing known about how long they take."""
    return [replace(job, request=replace(job.request, predicted_s=None)) for job in trace]

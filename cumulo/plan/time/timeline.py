"""The timeline of a plan's pipeline, with the cost model's seconds for its chunks; `cumulo plan train` draws it."""

from cumulo.errors import ConfigError
from cumulo.pipeline.decide.catalog import build
from cumulo.pipeline.decide.costs import Costs, Link
from cumulo.pipeline.simulate.timeline import Timeline, simulate
from cumulo.plan.job import TrainJob
from cumulo.plan.memory.live import enough_micro_batches
from cumulo.plan.time.compute_profile import shipped
from cumulo.plan.time.step import message_s, step_time
from cumulo.spec.cluster import Cluster


def timeline(job: TrainJob, cluster: Cluster) -> Timeline:
    """Of one data-parallel rank; a long step is shown until its pattern repeats."""
    layout = job.layout
    if layout.pp == 1:
        raise ConfigError(
            "this plan has one pipeline stage, so there is no pipeline to draw; omit --timeline"
        )
    profile, _ = shipped().find(cluster.device, job.dtype, job.software)
    time = step_time(job, cluster, profile, play=False)
    latency_s, transfer_s = message_s(job, cluster)
    message_bytes = job.stream_bytes / layout.tp
    link = Link(latency_s, message_bytes / max(transfer_s, 1e-12))
    shown = enough_micro_batches(layout.schedule, layout.pp, job.micro_batches)
    schedule = build(layout.schedule, layout.pp, shown, job.chunks_per_stage)
    return simulate(schedule, Costs(time.chunks.costs, link=link, message_bytes=message_bytes))

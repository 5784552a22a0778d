"""What a run waits for between its steps: data to be read, checkpoints to be saved. `cumulo plan train` shows it.

Symbols: b bytes of a token on disk, R the rate of a node's reading and writing, D bytes of a checkpoint, N devices,
H the rate between a device and its host, M the job's mean time to failure, τ training between two checkpoints.

    data          max(0, b · tokens that the ranks of a node read in a step / R − step)
    checkpoints   C / τ of the time, with C = D / (R · nodes) if training stops until all is written, and
                  C = D / (N H) if it stops only for the copy to host memory, which is written behind it
    τ             Daly (2006), equation 37, for M; no shorter than a step, nor than ten times what is written behind
"""

import math
from dataclasses import dataclass, replace

from cumulo.base.quantities import quantity
from cumulo.errors import ConfigError
from cumulo.layout.layout import Layout
from cumulo.plan.cluster.failures import Recovery, best_interval_s
from cumulo.plan.cluster.goal import Assumptions
from cumulo.plan.job import TrainJob
from cumulo.plan.memory.states import stage_elements, state_bytes
from cumulo.spec.cluster import Cluster

# Share of the time in which storage is written behind training: data are read from it, too.
MOST_WRITING = 0.1


@dataclass(frozen=True, slots=True)
class Storage:
    """Where data come from and checkpoints go, and how they go there."""

    # What a node reads and writes; the Llama 3 cluster sustained 2 TB/s for 2,048 nodes (Grattafiori et al. 2024).
    node_bytes_per_s: float = 1e9
    asynchronous: bool = True  # training goes on while a checkpoint is written
    interval_s: float | None = None  # between two checkpoints; None: the best for the rate of failures

    def __post_init__(self) -> None:
        for name, value, unit, instead in (
            ("--storage-gb-s", self.node_bytes_per_s, 1e9, "1 is usual"),
            ("--checkpoint-minutes", self.interval_s, 60, "leave it out for the best"),
        ):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be more than 0 and finite, got {value / unit:g}; {instead}")


@dataclass(frozen=True, slots=True)
class Stalls:
    """Of an average step."""

    data_s: float  # waited for data
    checkpoint_s: float  # waited for checkpoints, over the steps between two of them
    read_bytes_per_s: float  # that a node must read to keep up
    checkpoint_bytes: int  # of one, all ranks together
    interval_s: float  # between two
    stop_s: float  # that one stops training
    write_s: float  # that it takes to be written

    @property
    def step_s(self) -> float:
        return self.data_s + self.checkpoint_s

    def rows(self) -> tuple[tuple[str, float], ...]:
        return (("data loading", self.data_s), ("checkpoints", self.checkpoint_s))


def stalls_of(job: TrainJob, cluster: Cluster, step_s: float, storage: Storage) -> Stalls:
    layout = job.layout
    token_bytes = 2 if job.model.vocab_size <= 65536 else 4
    # Every rank reads the sequences of its data-parallel place, whether or not another one reads the same.
    read = min(cluster.node.gpus, layout.world) * job.tokens_per_step / layout.dp * token_bytes
    saved = checkpoint_bytes(job)
    write_s = saved / (storage.node_bytes_per_s * cluster.nodes)
    stop_s = saved / layout.world / cluster.device.host_bytes_per_s if storage.asynchronous else write_s
    interval_s = storage.interval_s or _best_interval_s(cluster, step_s, stop_s, write_s, storage)
    away_s = write_s if storage.asynchronous else 0.0
    least_minutes = math.ceil(max(step_s, away_s) / 6) / 10
    if interval_s < away_s:
        raise ConfigError(
            f"a checkpoint of {quantity(saved / 1e9, 'GB')} takes {quantity(write_s, 's')} to be written, and the "
            f"next is due after {quantity(interval_s, 's')}; raise --checkpoint-minutes to {least_minutes:g} or "
            "--storage-gb-s"
        )
    if interval_s < step_s:
        raise ConfigError(
            f"a checkpoint is saved between two steps, and a step takes {quantity(step_s, 's')}, longer than the "
            f"{quantity(interval_s, 's')} between two checkpoints; raise --checkpoint-minutes to {least_minutes:g}"
        )
    return Stalls(
        data_s=max(0.0, read / storage.node_bytes_per_s - step_s),
        checkpoint_s=stop_s * step_s / interval_s,
        read_bytes_per_s=read / step_s,
        checkpoint_bytes=saved,
        interval_s=interval_s,
        stop_s=stop_s,
        write_s=write_s,
    )


def checkpoint_bytes(job: TrainJob) -> int:
    """Weights, their float32 copy and moments in full width, each once: what `cumulo train` writes."""
    whole = replace(job, layout=Layout(), offload_optimizer=False)
    if job.optimizer == "adamw8bit":  # widened, so that blocks may begin elsewhere when it is read again
        whole = replace(whole, optimizer="adamw")
    states = state_bytes(whole, stage_elements(whole, ((0, 0),)))
    return states.weights + states.optimizer


def _best_interval_s(
    cluster: Cluster, step_s: float, stop_s: float, write_s: float, storage: Storage
) -> float:
    per_node_day = Assumptions().failures.value / 1000 * cluster.node.gpus / 8
    away_s = write_s if storage.asynchronous else 0.0
    recovery = Recovery(
        86400 / (cluster.nodes * per_node_day),
        stop_s,
        0.0,
        least_interval_s=max(step_s, away_s / MOST_WRITING),
        delay_s=away_s,
    )
    return best_interval_s(recovery)

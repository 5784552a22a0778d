"""The run's ledger: memory and step time as the planner predicts them before the first step, and as they turn out.
Pure; the trainer fills it, the command shows it, and `ledger.json` keeps it."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from cumulo.errors import ConfigError, OutOfMemory
from cumulo.plan.job import TrainJob
from cumulo.plan.memory import peak_memory, stage_memory
from cumulo.plan.memory_ledger import MemoryLedger
from cumulo.plan.train_time import estimate
from cumulo.spec.catalog import cluster, shipped
from cumulo.spec.model import ModelSpec
from cumulo.train.config import TrainConfig


@dataclass(frozen=True, slots=True)
class Entry:
    """One figure of rank 0's, or of the whole step."""

    name: str
    unit: str
    predicted: float
    measured: float | None
    basis: str  # what the prediction rests on


@dataclass(frozen=True, slots=True)
class Prediction:
    memory: MemoryLedger  # of the stage that needs most
    first: MemoryLedger  # of rank 0's stage
    step_s: float
    step_basis: str
    sent_bytes: tuple[
        tuple[str, float], ...
    ]  # by one rank in a step, by axis; empty: not known for this device


def predict(
    config: TrainConfig, spec: ModelSpec, device_name: str | None, step_flops: float, peak_flops: float
) -> Prediction | None:
    """`device_name`: of the GPU; None: a CPU. `peak_flops`: of all ranks. None: the planner knows no such job."""
    if config.dtype == "float64":
        return None
    try:
        job = TrainJob(
            spec, config.layout, config.batch_sequences, config.data.sequence_length, config.micro_batch,
            recompute="full" if config.recompute else "none", dtype=config.dtype,
            gradient_dtype="float32" if config.dtype == "float32" or config.master_weights else config.dtype,
            optimizer="muon" if config.optimizer.kind == "muon" else "adamw", master_weights=config.master_weights,
        )  # fmt: skip
    except ConfigError:
        return None
    memory, first = peak_memory(job), stage_memory(job, 0)
    if (known := _catalogued(device_name)) is None:
        basis = "all FLOPs at the rate of a matrix product timed here: the least it can take"
        return Prediction(memory, first, step_flops / peak_flops, basis, ())
    found = estimate(job, cluster(config.layout.world, device=known), explain=False)
    basis = f"cost model of {known}, {found.interval.low:.3g} to {found.interval.high:.3g} s"
    return Prediction(memory, first, found.step_s, basis, found.link_bytes)


def refuse_if_too_large(
    memory: MemoryLedger, available_bytes: int, on_gpu: bool, config: TrainConfig
) -> None:
    """Before anything is allocated."""
    needed = memory.total if on_gpu else memory.peak - memory.temporary
    if needed <= available_bytes:
        return
    largest = max(memory.rows()[:4], key=lambda row: row[1])
    advice = "layout.zero 1 to 3 or more tp or pp"
    if largest[0] == "activations":
        advice = (
            "a smaller micro_batch" + ("" if config.recompute else ", recompute: true") + ", or layout.cp"
        )
    raise OutOfMemory(
        f"a rank needs {needed / 2**30:.1f} GiB and {available_bytes / 2**30:.1f} GiB are free: {_words(memory)}; "
        f"try {advice}"
    )


def entries(
    prediction: Prediction,
    step_s: float,
    weights_bytes: int | None,
    optimizer_bytes: int | None,
    peak_bytes: int,
    on_gpu: bool,
) -> list[Entry]:
    memory = prediction.first
    exact, counted = "counted from the spec and the layout", "counted tensor by tensor"
    found = [
        Entry("step", "s", prediction.step_s, step_s, prediction.step_basis),
        Entry("weights", "bytes", memory.weights, weights_bytes, exact),
        Entry("gradients", "bytes", memory.gradients, None, exact),
        Entry("optimizer", "bytes", memory.optimizer, optimizer_bytes, exact),
        Entry("activations", "bytes", memory.activations, None, counted),
        Entry("logits", "bytes", memory.logits, None, counted),
    ]
    if on_gpu:
        found.append(Entry("peak memory", "bytes", memory.peak, peak_bytes, counted))
    return [
        *found,
        *(
            Entry(f"sent over {axis}", "bytes", size, None, "collectives' own volumes")
            for axis, size in prediction.sent_bytes
        ),
    ]


def write_ledger(path: Path, found: Iterable[Entry]) -> None:
    path.write_text(json.dumps([asdict(entry) for entry in found], indent=1) + "\n", "utf-8")


def _catalogued(device_name: str | None) -> str | None:
    """The catalogue's name of a GPU that torch calls `NVIDIA H200`."""
    if device_name is None:
        return None
    words = device_name.lower().replace("-", " ").split()
    return next((name for name in shipped().tables["devices"] if name.split("-")[0] in words), None)


def _words(memory: MemoryLedger) -> str:
    return ", ".join(
        f"{name} {size / 2**30:.2g}" for name, size in memory.rows() if size >= 0.01 * memory.total
    )

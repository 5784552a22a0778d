"""Published training results as jobs that can be predicted: `cumulo plan validate`, evidence and the fit read them.

The table `data/published_training.csv` is our transcription of printed figures; `published_training_sources.yaml`
says where each was printed and what was not printed there and is assumed.
"""

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from cumulo.base.files import read_text_file
from cumulo.base.strict import package_csv, package_yaml
from cumulo.errors import ConfigError
from cumulo.layout.layout import Layout
from cumulo.plan.job import TrainJob
from cumulo.plan.time.compute import megatron_flops, model_flops
from cumulo.plan.time.efficiency import shipped_efficiency
from cumulo.spec.catalog import Catalog
from cumulo.spec.cluster import Cluster
from cumulo.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class PublishedRow:
    name: str
    source: str
    job: TrainJob
    cluster: Cluster
    step_s: float  # as published, or from what was published


@cache
def rows() -> tuple[PublishedRow, ...]:
    """What ships with the package."""
    return _rows_in("published_training.csv")


@cache
def held_out_rows() -> tuple[PublishedRow, ...]:
    """Rows that no constant was ever fitted to, and that vouch for no interval."""
    return _rows_in("published_training_held_out.csv")


def _rows_in(name: str) -> tuple[PublishedRow, ...]:
    return rows_of(package_csv("cumulo.plan", f"data/{name}"))


def rows_of(lines: Iterable[Mapping[str, str]]) -> tuple[PublishedRow, ...]:
    """Lines in the columns of `published_training.csv`."""
    return tuple(_row(line, machines()) for line in lines)


def read_rows(path: Path, refused: list[str]) -> list[PublishedRow]:
    """Rows of a CSV file, or of a folder of them, in the columns of `published_training.csv`; an empty column has
    its usual value. `refused` takes why lines cannot be predicted."""
    found: list[PublishedRow] = []
    for file in sorted(path.glob("*.csv")) if path.is_dir() else [path]:
        try:
            lines = list(csv.DictReader(read_text_file(file).splitlines()))
        except csv.Error as error:
            raise ConfigError(f"cannot read {file}: {error}") from error
        for number, line in enumerate(lines, start=2):
            try:
                found += rows_of([_USUAL | {name: text for name, text in line.items() if name and text}])
            except KeyError as error:
                refused.append(f"{file.name}, line {number}: {error} is missing, or is not known here")
            except (ConfigError, ValueError) as error:
                refused.append(f"{file.name}, line {number}: {error}")
    return found


_MOST_LAYERS = 10_000
_USUAL = {
    "model": "", "dp": "1", "tp": "1", "pp": "1", "cp": "1", "ep": "1", "zero": "0", "sequence_parallel": "0",
    "schedule": "1f1b", "micro_batch": "1", "recompute": "none", "dtype": "bfloat16", "gradient_dtype": "float32",
    "flash": "1", "overlap_tensor": "0", "gated": "1", "tied": "0", "learned_positions": "0",
}  # fmt: skip


@cache
def machines() -> Catalog:
    return Catalog.load(Path(str(resources.files("cumulo.plan") / "data/published_training_machines.yaml")))


def citations() -> Mapping[str, str]:
    """Where each source was published."""
    return {name: str(entry["citation"]) for name, entry in _sources().items()}


def dates() -> Mapping[str, str]:
    """Year and month in which sources were published, where their citations say it."""
    return {name: str(entry["published"]) for name, entry in _sources().items() if "published" in entry}


def _sources() -> Any:
    return package_yaml("cumulo.plan", "data/published_training_sources.yaml")


def _row(line: Mapping[str, str], catalog: Catalog) -> PublishedRow:
    number = {name: int(text) for name, text in line.items() if text and text.lstrip("-").isdigit()}
    model = catalog.model(line["model"]) if line["model"] else _shaped(number)
    traits = shipped_efficiency().software[line["software"]]
    job = TrainJob(
        model,
        Layout(
            **{axis: number[axis] for axis in ("dp", "tp", "pp", "cp", "ep", "zero")},  # type: ignore[arg-type]
            shard=number.get("shard"),
            sequence_parallel=bool(number["sequence_parallel"]),
            schedule=line["schedule"],
            chunks_per_stage=number.get("chunks_per_stage"),
        ),
        global_batch=number["global_batch"],
        sequence_length=number["sequence"],
        micro_batch=number["micro_batch"],
        recompute=line["recompute"],  # type: ignore[arg-type]
        dtype=line["dtype"],  # type: ignore[arg-type]
        gradient_dtype=line["gradient_dtype"],  # type: ignore[arg-type]
        flash_attention=bool(number["flash"]),
        overlap_tensor=bool(number["overlap_tensor"]),
        expert_exchange=line.get("expert_exchange") or "all-to-all",  # type: ignore[arg-type]
        overlap_expert=bool(number.get("overlap_expert", 0)),
        predict_ahead=number.get("predict_ahead", 0),
        overlap_data=traits.overlaps_data,
        whole_experts=traits.whole_experts and model.moe is not None and number["tp"] > 1,
        software=line["software"],
    )
    cluster = _cluster(number["gpus"], line["node"], line.get("fabric") or "")
    return PublishedRow(line["id"], line["source"], job, cluster, _step_s(line, job, cluster))


@cache
def _cluster(gpus: int, node: str, fabric: str) -> Cluster:
    """Rows of a table are of few machines."""
    return machines().cluster(gpus, node=node, **({"fabric": fabric} if fabric else {}))


def _shaped(number: Mapping[str, int]) -> ModelSpec:
    """A model that its table gives by its sizes."""
    if not 1 <= number["layers"] <= _MOST_LAYERS:
        raise ValueError(f"layers must be 1 to {_MOST_LAYERS:,}, not {number['layers']:,}")
    return ModelSpec(
        family="published",
        vocab_size=number["vocabulary"],
        hidden=number["hidden"],
        layers=number["layers"],
        heads=number["heads"],
        kv_heads=number.get("kv_heads", number["heads"]),
        head_dim=number["hidden"] // number["heads"],
        ffn_hidden=number["ffn"],
        max_context=number["sequence"],
        tied_embeddings=bool(number["tied"]),
        gated_ffn=bool(number["gated"]),
        learned_positions=bool(number["learned_positions"]),
    )


def _step_s(line: Mapping[str, str], job: TrainJob, cluster: Cluster) -> float:
    """Seconds of a step from what was printed, by the convention of whoever printed it."""
    reported, unit = float(line["reported"]), line["unit"]
    model, sequence, tokens = job.model, job.sequence_length, job.tokens_per_step
    if unit == "step-seconds":
        return reported
    if unit == "tokens-per-second-per-gpu":
        return tokens / (reported * cluster.gpus)
    if unit == "mfu-percent-full-attention":
        flops = model_flops(model, sequence, causal=False) * tokens
        return flops / (reported / 100 * cluster.device.flops("bfloat16") * cluster.gpus)
    full = unit == "tflops-hardware-full-recompute"
    return megatron_flops(model, tokens, sequence, full) / (reported * 1e12 * cluster.gpus)


# Which software a job was probably run with, where nobody names it: from how published jobs were described.
#
#     likely(clues(job, cluster))      # (("nemo-2025", 0.7), ("megatron-core-2024", 0.2), ...)
#
# A device, a number format, a model's shape and a layout each go with some generations of software and not with
# others. Naive Bayes over the descriptions of the published rows, all software equally likely beforehand, one
# pseudo-count for each clue; step times have no say. What a software cannot do it was not used for; where the job's
# date is known, a version of a framework that was released later was not used if there was an earlier one; and
# nobody is taken to scale 8-bit numbers row by row who does not say so.
PSEUDO_COUNT = 1.0
LEAST = 0.02  # less likely software is left out
# A job that needs more than this share of the device's memory under a software was hardly run with it.
MOST_MEMORY, TOO_LARGE = 1.15, 0.05
LONG_SEQUENCE, LARGE_VOCABULARY = 8192, 100_000

Clues = tuple[tuple[str, str], ...]


def clues(job: TrainJob, cluster: Cluster, zero_known: bool = True) -> Clues:
    """What somebody who describes a job says of it."""
    layout, model = job.layout, job.model
    found = {
        "device": cluster.device.generation,
        "number format": job.dtype,
        "split": f"tp {layout.tp > 1}, pp {layout.pp > 1}",
        "recompute": job.recompute if job.recompute in ("none", "full", "selective") else "operations",
        "kind": "experts" if model.moe is not None else "gated" if model.gated_ffn else "plain",
        "sequence": "long" if job.sequence_length >= LONG_SEQUENCE else "short",
        "vocabulary": "large" if model.vocab_size >= LARGE_VOCABULARY else "small",
        "positions": "learned" if model.learned_positions else "rotary",
        "grouped heads": str(model.kv_heads < model.heads),
    }
    if zero_known and layout.data_ranks > 1:
        found["zero"] = str(layout.zero)
    if layout.pp > 1:
        found["schedule"] = "several chunks" if layout.chunks_per_stage else layout.schedule
    return tuple(found.items())


def likely(found: Clues, without: str = "", date: str | None = None) -> tuple[tuple[str, float], ...]:
    """Software and its probability, most likely first. `without`: a source whose descriptions are not known;
    `date`: year and month in which the job ran, or the year."""
    seen = _sightings(without)
    existed = [name for name in seen.rows if date is None or not _not_yet_released(name, date)]
    able = [name for name in existed if _able(name, found)] or existed
    logs = {name: seen.log_likelihood(name, found) for name in able}
    most = max(logs.values())
    weights = {name: math.exp(log - most) for name, log in logs.items()}
    total = sum(weights.values())
    return tuple(
        sorted(((name, weight / total) for name, weight in weights.items()), key=lambda one: -one[1])
    )


def _able(software: str, found: Clues) -> bool:
    traits, described = shipped_efficiency().software[software], dict(found)
    needed = {
        "tensor": "tp True" in described["split"],
        "pipeline": "pp True" in described["split"],
        "experts": described["kind"] == "experts",
    }
    return not traits.row_scaled and all(what in traits.runs for what, asked in needed.items() if asked)


def _not_yet_released(software: str, date: str) -> bool:
    """Whether its framework had an earlier version then, and not yet this one. Before its first version any of them
    stands for what others ran."""
    by_then = date if len(date) > 4 else f"{date}-12"
    known = shipped_efficiency().software
    mine = known[software]
    return mine.released > by_then and any(
        other.framework == mine.framework and "" < other.released <= by_then for other in known.values()
    )


@dataclass(frozen=True)
class _Sightings:
    rows: Mapping[str, int]  # by software
    values: Mapping[str, Counter[str]]  # that a clue has, by clue
    counts: Mapping[tuple[str, str], Counter[str]]  # by software and clue

    def log_likelihood(self, software: str, found: Clues) -> float:
        total = 0.0
        for clue, value in found:
            seen, kinds = self.counts[software, clue], len({*self.values[clue], value})
            total += math.log((seen[value] + PSEUDO_COUNT / kinds) / (seen.total() + PSEUDO_COUNT))
        return total


@cache
def _sightings(without: str) -> _Sightings:
    count: Counter[str] = Counter()
    values: defaultdict[str, Counter[str]] = defaultdict(Counter)
    counts: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row in rows():
        described = clues(row.job, row.cluster)
        for clue, value in described:
            values[clue][value] += 1
        if row.source == without:
            continue
        count[row.job.software] += 1
        for clue, value in described:
            counts[row.job.software, clue][value] += 1
    return _Sightings(count, values, counts)

"""Which software a job was probably run with, where nobody names it: from how published jobs were described.

    likely(clues(job, cluster))      # (("nemo-2025", 0.7), ("megatron-core-2024", 0.2), ...)

A device, a number format, a model's shape and a layout each go with some generations of software and not with
others. Naive Bayes over the descriptions of the published rows, all software equally likely beforehand, one
pseudo-count for each clue; step times have no say. What a software cannot do it was not used for; where the job's
date is known, a version of a framework that was released later was not used if there was an earlier one; and nobody
is taken to scale 8-bit numbers row by row who does not say so.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from cumulo.plan.evidence.published import rows
from cumulo.plan.job import TrainJob
from cumulo.plan.time.efficiency import shipped_efficiency
from cumulo.spec.cluster import Cluster

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

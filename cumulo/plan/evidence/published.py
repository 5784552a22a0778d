"""Published training results as jobs that can be predicted: `cumulo plan validate`, evidence and the fit read them.

The table `data/published_training.csv` is our transcription of printed figures; `published_training_sources.yaml`
says where each was printed and what was not printed there and is assumed.
"""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

import yaml

from cumulo.layout.layout import Layout
from cumulo.plan.job import TrainJob
from cumulo.plan.time.efficiency import shipped_efficiency
from cumulo.plan.time.flops import megatron_flops, model_flops
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
    with (_data() / name).open(encoding="utf-8", newline="") as file:
        return rows_of(csv.DictReader(file))


def rows_of(lines: Iterable[Mapping[str, str]]) -> tuple[PublishedRow, ...]:
    """Lines in the columns of `published_training.csv`."""
    return tuple(_row(line, machines()) for line in lines)


@cache
def machines() -> Catalog:
    return Catalog.load(_data() / "published_training_machines.yaml")


@cache
def citations() -> Mapping[str, str]:
    """Where each source was published."""
    text = (_data() / "published_training_sources.yaml").read_text("utf-8")
    return {name: str(entry["citation"]) for name, entry in yaml.safe_load(text).items()}


@cache
def dates() -> Mapping[str, str]:
    """Year and month in which sources were published, where their citations say it."""
    text = (_data() / "published_training_sources.yaml").read_text("utf-8")
    entries = yaml.safe_load(text).items()
    return {name: str(entry["published"]) for name, entry in entries if "published" in entry}


def _data() -> Path:
    return Path(str(resources.files("cumulo.plan") / "data"))


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

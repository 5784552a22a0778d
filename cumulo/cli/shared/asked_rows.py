"""Published rows asked for as a user asks: in words of `cumulo plan train`, read by its own options.

Only what somebody knows who wants to train is in the words: model, GPUs, layout, batch, sequence, number format,
the software by its name, or else the date. What else the transcription says of a row, the planner has to know by
itself.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from cumulo.cli.plan_train import parsed
from cumulo.plan.evidence.published import PublishedRow, machines
from cumulo.plan.job import TrainJob
from cumulo.plan.search.fixed import fitted, fixed_job, said_in
from cumulo.plan.search.space import TrainGoal
from cumulo.plan.search.unnamed import likely_jobs
from cumulo.spec.model_file import plain


class AskedRows:
    """Rows as a user's questions. Models and machines that are in no catalogue go into a file of the user's own."""

    def __init__(
        self, rows: list[PublishedRow], folder: Path, named: bool, dates: Mapping[str, str] | None = None
    ) -> None:
        self.named = named  # whether the user names the software
        self.dates = (
            dates or {}
        )  # when each source's jobs ran, which the user says where the software is not named
        self.file = folder / "published.yaml"
        tables = {kind: dict(entries) for kind, entries in machines().tables.items()}
        tables["models"] |= {row.name: plain(row.job.model) for row in rows}
        self.file.write_text(yaml.safe_dump(tables), "utf-8")

    def words(self, row: PublishedRow) -> list[str]:
        job, fabric = row.job, row.cluster.fabric.name
        words = [
            row.name, "--catalog", str(self.file), "--gpus", str(row.cluster.gpus), "--node", row.cluster.node.name,
            "--batch", str(job.global_batch), "--sequence", str(job.sequence_length), "--dtype", job.dtype,
            "--fixed", _layout(row),
        ]  # fmt: skip
        if fabric != "rail-infiniband":
            words += ["--fabric", fabric]
        if job.predict_ahead:
            words += ["--mtp", str(job.predict_ahead)]
        if self.named:
            words += ["--software", job.software]
        elif row.source in self.dates:
            words += ["--date", self.dates[row.source]]
        return words

    def asked(self, row: PublishedRow) -> PublishedRow:
        """The row with the job that the words describe."""
        goal, fixed = parsed(self.words(row))
        assert fixed is not None
        job = fitted(fixed_job(fixed, goal), goal.memory_limit_bytes, said_in(fixed)).job
        return replace(row, job=replace(job, software=_software(goal)), cluster=goal.cluster)

    def likely(self, row: PublishedRow, left_out: bool) -> list[tuple[float, TrainJob]]:
        """The jobs that the words may mean where they name no software, with their probabilities; `left_out`: as if
        nobody had described jobs of the row's source."""
        goal, fixed = parsed(self.words(row))
        assert fixed is not None
        jobs = likely_jobs(fixed, goal, row.source if left_out else "")
        return [(one.probability, one.job) for one in jobs]


def _layout(row: PublishedRow) -> str:
    """What tables print of a layout; whether tokens are shared between products they do not."""
    job, layout = row.job, row.job.layout
    sizes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": job.expert_ranks}
    parts = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
    if layout.shard:
        parts.append(f"shard={layout.shard}")
    if layout.schedule not in ("1f1b", "interleaved-1f1b"):
        parts.append(f"schedule={layout.schedule}")
    if layout.chunks_per_stage:
        parts.append(f"chunks={layout.chunks_per_stage}")
    if layout.data_ranks > 1:
        parts.append(f"zero={layout.zero}")
    if job.recompute != "none":
        parts.append(f"recompute={job.recompute}")
    return ",".join([*parts, f"micro_batch={job.micro_batch}"])


def _software(goal: TrainGoal) -> str:
    traits = goal.known_software
    return goal.software if traits is None else traits.name

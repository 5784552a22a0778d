"""Memory that a given layout can save where it does not fit as it stands: what a description leaves unsaid, chosen
so that it costs least. `cumulo plan train --fixed` and `cumulo plan validate` ask.

Published tables name ranks and batches, and seldom what their recipes recompute, or in which numbers they keep
moments. A layout that is known to have run was made to fit by such settings, so the planner chooses them, too, and
says which.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from cumulo.plan.job import TrainJob
from cumulo.plan.memory.peak import peak_memory


@dataclass(frozen=True, slots=True)
class Fitted:
    """The job as it fits, or as it was where nothing makes it fit."""

    job: TrainJob
    saved_by: tuple[str, ...] = ()  # settings that were chosen, in words
    needed_bytes: int = 0  # by the job as it was given, where something was chosen


def fitted(job: TrainJob, limit_bytes: int, said: Collection[str] = ()) -> Fitted:
    """`said`: settings that are not to be changed, by their names in `--fixed`."""
    needed = peak_memory(job).total
    if needed <= limit_bytes:
        return Fitted(job)
    for other, words in _ladder(job, said):
        if peak_memory(other).total <= limit_bytes:
            return Fitted(other, words, needed)
    return Fitted(job)


def _ladder(job: TrainJob, said: Collection[str]) -> Iterator[tuple[TrainJob, tuple[str, ...]]]:
    """From what costs little time to what costs much; each step keeps the ones before it."""
    words: tuple[str, ...] = ()
    recompute_free = "recompute" not in said and job.recompute == "none"
    if recompute_free:
        for operations in ("norm+activation", "norm+activation+attention"):
            job, words = replace(job, recompute=operations), (f"{operations} recomputed",)
            yield job, words
    if job.moment_dtype == "float32" and job.optimizer == "adamw" and job.lora_rank is None:
        job, words = replace(job, moment_dtype="bfloat16"), (*words, "optimizer moments in bfloat16")
        yield job, words
    if job.dtype == "float8" and not job.narrow_activations:
        job, words = replace(job, narrow_activations=True), (*words, "activations kept in 8 bits")
        yield job, words
    if recompute_free:
        kept = words[1:]
        most = max(map(sum, job.chunk_kinds))
        for layers in range(1, most):
            part = f"{layers} of each chunk's {most} layers recomputed"
            yield replace(job, recompute="full", recompute_layers=layers), (part, *kept)
        job, words = replace(job, recompute="full", narrow_activations=False), ("full recomputation", *kept)
        yield job, words
    if job.gradient_dtype == "float32" and job.dtype != "float32":
        narrow = "float16" if job.dtype == "float16" else "bfloat16"
        job, words = replace(job, gradient_dtype=narrow), (*words, f"gradients in {narrow}")  # type: ignore[arg-type]
        yield job, words
    if not job.offload_activations:
        yield replace(job, offload_activations=True), (*words, "activations in host memory")

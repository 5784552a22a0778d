"""Training jobs for tests of the memory ledger."""

from cumulo.layout.layout import Layout
from cumulo.plan.job import TrainJob
from cumulo.spec.catalog import model


def job_with(name: str = "gpt3-125m", **layout: object) -> TrainJob:
    split = Layout(**layout)  # type: ignore[arg-type]
    return TrainJob(model(name), split, global_batch=64 * split.dp, sequence_length=2048)

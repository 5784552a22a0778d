"""What a run waits for between steps: the worked example of docs/plan-time.md, and what changes with a job."""

from dataclasses import replace

import pytest

from cumulo.errors import ConfigError
from cumulo.layout.layout import Layout
from cumulo.plan.cluster.checkpoints import Recovery, best_interval_s
from cumulo.plan.job import TrainJob
from cumulo.plan.search.run_cost import Stalls, Storage, checkpoint_bytes, stalls_of
from cumulo.spec.catalog import cluster, model
from cumulo.spec.counting import parameter_count

JOB = TrainJob(
    model("llama-3.1-405b"), Layout(dp=128, tp=8, pp=16, zero=1), global_batch=2048, sequence_length=8192
)
GPUS = cluster(16384, "h100-sxm")
STEP_S = 6.5


def _stalls(job: TrainJob = JOB, step_s: float = STEP_S, **storage: object) -> Stalls:
    return stalls_of(job, GPUS, step_s, Storage(**storage))  # type: ignore[arg-type]


def test_the_worked_example_of_the_documentation() -> None:
    found = _stalls()
    # 16 sequences of 8,192 tokens of 4 bytes, for each of the 8 ranks of a node.
    assert found.read_bytes_per_s == pytest.approx(8 * 16 * 8192 * 4 / 6.5)
    assert found.read_bytes_per_s / 1e6 == pytest.approx(0.645, abs=0.001)
    assert found.data_s == 0
    assert found.checkpoint_bytes == 14 * parameter_count(JOB.model)
    assert found.checkpoint_bytes / 1e12 == pytest.approx(5.68, abs=0.01)
    assert found.stop_s == pytest.approx(found.checkpoint_bytes / 16384 / 64e9)
    assert found.stop_s * 1e3 == pytest.approx(5.42, abs=0.01)
    assert found.write_s == pytest.approx(2.77, abs=0.01)
    assert found.interval_s == pytest.approx(27.7, abs=0.1)
    assert found.checkpoint_s / STEP_S == pytest.approx(0.000195, abs=0.000001)
    stopped = _stalls(asynchronous=False)
    assert stopped.stop_s == found.write_s
    assert stopped.interval_s == pytest.approx(246, abs=1)
    assert stopped.checkpoint_s / STEP_S == pytest.approx(0.0113, abs=0.0001)


def test_the_interval_is_the_cluster_planners() -> None:
    mttf_s = 86400 / (2048 * 0.00379)
    stopped = _stalls(asynchronous=False)
    assert stopped.interval_s == best_interval_s(Recovery(mttf_s, stopped.write_s, 0.0))


def test_a_disk_that_is_slower_than_the_step_is_waited_for() -> None:
    needed = _stalls().read_bytes_per_s
    assert _stalls(node_bytes_per_s=needed, interval_s=1e5, asynchronous=False).data_s == pytest.approx(0)
    half = _stalls(node_bytes_per_s=needed / 2, interval_s=1e7, asynchronous=False)
    assert half.data_s == pytest.approx(STEP_S)
    wide = replace(JOB, model=replace(JOB.model, vocab_size=65536))
    assert _stalls(wide).read_bytes_per_s == pytest.approx(needed / 2)


def test_checkpoints_half_as_often_cost_half_as_much() -> None:
    often, seldom = (_stalls(interval_s=60.0 * minutes) for minutes in (5, 10))
    assert often.checkpoint_s == pytest.approx(2 * seldom.checkpoint_s)


def test_a_checkpoint_that_is_not_away_before_the_next_is_refused_with_what_to_change() -> None:
    with pytest.raises(ConfigError, match=r"takes 4\.62 min to be written.*--checkpoint-minutes to 4\.7 "):
        _stalls(interval_s=60.0, node_bytes_per_s=1e7)
    assert _stalls(interval_s=60 * 4.7, node_bytes_per_s=1e7).interval_s == 282
    with pytest.raises(
        ConfigError, match="--storage-gb-s must be more than 0 and finite, got -2; 1 is usual"
    ):
        Storage(node_bytes_per_s=-2e9)
    with pytest.raises(
        ConfigError, match=r"--checkpoint-minutes must be .* got 0; leave it out for the best"
    ):
        Storage(interval_s=0.0)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_checkpoints_more_often_than_steps_are_refused_with_the_least_that_is_not(asynchronous: bool) -> None:
    with pytest.raises(ConfigError, match=r"a step takes 65 s.*the 60 s .*--checkpoint-minutes to 1\.1$"):
        _stalls(step_s=65.0, interval_s=60.0, asynchronous=asynchronous)
    found = _stalls(step_s=65.0, interval_s=66.0, asynchronous=asynchronous)
    assert found.checkpoint_s <= found.stop_s  # of a step: no more than one


@pytest.mark.parametrize(("kind", "bytes_each"), [("adamw", 14), ("adamw8bit", 14)])
def test_moments_are_saved_in_full_width(kind: str, bytes_each: int) -> None:
    job = replace(JOB, optimizer=kind, offload_optimizer=True)  # type: ignore[arg-type]
    assert checkpoint_bytes(job) == bytes_each * parameter_count(JOB.model)

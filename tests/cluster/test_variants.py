"""Other mixes of a trace: the share that was asked for, and errors that say what to write."""

import pytest

from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.simulate.fill import variant
from cumulo.cluster.simulate.synthetic import mispredicted, synthetic_trace, uniform_nodes
from cumulo.errors import ConfigError

NODES = uniform_nodes(4, 8, device="a")
JOBS = [
    JobRequest(f"j{number}", 1, gpus, milli, 1000)
    for number, (gpus, milli) in enumerate([(1, 500), (1, 1000), (8, 1000), (0, 1000)] * 500)
]


def share(jobs, belongs, size=lambda job: job.milli_per_task):
    return sum(size(job) for job in jobs if belongs(job)) / sum(size(job) for job in jobs)


def test_a_mix_has_the_share_that_was_asked_for():
    assert share(variant(JOBS, NODES, "shares=0.6"), lambda job: job.fractional) == pytest.approx(
        0.6, abs=0.05
    )
    multi = variant(JOBS, NODES, "multi-gpu=0.3")
    assert share(multi, lambda job: job.gpus_per_task > 1) == pytest.approx(0.3, abs=0.05)
    assert share(multi, lambda job: not job.gpus_per_task, lambda job: 1) == pytest.approx(0.25, abs=0.05)
    cpu = variant(JOBS, NODES, "cpu=0.4")
    assert share(cpu, lambda job: not job.gpus_per_task, lambda job: 1) == pytest.approx(0.4, abs=0.05)
    asking = variant(JOBS, NODES, "device=0.5")
    assert sum(job.devices == ("a",) for job in asking) / 1500 == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(("wanted", "told"), (("shares=2", "a share of 0 to 1"), ("share=0.5", "shares")))
def test_a_mix_that_cannot_be_is_named(wanted, told):
    with pytest.raises(ConfigError, match=told):
        variant(JOBS, NODES, wanted)


def test_predictions_are_wrong_by_the_same_factor_every_time():
    trace = synthetic_trace(50, 64)
    once, again = mispredicted(trace, 0.5), mispredicted(trace, 0.5)
    assert once == again and mispredicted(trace, 0.0) == trace
    assert all(one.work == other.work for one, other in zip(trace, once, strict=True))
    assert sum(one.request != other.request for one, other in zip(trace, once, strict=True)) == 50

"""Health of nodes on a real Ray cluster: a job leaves a node with an Xid, and no job starts on a cordoned one."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cumulo.cluster import launching
from cumulo.cluster.decide.health import HealthSignal
from cumulo.cluster.drivers.command import run_folder
from cumulo.cluster.job_store import JobStore
from cumulo.cluster.node_health import NodeHealth, log_signals
from cumulo.train.run.log import read_log
from tests.cluster.ray_cluster import RayCluster, needs_ray
from tests.cluster.test_node_health import FALLEN
from tests.cluster.test_ray import gang, look, output, store, wait_for

__all__ = ["store"]  # a fixture
pytestmark = [needs_ray, pytest.mark.long]


@pytest.fixture
def cluster(store: JobStore) -> Iterator[RayCluster]:
    with RayCluster(head_cores=0, workers=4) as found:
        yield found


def test_a_gang_leaves_a_node_with_an_xid_and_a_slow_one_is_never_used(
    store: JobStore, cluster: RayCluster
) -> None:
    options = ["--set", "layout.dp=2", "--set", "micro_batch=4"]
    job = gang("moved", cluster.address, train={"config": "train-tiny.yaml", "options": options},
               devices={"count": 2, "kind": "cpu", "per_node": 1})  # fmt: skip
    record, _ = launching.launch(job, "ray", store)
    wait_for(lambda: look(store, record).places, "its places")
    health, first = NodeHealth(store), [place.node for place in store.jobs()[record.job_id].places]
    wait_for(lambda: len(read_log(run_folder(record) / "log.csv")) >= 12, "12 steps")
    assert "memory bandwidth" in output(record)  # its nodes were checked first
    for signal in log_signals(first[0], FALLEN, time.time()):
        health.tell(signal)
    health.tell(HealthSignal(first[1], "check", "memory bandwidth is 0.6 of", time.time(), "cordon"))
    wait_for(lambda: look(store, record).attempt == 2, "the second attempt")
    second = {place.node for place in store.jobs()[record.job_id].places}
    assert len(second) == 2 and not second & set(first)
    wait_for(lambda: look(store, record).ended, "its end")
    done = store.jobs()[record.job_id]
    assert (done.state, done.failures) == ("done", 0), output(record)
    assert [one.step for one in read_log(Path(run_folder(record)) / "log.csv")] == list(range(1, 41))

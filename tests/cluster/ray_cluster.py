"""A real Ray cluster of four nodes on this machine; a node can be killed.

with RayCluster() as cluster:
    cluster.kill(cluster.workers[0])
"""

import os
import signal
import socket
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
_OBJECTS_BYTES = 80 << 20


class RayCluster:
    def __init__(self, port: int | None = None, head_cores: int = 1, workers: int = 3, gpus: int = 0) -> None:
        """`gpus`: so many of each node, which are not there, and which Ray gives to actors all the same."""
        from ray.cluster_utils import Cluster

        self._gpus = gpus
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        head: dict[str, Any] = {
            "num_cpus": head_cores, "object_store_memory": _OBJECTS_BYTES, "include_dashboard": False,
            "num_gpus": gpus,
        }  # fmt: skip
        if port is not None:
            head["gcs_server_port"] = port
        # Ray gives a node 30 s to start, which on a busy machine may be too few.
        self._cluster = _patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
        self.workers = [self.add() for _ in range(workers)]

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> Any:
        return _patiently(
            lambda: self._cluster.add_node(
                num_cpus=1, num_gpus=self._gpus, object_store_memory=_OBJECTS_BYTES
            )
        )

    def kill(self, node: Any) -> None:
        """As when its power fails."""
        self.workers.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def kill_all(self) -> None:
        """As when the power of all nodes fails: the head is gone, and whoever was connected does not know yet."""
        for node in [*self.workers, self._cluster.head_node]:
            for started in [one for several in node.all_processes.values() for one in several]:
                started.process.kill()
                started.process.wait()

    def worker_with(self, class_name: str) -> Any:
        """A worker node on which an actor of this class lives."""
        from ray._private.state import actors

        nodes = {
            one["Address"]["NodeID"]
            for one in actors().values()
            if one["State"] == "ALIVE" and class_name in one["ActorClassName"]
        }
        return next(worker for worker in self.workers if worker.node_id in nodes)

    def __enter__(self) -> "RayCluster":
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


def _patiently(start: Callable[[], Any]) -> Any:
    for _ in range(4):
        before = _children()
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            # What it had started runs on, on the port that the next try needs.
            for process in _children() - before:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
    return start()


def _children() -> set[int]:
    """Processes that this one has started and that have not ended; none where there is no /proc."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(number) for one in lists for number in one.read_text().split()}


def free_port() -> int:
    with socket.socket() as line:
        line.bind(("", 0))
        return int(line.getsockname()[1])

"""RayDriver: jobs on a Ray cluster. Training jobs wait in the store until the cluster's queue places them
(`ray_queue.py`, `ray_job.py`). A service is a detached actor that has the submission key as its name: asking for it
twice gives the same actor (`ray_serve.py`).
"""

import contextlib
import json
import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cumulo.cluster.drivers.command import output_file, run_folder, server_arguments, work_command
from cumulo.cluster.drivers.driver import Facts, TargetLost, note_submission
from cumulo.cluster.job_progress import run_progress
from cumulo.cluster.job_store import JobRecord, JobStore
from cumulo.cluster.queue_settings import queue_settings
from cumulo.cluster.served_shape import replica_actor
from cumulo.errors import ConfigError, CumuloError

NAMESPACE = "cumulo"
_ANSWER_S = 5.0
_ASK_S = 60.0
_STAYS_S = 24 * 3600
_joined: list[str] = []  # the address of the cluster that this process has connected to


class RayDriver:
    def __init__(self, store: JobStore) -> None:
        self.store = store

    def explain(self, record: JobRecord) -> str:
        _ray()
        if record.job.serve is not None:
            return json.dumps(_service_plan(record), indent=2)
        from cumulo.cluster.drivers.ray_job import gang_bundle
        from cumulo.cluster.drivers.ray_queue import QUEUE, RayPlayer

        request, settings = RayPlayer(self.store).request(record, None), queue_settings(self.store, "ray")
        plan: dict[str, Any] = {
            "queue": {"actor": QUEUE, "namespace": NAMESPACE, "store": str(self.store.folder),
                      "policy": settings.policy, "quota": dict(settings.quota)},
            "gang": {"tenant": request.tenant, "priority": request.priority, "tasks": request.tasks,
                     "places": request.spread},
            "placement_group": {"bundles": [gang_bundle(record)] * request.tasks, "nodes": "as the policy chooses"},
            "each_rank_runs": work_command(record), "output": str(output_file(record)),
        }  # fmt: skip
        return json.dumps(plan, indent=2)

    def submit(self, record: JobRecord) -> Facts:
        if len(record.job.devices) > 1:
            raise ConfigError(f"{record.job.name} asks for several kinds of devices: launch it --on slurm")
        if record.job.serve is None:
            return {**self._queue(record), "state": "queued", "reason": "waits for the cluster's queue"}
        replica_actor(record.job)  # what one node cannot hold is refused here
        ray = connected(record)
        from cumulo.cluster.drivers.ray_job import ON_HEAD
        from cumulo.cluster.drivers.ray_service import ServiceKeeper

        note_submission(record)
        actor = ray.remote(ServiceKeeper).options(
            name=actor_name(record), namespace=NAMESPACE, lifetime="detached", get_if_exists=True,
            max_restarts=-1, max_task_retries=-1, num_cpus=0, resources=ON_HEAD,
        ).remote(record)  # fmt: skip
        facts = _ask(ray, actor)
        return {"handle": actor_name(record), **facts}

    def look(self, record: JobRecord) -> Facts:
        if record.job.serve is None:
            return self._queue(record)
        if end := _written_end(record):
            self._let_go(record)
            return end
        ray = connected(record)
        try:
            actor = ray.get_actor(actor_name(record), namespace=NAMESPACE)
        except ValueError:
            return {
                "state": "submitting", "places": (),
                "reason": "this Ray cluster does not know the job, which was lost with an earlier head: it is "
                f"submitted again{_resumes(record)}",
            }  # fmt: skip
        except (ray.exceptions.RayError, ConnectionError, TimeoutError, RuntimeError) as error:
            disconnect()
            raise TargetLost(f"the Ray head does not answer ({_first_line(error)})", _kept(record)) from error
        facts = _ask(ray, actor)
        if facts["state"] in ("done", "failed", "cancelled"):
            self._let_go(record)
        return facts

    def cancel(self, record: JobRecord) -> Facts:
        if record.job.serve is None:
            return self._queue(record)
        ray = connected(record)
        with contextlib.suppress(ValueError):
            actor = ray.get_actor(actor_name(record), namespace=NAMESPACE)
            ray.get(actor.cancel.remote(), timeout=_ASK_S)
            return _ask(ray, actor)
        return {"state": "cancelled", "reason": "the Ray cluster does not know the job", "places": ()}

    def _queue(self, record: JobRecord) -> Facts:
        """Ask for the queue of the job's cluster, which is started where it is missing, as after the loss of the
        head. It writes down what happens to the job."""
        ray = connected(record)
        from cumulo.cluster.drivers.ray_job import ON_HEAD
        from cumulo.cluster.drivers.ray_queue import QUEUE, RayQueue

        actor: Any = ray.remote(RayQueue)
        folder = str(self.store.folder)
        try:
            queue = actor.options(
                name=QUEUE, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, max_restarts=-1,
                max_task_retries=-1, max_concurrency=4, num_cpus=0, resources=ON_HEAD,
            ).remote(folder)  # fmt: skip
            told = ray.get(queue.cluster.remote(folder), timeout=_ASK_S)
        except (ray.exceptions.RayError, ConnectionError, TimeoutError, RuntimeError) as error:
            disconnect()
            raise TargetLost(f"the Ray head does not answer ({_first_line(error)})", _kept(record)) from error
        if "refused" in told:
            raise ConfigError(told["refused"])
        if told["trouble"]:
            raise TargetLost(f"the queue of the Ray cluster fails ({told['trouble']})", "its jobs are kept")
        return {"handle": told["handle"]}

    def _let_go(self, record: JobRecord) -> None:
        """The job has ended, and what was to be known of it is known: its actor may go."""
        with contextlib.suppress(ValueError, TargetLost):
            ray = connected(record)
            ray.kill(ray.get_actor(actor_name(record), namespace=NAMESPACE))


def _service_plan(record: JobRecord) -> dict[str, Any]:
    from cumulo.cluster.drivers.ray_job import ON_HEAD

    serve = record.job.serve
    assert serve is not None
    actor, per_node = replica_actor(record.job)
    engines = {
        "application": f"{record.job_id}-engines", "deployment": "EngineReplica", "num_replicas": serve.replicas,
        "ray_actor_options": actor, "max_replicas_per_node": per_node,
        "each_replica_runs": ["cumulo", "serve", *server_arguments(serve), "--port", "0"],
    }  # fmt: skip
    route = {
        "application": f"{record.job_id}-front", "deployment": "ServiceRoute", "route_prefix": "/",
        "http_port": serve.port or 8000, "ray_actor_options": {"num_cpus": 0, "resources": ON_HEAD},
        "runs": ["cumulo", "gateway", "--router", "prefix-aware"],
    }  # fmt: skip
    scaling = None if serve.autoscale is None else asdict(serve.autoscale)
    limits = {"min_replicas": serve.min_replicas, "max_replicas": serve.max_replicas, "rule": scaling}
    return {
        "actor": actor_name(record),
        "namespace": NAMESPACE,
        "serve": [route, engines],
        "autoscale": limits,
    }


def actor_name(record: JobRecord) -> str:
    return f"cumulo-{record.key}-{record.job_id}"


def _ray() -> Any:
    # Else Ray ends this process 60 s after the head went away: it may be a server whose console somebody opened.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(_STAYS_S))
    try:
        import ray
    except ImportError as error:
        raise CumuloError("Ray is not installed: pip install -e '.[ray]' in Cumulo's folder") from error
    return ray


def connected(record: JobRecord) -> Any:
    """The module `ray`, connected to the job's cluster. A head that does not answer is noticed within seconds."""
    ray = _ray()
    address = record.job.ray.address or os.environ.get("RAY_ADDRESS") or "auto"
    if ray.is_initialized():
        joined = str(ray.get_runtime_context().gcs_address)
        if _joined and address not in (*_joined, joined):  # the job is on another cluster
            disconnect()
    if ray.is_initialized():
        try:
            _knock(joined, record)
        except TargetLost:
            disconnect()
            raise
        return ray
    if address not in ("auto", "local"):
        _knock(address.removeprefix("ray://"), record)
    if address == "auto" and (last := _last_head()):  # which may be gone: Ray would wait for it for minutes
        _knock(last, record)
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, TimeoutError, RuntimeError, OSError, ValueError) as error:
        raise TargetLost(_why_not_connected(address, " ".join(str(error).split())[:160])) from error
    _joined[:] = [address]
    return ray


def disconnect() -> None:
    ray = _ray()
    if ray.is_initialized():
        with contextlib.suppress(Exception):  # the head is gone: there is nobody to say goodbye to
            ray.shutdown()


def _kept(record: JobRecord) -> str:
    """What becomes of a job whose head is gone. Its actors end with the head, unless Ray keeps state elsewhere."""
    if record.state not in ("running", "queued", "stopping"):
        return "the job is kept, and the next `cumulo jobs` or the same `cumulo launch` submits it, once"
    return (
        f"{record.job_id} was {record.state} and ended with it. The job is kept: when a head answers there again, "
        f"the next `cumulo jobs` submits it again, once{_resumes(record)}"
    )


def _resumes(record: JobRecord) -> str:
    if record.job.serve is not None:
        return ", with as many replicas as its file says"
    step = run_progress(run_folder(record)).step
    return f", and it resumes from its last checkpoint (it was at step {step})" if step else ""


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:160]


def _last_head() -> str:
    """HOST:PORT of the cluster that was last started on this machine, as `auto` finds it; empty: none was."""
    file = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
    return file.read_text().strip() if file.exists() else ""


def _why_not_connected(address: str, said: str) -> str:
    if address == "auto":
        return (
            "no Ray cluster runs on this machine: start one with `ray start --head`, or set ray.address in the job "
            f"file; the job is kept ({said})"
        )
    return (
        f"the Ray head at {address} is there, and does not let you in ({said}): check that RAY_AUTH_TOKEN is right "
        "and has not expired, and that both sides have the same Ray version; the job is kept"
    )


def _knock(address: str, record: JobRecord) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"ray.address must be HOST:PORT, got {address!r}")
    import grpc  # Ray brings it

    why: object = ""
    channel = grpc.insecure_channel(address)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
        if os.environ.get("RAY_USE_TLS", "0") == "0":  # else it speaks after a handshake of its own
            # Ray itself would wait for minutes for a port that takes connections and never answers.
            grpc.channel_ready_future(channel).result(timeout=_ANSWER_S)
    except OSError as error:
        why = error.strerror or error
    except grpc.FutureTimeoutError:
        why = "what listens there is no Ray head, or hangs: check ray.address"
    finally:
        channel.close()
    if why:
        raise TargetLost(f"the Ray head at {address} does not answer ({why})", _kept(record))


def _ask(ray: Any, actor: Any) -> Facts:
    try:
        facts: Facts = ray.get(actor.look.remote(), timeout=_ASK_S)
    except ray.exceptions.RayError as error:
        raise TargetLost(
            f"the job's actor does not answer ({_first_line(error)})", "the job is kept", of_job=True
        ) from error
    return {name: value for name, value in facts.items() if name in _KNOWN}


_KNOWN = ("state", "reason", "places", "attempt", "failures", "url")


def _written_end(record: JobRecord) -> Facts:
    path = Path(record.folder, "end.json")
    return {**json.loads(path.read_text("utf-8")), "places": ()} if path.exists() else {}

"""ServiceKeeper: the detached actor of a serving job on Ray. It deploys the two applications of `ray_serve.py`,
asks the autoscaling rule at its interval, and carries out what it says. Lost with its node, it is started again.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import ray
from ray import serve
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from cumulo.cluster.decide.jobs import TaskPlace
from cumulo.cluster.drivers.command import server_arguments
from cumulo.cluster.drivers.metrics_seen import USUAL_SLO, MetricsWatch, forecast_rule
from cumulo.cluster.drivers.ray_job import write_end
from cumulo.cluster.drivers.ray_serve import engine_application, front_application
from cumulo.cluster.job_store import JobRecord
from cumulo.cluster.served_shape import replica_actor
from cumulo.fleet.decide.forecast_rule import ForecastRule
from cumulo.fleet.decide.scaling import FleetSeen, RoleSeen

_LOOK_S = 1.0
_MOST_TRIES, _AGAIN_S = 10, 5.0


class ServiceKeeper:
    def __init__(self, record: JobRecord) -> None:
        self.record = record
        self.facts: dict[str, Any] = {"state": "queued", "reason": "replicas are starting", "places": ()}
        assert record.job.serve is not None
        self.work = record.job.serve
        self.replicas = self.work.replicas
        self._key = _kept_key(Path(record.folder, "fleet.key"))
        self._front, self._engines = f"{record.job_id}-front", f"{record.job_id}-engines"
        self._rule: ForecastRule | None = None
        self._watch = MetricsWatch(USUAL_SLO)
        if self.work.autoscale_rule:
            self._rule, slo = forecast_rule(self.work.autoscale_rule)
            self._watch = MetricsWatch(slo)
        self._life = asyncio.ensure_future(self._live())

    async def look(self) -> dict[str, Any]:
        return self.facts

    async def cancel(self) -> None:
        self._life.cancel()
        for name in (self._engines, self._front):
            await asyncio.to_thread(serve.delete, name)
        self._finish("cancelled", "cancelled by its user")

    async def _live(self) -> None:
        try:
            await self._patiently(self._deploy, "Ray Serve did not start the service")
            while True:
                await asyncio.sleep(_LOOK_S if self._rule is None else self._rule.interval_s)
                await self._patiently(self._look_around, "the route did not answer")
        except Exception as error:  # the keeper's own fault, or Ray's: whoever looks must see it
            self._finish("failed", _words(error))

    async def _patiently(self, work: Callable[[], Awaitable[None]], trouble: str) -> None:
        """Again, if one of Ray's actors died or was late: Ray starts it anew. On a busy machine Serve kills its own
        proxy when it is not ready within seconds, and the next one may be."""
        for number in range(1, _MOST_TRIES):
            try:
                await work()
            except (ray.exceptions.RayError, TimeoutError, aiohttp.ClientError) as error:
                self.facts |= {"reason": f"{trouble} ({_words(error)}); try {number + 1} of {_MOST_TRIES}"}
                await asyncio.sleep(_AGAIN_S)
            else:
                return
        await work()

    async def _deploy(self) -> None:
        options = {"host": "0.0.0.0", "port": self.work.port or 8000, "location": "HeadOnly"}
        await asyncio.to_thread(serve.start, http_options=options)
        # A keeper that was started again finds what it had deployed: to run it anew would replace every replica.
        known = (await asyncio.to_thread(serve.status)).applications
        if self._front not in known:
            front = front_application(self._key, "prefix-aware")
            await asyncio.to_thread(serve.run, front, name=self._front, route_prefix="/")
        if self._engines not in known:
            engines = engine_application(
                server_arguments(self.work),
                self._key,
                self._front,
                self.replicas,
                *replica_actor(self.record.job),
            )
            target = serve.RunTarget(
                engines, name=self._engines, route_prefix=None, external_scaler_enabled=True
            )
            await asyncio.to_thread(serve.run_many, [target])
        address = ray.util.get_node_ip_address()
        self.facts |= {"state": "running", "url": f"http://{address}:{options['port']}", "reason": "serving"}

    async def _scale(self, replicas: int) -> None:
        """What Serve's REST route for external scalers calls: the replicas that stay do not notice."""
        self.replicas = replicas
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        engines = DeploymentID(name="EngineReplica", app_name=self._engines)
        await controller.update_deployment_replicas.remote(engines, replicas)

    async def _look_around(self) -> None:
        handle = serve.get_deployment_handle("ServiceRoute", app_name=self._front)
        fleet, gateway = await handle.fleet.remote(), await handle.metrics.remote()
        ready = [one for one in fleet["replicas"] if one["state"] == "ready"]
        self.facts |= {"places": tuple(TaskPlace(one["name"]) for one in ready)}
        if self._rule is None:
            return
        seen = FleetSeen(time.time(), {"both": await self._seen(ready, gateway)})
        for wanted in self._rule.decide(seen):
            if wanted.replicas != self.replicas:
                self.facts |= {"reason": f"scaled from {self.replicas} to {wanted.replicas}: {wanted.why}"}
                await self._scale(wanted.replicas)

    async def _seen(self, ready: list[dict[str, Any]], gateway: str) -> RoleSeen:
        """What came since the look before, from the counters of each replica and of the gateway before them."""
        texts: dict[str, str] = {}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as client:
            for one in ready:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with client.get(f"{one['url']}/metrics") as answer:
                        texts[one["url"]] = await answer.text()
        return self._watch.seen(texts, max(0, self.replicas - len(texts)), gateway)

    def _finish(self, state: str, reason: str) -> None:
        self.facts |= {"state": state, "reason": reason, "places": ()}
        write_end(self.record, state, reason)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def _kept_key(path: Path) -> str:
    """The fleet's secret; a keeper that is started again must have the same, or all replicas would be new ones."""
    if not path.exists():
        path.touch(0o600)
        path.write_text(secrets.token_hex(32), "utf-8")
    return path.read_text("utf-8")

"""A service inside a Ray cluster, as two Ray Serve applications: engine replicas, each a `cumulo serve` process in
an actor of its own, and in front of them one route that passes every request to a `cumulo gateway` process. So Ray
places, checks and replaces the replicas, and the gateway routes, retries and moves streams as it does everywhere.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from cumulo.cluster.drivers.command import served_url
from cumulo.cluster.drivers.ray_job import ON_HEAD, ending_with_parent

_JOIN_S = 2.0  # how often a replica says that it is there
_SILENT_S = 20.0  # a replica that did not for so long is taken out
_START_S = 600.0
_WAIT_S = 120.0  # for a request, while there is no replica
_HOP_HEADERS = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "te", "upgrade"}


def start_process(command: list[str], key: str, name: str) -> tuple[subprocess.Popen[bytes], Path]:
    """A `cumulo` process that ends with this actor; what it prints goes to a file."""
    output = Path(tempfile.mkdtemp(prefix="cumulo-ray-")) / f"{name}.log"
    environment = os.environ | {"CUMULO_FLEET_KEY": key}
    environment.setdefault("OMP_NUM_THREADS", "1")
    with output.open("ab") as stream:
        process = subprocess.Popen(
            ending_with_parent(command),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=environment,
        )
    return process, output


def wait_until(process: subprocess.Popen[bytes], output: Path, found: Any) -> str:
    """What `found` reads from the output, once it does."""
    begin_s = time.monotonic()
    while time.monotonic() - begin_s < _START_S:
        if text := found(output):
            return str(text)
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended: {output.read_text('utf-8', 'replace')[-800:]}")
        time.sleep(0.1)
    raise RuntimeError(f"{process.args!r} is not ready after {_START_S:.0f} s")


class EngineReplica:
    """One engine. Its requests come from the gateway, not through Ray: tokens stream without a hop more."""

    def __init__(self, arguments: list[str], key: str, front: str) -> None:
        address = ray.util.get_node_ip_address()
        command = [sys.executable, "-m", "cumulo", "serve", *arguments, "--host", address, "--port", "0"]
        self._process, output = start_process(command, key, "engine")
        self.url = wait_until(self._process, output, served_url)
        self._front = front
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._say_so, daemon=True)
        self._thread.start()

    def _say_so(self) -> None:
        """Again and again, so that a route that was started anew learns of it."""
        handle = serve.get_deployment_handle("ServiceRoute", app_name=self._front)
        while not self._leaving.wait(_JOIN_S):
            with contextlib.suppress(Exception):  # the route may be starting; the next time will do
                handle.join.remote(self.url).result(timeout_s=10)

    def check_health(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError(f"the engine process ended with exit code {self._process.returncode}")

    def __del__(self) -> None:
        """Out of the fleet first: its streams move; then the process."""
        self._leaving.set()
        with contextlib.suppress(Exception):
            handle = serve.get_deployment_handle("ServiceRoute", app_name=self._front)
            handle.leave.remote(self.url).result(timeout_s=30)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)


class ServiceRoute:
    """The route: starts the gateway when the first replica has come, and passes requests to it unread."""

    def __init__(self, key: str, router: str) -> None:
        self._key, self._router = key, router
        self._gateway = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: dict[str, float] = {}
        self._starting = asyncio.Lock()
        self._some = asyncio.Event()  # the gateway has a replica
        self._waiting = 0  # requests that wait for one
        self._session: aiohttp.ClientSession | None = None

    async def join(self, url: str) -> None:
        self._seen[url] = time.monotonic()
        await self._ready(url)
        known = {one["url"] for one in (await self.fleet())["replicas"]}
        if url not in known:
            await self._ask("POST", "/v1/fleet/replicas", {"url": url})
        if url in self._seen:  # it may have left meanwhile
            self._some.set()
        for other, last_s in list(self._seen.items()):
            if time.monotonic() - last_s > _SILENT_S:
                await self.leave(other)

    async def leave(self, url: str) -> None:
        self._seen.pop(url, None)
        if not self._seen:
            self._some.clear()
        if self._gateway:
            await self._ask("DELETE", f"/v1/fleet/replicas/{url.split('//')[1]}")

    async def fleet(self) -> dict[str, Any]:
        """What the gateway says of its replicas; nothing before there is one."""
        if not self._gateway:
            return {"replicas": [], "totals": {}}
        return await self._ask("GET", "/v1/fleet")

    async def metrics(self) -> str:
        """The metrics of the gateway; requests that wait here for a replica count as being there."""
        waiting = f"cumulo:gateway_in_flight {self._waiting}\n"
        if not self._gateway:
            return waiting
        async with self._client().get(f"{self._gateway}/metrics") as answer:
            return waiting + await answer.text()

    async def _ready(self, url: str) -> None:
        async with self._starting:
            if self._process is not None and self._process.poll() is None:
                return
            command = [
                sys.executable,
                "-m",
                "cumulo",
                "gateway",
                url,
                "--port",
                "0",
                "--router",
                self._router,
            ]
            command += ["--wait-for-replica", f"{_WAIT_S:.0f}"]
            self._process, output = start_process(command, self._key, "gateway")
            self._gateway = await asyncio.to_thread(wait_until, self._process, output, _listening)

    async def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._key}"}
        async with self._client().request(method, self._gateway + path, json=body, headers=headers) as answer:
            found: dict[str, Any] = await answer.json(content_type=None)
            return found

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            limits = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                connector=limits, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
            )
        return self._session

    async def __call__(self, request: Request) -> Response:
        if not await self._has_replica():
            problem = {"error": {"message": "no replica is ready yet", "code": "no_replica"}}
            return JSONResponse(problem, 503, headers={"Retry-After": "2"})
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_HEADERS}
        answer = await self._client().request(
            request.method, self._gateway + path, data=await request.body(), headers=headers
        )
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_HEADERS}
        return StreamingResponse(_pieces(answer), answer.status, kept)

    async def _has_replica(self) -> bool:
        """Whether there is a replica, after a wait: a service without one starts it for a request."""
        if self._some.is_set():
            return True
        self._waiting += 1
        try:
            await asyncio.wait_for(self._some.wait(), _WAIT_S)
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1
        return True

    def check_health(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            raise RuntimeError("the gateway process has ended")


async def _pieces(answer: aiohttp.ClientResponse) -> Any:
    try:
        async for piece in answer.content.iter_any():
            yield piece
    finally:
        answer.close()


def _listening(output: Path) -> str:
    text = output.read_text("utf-8", "replace")
    return text.split("listening on ")[1].split(";")[0] if "listening on " in text else ""


def front_application(key: str, router: str) -> Any:
    """Runs on the head: what clients hold open must not die with a worker node."""
    actor = {"num_cpus": 0, "resources": ON_HEAD}
    deployment: Any = serve.deployment(
        ServiceRoute, name="ServiceRoute", num_replicas=1, ray_actor_options=actor, max_ongoing_requests=4096
    )
    return deployment.bind(key, router)


def engine_application(
    arguments: list[str], key: str, front: str, replicas: int, actor: dict[str, Any], per_node: int | None
) -> Any:
    spread: Any = {} if per_node is None else {"max_replicas_per_node": per_node}
    deployment: Any = serve.deployment(
        EngineReplica, name="EngineReplica", num_replicas=replicas, ray_actor_options=actor,
        health_check_period_s=2, health_check_timeout_s=10, graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=90, **spread,
    )  # fmt: skip
    return deployment.bind(arguments, key, front)


# -- for KubeRay --------------------------------------------------------------------------------------------
# A RayService imports these two by name (`import_path` of serveConfigV2) and calls them with its `args`.
FRONT = "front"


def front(args: dict[str, Any]) -> Any:
    return front_application(os.environ["CUMULO_FLEET_KEY"], str(args.get("router", "prefix-aware")))


def engines(args: dict[str, Any]) -> Any:
    resources = {"num_gpus": args["gpus"]} if args["gpus"] else {"num_cpus": 1}
    key = os.environ["CUMULO_FLEET_KEY"]
    return engine_application(list(args["arguments"]), key, FRONT, int(args["replicas"]), resources, None)

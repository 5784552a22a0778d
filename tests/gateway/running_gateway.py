"""A real `cumulo gateway` process for the tests, in front of real servers with a tiny model."""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from tests import processes
from tests.serve.running_server import ROOT, RunningServer, wait_for

KEY = "the fleet's key for tests".replace(" ", "-").replace("'", "")


class RunningGateway(RunningServer):
    """What tests do with a server they do with a gateway, too."""

    def __init__(self, *arguments: str) -> None:
        self._log = tempfile.NamedTemporaryFile(prefix="cumulo-gateway-", suffix=".log")  # noqa: SIM115
        self.process = processes.start(
            ["gateway", "--port", "0", *arguments],
            cwd=ROOT, stdout=self._log, stderr=self._log, env=os.environ | {"COLUMNS": "300"},
        )  # fmt: skip
        try:
            address = wait_for(
                lambda: re.search(r"listening on (http://\S+);", self.log), "the address", self
            )
            self.url = address[1]
            assert self.status("/health") == 200  # at once: it said so
        except BaseException:
            self.end()
            raise

    def operate(self, method: str, path: str, **body: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.request(
            method, f"{self.url}/v1/fleet/replicas{path}", json=body or None, headers=headers, timeout=60
        )

    def replica(self, url: str) -> dict[str, object]:
        (found,) = (one for one in self.get("/v1/fleet").json()["replicas"] if one["url"] == url)
        return found


def address(server: RunningServer) -> str:
    """As /v1/fleet names a replica."""
    return server.url.removeprefix("http://")


def key_file(folder: Path) -> str:
    path = folder / "fleet.key"
    path.write_text(KEY)
    return str(path)


@contextlib.contextmanager
def fleet_server(model: Path, key: str, *options: str) -> Iterator[RunningServer]:
    server = RunningServer(
        str(model), "--no-console", "--fleet-key-file", key, "--kv-memory-gib", "0.05", *options
    )
    try:
        yield server
    finally:
        server.end()


@contextlib.contextmanager
def gateway_of(servers: Sequence[RunningServer], key: str | None, *options: str) -> Iterator[RunningGateway]:
    keys = [] if key is None else ["--fleet-key-file", key]
    gateway = RunningGateway(*(server.url for server in servers), *keys, *options)
    try:
        yield gateway
    finally:
        gateway.end()

"""A real `cumulo gateway` process for the tests, in front of real servers with a tiny model."""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from cumulo.fleet.wire import ASK_HEADER, PROOF_HEADER, FleetKey
from tests import processes
from tests.serve.running_server import ROOT, RunningServer, wait_for

KEY, OPERATOR = "the-fleets-key-for-tests", "the-operators-key-for-tests"


class RunningGateway(RunningServer):
    """What tests do with a server they do with a gateway, too."""

    def __init__(self, *arguments: str) -> None:
        self._log = tempfile.NamedTemporaryFile(prefix="cumulo-gateway-", suffix=".log")  # noqa: SIM115
        self._operator = tempfile.NamedTemporaryFile("w", suffix=".key")  # noqa: SIM115
        print(OPERATOR, file=self._operator, flush=True)
        self.process = processes.start(
            ["gateway", "--port", "0", "--operator-key-file", self._operator.name, *arguments],
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
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        return httpx.request(
            method, f"{self.url}/v1/fleet/replicas{path}", json=body or None, headers=headers, timeout=60
        )

    def read(self, path: str) -> Any:
        """As its operator, who sees everybody's requests."""
        return self.get(path, headers={"Authorization": f"Bearer {OPERATOR}"}).json()

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


def proven(method: str, path: str, ask: bytes = b"") -> dict[str, str]:
    """The headers that a gateway sends with a request."""
    proof = {PROOF_HEADER.decode(): FleetKey(KEY).prove(method, path.encode(), ask).decode()}
    return proof | ({ASK_HEADER.decode(): ask.decode()} if ask else {})


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

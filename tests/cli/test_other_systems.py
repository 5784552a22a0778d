"""Systems that are not Linux, such as macOS: the core never calls what they lack, or says that it needs Linux."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from cumulo.base.machine import memory_file
from cumulo.cluster.drivers.local import refuse_if_never
from cumulo.cluster.job_file import job_from
from cumulo.cluster.job_store import JobStore
from cumulo.errors import ConfigError, CumuloError
from tests import processes
from tests.serve.running_server import wait_for
from tests.serve.tiny_model import NAME, save_tiny_model

# Python reads this at its start, also in the processes that the command starts.
NOT_LINUX = """
import builtins, io, os
for name in ("sched_getaffinity", "sched_setaffinity", "pidfd_open", "memfd_create", "eventfd", "posix_fadvise"):
    delattr(os, name) if hasattr(os, name) else None
def missing(what):
    def run(path, *more, **words):
        if str(path).startswith(("/proc", "/sys/", "/dev/shm")):
            raise FileNotFoundError(2, "no such file here", str(path))
        return what(path, *more, **words)
    return run
for module, name in ((builtins, "open"), (io, "open"), (os, "stat"), (os, "scandir"), (os, "listdir")):
    setattr(module, name, missing(getattr(module, name)))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "sitecustomize.py").write_text(NOT_LINUX)
    return os.environ | {"PYTHONPATH": str(tmp_path)}


@pytest.mark.long
def test_a_model_is_asked_trained_and_served_without_what_only_linux_has(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    model = str(save_tiny_model(tmp_path / "model"))
    (tmp_path / "mine.txt").write_text("the cat sat on the mat. " * 300)
    train = ["train", str(tmp_path / "mine.txt"), "--steps", "2", "--folder", str(tmp_path / "run")]
    for words in (["generate", "the cat", "--model", model, "--max-tokens", "3"], train):
        done = subprocess.run(
            [sys.executable, "-m", "cumulo", *words],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]
    log = tmp_path / "serve.log"
    with log.open("w") as stream:
        words = ["serve", model, "--port", str(port), "--kv-memory-gib", "0.02", "--replicas", "2"]
        process = processes.start(words, stdout=stream, stderr=stream, env=environment)
    try:
        wait_for(lambda: "is ready at" in log.read_text() or process.poll() is not None, "the server")
        body = {"model": NAME, "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 3}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=300)
        assert answer.status_code == 200, log.read_text()
    finally:
        process.terminate()
        process.wait(300)


def test_what_needs_linux_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pidfd_open", "memfd_create"):
        monkeypatch.delattr(os, name, raising=False)
    with pytest.raises(CumuloError, match="need Linux"):
        memory_file("kv", 8)
    store = JobStore(tmp_path)
    job = job_from({"name": "tiny", "serve": {}, "devices": {"count": 1}})
    with pytest.raises(ConfigError, match="jobs on this machine need Linux"):
        refuse_if_never(store.submit(job, "local")[0], store)

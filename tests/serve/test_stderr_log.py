"""A log that cannot be written stops neither the server nor its engine."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cumulo.serve import stderr_log
from cumulo.serve.stderr_log import BufferedStderr
from tests.ports import reserved_port
from tests.serve.running_server import ROOT, wait_for
from tests.serve.tiny_model import NAME, save_tiny_model

pytestmark = pytest.mark.long

CHAT = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
_SCRIPT = """
import logging, sys, warnings
from cumulo.cli.shared.terminal import note
from cumulo.serve import stderr_log
stderr_log.start_logging("info", "test")
for number in range(6_000):
    logging.getLogger("x").info("line %d, long enough to fill what there is to fill", number)
note("a note")
warnings.warn("a warning")
stderr_log.install().drain()
print("still alive", stderr_log.install().lost_lines)
"""


@contextlib.contextmanager
def full_pipe() -> Iterator[tuple[int, int]]:
    """A pipe with no room left and nobody who reads: both ends, the writer's as a process finds it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def run_script(stderr: int | None) -> str:
    command = [sys.executable, "-c", _SCRIPT]
    if stderr is None:
        command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    done = subprocess.run(command, cwd=ROOT, stderr=stderr, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0
    return done.stdout


def test_lines_are_lost_and_counted_where_nobody_reads() -> None:
    with full_pipe() as (_, writer):
        alive, lost = run_script(writer).rsplit(" ", 1)
        assert alive == "still alive" and int(lost) > 1_000
        assert os.get_blocking(writer)  # other processes write there, too


def test_a_full_disk_stops_nothing() -> None:
    with Path("/dev/full").open("w") as full:
        alive, lost = run_script(full.fileno()).rsplit(" ", 1)
        assert alive == "still alive" and 6_000 < int(lost) < 6_010


def test_a_closed_descriptor_stops_nothing() -> None:
    assert run_script(None).startswith("still alive")


def test_every_line_arrives_where_it_can(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        assert run_script(log.fileno()) == "still alive 0\n"
    text = (tmp_path / "log").read_text()
    assert text.count("long enough") == 6_000 and "a note" in text and "a warning" in text


def test_a_reader_that_comes_late_is_told_how_much_is_missing() -> None:
    with full_pipe() as (reader, writer):
        stderr = BufferedStderr(writer)
        for number in range(20_000):  # more than one buffer in waiting and another in the thread's hands
            stderr.write(f"line {number} of a log that nobody reads\n")
        lost = stderr.lost_lines
        assert lost > 0
        text = b""
        while b"line 0 of a log" not in text:
            text += os.read(reader, 65536)
        while b"the last line" not in text:
            if stderr.lost_lines == lost:
                stderr.write("the last line\n")
            text += os.read(reader, 65536)
        assert f"({lost} lines of this log were lost)\nthe last line\n".encode() in text


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("pipe", marks=pytest.mark.long),
        pytest.param("full", marks=pytest.mark.thorough),
        pytest.param("closed", marks=pytest.mark.thorough),
    ],
)
def test_the_server_serves_whatever_happens_to_its_log(kind: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        model = save_tiny_model(tmp_path)
        port = reserved_port()
        command = [
            sys.executable,
            "-m",
            "cumulo.cli",
            "serve",
            str(model),
            "--port",
            str(port),
            "--threads",
            "1",
        ]
        command += ["--kv-memory-gib", "0.1"]
        stderr: int | None = None
        if kind == "pipe":
            _, stderr = stack.enter_context(full_pipe())
        elif kind == "full":
            stderr = stack.enter_context(Path("/dev/full").open("w")).fileno()
        else:
            command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
        process = subprocess.Popen(command, cwd=ROOT, stderr=stderr, stdout=subprocess.DEVNULL)
        stack.callback(process.kill)
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: process.poll() is not None or is_ready(url), "readiness")
        assert process.poll() is None
        with httpx.Client(base_url=url, timeout=60) as client:
            for _ in range(100):
                assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
            if kind != "closed":
                assert "cumulo:log_lines_lost" in client.get("/metrics").text
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url + "/ready", timeout=5).status_code == 200
    return False


def test_what_callers_send_forges_no_line() -> None:
    formatter = stderr_log.SafeFormatter("%(asctime)s server %(levelname)s %(message)s")
    hostile = "/v1/x\n2026-01-01 server INFO forged\x1b[2J\x85\u2028\u202eend é"
    record = logging.LogRecord("a", logging.INFO, "", 0, "GET %s", (hostile,), None)
    told = formatter.format(record)
    assert len(told.splitlines()) == 1 and "\x1b" not in told and "\\x0a2026-01-01" in told
    assert told.endswith("\\u202eend é")
    try:
        raise ValueError(hostile)
    except ValueError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    assert all(line.startswith("    ") for line in formatter.format(record).splitlines()[1:])

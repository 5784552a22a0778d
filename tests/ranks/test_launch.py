"""Ranks that end are started again, or not; of several that ended, the one that began it is named."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cumulo.errors import TrainingError
from cumulo.ranks.launch import LOST, REFUSED, _cause, launch
from tests.serve.running_server import wait_for


@pytest.mark.parametrize(
    ("codes", "rank"),
    [
        ({0: (LOST, 10), 1: (-signal.SIGKILL, 10)}, 1),  # found last, and yet the first to go
        ({0: (-signal.SIGTERM, 10), 1: (-signal.SIGSEGV, 11)}, 1),  # whoever is left is ended by the agent
        ({0: (LOST, 10), 1: (1, 12)}, 1),
        ({0: (-signal.SIGKILL, 10), 1: (REFUSED, 12)}, 1),
        ({0: (LOST, 10), 1: (LOST, 10)}, 0),
        ({0: (1, 10), 1: (-signal.SIGKILL, 41)}, 0),  # by the agent: it did not end in time
        ({0: (LOST, 10), 1: (-signal.SIGKILL, 41)}, 0),
    ],
)
def test_the_rank_that_began_it_is_named(codes: dict[int, tuple[int, int]], rank: int) -> None:
    failures = {
        number: SimpleNamespace(exitcode=code, timestamp=when) for number, (code, when) in codes.items()
    }
    error = SimpleNamespace(failures=failures, get_first_failure=lambda: (0, failures[0]))
    assert _cause(error)[0] == rank  # type: ignore[arg-type]


@pytest.fixture
def handlers() -> Iterator[None]:
    """torchrun's agent leaves its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def program(*lines: str) -> list[str]:
    """A rank that needs no torch."""
    return [sys.executable, "-c", "\n".join(("import json, os, pathlib, signal, sys, time", *lines))]


REFUSE = (
    "told = {'message': 'it cannot be', 'timestamp': int(time.time())}",
    "pathlib.Path(os.environ['TORCHELASTIC_ERROR_FILE']).write_text(json.dumps(told))",
    f"sys.exit({REFUSED})",
)


def test_ctrl_c_is_passed_on_and_told_from_an_end(tmp_path: Path, handlers: None) -> None:
    begun = tmp_path / "begun"

    def interrupt() -> None:
        wait_for(begun.exists, "the rank")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    sleeps = program(f"pathlib.Path({str(begun)!r}).touch()", "time.sleep(600)")
    assert launch(sleeps, 1, 0, print) is False
    thread.join()
    assert launch(program(""), 1, 0, print) is True


def test_a_run_that_cannot_go_on_is_not_started_again(tmp_path: Path, handlers: None) -> None:
    heard: list[str] = []
    begun = f"pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).open('a').write('.')"
    with pytest.raises(TrainingError, match=r"^it cannot be$"):
        launch(program(begun, *REFUSE), 2, 3, heard.append)
    assert heard == [] and {path.read_text() for path in tmp_path.iterdir()} == {"."}


def test_killed_ranks_are_started_again_as_often_as_allowed(handlers: None) -> None:
    heard: list[str] = []
    kill = "os.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(TrainingError, match="rank 1 was ended by SIGKILL, after 1 restarts already"):
        launch(program(kill), 2, 1, heard.append)
    (message,) = heard
    assert "rank 1 was ended by SIGKILL; restarting all 2 processes (1 of 1)" in message

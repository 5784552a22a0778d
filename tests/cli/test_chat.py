"""`cumulo chat`: a question from a pipe, and a conversation in a real (pseudo) terminal."""

import os
import platform
import pty
import re
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import processes
from tests.cli.conftest import Run, needs_built_in_model
from tests.serve.running_server import quick_model

PATIENCE_S = 300.0  # for what always comes, on a busy machine later
# read, select and poll in Linux's tables of system calls: how a prompt waits for a key.
WAITS_FOR_A_KEY = {"aarch64": ("63", "72", "73"), "x86_64": ("0", "7", "23", "270", "271")}

pytestmark = [needs_built_in_model, pytest.mark.long]


def test_a_piped_question_gets_only_its_answer_on_stdout(cumulo: Run) -> None:
    ran = cumulo("chat", stdin="What is the capital of France?\n")
    assert ran.code == 0
    assert "Paris" in ran.out
    assert "\x1b" not in ran.out
    assert "tok/s" not in ran.out
    assert re.search(r"\d+ tokens · [\d.]+ tok/s · TTFT", ran.err)


def test_the_same_piped_question_gets_the_same_answer(cumulo: Run) -> None:
    first, second = (
        cumulo("chat", quick_model(), "--max-tokens", "12", stdin="Tell me a story.").out for _ in range(2)
    )
    assert first == second
    assert len(first.split()) > 3


def test_a_question_longer_than_the_context_is_refused(cumulo: Run) -> None:
    ran = cumulo("chat", quick_model(), "--max-context", "64", stdin="word " * 200)
    assert ran.code == 2
    assert "the context holds 64" in ran.err


class Terminal:
    """`cumulo chat` in a pseudo-terminal: type, and wait for what appears."""

    def __init__(self) -> None:
        self.master, slave = pty.openpty()
        with os.fdopen(slave, "r+b", buffering=0) as end:
            self.process = processes.start(
                ["chat", "--temperature", "0"], stdin=end, stdout=end, stderr=end,
                env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
            )  # fmt: skip
        self.seen = ""

    def type(self, line: str) -> None:
        os.write(self.master, line.encode() + b"\n")

    def wait_for(self, pattern: str) -> str:
        """Everything up to and including the pattern since the last call."""
        deadline = time.monotonic() + PATIENCE_S
        while not (match := re.search(pattern, self.seen)):
            if time.monotonic() > deadline or not self._read():
                pytest.fail(f"{pattern!r} did not appear in {self.seen!r}")
        found, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return found

    def interrupt(self, seen: Callable[[], bool]) -> None:
        """Ctrl-C at the prompt: one that comes before the wait for a key would be heard with the next key only."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._waits_for_a_key():
            assert time.monotonic() < deadline, self.seen
            time.sleep(0.01)
        self.process.send_signal(signal.SIGINT)
        while not seen():
            assert time.monotonic() < deadline, self.seen
            if not self._read():
                code = self.process.wait(PATIENCE_S)
                assert seen(), f"the program ended with {code}: {self.seen!r}"

    def _waits_for_a_key(self) -> bool:
        number = Path(f"/proc/{self.process.pid}/syscall").read_text().split()[0]
        return number in WAITS_FOR_A_KEY[platform.machine()]

    def _read(self) -> bool:
        if select.select([self.master], [], [], 1.0)[0]:
            try:
                self.seen += os.read(self.master, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                return False
        return True


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.process.kill()
    terminal.process.wait()
    os.close(terminal.master)


def test_a_conversation_in_a_terminal(terminal: Terminal) -> None:
    terminal.wait_for("/help lists the commands")
    terminal.wait_for("> ")
    terminal.type("What is the capital of France?")
    assert "Paris" in terminal.wait_for(r"tok/s.*TTFT [\d.]+ s")

    terminal.wait_for("> ")
    terminal.type("And of Italy? Answer in one word.")
    terminal.wait_for(r"prompt tokens cached")  # the conversation so far was computed before

    terminal.wait_for("> ")
    terminal.type("/why")
    terminal.wait_for("admitted to step")
    terminal.wait_for("first token")

    terminal.wait_for("> ")
    terminal.type("/stats")
    terminal.wait_for("2 answers")
    terminal.wait_for("kv cache")

    terminal.wait_for("> ")
    terminal.type("/dance")
    terminal.wait_for("there is no command /dance")

    terminal.wait_for("> ")
    terminal.type("/set temperature 0.7")
    terminal.wait_for("temperature is now 0.7")
    terminal.wait_for("> ")
    terminal.type("/set top-p 7")
    terminal.wait_for("top_p must be")
    terminal.wait_for("> ")
    terminal.type("/set temprature 1")
    terminal.wait_for("did you mean temperature")
    terminal.wait_for("> ")
    terminal.type("/set max_tokens 3")
    terminal.wait_for("max_tokens is now 3")

    terminal.wait_for("> ")
    terminal.type('"""Several')
    terminal.wait_for(r"\.\.\. ")
    terminal.type('lines."""')
    terminal.wait_for("3 tokens")
    terminal.wait_for("> ")
    terminal.type("a line that goes\\")
    terminal.wait_for(r"\.\.\. ")
    terminal.type("on")
    terminal.wait_for("3 tokens")

    terminal.wait_for("> ")
    terminal.type("/exit")
    assert terminal.process.wait(PATIENCE_S) == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.type("Write a very long story about a dragon.")
    terminal.wait_for(r"\w+ \w+ \w+ \w+ \w+ \w+ \w+ \w+ \w+ \w+")  # past the echoed question, into the answer
    terminal.wait_for(r"\w+ \w+ \w+ ")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("stopped")
    terminal.wait_for("> ")
    assert terminal.process.poll() is None
    terminal.type("/why")
    assert "finished: stop" not in terminal.wait_for("finished: abort")


@pytest.mark.thorough
def test_a_second_ctrl_c_at_the_prompt_exits(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.interrupt(lambda: "press Ctrl-C again to exit" in terminal.seen)
    terminal.wait_for("press Ctrl-C again to exit")
    terminal.wait_for("> ")
    terminal.interrupt(lambda: terminal.process.poll() is not None)
    assert terminal.process.wait() == 0

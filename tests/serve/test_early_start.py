"""An engine process that is started early is used once, and ends with a server that cannot start."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from cumulo.serve.engine_link import early_start

_FAILING = """
import atexit, sys
from cumulo.serve.engine_link import early_start
begin = early_start.begin
def noted():
    begin()
    print(early_start._spare[0].pid, flush=True)
early_start.begin = noted
from cumulo.cli import main
sys.argv = ["cumulo", "serve", "--port", "0", "no-such-model.gguf"]
main()
"""


def test_it_is_taken_once_and_only_with_the_environment_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def popen(arguments: list[str], **options: Any) -> Any:
        started.append(SimpleNamespace(environment=options["env"]))
        return started[-1]

    monkeypatch.setattr(early_start, "subprocess", SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE))
    monkeypatch.setattr(early_start.atexit, "register", lambda end: None)
    early_start.begin()
    pinned, _ = early_start.take_process({"CUDA_VISIBLE_DEVICES": "1"})
    assert pinned is started[1] and pinned.environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert early_start.take_process({})[0] is started[0]
    assert early_start.take_process({})[0] is started[2]


@pytest.mark.long
def test_it_ends_with_a_server_that_cannot_start() -> None:
    done = subprocess.run([sys.executable, "-c", _FAILING], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "there is no model at" in done.stderr and "Traceback" not in done.stderr
    with pytest.raises(ProcessLookupError):
        early_start.os.kill(int(done.stdout), 0)

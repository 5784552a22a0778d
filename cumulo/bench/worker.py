"""A benchmark side in a process of its own, so that threads and memory are its own: both ends of the pipe.

`SideProcess` (in the benchmark's process) starts `python -m cumulo.bench.worker NAME ...` and asks it for one
measurement at a time; requests and answers are JSON lines. Between requests the worker sleeps in read().
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cumulo.errors import CumuloError


class SideProcess:
    """One running side. `ask` blocks until it has answered."""

    def __init__(self, name: str, model: str | None, model_path: Path, threads: int, **settings: Any) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        settings |= {"name": name, "model": model, "model_path": str(model_path), "threads": threads}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cumulo.bench.worker", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"},
        )

    def ask(self, command: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"the {self.name} side of the benchmark died:\n{self._log_tail()}")
        answer = json.loads(line)
        if "user_error" in answer:
            raise CumuloError(answer["user_error"])
        return answer["value"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _log_tail(self) -> str:
        self._log.seek(0)
        return "".join(self._log.readlines()[-30:])


def serve(settings: dict[str, Any]) -> None:
    """Load the side named in `settings` and answer requests from stdin until it ends."""
    # Libraries print; only answers may go to the pipe.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    side: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        command = request.pop("command")
        try:
            if command == "load":
                from cumulo.bench.sides import make_side

                began_s = time.perf_counter()
                side = make_side(**settings | {"model_path": Path(settings["model_path"])})
                answer(value=time.perf_counter() - began_s)
            elif command == "peak_memory_bytes":
                # Linux counts in KiB, macOS in bytes.
                unit = 1 if sys.platform == "darwin" else 1024
                answer(value=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
            else:
                answer(value=getattr(side, command)(**request))
        except CumuloError as error:
            answer(user_error=str(error))


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))

"""Plays the cases of a module in a process of its own: `python -m tests.compile.backend.play MODULE OUT`.

The other tests' process has asked for Triton's interpreter, and Triton asks once. A case is a function `case_*`
that raises where something differs; what a case returns (tensors by name) is kept in OUT, and so can be compared
between the back end and the interpreter.
"""

import importlib
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import torch


def play(module: str, out: Path, interpreted: bool = False, only: str = "") -> dict[str, Any]:
    """{case: its traceback, or what it returned}."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "tests.compile.backend.play", module, str(out), only]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    played: dict[str, Any] = torch.load(out)
    return played


def _main(module_name: str, out: str, only: str = "") -> None:
    torch.manual_seed(0)
    module = importlib.import_module(module_name)
    results: dict[str, Any] = {}
    for name, function in vars(module).items():
        if name.startswith("case_") and only in name:
            try:
                print(name, file=sys.stderr, flush=True)
                results[name] = function() or {}
            except Exception:
                results[name] = traceback.format_exc(limit=-6)
    torch.save(results, out)


if __name__ == "__main__":
    _main(*sys.argv[1:])

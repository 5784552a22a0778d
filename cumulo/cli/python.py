"""`cumulo python`: the Python that `cumulo` runs in, where `import cumulo` works whatever environment is active."""

import os
import sys

import typer

EXAMPLE = "Example: [bold]cumulo python examples/quickstart.py[/bold]"
SETTINGS = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}  # options behind FILE are its own


def python(
    words: list[str] = typer.Argument(None, metavar="FILE", help="A program and its arguments."),
) -> None:
    """Run a Python program that imports cumulo, from any folder and without activating an environment."""
    os.execv(sys.executable, [sys.executable, *(words or [])])

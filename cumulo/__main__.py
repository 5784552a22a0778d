"""`python -m cumulo`: the command, for processes that others start (torchrun, `launch.py`)."""

from cumulo.cli import main

main()

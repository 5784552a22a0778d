"""`python -m cumulo.cli` is `cumulo`, for environments whose scripts are not on the PATH."""

from cumulo.cli import main

main()

"""The command in this process, as tests of the command line run it."""

from tests.cli.conftest import cumulo as cumulo

"""The command `cumulo`: one file per verb, no logic of its own. `main` is the entry point."""

import os
import sys

from cumulo.cli.shared.terminal import print_error
from cumulo.errors import CumuloError


def main() -> None:
    """Run the command line; an error meant for the user is one line on stderr and exit code 2."""
    from typer.main import get_command

    from cumulo.cli.app import application
    from cumulo.cli.shared.help import use_plain_types

    command = get_command(application(sys.argv[1:]))
    use_plain_types(command)
    try:
        command(prog_name="cumulo")
    except CumuloError as error:
        print_error(error)
        sys.exit(2)
    except BrokenPipeError:
        # `cumulo generate ... | head`: the reader has gone; point stdout elsewhere so exit stays silent.

        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)

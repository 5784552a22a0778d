"""The command `cumulo`: one file per verb, no logic of its own. `main` is the entry point."""

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Run the command line; an error meant for the user is one line on stderr and exit code 2."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(130)


def _run() -> None:
    from typer.main import get_command

    from cumulo.cli.app import application
    from cumulo.cli.shared.help import use_plain_types
    from cumulo.cli.shared.terminal import print_error
    from cumulo.errors import CumuloError

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


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Ctrl-C is a KeyboardInterrupt, as always, but ends the process at once in the middle of an import: compiled
    modules, such as numpy's, swallow the exception there and are half-imported from then on."""
    while frame is not None and "importlib._bootstrap" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        raise KeyboardInterrupt
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")  # a progress display hides the cursor
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)

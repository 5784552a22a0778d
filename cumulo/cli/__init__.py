"""The command `cumulo`: one file per verb, no logic of its own. `main` is the entry point."""

import os
import sys
from copy import copy
from typing import TYPE_CHECKING

from cumulo.cli.shared.terminal import print_error
from cumulo.errors import CumuloError

if TYPE_CHECKING:
    import typer
    from typer.models import CommandInfo, TyperInfo


def main() -> None:
    """Run the command line; an error meant for the user is one line on stderr and exit code 2."""
    from typer.main import get_command

    from cumulo.cli.app import app
    from cumulo.cli.shared.help import use_plain_types

    command = get_command(with_needed_verbs(app, sys.argv[1:]))
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


def with_needed_verbs(app: "typer.Typer", words: list[str]) -> "typer.Typer":
    """A copy of the application with the verb that `words` name; the list of verbs needs none of their options.

    Typer makes every option of every verb that it is given, which takes longer than the rest of a short command.
    """
    verbs, groups = app.registered_commands, app.registered_groups
    named = words[0] if words else "--help"
    if named in ("-h", "--help"):
        verbs = [_without_options(verb) for verb in verbs]
        groups = [_with_needed_verbs_of(group, []) for group in groups]
    else:
        verbs = [verb for verb in verbs if _name(verb) == named]
        groups = [_with_needed_verbs_of(group, words[1:]) for group in groups if group.name == named]
        if not verbs and not groups:  # an option, or a mistake: typer knows what to say
            return app
    needed = copy(app)
    needed.registered_commands, needed.registered_groups = verbs, groups
    return needed


def _with_needed_verbs_of(group: "TyperInfo", words: list[str]) -> "TyperInfo":
    needed = copy(group)
    if group.typer_instance is not None:
        needed.typer_instance = with_needed_verbs(group.typer_instance, words)
    return needed


def _without_options(verb: "CommandInfo") -> "CommandInfo":
    def shown() -> None:
        """The verb without its options, for the list of verbs."""

    shown.__doc__ = verb.callback.__doc__
    listed = copy(verb)
    listed.name, listed.callback = _name(verb), shown
    return listed


def _name(verb: "CommandInfo") -> str:
    return verb.name or getattr(verb.callback, "__name__", "").replace("_", "-")

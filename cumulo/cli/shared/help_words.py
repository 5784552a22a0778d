"""Words for the types of options in --help: TEXT, INTEGER, FLOAT, PATH, and nothing for a flag. Called by `main`.

Newer releases of typer write <str>, <int> and <bool>, older ones TEXT, INTEGER and nothing: with this all agree.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from cumulo.cli.shared.help_page import print_help

_WORDS = {str: "TEXT", int: "INTEGER", float: "FLOAT", Path: "PATH"}


def use_plain_types(command: Any) -> None:
    """For a command and all commands below it."""
    for parameter in command.params:
        if parameter.param_type_name == "argument":  # it is named, and its help says what it is
            parameter.display_type_rich = lambda ctx: ""
            parameter.metavar = parameter.metavar or parameter.name.upper()
            parameter.get_usage_pieces = _usage(parameter)
        elif parameter.metavar is None:
            parameter.metavar = _word(parameter)
    ask_help = command.get_help_option

    def help_option(context: Any) -> Any:
        option = ask_help(context)
        if option is not None:
            option.metavar = ""
        return option

    command.get_help_option = help_option
    command.format_help = lambda context, formatter: print_help(command, context)
    for inner in getattr(command, "commands", {}).values():
        use_plain_types(inner)


def _usage(parameter: Any) -> Callable[[Any], list[str]]:
    """NAME, or [NAME] where it can be omitted, with ... where there can be several; never {NAME} or [[NAME]]."""
    name = parameter.metavar if parameter.required else f"[{parameter.metavar}]"
    return lambda ctx: [name if parameter.nargs == 1 else f"{name}..."]


def _word(parameter: Any) -> str | None:
    """None: as typer writes it (choices, for instance)."""
    if getattr(parameter, "is_flag", False):
        return ""
    kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    kinds = get_args(kind) or (kind,)
    return _WORDS.get(next((one for one in kinds if one in _WORDS), type(None)))

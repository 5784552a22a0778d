"""Words for the types of options in --help: TEXT, INTEGER, FLOAT, FILE, and nothing for a flag. Called by `main`.

Newer releases of typer write <str>, <int> and <bool>, older ones TEXT, INTEGER and nothing: with this all agree.
"""

import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

_WIDEST = 110  # longer lines are hard to read
_UNBROKEN = "\N{NO-BREAK SPACE}"
_NAMES = 26  # the widest column of names
_WORDS_OF_OPTIONS = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
_FACTS = re.compile(r" +\[((?:default|env var|required|x|\d)[^\[\]]*)\]$")  # what click adds to a text
_EPILOG = re.compile(r"(?P<title>[^\[]*): *\[bold\](?P<command>.*?)\[/bold\](?P<rest>.*)", re.S)

Rows = list[tuple[str, str]]


def print_help(command: Any, context: Any) -> None:
    from rich.console import Console
    from rich.text import Text

    out = Console(highlight=False)
    width = min(out.width, _WIDEST)
    usage = command.get_usage(context).removeprefix("Usage: ")
    lines = textwrap.wrap(" ".join(usage.split()), width - 9, break_on_hyphens=False)
    out.print(Text.assemble("\n ", ("Usage: ", "yellow"), ("\n        ".join(lines), "bold"), "\n"))
    for paragraph in _paragraphs(command.help):
        out.print(Text(textwrap.indent(textwrap.fill(paragraph, width - 2), " ") + "\n"), soft_wrap=True)
    for title, rows in _panels(command, context).items():
        out.print(_panel(title, rows, width))
    if found := _EPILOG.match(" ".join((command.epilog or "").split())):
        out.print(_example(found, width), soft_wrap=True)


def _paragraphs(text: str | None) -> list[str]:
    return [" ".join(part.split()) for part in inspect.cleandoc(text or "").split("\n\n") if part.strip()]


def _panels(command: Any, context: Any) -> dict[str, Rows]:
    """The title of each panel, and its rows: the arguments first, then the options, then the commands."""
    panels: dict[str, Rows] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(context):
        record = None if getattr(parameter, "hidden", False) else parameter.get_help_record(context)
        if record is None:
            continue
        usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
        title = getattr(parameter, "rich_help_panel", None) or usual
        names, text = record
        panels.setdefault(title, []).append((" ".join(names.split()), _FACTS.sub(_facts, text)))
    panels["Options"] = (
        panels.pop("Options") if len(panels) > 2 and len(panels["Options"]) < 4 else panels["Options"]
    )
    for name, inner in getattr(command, "commands", {}).items():
        title = getattr(inner, "rich_help_panel", None) or "Commands"
        panels.setdefault(title, []).append((name, next(iter(_paragraphs(inner.help)), "")))
    return {title: rows for title, rows in panels.items() if rows}


def _facts(found: re.Match[str]) -> str:
    """Whole numbers without .0 and ranges in words, with spaces at which no line is broken."""
    facts = re.sub(r"(\d)\.0\b(?!\.)", r"\1", found[1])
    facts = re.sub(r"(\S+)<=x<=(\S+)", r"\1 to \2", facts)
    facts = re.sub(r"x>=(\S+)", r"at least \1", facts)
    facts = re.sub(r"x>(\S+)", r"more than \1", facts)
    return f" [{facts}]".replace(" ", _UNBROKEN).replace(_UNBROKEN, " ", 1)


def _wrapped(text: str, width: int) -> list[str]:
    """Whole words; one that is longer than a line, such as a list of settings, is broken after a comma."""
    words = [
        piece
        for word in text.split(" ")
        for piece in (_lines(re.split(r"(?<=,)", word), "", width) if word else [])
    ]
    lines = textwrap.wrap(" ".join(words), width, break_long_words=False, break_on_hyphens=False)
    return [line.replace(_UNBROKEN, " ") for line in lines]


def _lines(parts: list[str], joint: str, width: int) -> list[str]:
    """The parts in lines of at most this width, as many in each as fit."""
    lines = parts[:1]
    for part in parts[1:]:
        joined = f"{lines[-1]}{joint}{part}"
        lines = [*lines[:-1], joined] if len(joined) <= width else [*lines, part]
    return lines


def _panel(title: str, rows: Rows, width: int) -> Any:
    from rich.panel import Panel
    from rich.text import Text

    names = min(max(len(name) for name, _ in rows), _NAMES)
    page = Text()
    for name, text in rows:
        lines = _wrapped(text, width - names - 6)
        first = lines[:1] if len(name) <= names else []
        page.append(_shown(name.ljust(names + 2) if first else name, bold=True))
        page.append(_shown("".join(first), bold=False)).append("\n")
        for line in lines[len(first) :]:
            page.append(" " * (names + 2)).append(_shown(line, bold=False)).append("\n")
    page.rstrip()
    return Panel(page, title=title, title_align="left", border_style="dim", width=width)


def _shown(text: str, bold: bool) -> Any:
    """The names of options stand out, everywhere."""
    from rich.text import Text

    shown = Text(text)
    shown.highlight_regex(_WORDS_OF_OPTIONS, "bold cyan" if bold else "cyan")
    if bold and not text.startswith("-"):
        shown.stylize("bold cyan")
    return shown


def _example(found: re.Match[str], width: int) -> Any:
    """On a line of its own; a long command is continued with backslashes, so that it can be pasted."""
    from rich.text import Text

    lines = _lines(re.split(r" (?=--|\||&&)", found["command"]), " ", width - 8)
    rest = found["rest"].strip(" ,")
    page = Text.assemble(f"\n {found['title']}:\n   ", (" \\\n     ".join(lines), "bold"))
    if rest:
        ending = rest[0].upper() + rest[1:] + ("" if rest.endswith(".") else ".")
        page.append("\n\n " + "\n ".join(textwrap.wrap(ending, width - 2, break_on_hyphens=False)))
    return page


_WORDS = {str: "TEXT", int: "INTEGER", float: "FLOAT", Path: "FILE"}  # of folders the options say DIR


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
    """The word for the parameter's type; None leaves it to typer (choices, for instance)."""
    if getattr(parameter, "is_flag", False):
        return ""
    kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    kinds = get_args(kind) or (kind,)
    return _WORDS.get(next((one for one in kinds if one in _WORDS), type(None)))

"""What the pages, the help and the examples tell people to type. Used by the tests of the documentation.

A block of commands is run as it stands. One that cannot be here says why in a comment directly before it:
`<!-- not run: needs a GPU -->`. Its commands are still held against the command line's own options.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from typer.main import get_command

from tests.cli.conftest import ROOT
from tests.whole_command import app

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"(?:^<!-- not run: (.*?) -->\n+)?^```(\w*)\n(.*?)^```", re.S | re.M)
_OUTPUT = re.compile(r"\n\n```text\n(.*?)^```", re.S | re.M)
_INLINE = re.compile(r"`(cumulo [a-z][^`]*)`")
_COMMAND = re.compile(r"(?:^|[|;&] *)((?:\$ )?cumulo .*)")


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    not_run: str | None  # why
    output: str | None  # the block of text directly after it

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_program(self) -> bool:
        """Python that is run as a file; `>>>` examples are doctests, which have a test of their own."""
        return self.language == "python" and not self.text.startswith(">>>")

    @property
    def commands(self) -> list[str]:
        """The lines that a shell would run; what they print is left out."""
        if self.language not in ("", "sh", "bash", "console"):
            return []
        joined = self.text.replace("\\\n", " ")
        shown = [line.strip() for line in joined.splitlines() if line.strip()]
        if any(line.startswith("$ ") for line in shown):
            return [line.removeprefix("$ ") for line in shown if line.startswith("$ ")]
        programs = (
            "cumulo ",
            "make ",
            "echo ",
            "python ",
            "curl ",
            "prometheus ",
            "schemathesis ",
            "pip ",
            "export ",
        )
        return [line for line in shown if line.startswith(programs)]


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text("utf-8")
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start(2)) + 1
            output = _OUTPUT.match(text, match.end())
            found.append(Block(page, line, match[2], match[3], match[1], output[1] if output else None))
    return found


def all_commands() -> Iterator[tuple[str, str]]:
    """Every `cumulo ...` that people are told to type: where, and what."""
    for block in blocks():
        yield from ((block.name, command) for command in block.commands)
    for page in PAGES:
        outside = _BLOCK.sub("", page.read_text("utf-8"))
        yield from ((str(page.relative_to(ROOT)), found[1]) for found in _INLINE.finditer(outside))
    for example in sorted(path for path in (ROOT / "examples").glob("*") if path.is_file()):
        for line in example.read_text("utf-8").splitlines():
            if (found := re.search(r"#.*?(cumulo (?:train|plan|serve|chat) .*)", line)) is not None:
                yield example.name, re.split(r"   ", found[1])[0]
    yield from help_examples()


def help_examples() -> Iterator[tuple[str, str]]:
    """The examples at the end of --help, by command."""

    def walk(command: Any, name: str) -> Iterator[tuple[str, str]]:
        for text in re.findall(r"\[bold\](.*?)\[/bold\]", command.epilog or "", re.S):
            yield f"{name} --help", " ".join(text.split())
        for inner, below in getattr(command, "commands", {}).items():
            yield from walk(below, f"{name} {inner}")

    yield from walk(get_command(app), "cumulo")


@cache
def _commands() -> Any:
    return get_command(app)


def problem_with(line: str) -> str | None:
    """What is wrong with the `cumulo` commands of a line, by the command line's own definitions."""
    for found in _COMMAND.finditer(line):
        text = re.split(r" (?:#|\||>|<|&&) ?", found[1])[0]
        try:
            words = shlex.split(text.removeprefix("$ "), comments=True)[1:]
        except ValueError as error:
            return str(error)
        command = _commands()
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        if getattr(command, "commands", None) and words and not words[0].startswith("-"):
            return f"there is no command {words[0]!r} in {text!r}"
        known = {
            name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)
        }
        known |= {"--help", "-h"}
        for word in words:
            option = word.partition("=")[0]
            if re.fullmatch(r"--[a-z][a-z-]*", option) and option not in known:
                return f"there is no option {option} in {text!r}"
    return None

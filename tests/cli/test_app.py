"""The command as a whole: it starts quickly, explains itself, and tells users' errors from its own."""

import subprocess
import sys
from typing import Any

import pytest
from typer.main import get_command

from cumulo import __version__
from cumulo.cli.app import application
from cumulo.cli.shared.help import use_plain_types
from cumulo.errors import CumuloError
from tests.cli.conftest import ROOT, Run, cumulo_process
from tests.whole_command import app

VERBS = [
    ("chat",),
    ("generate",),
    ("doctor",),
    ("train",),
    ("data", "build"),
    ("data", "show"),
    ("bench", "guided"),
    ("bench",),
    ("bench", "engine"),
    ("bench", "scheduler"),
    ("bench", "kernels"),
]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_explains_itself_with_an_example(cumulo: Run, verb: tuple[str, ...]) -> None:
    ran = cumulo(*verb, "--help")
    assert ran.code == 0
    assert "Usage:" in ran.out
    if verb != ("bench",):
        assert "Example:" in ran.out
        assert "cumulo " + " ".join(verb) in ran.out.split("Example:")[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("verb", "usage"),
    [
        (("explain",), "explain [OPTIONS] ID [N]"),
        (("train",), "train [OPTIONS] [CONFIG.yaml|DATA...]"),
        (("data", "build"), "data build [OPTIONS] FOLDER SOURCES..."),
        (("generate",), "generate [OPTIONS] [PROMPT]"),
    ],
)
def test_usage_lines_name_arguments_as_users_know_them(verb: tuple[str, ...], usage: str) -> None:
    ran = cumulo_process(*verb, "--help")  # a process: help is set up in `main`
    assert f"Usage: cumulo {usage}" in " ".join(ran.out.split())


def test_no_help_page_is_cut_off_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = get_command(app)
    use_plain_types(command)

    def look(command: Any, context: Any, path: str) -> int:
        command.format_help(context, None)
        page = capsys.readouterr().out
        assert "…" not in page, path
        assert max(map(len, page.splitlines())) <= 80, path
        assert "[[" not in page and "<bool>" not in page, path
        for parameter in command.get_params(context):
            assert all(name in page for name in parameter.opts if name.startswith("-")), path
        inner = getattr(command, "commands", {})
        return 1 + sum(
            look(one, one.context_class(one, parent=context, info_name=name), f"{path} {name}")
            for name, one in inner.items()
        )

    assert look(command, command.context_class(command, info_name="cumulo"), "cumulo") > 40


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--help"],
        ["plan", "-h"],
        ["bench"],
        ["doctor", "--help"],
        ["simulate", "network", "--help"],
        ["plan", "trian"],
    ],
)
def test_importing_only_the_named_verbs_changes_no_page(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pages = []
    for made in (app, application(words)):
        command = get_command(made)
        use_plain_types(command)
        with pytest.raises(SystemExit):
            command(words, prog_name="cumulo")
        shown = capsys.readouterr()
        pages.append(shown.out + shown.err)
    assert pages[0] == pages[1] and "Usage: cumulo" in pages[0]


def test_help_imports_no_torch() -> None:
    script = (
        "import sys\nfrom cumulo.cli import main\nsys.argv = ['cumulo', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('heavy:', [name for name in ('torch', 'numpy', 'tokenizers', 'gguf') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "chat" in done.stdout
    assert done.stdout.rstrip().endswith("heavy: []")


def test_the_version_is_shown(cumulo: Run) -> None:
    assert cumulo("--version").out.strip() == f"cumulo {__version__}"


def test_an_unknown_verb_is_refused() -> None:
    ran = cumulo_process("dance")
    assert ran.code == 2
    assert "dance" in ran.err
    assert "Traceback" not in ran.err


def test_a_user_error_is_one_line_and_exit_code_two(cumulo: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise CumuloError("the [file] is\nmissing: get one")

    monkeypatch.setattr("cumulo.cli.generate.run_jobs", fail)
    ran = cumulo("generate", "hello")
    assert ran.code == 2
    assert ran.err == "error: the [file] is missing: get one\n"
    assert ran.out == ""


def test_an_error_of_ours_keeps_its_traceback(cumulo: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("cumulo.cli.generate.run_jobs", fail)
    with pytest.raises(ZeroDivisionError):
        cumulo("generate", "hello")

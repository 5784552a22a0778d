"""What people are told to type exists, and runs as it stands."""

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import processes
from tests.cli.conftest import ROOT, needs_built_in_model
from tests.docs.pages import PAGES, Block, all_commands, blocks, help_examples, problem_with
from tests.serve.running_server import MODEL, wait_for

PATIENCE_S = 900  # a hang guard
SERVER = "cumulo serve"


def test_every_command_that_people_are_told_to_type_exists() -> None:
    found = list(all_commands())
    assert len(found) > 60
    wrong = [f"{where}: {problem}" for where, line in found if (problem := problem_with(line)) is not None]
    assert not wrong, "\n".join(wrong)


def test_a_command_that_does_not_exist_is_noticed() -> None:
    assert problem_with("cumulo serve --port 8000") is None
    assert problem_with('echo "x" | cumulo chat --system "Be brief."  # a comment --nothing') is None
    assert "--prot" in str(problem_with("cumulo serve --prot 8000"))
    assert "fly" in str(problem_with("cumulo plan fly"))


def test_every_curl_that_sends_something_says_that_it_is_json() -> None:
    """curl calls a body a form unless it is told otherwise, and a server refuses that."""
    sent = [
        (block.name, line)
        for block in blocks()
        for line in block.text.replace("\\\n", " ").splitlines()
        if "curl " in line and re.search(r" (-d|--data\S*|--json) ", line)
    ]  # fmt: skip
    assert len(sent) > 3
    assert not [one for one in sent if "--json" not in one[1] and "application/json" not in one[1]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with nothing in it but what README's first command puts there, and a copy of the examples."""
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(ROOT / "examples", home / "work" / "examples")
    (home / "work" / "question.txt").write_text("What is the capital of France?")
    (home / "work" / "prompts.txt").write_text("The sun rises in the\nTwo and two are\n")
    (home / "work" / "prompts.jsonl").write_text('{"prompt": "The sun rises in the", "max_tokens": 4}\n')
    (home / "work" / "texts").mkdir()
    (home / "work" / "texts" / "a.txt").write_text("the cat sat on the mat. " * 200)
    (home / "work" / "trace.jsonl").write_text(
        '{"arrival_s": 0.0, "prompt_tokens": 90, "output_tokens": 12, "prefix": "a", "prefix_tokens": 64}\n'
    )
    return home


def _environment(home: Path) -> dict[str, str]:
    return {
        "HOME": str(home), "PATH": f"{home}/.local/bin:/usr/bin:/bin", "COLUMNS": "120", "LANG": "C.UTF-8",
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", f"{home}/.cache"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def shell(home: Path, line: str) -> subprocess.CompletedProcess[str]:
    """As a person would type it, in a shell that finds nothing of the checkout but the installed command."""
    folder = ROOT if line.startswith("make ") else home / "work"
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env=_environment(home), capture_output=True, text=True,
        timeout=PATIENCE_S, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def until_stopped(home: Path, line: str) -> str:
    """What a command that runs for ever says until it is up; then it gets Ctrl+C, and ends as it should."""
    log = home / "until-stopped.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {line}"], cwd=home / "work", env=_environment(home), stdin=subprocess.DEVNULL,
            stdout=stream, stderr=stream,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
        )  # fmt: skip
    try:
        wait_for(lambda: "listens on" in log.read_text() or process.poll() is not None, line)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0, log.read_text()
    finally:
        process.kill()
    return log.read_text()


@pytest.fixture(scope="module")
def installed(home: Path) -> Path:
    if shutil.which("make") is None or not (ROOT / ".venv/.ready").exists():
        pytest.skip("needs make, and an environment that make has set up")
    done = shell(home, "make install")
    assert done.returncode == 0, done.stderr
    assert (home / ".local/bin/cumulo").exists()
    assert "export PATH" not in done.stderr  # it is on the path already
    return home


@pytest.fixture(scope="module")
def server(installed: Path) -> Iterator[str]:
    """`cumulo serve` at the address that the pages name; answers that nobody bounds are short."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", 8000))
        except OSError:
            pytest.skip("the pages say port 8000, and another program has it")
    log = installed / "serve.log"
    with log.open("w") as stream:
        words = ["serve", "--threads", "1", "--default-max-tokens", "48"]
        process = processes.start(words, stdout=stream, stderr=stream, cwd=installed / "work")
    try:
        wait_for(lambda: "is ready at" in log.read_text() or process.poll() is not None, "the server")
        if "cannot listen on" in log.read_text():
            pytest.skip("the pages say port 8000, and another program took it meanwhile")
        assert process.poll() is None, log.read_text()
        yield "http://127.0.0.1:8000"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(300)


_README = [
    command
    for block in blocks()
    if block.page == PAGES[0] and block.not_run is None
    for command in block.commands
]


@needs_built_in_model
@pytest.mark.parametrize(  # tests/cli/test_doctor.py runs the doctor, too
    "line", [pytest.param(line, marks=pytest.mark.long if "doctor" in line else ()) for line in _README[1:]]
)
def test_a_command_of_the_readme_runs_as_it_stands(installed: Path, line: str) -> None:
    done = shell(installed, line)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    if "capital of France" in line:
        assert "Paris" in done.stdout


def test_the_readme_begins_with_the_installation_and_asks_a_question() -> None:
    assert _README[0] == "make install" and any("capital of France" in line for line in _README)


@needs_built_in_model
@pytest.mark.long
def test_readmes_programs_run_as_they_stand(installed: Path, server: str) -> None:
    programs = [block for block in blocks() if block.page == PAGES[0] and block.language == "python"]
    assert len(programs) == 2
    for block in programs:
        file = installed / "work" / "readme.py"
        file.write_text(block.text)
        done = shell(installed, "cumulo python readme.py")  # as README says
        assert done.returncode == 0, f"{block.name}\n{done.stderr}"
        assert len(done.stdout.split()) > 10, done.stdout


_PROGRAMS = [block for block in blocks() if block.page != PAGES[0] and block.is_program]


def _program_marks(text: str) -> list[pytest.MarkDecorator]:
    """Only programs that need neither a model nor a server are run every time."""
    heavy = ("LLM", "127.0.0.1", "train", "profile.yaml", "quantise(")
    return [pytest.mark.thorough] if any(word in text for word in heavy) else []


@needs_built_in_model
@pytest.mark.parametrize(
    "block", [pytest.param(block, marks=_program_marks(block.text), id=block.name) for block in _PROGRAMS]
)
def test_a_program_of_the_documentation_runs_as_it_stands(
    home: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, block: Block
) -> None:
    if block.not_run is not None:
        pytest.skip(block.not_run)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # it is the tests', and not the reader's
    if "127.0.0.1:8000" in block.text:
        request.getfixturevalue("server")
    if "profile.yaml" in block.text:
        written = shell(
            request.getfixturevalue("installed"), "cumulo calibrate --out profile.yaml --seconds 0.01"
        )
        assert written.returncode == 0, written.stderr
    file = home / "work" / "program.py"
    file.write_text(block.text)
    done = processes.run_program(file, cwd=file.parent)
    assert done.returncode == 0, f"{block.name}\n{done.stderr}"
    if block.output is not None and "cumulo.plan" in block.text:  # the planner prints the same everywhere
        assert done.stdout == block.output


_QUICK = ("cumulo schedule", "cumulo explain")  # the other verbs are run by tests of their own, too


def _marks(line: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.long] if line.startswith(_QUICK) else [pytest.mark.long, pytest.mark.thorough]


_OF_A_SERVER = ("cumulo bench serve", "cumulo explain")


def ask_something(url: str) -> None:
    """A server that `cumulo explain last` can tell something about."""
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 1}
    httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()


_HELP = sorted({line for _, line in help_examples()})


@needs_built_in_model
@pytest.mark.parametrize("line", [pytest.param(line, marks=_marks(line), id=line[:60]) for line in _HELP])
def test_an_example_of_the_help_runs_as_it_stands(
    installed: Path, request: pytest.FixtureRequest, line: str
) -> None:
    if line.startswith(SERVER):
        request.getfixturevalue("server")
        return
    if line.startswith("cumulo gateway"):
        pytest.skip("its servers have the fleet's key; tests/gateway starts gateways with such servers")
    if line.startswith("cumulo kubernetes scaler"):
        assert "Traceback" not in until_stopped(installed, line)
        return
    if line.startswith(_OF_A_SERVER):
        ask_something(request.getfixturevalue("server"))
    done = shell(installed, line)
    # A benchmark exits with 1 when a figure misses its bound, as it may on a busy machine: it ran all the same.
    ran = done.returncode == 0 or (line.startswith("cumulo bench") and "misses must" in done.stdout)
    assert ran, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


_BLOCKS = [block for block in blocks() if block.page != PAGES[0] and block.commands]


@needs_built_in_model
@pytest.mark.thorough
@pytest.mark.parametrize("number", range(len(_BLOCKS)), ids=[block.name for block in _BLOCKS])
def test_a_block_of_the_documentation_runs_as_it_stands(
    installed: Path, request: pytest.FixtureRequest, number: int
) -> None:
    block = _BLOCKS[number]
    if block.not_run is not None:
        pytest.skip(block.not_run)
    for command in block.commands:
        if command.startswith(SERVER) and "--new-api-key" not in command:
            request.getfixturevalue("server")
            continue
        if command.startswith("make "):
            continue  # it is installed
        if command.startswith(_OF_A_SERVER) and "--server" not in command:
            ask_something(request.getfixturevalue("server"))
        done = shell(installed, command)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"

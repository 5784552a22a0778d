"""The container file: what it copies is there, it installs what the package says, and it builds."""

import json
import re
import shutil
import subprocess
import tomllib

import pytest

from tests.cli.conftest import ROOT
from tests.docs.pages import problem_with

FILE = (ROOT / "Containerfile").read_text("utf-8")


def instructions() -> list[tuple[str, str]]:
    lines = [line for line in FILE.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def words_of(name: str) -> list[list[str]]:
    """The words of instructions that are written as lists."""
    return [json.loads(re.sub(r"^.*?(?=\[)", "", rest)) for found, rest in instructions() if found == name]


def test_the_container_file_builds_from_what_is_there() -> None:
    names = [name for name, _ in instructions()]
    assert names[0] == "FROM" and names[-2:] == ["ENTRYPOINT", "CMD"]
    assert names.index("USER") < names.index("ENTRYPOINT"), "it must not run as root"
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for source in (one for name, rest in instructions() if name == "COPY" for one in rest.split()[:-1]):
        assert (ROOT / source).exists() and f"!{source}" in ignored


def test_the_container_installs_what_the_package_and_the_makefile_say() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"'\.\[(.*?)\]'", FILE)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (python,) = re.findall(r"python:3\.(\d+)", FILE)
    assert 11 <= int(python) <= 14
    (torch,) = re.findall(r"torch==(\S+)", FILE)
    assert f"torch=={torch}\n" in (ROOT / "Makefile").read_text()


def test_the_command_of_the_container_exists() -> None:
    (entry,), (command,) = words_of("ENTRYPOINT"), words_of("CMD")
    assert entry == ["cumulo"] and problem_with(" ".join(entry + command)) is None
    (example,) = re.findall(r"docker run cumulo (.*?)\.", FILE.replace("3.1", "3_1"))
    assert problem_with(f"cumulo {example}") is None
    compile(words_of("HEALTHCHECK")[0][2], "the health check", "exec")


def builder() -> str | None:
    """A program that can build here: Docker's needs its daemon."""
    for name in ("docker", "podman", "buildah"):
        if (
            shutil.which(name)
            and subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0
        ):
            return name
    return None


@pytest.mark.thorough
def test_the_container_is_built_and_answers(request: pytest.FixtureRequest) -> None:
    name = builder()
    if name is None:
        pytest.skip("no docker, podman or buildah that works here")
    subprocess.run([name, "build", "-f", "Containerfile", "-t", "cumulo-test", "."], cwd=ROOT, check=True)
    if name != "buildah":
        request.addfinalizer(lambda: subprocess.run([name, "rmi", "-f", "cumulo-test"], check=False))
        asked = [name, "run", "--rm", "-i", "cumulo-test", "chat"]
        done = subprocess.run(
            asked, input="What is the capital of France?", capture_output=True, text=True, check=True
        )
        assert "Paris" in done.stdout

"""The language's corners on the CPU back end, against torch and against Triton's interpreter."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("triton")
SOURCE = Path(__file__).with_name("cases_language.py").read_text()
CASES = [line.split("def ")[1].split("(")[0] for line in SOURCE.splitlines() if line.startswith("def case_")]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    from tests.compile.backend.play import play

    return play("tests.compile.backend.cases_language", tmp_path_factory.mktemp("played") / "results.pt")


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_the_back_end_agrees_with_torch(case: str, played: dict[str, object]) -> None:
    assert isinstance(played[case], dict), played[case]

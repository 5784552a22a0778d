"""The questions that buyers ask: every command of docs/questions runs as it stands, and its answer is what the page
says it must be. A page's table has a figure, where it must lie, and why."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.cli.conftest import ROOT
from tests.docs.pages import blocks
from tests.plan.printed import too_long
from tests.whole_command import app

pytestmark = pytest.mark.long

PAGES = sorted((ROOT / "docs" / "questions").glob("*.md"))
_ROW = re.compile(
    r"^\| (?P<name>[^|]+) \| (?P<low>[\d.,]+) to (?P<high>[\d.,]+) (?P<unit>[^|]+) \| [^|]+ \|$", re.M
)
# The others run with --thorough: seconds of processor time each.
_QUICK = ("lora-8b", "serve-70b", "moe-1t")


@dataclass(frozen=True)
class Answered:
    page: str
    text: str  # as a terminal shows it
    rows: list[dict[str, object]]

    def value(self, name: str, unit: str) -> float:
        """Of the row with this name, or label, in this unit."""
        named = [
            row for row in self.rows if name in (row["name"], row.get("note")) and row["value"] is not None
        ]
        for row in named:
            if row["unit"] == unit:
                return float(row["value"])  # type: ignore[arg-type]
        assert not named, f"{self.page}: {name} is in {named[0]['unit']}, not in {unit}"
        raise AssertionError(f"{self.page}: the answer has no {name!r}")


def commands_of(page: Path) -> list[str]:
    return [
        line
        for block in blocks()
        if block.page == page
        for line in block.commands
        if line.startswith("cumulo plan")
    ]


def _marks(page: Path) -> list[pytest.MarkDecorator]:
    return [] if page.stem in _QUICK else [pytest.mark.thorough]


_ASKED = [pytest.param(page, id=page.stem, marks=_marks(page)) for page in PAGES if page.stem != "index"]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("answers")
    known: dict[str, Answered] = {}

    def asked(page: Path) -> Answered:
        if page.stem not in known:
            text, rows = "", []
            for number, line in enumerate(commands_of(page)):
                file = folder / f"{page.stem}-{number}.json"
                words = [
                    str(folder / word) if word.endswith((".html", ".yaml")) else word
                    for word in shlex.split(line)[1:]
                ]
                done = CliRunner().invoke(app, [*words, "--json", str(file)], env={"COLUMNS": "300"})
                assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception}"
                text += done.output
                rows += json.loads(file.read_text())["rows"]
            known[page.stem] = Answered(page.stem, text, rows)
        return known[page.stem]

    return asked


def test_there_are_ten_questions_and_every_page_says_what_the_answer_must_be() -> None:
    assert len(_ASKED) == 10
    for page in PAGES:
        if page.stem != "index":
            assert commands_of(page), page.name
            assert len(_ROW.findall(page.read_text("utf-8"))) >= 2, page.name


@pytest.mark.parametrize("page", _ASKED)
def test_the_answer_is_what_the_page_says(ask, page: Path) -> None:  # type: ignore[no-untyped-def]
    answer = ask(page)
    for found in _ROW.finditer(page.read_text("utf-8")):
        low, high = (float(found[end].replace(",", "")) for end in ("low", "high"))
        value = answer.value(found["name"].strip(), found["unit"].strip())
        assert low <= value <= high, f"{found['name']}: {value:g}"


@pytest.mark.parametrize("page", _ASKED)
def test_every_figure_has_a_unit_and_every_answer_a_range_and_a_reason(ask, page: Path) -> None:  # type: ignore[no-untyped-def]
    answer = ask(page)
    bare = [row["name"] for row in answer.rows if isinstance(row["value"], int | float) and not row["unit"]]
    assert not bare
    assert re.search(r"\brange\b|90% interval", answer.text)
    assert re.search(r"^why\b", answer.text, re.M | re.I)


@pytest.mark.parametrize("page", _ASKED)
def test_no_number_has_more_than_three_digits_that_count(ask, page: Path) -> None:  # type: ignore[no-untyped-def]
    wrong = too_long(ask(page).text)
    assert not wrong, "\n".join(wrong)

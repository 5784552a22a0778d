"""What the verbs print: names and texts of users are never markup, in sentences, tables and reports."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some
from rich.text import Text

from cumulo.base.report import Row, grid, table
from cumulo.cli.diagnose import diagnose
from cumulo.cli.shared.terminal import WordWrap, err, marked, note, out, print_error
from cumulo.errors import CumuloError

HOSTILE = "node07:1234:1301 :fire:.gguf [red]x[/red] [1]"


def test_a_users_text_is_printed_as_it_is_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out, "width", 300)
    with out.capture() as shown, err.capture() as told:
        out.print(HOSTILE, soft_wrap=True)
        out.print(marked("[bold]{}[/bold] of {}", HOSTILE, ":tada:"), soft_wrap=True)
        out.print(table(HOSTILE, [Row(HOSTILE, HOSTILE, note=HOSTILE)]))
        out.print(grid((HOSTILE, "value"), [(HOSTILE, Text("ok", "green"))], HOSTILE, caption=HOSTILE))
        note(HOSTILE)
        print_error(CumuloError(HOSTILE))
    assert shown.get().count(HOSTILE) == 2 + 4 + 4 and ":tada:" in shown.get()
    assert (
        told.get().count(HOSTILE) == 2 and "error:" in told.get() and "[bold" not in shown.get() + told.get()
    )


@given(
    words=some.lists(
        some.sampled_from(["a", "the", "exactlyten", "houses", "longerthanaline", "\n", "\n\n"])
    ),
    size=some.integers(1, 7),
)
def test_a_text_in_pieces_is_broken_between_words_and_nowhere_else(words: list[str], size: int) -> None:
    text, wrap = " ".join(words), WordWrap(10)
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    shown = "".join([*map(wrap.add, pieces), wrap.end()])
    assert shown.split() == text.split(), "no word is broken"
    assert all(len(line.rstrip()) <= 10 or " " not in line.rstrip() for line in shown.split("\n"))
    assert WordWrap(8).add("鲸鱼在冬天唱歌") == "鲸鱼在冬\n天唱歌", (
        "text without spaces does not wait for its end"
    )


def test_diagnose_repeats_hosts_of_a_log_as_they_stand_there(tmp_path: Path) -> None:
    log = tmp_path / "nccl.txt"
    log.write_text(
        "node07:1234:1301 [3] misc/ibvwrap.cc:262 NCCL WARN NET/IB : mlx5_5:1 Got async event : port error\n"
    )
    with out.capture() as shown:
        diagnose(log, None)
    assert "node07:1234:1301 [3] misc" in shown.get()


@pytest.mark.parametrize("text", ["[/]", "[bold", ":+1:", "[link=x]y[/link]"])
def test_marks_that_would_break_markup_are_text(text: str) -> None:
    with out.capture() as shown:
        out.print(marked("[dim]{}[/dim]", text))
    assert shown.get().strip() == text

"""Patterns that are looked for by their words first (cumulo/base/quick_re.py) find what `re` finds."""

import importlib
import json
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

from cumulo.base import quick_re
from cumulo.plan import diagnose

OUTPUTS = Path(__file__).parents[1] / "collectives/outputs"
LABELS: dict[str, dict[str, str]] = json.loads((OUTPUTS / "labels.json").read_text())


@pytest.mark.parametrize(
    ("pattern", "flags", "words"),
    [
        (r"port \d+ is (?:Down|Init)", 0, ((" is Down", " is Init"), ("port ",))),
        (r"(?:ConnectX|CX)-?\s?[5678]", re.I, (("connectx", "cx"),)),
        (r"\bcold(?:er|est)?\b", 0, (("cold",),)),
        (r"(?:NCCL )?version|(\d+) GB", 0, (("version", " GB"),)),
        (r"(?:ab){2,}|(?:cd){1}", 0, (("ab", "cd"),)),
        (r"a(?!bc)\wd+", 0, ()),  # what must not follow is no word of it
        (r"(?:left|x?)right?", 0, (("righ",),)),
        (r"(?i:on)line", 0, (("line",),)),
        (r"(?:up|\d+)", 0, ()),
        (r"\u212aey", re.I, (("ey",),)),
    ],
)
def test_the_words_that_every_match_contains_are_read_from_the_pattern(
    pattern: str, flags: int, words: tuple[tuple[str, ...], ...]
) -> None:
    assert quick_re.needed_words(re.compile(pattern, flags)) == words


def _patterns(module: ModuleType) -> list[quick_re.Pattern]:
    return [value for value in vars(module).values() if isinstance(value, quick_re.Pattern)]


def test_every_pattern_of_diagnose_finds_what_it_would_find_without_its_words() -> None:
    modules = [
        importlib.import_module(one.name)
        for one in pkgutil.walk_packages(diagnose.__path__, f"{diagnose.__name__}.")
    ]
    patterns = [pattern for module in modules for pattern in _patterns(module)]
    assert len(patterns) > 100
    labels = LABELS["blind_6"]
    texts = [(OUTPUTS / "blind_6" / f"{name}.txt").read_text()[:2000] for name in list(labels)[::9]]
    found = 0
    for text in [*texts, texts[0].upper(), texts[1] + "\u212a \u00d7"]:
        for pattern in patterns:
            plain = re.compile(pattern.pattern, pattern.flags)
            spans = [match.span() for match in plain.finditer(text)]
            assert [match.span() for match in pattern.finditer(text)] == spans, pattern.pattern
            found += bool(spans)
    assert found > 100


def test_search_findall_and_sub_answer_as_re_does_with_the_word_and_without() -> None:
    for text in ("it is COLD, colder", "warm", "\u212aold"):
        assert quick_re.findall("(?i)cold", text) == re.findall("(?i)cold", text)
        assert quick_re.sub("cold", "hot", text, re.I) == re.sub("cold", "hot", text, flags=re.I)
        assert bool(quick_re.search("kold", text, re.I)) == bool(re.search("kold", text, re.I))

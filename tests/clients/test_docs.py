"""The examples for clients in docs/serving.md print what the page says they print."""

import contextlib
import io
import re

import pytest

from tests.serve.running_server import ROOT, RunningServer, needs_built_in_model

pytestmark = [needs_built_in_model, pytest.mark.long]


@pytest.mark.parametrize(
    ("heading", "package"),
    [
        ("### Rerank and score", None),
        ("### Batches", None),
        ("### Responses", "openai"),
        ("### Anthropic's Messages API", "anthropic"),
    ],
)
def test_an_example_prints_what_the_page_says(
    server: RunningServer, heading: str, package: str | None
) -> None:
    if package:
        pytest.importorskip(package)
    section = (ROOT / "docs" / "serving.md").read_text("utf-8").split(f"\n{heading}\n")[1].split("\n### ")[0]
    found = re.search(r"```python\n(.*?)```\n\n```(?:text)?\n(.*?)```", section, re.DOTALL)
    assert found is not None
    code = found[1].replace("http://127.0.0.1:8000", server.url)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {})
    if not package:
        assert out.getvalue() == found[2]
        return
    # Another processor may round differently, and so word a longer answer differently.
    printed, expected = (
        [line.split()[0] for line in text.splitlines()] for text in (out.getvalue(), found[2])
    )
    assert printed == expected, out.getvalue()

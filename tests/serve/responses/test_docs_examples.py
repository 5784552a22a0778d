"""The examples for OpenAI's and Anthropic's clients in docs/serving.md print what the page says they print."""

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.serve.running_server import ROOT, RunningServer, needs_built_in_model

pytestmark = needs_built_in_model


@pytest.mark.parametrize(
    ("heading", "package"), [("### Responses", "openai"), ("### Anthropic's Messages API", "anthropic")]
)
def test_an_example_prints_what_the_page_says(server: RunningServer, heading: str, package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    section = (ROOT / "docs" / "serving.md").read_text("utf-8").split(f"\n{heading}\n")[1].split("\n### ")[0]
    found = re.search(r"```python\n(.*?)```\n\n```(?:text)?\n(.*?)```", section, re.DOTALL)
    assert found is not None
    code = found[1].replace("http://127.0.0.1:8000", server.url)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    # Another processor may round differently, and so word a longer answer differently.
    printed, expected = ([line.split()[0] for line in text.splitlines()] for text in (ran.stdout, found[2]))
    assert printed == expected, ran.stdout

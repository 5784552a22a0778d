"""The examples of reranking and of batches in docs/serving.md print what the page says they print."""

import re
import subprocess
import sys

import pytest

from tests.serve.running_server import ROOT, RunningServer, needs_built_in_model

pytestmark = [needs_built_in_model, pytest.mark.slow]


@pytest.mark.parametrize("heading", ["### Rerank and score", "### Batches"])
def test_an_example_prints_what_the_page_says(server: RunningServer, heading: str) -> None:
    section = (ROOT / "docs" / "serving.md").read_text("utf-8").split(f"\n{heading}\n")[1].split("\n### ")[0]
    found = re.search(r"```python\n(.*?)```\n\n```(?:text)?\n(.*?)```", section, re.DOTALL)
    assert found is not None
    code = found[1].replace("http://127.0.0.1:8000", server.url)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ran.stdout, ran.returncode) == (found[2], 0), ran.stderr

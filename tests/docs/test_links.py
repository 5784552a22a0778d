"""Links between pages lead somewhere, and the site builds."""

import json
import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from cumulo.serve.options import ServeOptions
from tests.cli.conftest import ROOT
from tests.docs.pages import PAGES

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """As GitHub and MkDocs make them of headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    plain = [
        re.sub(r"[^\w\s-]", "", re.sub(r"`|\[|\]\([^)]*\)", "", heading)).strip().lower()
        for heading in headings
    ]
    return {re.sub(r"\s", "-", heading) for heading in plain} | {
        re.sub(r"[\s-]+", "-", heading) for heading in plain
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_pages_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in _LINK.findall(page.read_text("utf-8")):
        path, _, anchor = target.partition("#")
        if path.startswith(("http://", "https://", "mailto:")):
            continue
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and found.suffix == ".md" and anchor not in anchors(found)):
            broken.append(target)
    assert not broken, f"{page.name}: {broken}"


def test_every_page_is_in_the_sites_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    missing = [
        str(page.relative_to(ROOT / "docs"))
        for page in PAGES[1:]
        if str(page.relative_to(ROOT / "docs")) not in navigation
    ]
    assert not missing


def test_the_options_of_the_server_are_those_of_the_command() -> None:
    text = runpy.run_path(str(ROOT / "docs" / "write_options.py"))["options_text"]()
    page = ROOT / "docs" / "serve-options.yaml"
    assert page.read_text("utf-8") == text, "run docs/write_options.py"
    options = {name for panel in yaml.safe_load(text).values() for name in panel}
    assert {"--max-context", "--port", "--api-keys"} <= options


def test_make_docs_runs_next_to_a_server() -> None:
    """MkDocs' own port is 8000, and so is that of `cumulo serve`."""
    (address,) = re.findall(r"^dev_addr: (\S+)", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M)
    assert (
        address != f"127.0.0.1:{ServeOptions().port}"
        and f"http://{address}" in (ROOT / "Makefile").read_text()
    )


@pytest.mark.long
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs-material is not installed (make docs)")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "start" / "run-a-model.html").exists()
    found = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text("utf-8"))["docs"]
    assert any(one["title"] == "Download a model" and "cumulo pull" in one["text"] for one in found)

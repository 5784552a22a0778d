"""Names that strangers choose are text on every page, also where they look like HTML: of models, adapters, tools,
and in the reasons of refusals and of jobs."""

from pathlib import Path
from typing import Any

import pytest

from cumulo.cluster.job_store import JobStore, default_store
from tests.console.browsing import DESKTOP, in_a_browser, looking_at, ready, say, text_of
from tests.console.test_jobs_page import JOB
from tests.serve.running_server import running_server
from tests.serve.tiny_model import save_tiny_model

pytestmark = in_a_browser
HOSTILE = """'"><img src=x onerror="window.forged=1"><script>window.forged=1</script>{{forged}}"""
_FOUND = "() => window.forged || document.querySelectorAll('img[src=x], [onerror]').length"


def test_names_never_become_html(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    store = JobStore(default_store())
    record, _ = store.submit(JOB, "slurm")
    store.change(record, state="queued", reason=HOSTILE, url=HOSTILE)
    model = save_tiny_model(tmp_path)
    options = ("--name", HOSTILE, "--max-loras", "2", "--kv-memory-gib", "0.02")
    with running_server(str(model), *options) as server:
        adapter = {"lora_name": HOSTILE, "lora_path": HOSTILE}
        assert server.post("/v1/load_lora_adapter", adapter).status_code == 400
        chat = {"model": HOSTILE, "messages": [{"role": "user", "content": HOSTILE}], "max_tokens": 2}
        tool = {"type": "function", "function": {"name": HOSTILE}}
        asked = [chat, chat | {"user": HOSTILE, "stop": [HOSTILE]}, chat | {"model": HOSTILE + "y"},
                 chat | {"tools": [tool]}, chat | {HOSTILE: 1}]  # fmt: skip
        statuses = [server.post("/v1/chat/completions", body).status_code for body in asked]
        assert statuses == [200, 200, 404, 400, 400]
        answered = server.post("/v1/chat/completions", chat).json()["id"]
        for path in ("/system", "/live", "/requests", f"/requests/{answered}", "/jobs"):
            with looking_at(browser, server, path, DESKTOP) as page:
                page.get_by_text("forged=1").first.wait_for()
                assert not page.evaluate(_FOUND), path
        unknown = server.get("/none/<img src=x>", headers={"Accept": "text/html"})
        assert unknown.status_code == 404 and "&lt;img" in unknown.text and "<img src=x" not in unknown.text
        with looking_at(browser, server, "/", DESKTOP) as page:
            ready(page)
            say(page, HOSTILE)
            page.locator(".said.user").wait_for()
            page.locator(".said.assistant .foot").wait_for()
            assert "onerror" in text_of(page, ".said.user") and not page.evaluate(_FOUND)

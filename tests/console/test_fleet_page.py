"""The fleet page: what it shows of replicas and decisions, and its buttons in a real browser."""

from pathlib import Path
from typing import Any

import pytest

from cumulo.console.fleet_page import decisions_html, overlap_html, prefill_html, replicas_html, tiles_html
from tests.console.browsing import DESKTOP, PHONE, in_a_browser, looking_at
from tests.serve.running_server import running_server, wait_for
from tests.serve.tiny_model import NAME, save_tiny_model


def replica(name: str, **more: Any) -> dict[str, Any]:
    blocks = {"used": 5, "total": 20, "cached": 10, "also_elsewhere": 4}
    return {
        "name": name, "state": "ready", "detail": None, "pid": 7, "running": 2, "waiting": 1, "waiting_tokens": 30,
        "blocks": blocks, "requests": 9, "prompt_tokens": 400, "cached_tokens": 100, "step_ms": 2.5, "restarts": 0,
        "last_failure": None,
    } | more  # fmt: skip


def test_replicas_are_shown_with_their_trouble_and_with_buttons_only_for_operators() -> None:
    rows = [replica("r0"), replica("r1", state="restarting", last_failure="killed <b>by</b> SIGKILL")]
    shown = replicas_html(rows, may_operate=True)
    assert 'aria-label="Drain r0"' in shown and 'aria-label="Drain r1"' not in shown
    assert "killed &lt;b&gt;by&lt;/b&gt; SIGKILL" in shown and ">25%<" in shown
    assert "<button" not in replicas_html(rows, may_operate=False)
    assert 'aria-label="Undrain r0"' in replicas_html([replica("r0", state="draining")], may_operate=True)


def test_tiles_and_overlap_say_how_evenly_and_how_often() -> None:
    rows = [replica("r0"), replica("r1", prompt_tokens=200, cached_tokens=100, state="draining")]
    tiles = tiles_html(rows, "prefix-aware", 3)
    assert "1 of 2" in tiles and "1.5<small>×" in tiles and "prefix-aware" in tiles
    overlap = overlap_html(rows, {"r0": {"r1": 4}, "r1": {"r0": 4}})
    assert overlap.count(">40%<") == 2
    assert "Nothing is cached yet" in overlap_html([replica("r0", blocks={"cached": 0})], {"r0": {}})


def test_decisions_show_why_and_the_second_choice_with_what_was_measured() -> None:
    decision = {
        "request_id": "cmpl-0123456789abcdef", "replica": "r0", "ttft_ms": 12.0, "cached_tokens": 32,
        "second": {"replica": "r1", "ttft_ms": 50.0, "cached_tokens": 0}, "moved_because": "r1 was killed",
        "why": "a <why>", "time_s": 1.0, "measured_s": 0.013, "prompt_tokens": 40,
    }  # fmt: skip
    shown = decisions_html([decision])
    assert "32 of 40" in shown and "13 ms" in shown and "r1, 50 ms" in shown
    assert "moved because r1 was killed; a &lt;why&gt;" in shown
    assert "No request yet" in decisions_html([])


@pytest.mark.thorough
class TestInABrowser:
    pytestmark = in_a_browser

    def test_a_replica_is_drained_by_its_button(self, browser: Any, tmp_path: Path) -> None:
        options = ("--replicas", "2", "--kv-memory-gib", "0.02")
        with running_server(str(save_tiny_model(tmp_path)), *options) as server:
            wait_for(lambda: all(one["state"] == "ready" for one in replicas(server)), "both", server)
            server.post("/v1/completions", {"model": NAME, "prompt": "Once " * 30, "max_tokens": 4})
            with looking_at(browser, server, "/fleet", DESKTOP) as page:
                page.get_by_label("Drain r0").click()
                page.get_by_label("Undrain r0").wait_for()
                assert replicas(server)[0]["state"] == "draining"
                page.get_by_label("Drain r1").click()
                page.get_by_text("no other takes requests").wait_for()
                page.get_by_label("Undrain r0").click()
                page.get_by_label("Drain r0").wait_for()
                assert "of" in page.locator("table.requests tbody tr").first.inner_text()
            with looking_at(browser, server, "/fleet", PHONE) as page:
                page.get_by_label("Drain r0").wait_for()
                assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def replicas(server: Any) -> list[dict[str, Any]]:
    return list(server.get("/v1/fleet").json()["replicas"])


def test_prefill_engines_are_shown_with_what_each_replica_got_from_them() -> None:
    engine = {
        "name": "prefill-0", "state": "ready", "pid": 7, "running": 2, "waiting": 3, "restarts": 1,
        "transfers": {"sending": 4},
    }  # fmt: skip
    got = {"receiving": 1, "received": 1234, "failed": 5, "bytes_per_s": 3.4e9}
    shown = prefill_html([engine], [replica("r0") | {"transfers": got}, replica("r1") | {"transfers": None}])
    assert "prefill-0" in shown and "1,234" in shown and "3.4 GB/s" in shown and "r1" in shown
    assert prefill_html([], [replica("r0")]) == ""

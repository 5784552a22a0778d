"""The jobs page: queue, cluster map and timeline as HTML, and what a visitor may do."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cumulo.cluster.decide.jobs import TaskPlace
from cumulo.cluster.drivers.command import output_file
from cumulo.cluster.job_file import job_from
from cumulo.cluster.job_progress import JobProgress
from cumulo.cluster.job_store import JobPhase, JobRecord, JobStore, default_store
from cumulo.cluster.node_health import NodeState
from cumulo.console.fleet_page import tiles_html
from cumulo.console.jobs_page import colour, job_tiles_html, map_html, queue_html, timeline_html
from cumulo.console.live_page import _LEDGER, _LEDGER_TOLD
from tests.console.browsing import DESKTOP, PHONE, in_a_browser, looking_at
from tests.serve.running_server import running_server
from tests.serve.tiny_model import save_tiny_model

JOB = job_from({"name": "tiny", "train": {"config": "a.yaml"}, "devices": {"count": 2}})
RUNS = JobRecord(
    "tiny-1", "k", "slurm", JOB, "/jobs/tiny-1", "/home", 100.0, state="running", reason="its <whole> gang",
    places=(TaskPlace("n1"), TaskPlace("n2")),
    phases=(JobPhase("queued", 100.0, (), 110.0), JobPhase("running", 110.0)),
)  # fmt: skip
WAITS = replace(RUNS, job_id="tiny-2", target="local", state="queued", places=(), reason="behind tiny-1",
                phases=(JobPhase("queued", 105.0),))  # fmt: skip


def test_the_queue_shows_why_a_job_waits_and_predicted_next_to_measured_speed() -> None:
    progress = JobProgress(12, 40, 3.5, step_s=0.131, predicted_step_s=0.1)
    shown = queue_html([RUNS, WAITS], {"tiny-1": progress}, may_cancel=True)
    assert "12 of 40" in shown and "131 ms" in shown and "100 ms" in shown
    assert "its &lt;whole&gt; gang" in shown and "behind tiny-1" in shown
    assert 'aria-label="Cancel tiny-2"' in shown
    assert "<button" not in queue_html([RUNS, replace(WAITS, state="done")], {}, may_cancel=False)
    ended = queue_html([replace(RUNS, state="done")], {}, may_cancel=True)
    assert "Cancel" not in ended and 'aria-label="Logs tiny-1"' in ended
    assert "No job yet" in queue_html([], {}, may_cancel=True)
    tiles = job_tiles_html([RUNS, WAITS])
    assert tiles.count("<b>1<small>") == 2 and tiles.count("<b>0<small>") == 2


def test_the_map_colours_tasks_by_job_and_shows_free_slots() -> None:
    shown = map_html([RUNS, WAITS], {"here": 2})
    assert shown.count(colour("tiny-1")) == 2 and shown.count('title="free"') == 2
    assert colour("tiny-1") != colour("tiny-2")
    assert "No node is in use" in map_html([WAITS], {})
    closed = NodeState("n7", "drain", 100.0, "Xid 79: a GPU <fell> off", "log")
    told = map_html([WAITS], {}, [closed])
    assert ">n7</b>" in told and ">draining</span>" in told and "Xid 79: a GPU &lt;fell&gt; off" in told


def test_the_timeline_draws_waiting_and_running_of_each_job() -> None:
    shown = timeline_html([RUNS, WAITS], now_s=160.0)
    assert shown.count('<i class="ran"') == 1 and shown.count('<i class="waited"') == 2
    assert "tiny-1: queued for 10 s" in shown and "tiny-1: running for 50 s" in shown
    assert datetime.fromtimestamp(160.0).strftime("%H:%M:%S") in shown  # of the clock on the wall
    assert "No job yet" in timeline_html([], 0.0)


def test_figures_say_what_they_are() -> None:
    replica = {"state": "ready", "running": 1, "cached_tokens": 0, "prompt_tokens": 4}
    fleet = tiles_html([replica] * 2, "prefix", moved=0)
    assert "Busiest replica" in fleet and "1 is even" in fleet and "Moved requests" in fleet
    assert "All jobs" in queue_html([RUNS], {}, may_cancel=True)
    assert [name for name, *_ in _LEDGER][1:3] == ["predicted", "allocated"] and "first used" in _LEDGER_TOLD


@pytest.mark.thorough
class TestInABrowser:
    pytestmark = in_a_browser

    def test_a_job_is_seen_and_cancelled_in_the_browser(
        self, browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        store = JobStore(default_store())
        record, _ = store.submit(JOB, "ray")
        output_file(record).write_text("--- attempt 1 ---\nerror: no <b>GPU</b>\n")
        with running_server(str(save_tiny_model(tmp_path)), "--kv-memory-gib", "0.02") as server:
            with looking_at(browser, server, "/jobs", DESKTOP) as page:
                page.get_by_label("Logs tiny-1").click()
                page.locator(".job-log pre", has_text="error: no <b>GPU</b>").wait_for()
                page.keyboard.press("Escape")
                page.get_by_label("Cancel tiny-1").click()
                page.locator(".badge", has_text="cancelled").wait_for()
                assert store.find("tiny").state == "cancelled"
            with looking_at(browser, server, "/jobs", PHONE) as page:
                page.locator("table.jobs").wait_for()
                assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")

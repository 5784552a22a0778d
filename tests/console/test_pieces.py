"""The console's parts that need no browser: numbers, charts, sessions, filters."""

import dataclasses
import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cumulo.console.charts import block_chart, columns_for, columns_option
from cumulo.console.front import COOKIE, Sessions, Visitor
from cumulo.console.live_page import WINDOWS, latencies, machine_line
from cumulo.console.machine_use import MachineUse, UseSample
from cumulo.console.request_view import Filter, rows_of, table_html
from cumulo.console.system_page import engine_rows, server_rows
from cumulo.console.values import duration, milliseconds, short_id, tile
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.story import Story
from cumulo.serve.access.keys import ApiKeys, Caller, new_key
from cumulo.serve.engine_link.messages import BlockMap, Ready, Stats, StepRecord
from cumulo.serve.observe.step_history import StepHistory
from cumulo.serve.observe.stories import Record, Rejection
from cumulo.serve.options import ServeOptions
from cumulo.spec.slo import Slo


def record(received_s: float, ttft_s: float, token_times_s: list[float]) -> Record:
    made = Record("chatcmpl-1", "chatcmpl-1", "anyone", "model", received_s, received_s, 4, 1, True)
    made.token_times_s = array("d", token_times_s)
    made.story = Story(arrived_s=received_s, first_token_s=received_s + ttft_s)
    return made


def renamed(made: Record, name: str, received_s: float) -> Record:
    return dataclasses.replace(made, request_id=name, call_id=name, received_s=received_s)


def test_latencies_are_of_recent_requests_only() -> None:
    late = latencies([record(1000.0, 0.2, [1000.2, 1000.3, 1000.5]), record(1.0, 9.0, [])], now_s=1010.0)
    assert late.requests == 1
    assert late.first_p50_s == pytest.approx(0.2)
    assert late.gap_p50_s == pytest.approx(0.1) and late.gap_p99_s == pytest.approx(0.2)


def test_times_are_written_in_the_unit_one_would_say() -> None:
    assert [milliseconds(s) for s in (None, 0.0123, 1.5, 75.0)] == ["–", "12.3 ms", "1.5 s", "75 s"]
    assert [duration(s) for s in (0, 61, 90_000)] == ["0 s", "1 min 1 s", "1 d 1 h"]


def test_a_tile_shows_long_times_in_seconds() -> None:
    assert "<b>818<small>ms</small></b>" in tile("TTFT", 818.2, "ms", "Time to first token.")
    assert "<b>1.41<small>s</small></b>" in tile("TTFT", 1410.0, "ms", "Time to first token.")


def test_a_short_id_tells_the_prompts_of_one_call_apart() -> None:
    assert short_id("chatcmpl-0123456789abcdef", 8) == "01234567"
    assert short_id("resp_0123456789abcdef", 8) == "01234567"
    assert [short_id(f"embd-0123456789abcdef-{n}", 8) for n in (0, 11)] == ["01234567-0", "01234567-11"]
    assert short_id("unusual", 4) == "unus"


INFO = Ready(
    "m", 8192, 100, 8, [1], {}, 728, 16, 256, 512, "fused native kernels",
    {"rows": [{"name": "kv cache", "predicted_bytes": 1 << 29}]},
)  # fmt: skip


def test_options_are_shown_as_they_apply_and_never_as_auto() -> None:
    left = dict(engine_rows(EngineConfig(), INFO))
    assert left["max_running"] == "256 sequences" and left["block_size"] == "16 tokens"
    assert left["kv_memory_gib"].startswith("512.0 MiB") and left["device"] == "cpu"
    assert (left["dtype"], left["kv_dtype"]) == ("float32", "float32")
    on_gpu = dict(
        engine_rows(
            EngineConfig(kv_memory_gib=2.5), msgspec.structs.replace(INFO, runs_on="GPU kernels on H200")
        )
    )
    assert (on_gpu["device"], on_gpu["dtype"], on_gpu["kv_memory_gib"]) == ("cuda", "bfloat16", "2.5 GiB")
    server = dict(server_rows(ServeOptions(), "my-model"))
    assert server["name"] == "my-model" and server["max_body_bytes"] == "4.0 MiB"
    assert server["drain_timeout_s"] == "30 s" and server["tokens_per_minute"] == "no limit"
    assert server["default_max_tokens"] == "512" and left["cuda_graphs"] == "no GPU is used"
    for shown in (left, on_gpu, server):
        assert not {"auto", "None", "not set", ""} & set(shown.values())


def test_a_promise_is_shown_as_every_request_has_it() -> None:
    rows = dict(engine_rows(EngineConfig(slo=Slo(1.0, 0.05)), INFO))
    assert rows["slo"] == "TTFT 1 s, ITL 50 ms"


def test_keys_are_never_among_the_options_that_are_shown() -> None:
    options = ServeOptions(fleet_key="secret", engine=EngineConfig(transfer_key="secret"))
    rows = server_rows(options, "m") + engine_rows(options.engine, INFO)
    assert not [row for row in rows if "secret" in row[1] or not row[1]]


def test_the_block_map_tells_owned_cached_and_free_apart_and_hides_foreign_owners() -> None:
    blocks = BlockMap(["chatcmpl-aaa", "chatcmpl-bbb"], [0, 0, 1, -1, -1, -1], bytes([1, 0, 0, 1, 0, 0]))
    drawn = block_chart(blocks, may_see=lambda request_id: request_id.endswith("aaa"))
    assert "aaa</a> (2)" in drawn and "bbb" not in drawn and "another key (1)" in drawn
    assert "reusable (1)" in drawn and "free (2)" in drawn
    assert drawn.count("<rect") == 4  # equal neighbours are one


def test_the_block_maps_last_row_is_full_or_nearly() -> None:
    assert [columns_for(cells) for cells in (1, 40, 728, 1536)] == [1, 40, 56, 64]
    assert all(-cells % columns_for(cells) <= 11 for cells in range(700, 1537))


def test_a_chart_says_when_nothing_happened_and_labels_its_ends() -> None:
    bars = {"type": "bar", "data": [1.0, 0.0, 13.0]}
    drawn = columns_option("tokens/s", [bars], ("1 min ago", "now"), 10, ())
    assert drawn["xAxis"]["data"] == ["1 min ago", "", "now"] and drawn["yAxis"]["max"] == 10
    assert drawn["title"] == {} and drawn["series"][0]["data"] == bars["data"]
    idle = columns_option("tokens/s", [{"type": "bar", "data": [0.0, 0.0]}], ("", "now"), 10, ())
    assert idle["title"]["text"] == "nothing in this time"


def test_one_window_shows_seconds_and_another_an_hour() -> None:
    history = StepHistory()
    history.note(Stats(1, 1, 1, 0, 0, 9, 0, 0, records=[StepRecord(1, 3595.0, 3595.5, 4, 2, 1)]), 3595.6)
    minute, _, hour = (history.last(3600.0, window.slices, window.slice_s) for window in WINDOWS)
    assert len(minute) == 60 and minute[55].decode_tokens == 2
    assert len(hour) == 120 and hour[-1].prefill_tokens == 4


def test_machine_use_tells_memory_and_processes_and_forgets_those_that_ended() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    use = MachineUse(lambda: (os.getpid(), ended.pid))
    use.sample(12.5)
    (sample,) = use.samples
    assert 0 <= sample.cpu_percent <= 100 and 0 < sample.memory_percent < 100
    assert sample.engine_bytes == pytest.approx(sample.server_bytes, rel=0.1) and sample.gpus == ()


def test_samples_of_the_machine_fill_the_slices_between_them() -> None:
    samples = [UseSample(time_s, 0.0, 1, 2, None, None) for time_s in (10.0, 25.0)]
    line = machine_line(samples, [30.0, 60.0], WINDOWS[0], now_s=60.0)
    assert line[9:12] == [None, 30.0, 30.0] and line[24:26] == [30.0, 60.0] and line[-1] == 60.0


def test_requests_are_filtered_by_status_key_time_and_words() -> None:
    running = record(1000.0, 0.2, [])
    waiting = renamed(running, "chatcmpl-2", 1001.0)
    refused = Rejection(
        1002.0, 0.0, "/v1/chat/completions", 429, "other", b'{"error": {"message": "queue <full>"}}'
    )
    rows = rows_of([running, waiting], [refused], queued_ids={"chatcmpl-2"})
    assert [row.status for row in rows] == ["rejected", "queued", "running"]

    def kept(**chosen: Any) -> list[str]:
        return [row.status for row in rows if row.is_let_through(Filter(**chosen))]

    assert kept(status="queued") == ["queued"] and kept(caller="other") == ["rejected"]
    assert kept(since_s=1000.5) == ["rejected", "queued"] and kept(words="FULL") == ["rejected"]
    assert kept(words="chatcmpl-1") == ["running"] and kept(caller="nobody") == []
    drawn = table_html(rows, picked=["chatcmpl-2"])
    assert "queue &lt;full&gt;" in drawn and "rejected 429" in drawn and drawn.count(" checked") == 1


def test_a_large_block_map_stays_a_small_drawing() -> None:
    many = 200_000
    owners = [block % 3 - 1 for block in range(many)]
    assert len(block_chart(BlockMap(["a", "b"], owners, bytes(many)), lambda _: True)) < 200_000


def test_a_revoked_key_ends_its_session(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = new_key(path, "mine")
    keys = ApiKeys(path, Caller("anyone"))
    sessions = Sessions(keys)
    assert sessions.visitor({}) is None and sessions.begin("ck-wrong") is None
    token = sessions.begin(key)
    assert token is not None
    visitor = sessions.visitor({COOKIE: token})
    assert visitor is not None and visitor.name == "mine"
    assert visitor.may_see("mine") and not visitor.may_see("other")
    assert not visitor.may_see(None), "calls without a valid key are the operator's to see"
    assert Visitor("operator", "ck-1", may_see_names=True).may_see(None) and Visitor("anyone").may_see(None)
    assert Visitor("operator", "ck-1", may_operate=True).may_see("other")
    keys._entries.clear()  # what reading a file without the key leaves
    assert sessions.visitor({COOKIE: token}) is None and not sessions.still_valid(visitor)


def test_without_nicegui_the_server_has_no_console_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from cumulo.cli.serve import _console

    for name in [name for name in sys.modules if name.startswith(("cumulo.console.", "nicegui"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nicegui", None)
    assert _console() is None

"""The console's parts that need no browser: numbers, charts, sessions, filters."""

import sys
from array import array
from pathlib import Path

import pytest

from cumulo.console.charts import block_chart
from cumulo.console.live_numbers import WINDOW_S, Throughput, latencies
from cumulo.console.sessions import COOKIE, Sessions
from cumulo.console.words import duration, milliseconds, percentile, short_id
from cumulo.engine.config import EngineConfig
from cumulo.engine.story import Story
from cumulo.serve.keys import ApiKeys, Caller, new_key
from cumulo.serve.messages import BlockMap, StepRecord
from cumulo.serve.stories import Record


def record(received_s: float, ttft_s: float, token_times_s: list[float]) -> Record:
    made = Record("chatcmpl-1", "chatcmpl-1", "anyone", "model", received_s, received_s, 4, 1, True)
    made.token_times_s = array("d", token_times_s)
    made.story = Story(arrived_s=received_s, first_token_s=received_s + ttft_s)
    return made


def test_a_step_seen_twice_is_counted_once() -> None:
    throughput = Throughput()
    steps = [StepRecord(1, 99.0, 99.5, 30, 2, 2), StepRecord(2, 99.5, 99.9, 0, 3, 3)]
    throughput.take(steps, now_s=100.0)
    throughput.take([*steps, StepRecord(3, 100.0, 100.1, 7, 0, 0)], now_s=101.0)
    history = throughput.history(101.0)
    assert len(history) == WINDOW_S
    assert history[-2:] == [(30, 5), (7, 0)]
    assert throughput.rate(101.0) == (37 / 5, 5 / 5)


def test_seconds_outside_the_window_are_forgotten() -> None:
    throughput = Throughput()
    throughput.take([StepRecord(1, 10.0, 10.5, 1, 1, 1)], now_s=11.0)
    throughput.take([], now_s=11.0 + WINDOW_S)
    assert throughput.seconds == {}


def test_latencies_are_of_recent_requests_only() -> None:
    late = latencies([record(1000.0, 0.2, [1000.2, 1000.3, 1000.5]), record(1.0, 9.0, [])], now_s=1010.0)
    assert late.requests == 1
    assert late.first_p50_s == pytest.approx(0.2)
    assert late.gap_p50_s == pytest.approx(0.1) and late.gap_p99_s == pytest.approx(0.2)


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(list(map(float, range(1, 101))), 0.99) == 99.0


def test_times_are_written_in_the_unit_one_would_say() -> None:
    assert [milliseconds(s) for s in (None, 0.0123, 1.5, 75.0)] == ["–", "12.3 ms", "1.50 s", "75.0 s"]
    assert [duration(s) for s in (0, 61, 90_000)] == ["0 s", "1 min 1 s", "1 d 1 h"]


def test_a_short_id_tells_the_prompts_of_one_call_apart() -> None:
    assert short_id("chatcmpl-0123456789abcdef", 8) == "01234567"
    assert short_id("resp_0123456789abcdef", 8) == "01234567"
    assert [short_id(f"embd-0123456789abcdef-{n}", 8) for n in (0, 11)] == ["01234567-0", "01234567-11"]
    assert short_id("unusual", 4) == "unus"


def test_an_option_left_to_the_engine_is_not_shown_as_zero() -> None:
    pytest.importorskip("nicegui")
    from cumulo.console.system_page import _options

    left, chosen = dict(_options(EngineConfig())), dict(_options(EngineConfig(max_running=7)))
    assert (left["max_running"], left["block_size"], left["swap_gib"]) == ("auto", "auto", 0.0)
    assert chosen["max_running"] == 7


def test_the_block_map_tells_owned_cached_and_free_apart_and_hides_foreign_owners() -> None:
    blocks = BlockMap(["chatcmpl-aaa", "chatcmpl-bbb"], [0, 0, 1, -1, -1, -1], bytes([1, 0, 0, 1, 0, 0]))
    drawn = block_chart(blocks, may_see=lambda request_id: request_id.endswith("aaa"))
    assert "aaa</a> (2)" in drawn and "bbb" not in drawn and "someone else (1)" in drawn
    assert "reusable (1)" in drawn and "free (2)" in drawn
    assert drawn.count("<rect") == 4  # equal neighbours are one


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
    keys._entries.clear()  # what reading a file without the key leaves
    assert sessions.visitor({COOKIE: token}) is None and not sessions.still_valid(visitor)


def test_without_nicegui_the_server_has_no_console_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from cumulo.cli.serve import _console

    for name in [name for name in sys.modules if name.startswith(("cumulo.console.", "nicegui"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nicegui", None)
    assert _console() is None

"""The player against a real server: what it measures is what the server did, and every failure has a name."""

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from openai import OpenAI

from cumulo.errors import CumuloError
from cumulo.load.client import Dialect, Target, discover_model, probe
from cumulo.load.connection import Pool
from cumulo.load.player import Level, LoadPlayer
from cumulo.load.prompts import constant
from cumulo.load.schedule import Arrivals, Schedule, Workload, plan
from cumulo.load.summary import RequestRecord, summarise
from cumulo.load.trace import TraceRow, plan_trace
from tests.load.toy_server import Behaviour, Seen, ToyServer

pytestmark = pytest.mark.long

SHORT = Workload(constant(12), constant(4))


class Clock:
    """Seconds that pass only when a test says so."""

    now_s = 0.0

    def loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loop.time = lambda: self.now_s  # type: ignore[method-assign]
        return loop


class Leaping(Clock):
    """The machine's seconds, of which a test can let many pass at once."""

    ahead_s = 0.0

    @property
    def now_s(self) -> float:  # type: ignore[override]
        return time.monotonic() + self.ahead_s


def play(
    url: str, schedule: Schedule, target: Target | None = None, clock: Clock | None = None,
    watch: Callable[[Level], bool] | None = None, **options: Any,
) -> Level:  # fmt: skip
    """`clock`: of the player; it may not have to wait then. `watch`: as in `LoadPlayer.play`."""

    async def run() -> Level:
        pool = Pool(url)
        level = Level(schedule)
        try:
            player = LoadPlayer(pool, target or Target("toy-model"), **options)
            await player.play(level, watch, watch_every_s=0.02 if watch else 0.5)
        finally:
            pool.close()
        return level

    with asyncio.Runner(loop_factory=clock.loop if clock else None) as runner:
        return runner.run(run())


def by_prompt(server: ToyServer) -> dict[str, Seen]:
    return {seen.body["messages"][-1]["content"]: seen for seen in server.seen}


def ordered(level: Level) -> list[RequestRecord]:
    return sorted(level.records, key=lambda record: record.number)


def test_measured_times_are_those_the_server_wrote_down() -> None:
    pace = Behaviour(first_s=0.1, gap_s=0.03)
    with ToyServer(lambda number, body: pace) as server:
        level = play(server.url, plan(Workload(constant(12), constant(8)), 3, "x", 9))
    assert [record.error for record in level.records] == [None] * 9
    served = sorted(server.seen, key=lambda seen: seen.arrived_s)
    for record, seen in zip(ordered(level), served, strict=True):
        assert len(record.chunk_times_s) == record.output_tokens == 8
        arrived_s = np.array(record.chunk_times_s) + level.began_s
        # A token is seen after it is written, and before the generator is declared broken.
        assert (arrived_s >= np.array(seen.wrote_s)).all()
        assert np.median(arrived_s - np.array(seen.wrote_s)) < 0.5
        assert record.ttft_s is not None and record.ttft_s >= 0.1
        assert record.sent_s + level.began_s <= seen.arrived_s
    summary = summarise(level.records)
    true_gaps = np.concatenate([np.diff(seen.wrote_s) for seen in server.seen])
    assert summary.itl_s is not None
    assert summary.itl_s.p50 == pytest.approx(np.median(true_gaps), rel=1.0, abs=0.05)
    assert level.most_running == 3


def test_a_closed_loop_keeps_its_places_filled_and_its_connections_open() -> None:
    with ToyServer(lambda number, body: Behaviour(gap_s=0.01)) as server:
        level = play(server.url, plan(SHORT, 4, "x", 20))
    assert len(level.records) == 20
    assert server.connections == 4
    assert level.most_running == 4
    assert level.cpu_s > 0 and level.wall_s > 0


def test_an_open_loop_sends_on_time_however_slow_the_answers_are() -> None:
    arrivals = Arrivals(200.0)
    with ToyServer(lambda number, body: Behaviour(after_requests=20)) as server:  # a closed loop would wait
        level = play(server.url, plan(SHORT, arrivals, "x", 20))
    assert level.most_running == 20
    records = ordered(level)
    planned = [c.start_s for c in plan(SHORT, arrivals, "x", 20).conversations]
    assert [record.due_s for record in records] == planned
    assert all(record.lateness_s >= 0 for record in records)


def test_a_duration_ends_a_closed_loop_and_lets_the_last_answers_finish() -> None:
    clock = Clock()

    def behave(number: int, body: dict[str, Any]) -> Behaviour:
        clock.now_s += 0.25
        return Behaviour()

    with ToyServer(behave) as server:
        level = play(server.url, plan(SHORT, 2, "x", duration_s=1.5), clock=clock)
    # The sixth request to arrive ends the time; one of the other place may have been sent by then.
    assert len(level.records) in (6, 7)
    assert all(record.error is None and record.output_tokens == 4 for record in level.records)
    assert max(record.due_s for record in level.records) < 1.5
    assert max(record.end_s for record in level.records) >= 1.5


def test_conversations_carry_their_history_and_the_servers_own_answers() -> None:
    workload = Workload(constant(12), constant(3), constant(3), think_s=0.01, prefix_tokens=20)
    with ToyServer() as server:
        level = play(server.url, plan(workload, 1, "x", 2))
    assert [(r.conversation, r.turn) for r in ordered(level)] == [(c, t) for c in (0, 1) for t in range(3)]
    third = server.seen[2].body["messages"]
    assert [m["role"] for m in third] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert third[2]["content"] == server.seen[0].text
    assert third[4]["content"] == server.seen[1].text
    assert third[:2] == server.seen[0].body["messages"]
    assert server.seen[0].body["messages"][0] == server.seen[3].body["messages"][0]  # the shared prefix
    assert len(third[0]["content"].split()) == 20
    late = [
        seen.arrived_s - before.ended_s for before, seen in zip(server.seen, server.seen[1:], strict=False)
    ]
    assert all(gap >= 0 for gap in late)


def test_a_trace_is_replayed_in_its_own_time_with_its_own_lengths() -> None:
    rows = [
        TraceRow(0.0, 5, 2),
        TraceRow(0.1, 9, 3, "a", (7,)),
        TraceRow(0.2, 4, 1, "a"),
        TraceRow(0.3, 9, 3, None, (7,)),
    ]
    with ToyServer() as server:
        level = play(server.url, plan_trace(rows, "x"))
    # On a busy machine the last may overtake the second turn of "a".
    asked = [(len(seen.body["messages"][-1]["content"].split()), seen.body) for seen in server.seen]
    assert sorted((size, body["max_tokens"]) for size, body in asked) == [(4, 1), (5, 2), (9, 3), (9, 3)]
    assert (
        len({body["messages"][0]["content"] for size, body in asked if size == 9}) == 1
    )  # of the same block
    turns = sorted(level.records, key=lambda record: (record.conversation, record.turn))
    assert [record.output_tokens_planned for record in turns] == [row.output_tokens for row in rows]
    assert all(record.sent_s >= row.time_s for record, row in zip(turns, rows, strict=True))


def test_the_server_counts_the_tokens_where_it_can() -> None:
    with ToyServer(lambda number, body: Behaviour(tokens_per_chunk=3)) as server:
        level = play(server.url, plan(Workload(constant(12), constant(9)), 1, "x", 2))
        silent = play(server.url, plan(SHORT, 1, "y", 1), Target("toy-model", dialect=Dialect(usage=False)))
    assert [(r.output_tokens, len(r.chunk_times_s), r.input_tokens) for r in level.records] == [
        (9, 3, 19)
    ] * 2
    assert [(r.output_tokens, r.input_tokens) for r in silent.records] == [(2, None)]


@pytest.mark.parametrize(
    ("behaviour", "kind", "detail"),
    [
        (Behaviour("429", retry_after="7"), "HTTP 429", "the toy is unwell"),
        (Behaviour("500"), "HTTP 500", "the toy is unwell"),
        (Behaviour("cut", pieces=2), "stream cut", "after 2 chunks"),
        (Behaviour("no end", pieces=2), "stream cut", "without a finish reason"),
        (Behaviour("malformed", pieces=2), "malformed answer", "not a chunk"),
        (Behaviour("error event", pieces=2), "error in stream", "the engine died"),
        (Behaviour("json"), "malformed answer", "no event stream but application/json"),
        (Behaviour("not http"), "malformed answer", "not an HTTP response"),
        (Behaviour("reset"), "connection lost", "before any answer"),
        (Behaviour("empty"), "empty answer", "no text"),
        (Behaviour("hang"), "timeout", "within 300 s"),
        (Behaviour(gap_s=30.0), "timeout", "within 300 s"),
    ],
    ids=lambda value: value.kind if isinstance(value, Behaviour) else None,
)
def test_every_failure_has_a_name_and_spares_the_others(behaviour: Behaviour, kind: str, detail: str) -> None:
    order: dict[str, int] = {}

    def behave(number: int, body: dict[str, Any]) -> Behaviour:
        prompt = body["messages"][0]["content"]  # one that is sent again on a fresh connection fails again
        return behaviour if order.setdefault(prompt, len(order)) % 2 else Behaviour()

    clock = Leaping()

    def leap(level: Level) -> bool:
        if kind == "timeout" and len(level.records) == 3 and len(server.seen) == 6:  # the others have answers
            clock.ahead_s = 400.0
        return True

    with ToyServer(behave) as server:
        # An open loop, so that Retry-After is not waited for.
        level = play(
            server.url, plan(SHORT, Arrivals(20, "constant"), "x", 6), clock=clock, watch=leap, timeout_s=300
        )
    errors = {record.error for record in level.records}
    assert errors == {None, kind}
    failed = [record for record in level.records if record.error]
    assert len(failed) == 3
    assert all(detail in record.error_detail for record in failed)
    assert all(record.output_tokens == 4 for record in level.records if not record.error)
    summary = summarise(level.records)
    assert summary.errors == {kind: 3}
    assert summary.succeeded == 3
    assert not level.running


def test_nobody_listening_is_a_refused_connection() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        level = play(f"http://127.0.0.1:{free.getsockname()[1]}", plan(SHORT, 2, "x", 4))
    assert [record.error for record in level.records] == ["connection refused"] * 4


def test_a_refused_request_is_retried_when_asked_and_pays_for_it() -> None:
    with ToyServer(
        lambda number, body: Behaviour("429", retry_after="0.2") if number < 2 else Behaviour()
    ) as server:
        level = play(server.url, plan(SHORT, 1, "x", 1), retries=3)
    (record,) = level.records
    assert (record.error, record.attempts) == (None, 3)
    assert record.ttft_s is not None and record.ttft_s >= 0.4  # waiting counts
    assert len(server.seen) == 3


def test_a_closed_loop_waits_as_long_as_it_is_told_to() -> None:
    with ToyServer(lambda number, body: Behaviour("503", retry_after="0.3")) as server:
        play(server.url, plan(SHORT, 1, "x", 3))
    gaps = np.diff([seen.arrived_s for seen in server.seen])
    assert (gaps >= 0.3).all()


def test_a_connection_the_server_closed_while_idle_is_replaced_unnoticed() -> None:
    with ToyServer() as server:
        server.close_after_answer = True
        level = play(server.url, plan(SHORT, 1, "x", 5))
    assert [record.error for record in level.records] == [None] * 5
    assert server.connections == 5


def test_an_answer_that_ends_with_its_connection_is_whole() -> None:
    with ToyServer(lambda number, body: Behaviour("http/1.0")) as server:
        level = play(server.url, plan(SHORT, 1, "x", 3))
    assert [(record.error, record.output_tokens) for record in level.records] == [(None, 4)] * 3


def test_a_watcher_can_end_a_level_and_running_requests_are_aborted() -> None:
    async def run(url: str) -> Level:
        pool, level = Pool(url), Level(plan(SHORT, 3, "x", 50))
        await LoadPlayer(pool, Target("toy-model")).play(
            level, lambda level: not level.running, watch_every_s=0.2
        )
        pool.close()
        return level

    with ToyServer(lambda number, body: Behaviour(first_s=5.0)) as server:
        level = asyncio.run(run(server.url))
    assert level.stopped
    assert [record.error for record in level.records] == ["stopped"] * 3
    assert summarise(level.records).requests == 0


def test_both_endpoints_extra_fields_and_the_key_reach_the_server() -> None:
    target = Target("m", "completions", "secret", extra={"top_p": 0.5, "temperature": None})
    with ToyServer() as server:
        level = play(server.url, plan(SHORT, 1, "x", 1), target)
    (seen,) = server.seen
    assert (level.records[0].error, seen.path) == (None, "/v1/completions")
    assert len(seen.body["prompt"].split()) == 12
    assert seen.headers["authorization"] == "Bearer secret"
    assert seen.body["top_p"] == 0.5 and "temperature" not in seen.body
    assert seen.body["ignore_eos"] is True and seen.body["stream"] is True


def test_the_official_client_reads_the_same_stream() -> None:
    """The oracle for the toy itself: what we test against is what OpenAI's own client understands."""
    with ToyServer() as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="x")
        stream = client.chat.completions.create(
            model="toy-model", messages=[{"role": "user", "content": "a b c"}], max_tokens=6, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == server.seen[0].text
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 6


def run_probe(server: ToyServer) -> tuple[Target, Any]:
    async def run() -> tuple[Target, Any]:
        pool = Pool(server.url)
        try:
            target = Target(await discover_model(pool, ""))
            return await probe(pool, target, 5.0, "x")
        finally:
            pool.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("refuse", "dialect"),
    [
        ((), Dialect()),
        (("ignore_eos",), Dialect(ignore_eos=False)),
        (("ignore_eos", "max_tokens"), Dialect("max_completion_tokens", ignore_eos=False)),
        (("ignore_eos", "stream_options"), Dialect(ignore_eos=False, usage=False)),
    ],
)
def test_the_probe_finds_the_model_the_fields_and_the_ruler(
    refuse: tuple[str, ...], dialect: Dialect
) -> None:
    with ToyServer(refuse=refuse, template_tokens=11) as server:
        target, ruler = run_probe(server)
    assert (target.model, target.dialect) == ("toy-model", dialect)
    if dialect.usage:
        assert (ruler.tokens_per_word, ruler.overhead_tokens) == (pytest.approx(1), pytest.approx(11))
    else:
        assert not ruler.measured


def test_prompts_have_the_planned_number_of_tokens_by_the_servers_count() -> None:
    with ToyServer(template_tokens=11) as server:
        _, ruler = run_probe(server)
        level = play(server.url, plan(Workload(constant(50), constant(3)), 1, "x", 3), ruler=ruler)
    assert [record.input_tokens for record in level.records] == [50] * 3


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [("500", "HTTP 500"), ("json", "malformed answer"), ("429", "HTTP 429")],
)
def test_a_server_that_fails_its_first_request_is_not_loaded(behaviour: str, message: str) -> None:
    with (
        ToyServer(lambda number, body: Behaviour(behaviour)) as server,
        pytest.raises(CumuloError, match=message),
    ):
        run_probe(server)


def test_a_server_that_refuses_every_form_says_why() -> None:
    with ToyServer(refuse=("model",)) as server, pytest.raises(CumuloError, match="model is not supported"):
        run_probe(server)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:notaport"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(CumuloError):
        Pool(url)


def test_an_address_may_have_a_path_and_no_scheme() -> None:
    pool = Pool("localhost:9000/api/")
    assert (pool.host, pool.port, pool.path, pool.url) == (
        "localhost",
        9000,
        "/api",
        "http://localhost:9000/api",
    )

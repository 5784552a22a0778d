"""`cumulo serve --prefill 1 --decode 2`: prompts are computed by an engine of their own. Killed and hung prefill
engines change no answer. Real processes, real signals."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from typer.testing import CliRunner

from cumulo.errors import CumuloError
from tests.serve.running_server import RunningServer, running_server, wait_for
from tests.serve.test_streams_survive import KINDS, Stream, said
from tests.serve.tiny_model import NAME, save_tiny_model
from tests.whole_command import app

pytestmark = pytest.mark.long
TEXT = "the dog saw that the cat was there and the mat was on the cat and she said we have seen "


class SplitServer:
    """A server with split roles, and what its streams say when nothing happens to them."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.connected_when_ready = self.any_connected()
        wait_for(self.connected, "the prefill engine", server)
        self.undisturbed = {
            name: said(stream.events) for name, stream in self.streams().items() if not stream.join()
        }

    def streams(self) -> dict[str, Stream]:
        """Streams of some kinds, with prompts that are long enough to be computed elsewhere."""
        long = {"messages": [{"role": "user", "content": TEXT * 4}]}
        return {
            name: Stream(self.server, KINDS[name][0], KINDS[name][1] | long)
            for name in ("greedy", "seeded", "logprobs", "guided")
        }

    def fleet(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.server.get("/v1/fleet").json()
        return answer

    def connected(self) -> bool:
        replicas = self.fleet()["replicas"]
        return all(one["transfers"] and one["transfers"]["prefill_engines"] for one in replicas)

    def any_connected(self) -> bool:
        told = [one["transfers"] for one in self.fleet()["replicas"]]
        return any(one and one["prefill_engines"] for one in told)

    def prefill(self) -> dict[str, Any]:
        (found,) = self.fleet()["prefill_engines"]
        return dict(found)

    def replaced(self, before: dict[str, Any]) -> bool:
        now = self.prefill()
        return now["restarts"] > before["restarts"] and now["state"] == "ready" and bool(now["pid"])

    def transfers(self, what: str) -> int:
        return sum(one["transfers"][what] for one in self.fleet()["replicas"])

    def ask(self, number: int) -> dict[str, Any]:
        body = {"model": NAME, "prompt": f"{number} {TEXT * 20}", "max_tokens": 24, "seed": number}
        answer = self.server.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def stopped_with_orders(
        self, clients: ThreadPoolExecutor, many: int
    ) -> tuple[int, list[Future[dict[str, Any]]]]:
        """Stops the prefill engine with orders that it has not done: the first question that was asked, and all
        answers. Where a prompt is computed follows from measured speeds, so that it may take several tries."""
        pid, failed = self.prefill()["pid"], self.transfers("failed")

        def has_orders() -> bool:
            return bool(self.transfers("receiving")) or self.transfers("failed") > failed

        for first in range(2000, 2000 + 50 * many, many):
            os.kill(pid, signal.SIGSTOP)
            asked = [clients.submit(self.ask, number) for number in range(first, first + many)]
            wait_for(
                lambda asked=asked: has_orders() or all(one.done() for one in asked),
                "orders on their way",
                self.server,
            )
            if has_orders():
                return first, asked
            os.kill(pid, signal.SIGCONT)
            wait_for(self.connected, "the prefill engine again", self.server)
        raise AssertionError("the prefill engine is never asked")

    def words(self, answer: dict[str, Any]) -> list[str]:
        story = self.server.get(f"/v1/requests/{answer['id']}/explain").json()["data"]
        return [event["words"] for event in story[0]["events"]]


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SplitServer]:
    model = save_tiny_model(tmp_path_factory.mktemp("roles"), max_context=1024)
    options = ("--prefill", "1", "--decode", "2", "--kv-memory-gib", "0.02")
    stalls = ("--transfer-stall", "1", "--stall-timeout", "12", "--drain-timeout", "1")
    with running_server(str(model), "--no-console", *options, *stalls) as running:
        yield SplitServer(running)


def test_a_server_is_ready_when_its_prefill_engine_is_connected(split: SplitServer) -> None:
    assert split.connected_when_ready


@pytest.fixture(scope="module")
def texts(split: SplitServer) -> list[str]:
    """What each question is answered when nothing happens."""
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(split.ask, range(12)))
    return [answer["choices"][0]["text"] for answer in answers]


def test_a_long_prompt_is_computed_by_the_prefill_engine_and_its_story_says_so(split: SplitServer) -> None:
    before = split.transfers("received")
    # Where a prompt is computed follows from measured speeds, and a transfer that stalls is given up after a
    # second: a busy machine computes some of them here.
    stories = ("\n".join(split.words(split.ask(number))) for number in range(1000, 1040))
    told = next(story for story in stories if "KV blocks from prefill-0 are here" in story)
    assert "prefill-0 computes" in told
    assert "step" in told and "computes 1 tokens" in told  # the last one, where it is drawn
    wait_for(lambda: split.transfers("received") > before, "the count of transfers", split.server)
    assert split.server.sample("cumulo:kv_transfers_total") > before


@pytest.mark.long
def test_a_prefill_engine_killed_in_mid_transfer_changes_no_answer(
    split: SplitServer, texts: list[str]
) -> None:
    prefill, failed = split.prefill(), split.transfers("failed")
    streams = split.streams()
    with ThreadPoolExecutor(16) as clients:
        first, asked = split.stopped_with_orders(clients, len(texts))
        os.kill(prefill["pid"], signal.SIGKILL)
        answers = [one.result() for one in asked]
    for name, stream in streams.items():
        stream.join()
        assert said(stream.events) == split.undisturbed[name], name
    assert split.transfers("failed") > failed
    hurt = [words for answer in answers if "does not deliver" in (words := "\n".join(split.words(answer)))]
    assert hurt and all("computed by the engine that answers" in one for one in hurt)
    wait_for(lambda: split.prefill()["restarts"] == 1 and split.connected(), "a new engine", split.server)
    # Nothing is left of the old one: the same questions are answered as before.
    again = [split.ask(number)["choices"][0]["text"] for number in range(2)]
    assert again == texts[:2]
    assert [split.ask(first + number)["choices"][0]["text"] for number in range(2)] == [
        answer["choices"][0]["text"] for answer in answers[:2]
    ]


def test_kills_in_the_middle_of_much_traffic_change_no_answer(split: SplitServer, texts: list[str]) -> None:
    with ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(split.ask, number) for number in range(len(texts))]
        for _ in range(2):
            before = split.prefill()
            os.kill(before["pid"], signal.SIGKILL)
            asked += [clients.submit(split.ask, number) for number in range(len(texts))]
            wait_for(lambda before=before: split.replaced(before), "a new engine", split.server)
        answers = [one.result()["choices"][0]["text"] for one in asked]
    assert answers == texts * 3
    wait_for(split.connected, "the new engine", split.server)


@pytest.mark.long
def test_a_prefill_engine_that_hangs_is_given_up_and_replaced(split: SplitServer, texts: list[str]) -> None:
    prefill, failed = split.prefill(), split.transfers("failed")
    with ThreadPoolExecutor(16) as clients:
        _, asked = split.stopped_with_orders(clients, len(texts))
        streams = split.streams()
        answers = [one.result() for one in asked]
    assert split.transfers("failed") > failed
    told = ["\n".join(split.words(answer)) for answer in answers]
    assert any("does not deliver: it said nothing for 1 s" in one for one in told), told
    for name, stream in streams.items():
        stream.join()
        assert said(stream.events) == split.undisturbed[name], name
    wait_for(
        lambda: split.prefill()["restarts"] > prefill["restarts"] and split.connected(),
        "its replacement",
        split.server,
    )
    assert split.ask(0)["choices"][0]["text"] == texts[0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--prefill", "1"), "--prefill and --decode go together"),
        (("--prefill", "1", "--decode", "1", "--replicas", "2"), "remove --replicas"),
        (("--role", "prefill"), "needs a transfer_address"),
        (
            ("--role", "decode", "--prefill-engine", "10.0.0.1:9000"),
            "unix:PATH or tcp:HOST:PORT; got '10.0.0.1:9000'",
        ),
        (("--role", "decode", "--prefill-engine", "tcp:10.0.0.1:9000"), "--fleet-key-file"),
    ],
)
def test_roles_that_do_not_go_together_are_refused_with_what_would_work(
    options: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cumulo.serve.stderr_log.install", lambda: None)  # stderr is the test's
    result = CliRunner().invoke(app, ["serve", *options])
    assert isinstance(result.exception, CumuloError) and told in str(result.exception)

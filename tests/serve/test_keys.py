"""API keys and limits: as data, and as a client of a guarded server meets them."""

import json
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumulo.errors import CumuloError
from cumulo.serve.access import keys as keys_module
from cumulo.serve.access.keys import ApiKeys, Caller, new_key, read_keys
from cumulo.serve.access.limits import RateLimits
from cumulo.spec.slo import Slo
from tests.cli.conftest import cumulo_process
from tests.serve.running_server import (
    MODEL,
    RunningServer,
    needs_built_in_model,
    quick_model,
    running_server,
    wait_for,
)

pytestmark = pytest.mark.long

ANYONE = Caller("anyone", requests_per_minute=7)


def test_a_key_is_known_again_and_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    ann, bob = new_key(path, "ann"), new_key(path, "bob", requests_per_minute=3, tokens_per_minute=50)
    assert ann not in path.read_text() and bob not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keys = ApiKeys(path, ANYONE)
    # What the entry leaves open is the server's default; going first is for those it names.
    for key, name, requests, tokens in ((ann, "ann", 7, None), (bob, "bob", 3, 50)):
        caller = keys.caller_of(key)
        assert caller is not None and not caller.may_go_first and not caller.may_see_names
        assert (caller.name, caller.requests_per_minute, caller.tokens_per_minute) == (name, requests, tokens)
    for wrong in ("", ann[:-1], ann + "x", ann.upper(), "x" * 10_000, "\ud800"):
        assert keys.caller_of(wrong) is None
    salts = {entry.salt for entry in read_keys(path)}
    assert len(salts) == 2


def with_slo(path: Path, slo: str) -> str:
    """A file of one key with this promise; the key."""
    key = new_key(path, "ann")
    content = json.loads(path.read_text())
    content["keys"][0]["slo"] = slo
    path.write_text(json.dumps(content))
    return key


def test_a_request_fills_up_its_own_promise_from_its_keys(tmp_path: Path) -> None:
    key = with_slo(tmp_path / "keys.json", "ttft=300ms,itl=30ms")
    caller = ApiKeys(tmp_path / "keys.json", ANYONE).caller_of(key)
    assert caller is not None
    assert caller.promised(None, 0) == Slo(0.3, 0.03)
    assert caller.promised(Slo(ttft_s=3.0), 0) == Slo(3.0, 0.03)
    assert caller.promised(Slo(itl_s=1.0), -1) == Slo(0.3, 1.0)
    # What is less important, such as a batch, is promised what it asks for.
    assert caller.promised(None, 1) is None
    assert caller.promised(Slo(ttft_s=3.0), 1) == Slo(ttft_s=3.0)
    assert ANYONE.promised(None, 0) is None


@pytest.mark.parametrize("slo", ["ttft=500", "ttft", "tpot=5ms", "ttft=0ms", "itl=-1s", "ttft=1s;itl=1s"])
def test_a_wrong_promise_of_a_key_is_refused_at_the_start(slo: str, tmp_path: Path) -> None:
    with_slo(tmp_path / "keys.json", slo)
    with pytest.raises(CumuloError, match=r"keys\.json: the slo of the key 'ann' is wrong: "):
        ApiKeys(tmp_path / "keys.json", ANYONE)


def test_callers_share_cached_prefixes_only_within_a_group_and_salts_cannot_collide(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    made = {name: new_key(path, name) for name in ("a", "a/b", 'a", "b')}
    made |= {name: new_key(path, name, cache_group="team") for name in ("c", "d")}
    keys = ApiKeys(path, ANYONE)
    callers = {name: keys.caller_of(key) for name, key in made.items()}
    salts = {
        (name, own): caller.salt(own)
        for name, caller in callers.items() if caller is not None
        for own in ("", "x", "b/x", '", "x', "team")
    }  # fmt: skip
    assert len(salts) == 25
    same = [pair for pair in salts if salts[pair] == salts[pair[0], ""] and pair[1]]
    assert same == []
    groups = {salt: {name for name, own in salts if salts[name, own] == salt} for salt in salts.values()}
    assert sorted(map(sorted, {frozenset(names) for names in groups.values()})) == [
        ["a"], ['a", "b'], ["a/b"], ["c", "d"],
    ]  # fmt: skip
    assert ANYONE.salt("") == "" and ANYONE.salt("x") not in salts.values()


def test_keys_that_are_made_at_once_are_all_kept(tmp_path: Path) -> None:
    path, names = tmp_path / "keys.json", [f"user {number}" for number in range(12)]
    with ThreadPoolExecutor(len(names)) as threads:
        keys = list(threads.map(lambda name: new_key(path, name), names))
    known = ApiKeys(path, Caller("anyone"))
    assert [caller.name for key in keys if (caller := known.caller_of(key))] == names


def test_a_key_that_is_revoked_while_the_file_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.json"
    key = new_key(path, "gone")
    original = keys_module.read_keys

    def read_and_revoke(read: Path) -> list[keys_module.KeyEntry]:
        found = original(read)
        monkeypatch.setattr(keys_module, "read_keys", original)
        path.write_text('{"keys": []}')
        return found

    monkeypatch.setattr(keys_module, "read_keys", read_and_revoke)
    known = ApiKeys(path, Caller("anyone"))
    monkeypatch.setattr(keys_module, "_LOOK_AGAIN_S", 0.0)
    assert known.caller_of(key) is None


def test_a_second_key_of_the_same_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    new_key(path, "ann")
    with pytest.raises(CumuloError, match="already has a key named 'ann'"):
        new_key(path, "ann")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"keys": [{"name": "x"}]}', '{"keys": [], "more": 1}'])
def test_a_file_that_is_none_of_keys_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(CumuloError, match="no file of API keys"):
        read_keys(path)


def test_an_allowance_refills_evenly() -> None:
    now_s = 0.0
    limits = RateLimits(clock=lambda: now_s)
    caller = Caller("ann", requests_per_minute=2)
    assert [limits.take_amount("requests", caller, 1) for _ in range(3)] == [0, 0, 30]
    now_s = 29
    assert limits.take_amount("requests", caller, 1) == pytest.approx(1)
    now_s = 31
    assert limits.take_amount("requests", caller, 1) == 0
    assert limits.take_amount("requests", Caller("bob", requests_per_minute=2), 1) == 0  # each has their own


def test_long_answers_leave_a_debt() -> None:
    now_s = 0.0
    limits = RateLimits(clock=lambda: now_s)
    caller = Caller("ann", tokens_per_minute=60)
    assert limits.take_amount("tokens", caller, 10) == 0
    limits.charge_output(caller, 80)  # 30 in debt
    assert limits.take_amount("tokens", caller, 10) == pytest.approx(40)
    now_s = 41
    assert limits.take_amount("tokens", caller, 10) == 0
    assert (
        limits.take_amount("tokens", caller, 1000) > 0
    )  # more than a minute's worth: when the bucket is full
    now_s = 200
    assert limits.take_amount("tokens", caller, 1000) == 0


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 40)), max_size=60))
def test_no_minute_sees_more_than_twice_its_allowance(asked: list[tuple[float, int]]) -> None:
    """A bucket lets at most a full bucket and a minute's refill through in any minute."""
    now_s = 0.0
    limits = RateLimits(clock=lambda: now_s)
    caller = Caller("ann", tokens_per_minute=50)
    taken: list[tuple[float, int]] = []
    for pause_s, tokens in asked:
        now_s += pause_s
        if limits.take_amount("tokens", caller, tokens) == 0:
            taken.append((now_s, tokens))
    for start_s, _ in taken:
        assert sum(tokens for at_s, tokens in taken if start_s <= at_s < start_s + 60) <= 100 + 1e-6


# -- over HTTP --------------------------------------------------------------------------------------------------
ASK: dict[str, Any] = {"model": MODEL, "prompt": "Hi", "max_tokens": 2}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, dict[str, str], Path]]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    made = cumulo_process("serve", "--api-keys", str(path), "--new-api-key", "ann")
    assert made.code == 0, made.err
    keys = {
        "ann": made.out.strip(),
        "few": new_key(path, "few", requests_per_minute=2),
        "short": new_key(path, "short", tokens_per_minute=20),
        "revoked": new_key(path, "revoked"),
    }
    with running_server(quick_model(), "--api-keys", str(path), "--log-prompts") as server:
        yield server, keys, path


Guarded = tuple[RunningServer, dict[str, str], Path]


@needs_built_in_model
def test_only_a_valid_key_is_let_in(guarded: Guarded) -> None:
    server, keys, _ = guarded
    assert server.client(keys["ann"]).completions.create(**ASK).usage is not None
    with pytest.raises(openai.AuthenticationError) as caught:
        server.client("ck-guessed").completions.create(**ASK)
    assert caught.value.code == "invalid_api_key"
    for path in ("/v1/models", "/v1/requests/x/explain"):
        answer = server.get(path)
        assert answer.status_code == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
    malformed = httpx.post(f"{server.url}/v1/completions", content=b"{" * 1000, timeout=60)
    assert malformed.status_code == 401  # a stranger's body is not even looked at
    for path in ("/health", "/ready", "/metrics", "/version", "/openapi.json"):
        assert server.status(path) == 200
    assert keys["ann"] not in server.log


@needs_built_in_model
def test_a_key_may_come_as_anthropics_clients_send_it(guarded: Guarded) -> None:
    server, keys, _ = guarded

    def status(*headers: tuple[str, str]) -> int:
        return server.get("/v1/models", headers=list(headers)).status_code

    ann, few = keys["ann"], keys["few"]
    assert status(("X-Api-Key", ann)) == 200
    assert status(("X-Api-Key", ann), ("Authorization", f"Bearer {ann}")) == 200
    assert status(("X-Api-Key", ann), ("Authorization", "Basic c29tZWJvZHk6ZWxzZQ==")) == 200
    for wrong in (
        [("X-Api-Key", "ck-guessed")],
        [("X-Api-Key", "")],
        [("X-Api-Key", ann), ("Authorization", f"Bearer {few}")],
        [("X-Api-Key", "ck-guessed"), ("Authorization", f"Bearer {ann}")],
        [("X-Api-Key", ann), ("X-Api-Key", few)],
    ):
        assert status(*wrong) == 401


@needs_built_in_model
def test_only_a_key_that_may_go_first_sends_a_priority_below_0(guarded: Guarded) -> None:
    server, keys, path = guarded

    def ask(priority: int) -> Any:
        return server.client(keys["ann"]).completions.create(
            model=MODEL, prompt="Hi", max_tokens=1, extra_body={"priority": priority}
        )

    ask(0)
    with pytest.raises(openai.BadRequestError, match="may_go_first") as refused:
        ask(-1)
    assert refused.value.param == "priority"
    content = json.loads(path.read_text())
    content["keys"][0]["may_go_first"] = True
    assert content["keys"][0]["name"] == "ann"
    path.write_text(json.dumps(content))

    def let_through() -> bool:
        try:
            return bool(ask(-1))
        except openai.BadRequestError:
            return False

    wait_for(let_through, "the changed key file to be read", server)


@needs_built_in_model
def test_stories_are_their_callers_own(guarded: Guarded) -> None:
    server, keys, _ = guarded
    answer = server.client(keys["ann"]).completions.create(**ASK)
    path = f"/v1/requests/{answer.id}/explain"
    assert server.get(path, headers={"Authorization": f"Bearer {keys['ann']}"}).status_code == 200
    assert server.get(path, headers={"Authorization": f"Bearer {keys['few']}"}).status_code == 404


@needs_built_in_model
def test_too_many_requests_or_tokens_are_429(guarded: Guarded) -> None:
    server, keys, _ = guarded
    few, short = server.client(keys["few"]), server.client(keys["short"])
    for _ in range(2):
        few.completions.create(**ASK)
    with pytest.raises(openai.RateLimitError, match="2 requests per minute") as caught:
        few.completions.create(**ASK)
    assert 1 <= int(caught.value.response.headers["Retry-After"]) <= 30
    short.completions.create(**(ASK | {"max_tokens": 40}), extra_body={"ignore_eos": True})
    with pytest.raises(openai.RateLimitError, match="20 tokens per minute") as caught:
        short.completions.create(**ASK)
    assert int(caught.value.response.headers["Retry-After"]) > 1


@needs_built_in_model
def test_a_revoked_key_stops_working_while_the_server_runs(guarded: Guarded) -> None:
    server, keys, path = guarded
    header = {"Authorization": f"Bearer {keys['revoked']}"}
    assert server.get("/v1/models", headers=header).status_code == 200
    content = json.loads(path.read_text())
    content["keys"] = [entry for entry in content["keys"] if entry["name"] != "revoked"]
    path.write_text(json.dumps(content))
    wait_for(lambda: server.get("/v1/models", headers=header).status_code == 401, "the revocation", server)
    assert server.client(keys["ann"]).models.list().data


@needs_built_in_model
def test_prompts_are_logged_where_that_was_asked_for(guarded: Guarded) -> None:
    server, keys, _ = guarded
    server.client(keys["ann"]).completions.create(**(ASK | {"prompt": "plugh"}))
    assert "prompt: 'plugh'" in server.log

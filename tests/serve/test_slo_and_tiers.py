"""A server with a promised latency and a KV tier on disk, end to end: what clients are told, what metrics count,
and what a new server finds of the old one's work."""

from pathlib import Path

import httpx
import pytest

from tests.serve.running_server import MODEL, RunningServer, quick_model, running_server

pytestmark = pytest.mark.long

PROMPT = "The river runs past the old mill and the bridge. " * 12


def ask(server: RunningServer, **more: object) -> httpx.Response:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True} | more
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)


def story(server: RunningServer, answer: httpx.Response) -> str:
    told = httpx.get(f"{server.url}/v1/requests/{answer.json()['id']}/explain", timeout=60).json()
    return " · ".join(event["words"] for event in told["data"][0]["events"])


def test_promises_and_tiers_of_a_server_and_of_the_next_one(tmp_path: Path) -> None:
    options = (quick_model(), "--no-console", "--slo", "ttft=300s,itl=300s", "--kv-disk", f"{tmp_path}:1")
    with running_server(*options) as server:
        answer = ask(server)
        assert answer.status_code == 200, answer.text
        first = answer.json()["choices"][0]["text"]
        assert "is promised TTFT 300000 ms" in story(server, answer)
        assert "its promise was kept" in story(server, answer)
        refused = ask(server, prompt="Another " * 200, slo={"ttft_ms": 0.001})
        assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["code"] == "slo_not_kept"
        wrong = ask(server, slo={})
        assert wrong.status_code == 400 and "ttft_ms" in wrong.json()["error"]["message"]
        metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
        assert 'outcome="kept"} 1.0' in metrics and 'outcome="refused"} 1.0' in metrics
    assert list(tmp_path.rglob("*.kv")), "a server that ends leaves its prefixes on disk"
    with running_server(*options) as server:
        answer = ask(server)
        assert answer.json()["choices"][0]["text"] == first
        words = story(server, answer)
        assert "found on disk: fetched" in words or "found on disk, but reading them" in words
        metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
        assert 'cumulo:kv_tier_blocks{engine="0"' in metrics


@pytest.mark.parametrize("given", ["/var/cache/kv", "/var/cache/kv:", ":5", "/var/cache/kv:-1"])
def test_a_disk_needs_a_folder_and_a_size(given: str) -> None:
    from cumulo.cli.shared.options import TierOptions
    from cumulo.errors import CumuloError

    with pytest.raises(CumuloError, match="a folder and a size in GiB"):
        TierOptions(kv_disk=given).config()


def test_a_disk_is_not_asked_for_more_than_it_has(tmp_path: Path) -> None:
    from cumulo.cli.shared.options import TierOptions
    from cumulo.errors import CumuloError

    assert TierOptions(kv_disk=f"{tmp_path}/new/kv:0.1").config()["kv_disk_gib"] == 0.1
    with pytest.raises(CumuloError, match=r":1e\+12 is more than its disk has, [0-9]+ GiB in all"):
        TierOptions(kv_disk=f"{tmp_path}/new/kv:1e12").config()


@pytest.mark.parametrize("size", [float("inf"), float("nan"), -1.0])
def test_host_memory_has_a_size(size: float) -> None:
    from cumulo.cli.shared.options import TierOptions
    from cumulo.errors import CumuloError

    with pytest.raises(CumuloError, match="--kv-host-gib must be a size in GiB"):
        TierOptions(kv_host_gib=size).config()


@pytest.mark.parametrize("given", ["ttft=500", "ttft=500ms,itl=40", "tpot=5ms", "ttft=1s,ttft=2s"])
def test_a_promise_needs_units_and_is_of_ttft_and_itl(given: str) -> None:
    from cumulo.errors import CumuloError
    from cumulo.load.slo import parse_promise

    with pytest.raises(CumuloError, match=r"needs units|can promise ttft and itl|says ttft twice"):
        parse_promise(given)

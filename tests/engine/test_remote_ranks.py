"""Ranks that join over TCP, as those of other hosts do: same tokens as one rank, the next engine is joined when one
ends, and who has no key is refused. Real processes, on this host's own address."""

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

import pytest

pytest.importorskip("torch.distributed", reason="this torch has no distributed package")

from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.play.ranked_runner import RankedRunner
from cumulo.errors import CumuloError, RanksFailed
from cumulo.ranks import remote
from cumulo.ranks.rank_group import meeting_point
from cumulo.ranks.remote import RankListener, join_engine
from tests import processes
from tests.engine.ranked_models import save_model
from tests.engine.test_ranks import compare, started
from tests.ports import reserved_port

pytestmark = pytest.mark.long

_TCP_REPAIR = 19  # of Linux: a connection that is closed then just stops to be
KEY = "a key that is long enough for all of them".replace(" ", "-")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("dense", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def joining(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, TextIO]]:
    with _joining(tmp_path_factory.mktemp("key"), 1) as one:
        yield one


@contextmanager
def _joining(folder: Path, count: int) -> Iterator[tuple[str, TextIO]]:
    """An address, and what a process says that wants to have ranks of whatever engine waits there."""
    address, key = f"127.0.0.1:{reserved_port()}", folder / "fleet.key"
    key.write_text(KEY)
    words = ["serve", "--rank-of", address, "--fleet-key-file", str(key), "--threads", "1"]
    words += ["--rank-count", str(count)] if count > 1 else []
    reading, writing = os.pipe()
    with os.fdopen(reading) as said:
        with os.fdopen(writing, "w") as saying:
            process = processes.start(words, stdout=saying, stderr=saying)
        try:
            yield address, said
        finally:
            process.send_signal(signal.SIGINT)  # at which it ends its rank
            process.wait()


def _rank_said(said: TextIO) -> str:
    return next(line for line in said if line.startswith("rank"))


def test_ranks_over_tcp_say_what_one_says_and_join_the_next_engine(
    model: Path, joining: tuple[str, TextIO]
) -> None:
    address, said = joining
    options = {"tp": 2, "remote_ranks": 1, "rank_address": address, "transfer_key": KEY}
    with started(model) as one:
        with started(model, **options) as several:
            assert _rank_said(said) == f"rank 1 of the engine at {address}\n"
            runner = several.player.runner
            assert isinstance(runner, RankedRunner)
            compare(one.engine, several.engine, rounds=1, seed=5)
            several.engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
            for _ in range(3):
                several.engine.step()
            with socket.socket(fileno=os.dup(runner.ranks.pipes[1].fileno())) as line:
                line.shutdown(socket.SHUT_RDWR)  # as if the network were cut
            with pytest.raises(RanksFailed, match="rank 1"):
                while several.engine.has_work:
                    several.engine.step()
        with started(model, **options) as again:
            assert _rank_said(said) == f"rank 1 of the engine at {address}\n"
            compare(one.engine, again.engine, rounds=1, seed=6, count=4)


def test_experts_on_another_host_say_what_one_rank_says(
    tmp_path_factory: pytest.TempPathFactory, joining: tuple[str, TextIO]
) -> None:
    address, said = joining
    model = save_model("experts", tmp_path_factory.mktemp("experts"))
    options = {
        "ep": 2,
        "remote_ranks": 1,
        "rank_address": address,
        "transfer_key": KEY,
        "rank_backend": "gloo",
    }
    with started(model) as one, started(model, **options) as several:
        assert _rank_said(said) == f"rank 1 of the engine at {address}\n"
        compare(one.engine, several.engine, rounds=1, seed=8, count=3)


def test_one_command_starts_all_ranks_of_its_host(model: Path, tmp_path: Path) -> None:
    with _joining(tmp_path, 2) as (address, said):
        options = {"pp": 3, "remote_ranks": 2, "rank_address": address, "transfer_key": KEY}
        with started(model) as one, started(model, **options) as several:
            joined = {_rank_said(said), _rank_said(said)}
            assert joined == {f"rank {number} of the engine at {address}\n" for number in (1, 2)}
            compare(one.engine, several.engine, rounds=1, seed=7, count=3)


def _unacknowledged(connection: Connection) -> int:
    """Segments on their way, as Linux counts them (struct tcp_info)."""
    with socket.socket(fileno=os.dup(connection.fileno())) as line:
        return struct.unpack_from("I", line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 24)[0]


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="Linux's options")
def test_a_host_that_vanishes_without_a_word_is_noticed_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_ALIVE_S", 1)
    listener = RankListener(f"127.0.0.1:{reserved_port()}", KEY)
    try:
        with ThreadPoolExecutor(1) as pool:
            for engine_vanishes in (False, True):
                admitted = pool.submit(listener.admit, 1, "told")
                joined, *_ = join_engine(listener.address, KEY)
                gone, stays = (admitted.result(), joined) if engine_vanishes else (joined, admitted.result())
                while any(_unacknowledged(one) for one in (gone, stays)):
                    time.sleep(0.01)  # or sending it again would find out
                with socket.socket(fileno=os.dup(gone.fileno())) as line:
                    try:
                        line.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
                    except PermissionError:
                        pytest.skip(
                            "only a privileged process can close a connection without telling the other"
                        )
                gone.close()  # nothing is sent
                with pytest.raises(
                    OSError
                ):  # what a reader of the other side meets, instead of waiting for ever
                    stays.recv_bytes()
                stays.close()
    finally:
        listener.close()


def test_a_rank_with_another_key_is_refused_and_says_so() -> None:
    listener = RankListener(f"127.0.0.1:{reserved_port()}", KEY)
    try:
        with ThreadPoolExecutor(1) as pool:
            admitted = pool.submit(listener.admit, 1, "told")
            with pytest.raises(CumuloError, match="has another key"):
                join_engine(listener.address, "another key")
            connection, rank, told, host = join_engine(listener.address, KEY)
            assert (rank, told, host) == (1, "told", "127.0.0.1")
            admitted.result().close()
            connection.close()
    finally:
        listener.close()


def test_strangers_that_say_nothing_or_nonsense_keep_no_rank_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_GREETING_S", 3)
    listener = RankListener(f"127.0.0.1:{reserved_port()}", KEY)
    where = remote.host_and_port(listener.address)
    try:
        with socket.create_connection(where), socket.create_connection(where) as second:
            second.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with ThreadPoolExecutor(1) as pool:
                admitted = pool.submit(listener.admit, 1, "told")
                connection, rank, told, _ = join_engine(listener.address, KEY)
                assert (rank, told) == (1, "told")
                admitted.result().close()
                connection.close()
    finally:
        listener.close()


@pytest.mark.parametrize("address", ["nowhere", "10.0.0.1", "127.0.0.1:70000", ":9", "127.0.0.1:-1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(CumuloError, match="write HOST:PORT"):
        remote.host_and_port(address)


def test_an_address_of_another_host_is_refused_at_once() -> None:
    with pytest.raises(CumuloError, match=r"'192\.0\.2\.1' is no address of this host"):
        meeting_point(host="192.0.2.1")


def test_what_several_hosts_need_is_said() -> None:
    with pytest.raises(CumuloError, match="needs a rank_address"):
        EngineConfig(tp=2, remote_ranks=1)
    with pytest.raises(CumuloError, match="all but one at most"):
        EngineConfig(tp=2, remote_ranks=2, rank_address="10.0.0.1:9", transfer_key=KEY)
    with pytest.raises(CumuloError, match="need a key"):
        EngineConfig(tp=2, remote_ranks=1, rank_address="10.0.0.1:9")

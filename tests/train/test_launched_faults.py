"""A training run under its launcher whose ranks are killed, refuse or are told to stop. Real processes."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cumulo.layout.layout import Layout
from cumulo.train.decide.config import CheckpointConfig, config_text
from cumulo.train.run.log import read_log
from tests import processes, thorough
from tests.ports import reserved_port
from tests.serve.running_server import wait_for
from tests.train.kill import ranks_of, torment
from tests.train.ranked import tiny, train, write_texts
from tests.train.test_resume import difference

pytestmark = pytest.mark.long


@pytest.mark.long
@pytest.mark.parametrize(
    "memory_every_steps",
    [
        pytest.param(0, id="storage", marks=pytest.mark.thorough),
        pytest.param(1, id="memory", marks=pytest.mark.long),
    ],
)
def test_ranks_that_are_killed_do_not_change_what_is_learnt(memory_every_steps: int, tmp_path: Path) -> None:
    """See `tests/train/kill.py`, which does it more often."""
    times = 2 if thorough.chosen else 1
    outcome = torment(tmp_path, times, Layout(dp=2), seed=1, memory_every_steps=memory_every_steps)
    assert len(outcome.kills) == times
    assert outcome.difference < 1e-9
    assert outcome.same_tokens
    assert outcome.heard.count("was ended by SIGKILL") >= 1
    assert ("from memory" in outcome.heard) == bool(memory_every_steps)


def _launched(folder: Path, *changes: str) -> tuple[subprocess.Popen[bytes], Path]:
    """The run, and what it says."""
    source = write_texts(folder / "texts.jsonl")
    config = tiny(folder / "run", source, Layout(dp=2), steps=400, evaluate_sequences=0)
    (folder / "config.yaml").write_text(config_text(config))
    options = [word for change in changes for word in ("--set", change)]
    more = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    heard = folder / "heard.txt"
    with heard.open("wb") as stream:
        run = processes.start(
            ["train", str(folder / "config.yaml"), *options],
            stdout=stream,
            stderr=stream,
            env=os.environ | more,
        )
    return run, heard


@pytest.mark.thorough  # tests/ranks/test_launch.py does it with ranks that need no torch
def test_a_run_that_cannot_go_on_says_so_once_and_is_not_started_again(tmp_path: Path) -> None:
    run, heard = _launched(tmp_path, "optimizer.learning_rate=1e30", "optimizer.clip_norm=0")
    code, text = run.wait(300), heard.read_text()
    assert code == 2, text
    assert len(re.findall(r"stopped at step \d+: the loss", " ".join(text.split()))) == 1
    assert "restarting all" not in text


@pytest.mark.long
def test_ctrl_c_reaches_all_ranks_and_they_save(tmp_path: Path) -> None:
    run, heard = _launched(tmp_path)
    log = tmp_path / "run/log.csv"
    try:
        wait_for(lambda: len(read_log(log)) >= 2 or run.poll() is not None, "two steps")
        run.send_signal(signal.SIGINT)
        code, text = run.wait(300), heard.read_text()
    finally:
        run.kill()
    assert code == 0, text
    (stopped,) = re.findall(r"stopped after step (\d+); checkpoint saved", " ".join(text.split()))
    assert (tmp_path / f"run/checkpoints/step-{int(stopped):09d}").is_dir()
    assert (tmp_path / "run/model/model.safetensors").is_file()
    assert len(read_log(log)) == int(stopped)


@pytest.mark.long
def test_ranks_end_with_their_parent_and_the_run_has_one_owner(tmp_path: Path) -> None:
    run, _ = _launched(tmp_path)
    log, config = tmp_path / "run/log.csv", tmp_path / "run/config.yaml"
    try:
        wait_for(lambda: len(read_log(log)) >= 2 or run.poll() is not None, "two steps")
        before, heard = config.read_text(), tmp_path / "second.txt"
        with heard.open("wb") as stream:
            second = processes.start(
                ["train", "--resume", "--folder", str(tmp_path / "run"), "--steps", "7"],
                stdout=stream, stderr=stream,
            )  # fmt: skip
        assert second.wait(300) == 2
        assert "is in use by process" in (words := " ".join(heard.read_text().split())), words
        assert config.read_text() == before and run.poll() is None
        ranks = list(ranks_of(run.pid).values())
        assert len(ranks) == 2
    finally:
        run.kill()
        run.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), "the ranks' end")
    with heard.open("wb") as stream:  # nobody is left: it goes on at once
        third = processes.start(
            ["train", "--resume", "--folder", str(tmp_path / "run"), "--set", "steps=30"],
            stdout=stream, stderr=stream, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    assert third.wait(300) == 0, heard.read_text()


@pytest.mark.long
def test_a_rank_that_stands_still_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    run, heard = _launched(tmp_path, "steps=60")
    log = tmp_path / "run/log.csv"
    try:
        wait_for(lambda: len(read_log(log)) >= 6 or run.poll() is not None, "six steps")
        os.kill(ranks_of(run.pid)[1], signal.SIGSTOP)
        assert run.wait(600) == 0, heard.read_text()
    finally:
        run.kill()
    text = " ".join(heard.read_text().split())
    assert "rank 1 did not answer: stopped, or the machine is gone" in text, text
    said = re.findall(r"has taken more than (\S+) s: rank 1 held it up", text)
    assert len(said) == 2 and float(said[0]) <= 30, text
    assert "rank 1 held it up; restarting all 2 processes (1 of 3)" in text
    assert [one.step for one in read_log(log)] == list(range(1, 61))


def _node(name: str, folder: Path, port: int) -> subprocess.Popen[bytes]:
    """A machine of one rank under a torchrun of its own."""
    torchrun = [
        "--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "job",
        "--max-restarts", "3", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1",
        "--rdzv-conf", "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=25",
    ]  # fmt: skip
    command = ["-m", "cumulo", "train", str(folder / "config.yaml")]
    changes = {
        "CUMULO_NODE": name, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip
    with (folder / f"{name}.txt").open("wb") as heard:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *torchrun, *command],
            stdout=heard, stderr=heard, env=os.environ | changes,
        )  # fmt: skip


def _wait_until_it_listens(port: int) -> None:
    def listens() -> bool:
        with socket.socket() as trial:
            return trial.connect_ex(("127.0.0.1", port)) == 0

    wait_for(listens, "the rendezvous")


def _end(node: subprocess.Popen[bytes]) -> None:
    for pid in ranks_of(node.pid).values():
        os.kill(pid, signal.SIGKILL)
    node.kill()
    node.wait()


@pytest.mark.thorough
def test_when_a_node_is_lost_the_run_goes_on_without_it_from_its_copy_in_a_peers_memory(
    tmp_path: Path,
) -> None:
    source = write_texts(tmp_path / "texts.jsonl")
    changes: dict[str, Any] = dict(
        steps=30, evaluate_sequences=0,
        checkpoint=CheckpointConfig(every_steps=0, memory_every_steps=2, memory_folder=str(tmp_path / "memory")),
    )  # fmt: skip
    _, expected, _ = train(tiny(tmp_path / "alone", source, Layout(), **changes))
    config = tiny(tmp_path / "run", source, Layout(dp=2, zero=1), **changes)
    (tmp_path / "config.yaml").write_text(config_text(config))
    port = reserved_port()
    log, deadline = tmp_path / "run/log.csv", time.monotonic() + 300
    first = _node("first", tmp_path, port)
    _wait_until_it_listens(port)  # it hosts the rendezvous
    second = _node("second", tmp_path, port)
    try:
        while len(read_log(log)) < 5 and time.monotonic() < deadline and first.poll() is None:
            time.sleep(0.05)
        _end(second)
        for memory in (tmp_path / "memory").glob("*/second"):
            shutil.rmtree(memory)
        assert first.wait(max(1.0, deadline - time.monotonic())) == 0
    finally:
        _end(first)
        _end(second)
    text = (tmp_path / "first.txt").read_text()
    assert re.search(r"resuming after step \d+, from memory", text), text
    assert difference(read_log(log), expected) < 1e-9

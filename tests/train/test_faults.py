"""What goes wrong in a run of several processes: ranks die, hang, and break their files; the run goes on."""

import json
import os
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cumulo.checkpoint.play.saver import Saver
from cumulo.checkpoint.play.store import CheckpointStore
from cumulo.errors import ConfigError, TrainingError
from cumulo.layout.layout import Layout
from cumulo.ranks.collectives import all_reduce
from cumulo.ranks.groups import control_group, world_group
from cumulo.ranks.hang import HangWatch, Standing, verdict
from cumulo.ranks.launch import HUNG
from cumulo.ranks.team import Team
from cumulo.train.decide.config import CheckpointConfig, GuardConfig
from cumulo.train.decide.elastic import fitted
from cumulo.train.run.log import RunLog, TrainRecord, read_log
from tests.serve.running_server import wait_for
from tests.thorough import rare
from tests.train.pool import run_ranks
from tests.train.ranked import tiny, train
from tests.train.test_resume import DENSE, assert_same, difference, rank_state, whole_state

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("layout", "world", "expected"),
    [
        (Layout(dp=4), 2, Layout(dp=2)),
        (Layout(dp=2), 4, Layout(dp=4)),  # a node came back
        (
            Layout(dp=4, tp=2),
            6,
            Layout(dp=2, tp=2),
        ),  # 3 copies cannot share a batch of 16; one pair is left over
        (Layout(dp=4, ep=4), 2, Layout(dp=2, ep=2)),
        (Layout(dp=4, zero=3, shard=4), 2, Layout(dp=2, zero=3)),
    ],
    ids=str,
)
def test_a_layout_gives_way_in_its_copies_only(
    layout: Layout, world: int, expected: Layout, tmp_path: Path
) -> None:
    config = tiny(tmp_path, tmp_path, layout, experts=layout.ep > 1)
    assert fitted(config, world) == expected


def test_too_few_ranks_for_one_copy_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs 4 processes at least .* and 3 were started"):
        fitted(tiny(tmp_path, tmp_path, Layout(dp=2, tp=2, pp=2)), 3)


def _stuck_in_a_lock(lock: threading.Lock) -> None:
    lock.acquire()


def _hang(rank: int, folder: Path) -> list[int]:
    """Rank 1 does something else while the others wait for it in a collective."""
    codes: list[int] = []
    lock = threading.Lock()
    lock.acquire()

    def end(code: int) -> None:
        codes.append(code)
        if rank == 1:
            lock.release()

    all_reduce(torch.zeros(1), world_group())  # all are here
    with HangWatch(folder, rank, 3, 1.0, end, grace_s=5.0) as watch:
        watch.begin(7)
        if rank == 1:
            _stuck_in_a_lock(lock)
        all_reduce(torch.zeros(1), world_group())
    return codes


@pytest.mark.long
def test_a_hang_is_reported_with_who_did_not_arrive(tmp_path: Path) -> None:
    assert run_ranks(_hang, 3, tmp_path) == [[HUNG]] * 3
    stacks = (tmp_path / "stacks.txt").read_text()
    assert "rank 1, step 7" in stacks
    assert "_stuck_in_a_lock" in stacks.split("rank 1, step 7")[1].split("rank 2, step 7")[0]
    assert stacks.count("all_reduce(torch.zeros(1), world_group())") == 2


def test_a_verdict_names_the_silent_the_late_and_the_waiting() -> None:
    found = [Standing(0, 4, True, "a.py:1 (x)", ""), Standing(2, 4, False, "b.py:2 (y)", "")]
    text = verdict(found, 4, 30)
    assert text.startswith("step 4 has taken more than 30 s: ranks 1, 2, 3 held it up\n")
    assert "ranks 1, 3 did not answer" in text
    assert "rank 2 did not arrive: it stands at b.py:2 (y)" in text
    assert "rank 0 waited at a.py:1 (x)" in text
    alike = [Standing(rank, 4, True, "a.py:1 (x)", "") for rank in range(2)]
    assert "all wait for each other" in verdict(alike, 2, 30)


class _Clock:
    """Goes on when the test says so; knows how often the watching thread has looked at it."""

    def __init__(self) -> None:
        self.now_s, self.looks = 0.0, threading.Semaphore(0)

    def __call__(self) -> float:
        if threading.current_thread() is not threading.main_thread():
            self.looks.release()
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        """Returns when the watch has seen it, and acted on it."""
        self.now_s += seconds
        while self.looks.acquire(blocking=False):
            pass
        for _ in range(3):
            assert self.looks.acquire(timeout=300)


def test_a_step_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    codes: list[int] = []
    clock = _Clock()
    with HangWatch(tmp_path, 0, 1, 0.04, codes.append, grace_s=0.1, clock=clock) as watch:
        for step in range(4):
            watch.begin(step)
            clock.pass_s(0.03)
        watch.pause()
        clock.pass_s(60)
    assert codes == []


class _FullDisk(CheckpointStore):
    """Rank 1's file system is full: its file cannot be opened for writing."""

    def _own_files(self, aside: Path) -> list[Path]:
        if self.team.rank == 1:
            raise OSError(28, os.strerror(28))
        return super()._own_files(aside)


def _save_and_load(rank: int, folder: Path, layout: Layout, harm: str) -> tuple[list[str], str | None]:
    heard: list[str] = []
    team = Team(control_group())
    whole = whole_state(DENSE)
    saver, store = Saver(rank, heard.append), CheckpointStore(folder, 3, heard.append, team)
    state = rank_state(DENSE, layout, rank, whole)
    for step in (1, 2):
        saver.save(step, state, {"samples": step}, [store], later=True)
        saver.wait()
    if harm == "full disk":
        saver.save(3, state, {}, [_FullDisk(folder, 3, heard.append, team)], later=False)
    elif rank == 0:
        drawn = random.Random(harm)
        path = drawn.choice(sorted((store.path_of(2) / "tensors").glob("*.distcp")))
        content = bytearray(path.read_bytes())
        if harm == "flip":
            content[drawn.randrange(len(content))] ^= 1
        path.write_bytes(content if harm == "flip" else content[: len(content) // 2])
    team.together(lambda: None)
    latest = store.latest()
    assert latest is not None
    assert latest.facts["samples"] == (2 if harm == "full disk" else 1)
    loaded = rank_state(DENSE, layout, rank, None)
    store.load(latest, loaded)
    assert_same(loaded, rank_state(DENSE, layout, rank, whole))
    return heard, saver.failed


@pytest.mark.long
@pytest.mark.parametrize("harm", ["full disk", "flip", *rare("cut")])
def test_what_is_broken_by_one_rank_is_known_to_all_and_the_one_before_is_used(
    harm: str, tmp_path: Path
) -> None:
    results = run_ranks(_save_and_load, 4, tmp_path, Layout(dp=2, tp=2, zero=1), harm)
    for heard, failed in results:
        (message,) = heard
        if harm == "full disk":
            assert failed is not None
            assert "No space left on device" in failed
            assert "step 3 could not be written" in message
            assert not list(tmp_path.glob("*.writing"))
        else:
            assert "step-000000002 is damaged" in message
            assert {"flip": "hash differs", "cut": "bytes instead of"}[harm] in message


def _disagree(rank: int) -> str:
    team = Team(control_group())

    def work() -> int:
        if rank == 1:
            raise ValueError("mine alone")
        return rank

    try:
        team.together(work)
    except (ValueError, TrainingError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_error_of_one_rank_is_raised_by_all() -> None:
    assert run_ranks(_disagree, 3) == [
        "TrainingError: rank 1: ValueError: mine alone",
        "ValueError: mine alone",
        "TrainingError: rank 1: ValueError: mine alone",
    ]


@pytest.mark.long
def test_after_a_spike_all_ranks_go_back_together(tmp_path: Path) -> None:
    drawn = random.Random(0)
    noise = "".join(chr(drawn.randint(33, 126)) for _ in range(70))
    source = tmp_path / "texts.jsonl"
    texts = (["ab" * 100] * 40 + [noise]) * 4
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    changes: dict[str, Any] = dict(
        steps=40, evaluate_sequences=0, batch_sequences=8, micro_batch=4,
        guard=GuardConfig("rollback", spike_deviations=8, window_steps=10, most_rollbacks=20),
        checkpoint=CheckpointConfig(every_steps=5, keep=2),
    )  # fmt: skip
    changes["model"] = replace(tiny(tmp_path, source, Layout()).model, layers=1)
    heard, found, _ = train(tiny(tmp_path / "ranks", source, Layout(dp=2), **changes))
    expected_heard, expected, _ = train(tiny(tmp_path / "alone", source, Layout(), **changes))
    back = [message for message in heard if "back to step" in message]
    assert len(back) >= 1
    assert back == [message for message in expected_heard if "back to step" in message]
    assert difference(found, expected) < 1e-9


def test_how_long_a_step_may_take_is_learnt_from_the_steps_before(tmp_path: Path) -> None:
    """Steps that vary by five times are no hang; one that hangs is found long before the first limit."""
    codes: list[int] = []
    drawn, clock = random.Random(3), _Clock()
    watch = HangWatch(tmp_path, 0, 1, None, codes.append, grace_s=0.1, clock=clock)
    limits = []
    for step in range(2000):
        watch.begin(step)
        seconds = 2.0 * drawn.uniform(1, 5)
        limits.append(watch.after_s)
        assert seconds < watch.after_s
        clock.now_s += seconds
        watch.pause()
    assert limits[:4] == [600.0] * 4
    assert 48 <= limits[-1] <= 60
    quick = HangWatch(tmp_path, 0, 1, None, codes.append, grace_s=0.1, clock=clock)
    with quick:
        for step in range(5):
            quick.begin(step)
            clock.now_s += 0.05
            quick.pause()
        quick.begin(5)
        clock.now_s += 10.1
        wait_for(lambda: codes == [HUNG], "the watch")


def test_between_steps_only_a_rank_that_does_not_answer_hangs(tmp_path: Path) -> None:
    """A checkpoint that takes long is none, while all ranks answer."""
    ends: dict[int, list[int]] = {0: [], 1: []}
    clocks = [_Clock(), _Clock()]
    watches = [
        HangWatch(tmp_path, rank, 2, None, ends[rank].append, grace_s=3.0, clock=clocks[rank])
        for rank in (0, 1)
    ]
    with watches[0]:
        with watches[1]:
            for watch, clock in zip(watches, clocks, strict=True):
                watch.between("checkpoint", 5)  # the first one teaches how long it takes
                clock.now_s += 1.0
                watch.begin(6)
                watch.between("checkpoint", 6)
            for clock in clocks:
                clock.now_s += 20.5
            wait_for(lambda: watches[0].after_s == 40.0, "the answer of the other rank")
            assert ends == {0: [], 1: []}
        clocks[0].now_s += 40.0  # nobody answers for rank 1 any more
        wait_for(lambda: ends[0] == [HUNG], "the watch")
    assert "rank 1" not in (tmp_path / "stacks.txt").read_text()


def test_a_log_has_a_step_before_its_checkpoint_and_its_whole_line_after(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 0)
    record = TrainRecord(1, 100, 2.5, 0.0, 1.0, 1.0, None, 10.0, 10.0, 0.25, 0.0, 0.123456789)
    log.add([record])
    assert read_log(tmp_path / "log.csv") == [record]
    log.write(replace(record, checkpoint_block_s=2.0))
    log.write(replace(record, step=2))
    log.close()
    found = [(one.step, one.checkpoint_block_s) for one in read_log(tmp_path / "log.csv")]
    assert found == [(1, 2.0), (2, 0.123456789)]

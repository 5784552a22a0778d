"""KV tiers: what leaves the device is found again in host memory and on disk, and answers stay the same."""

import os
import signal
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from cumulo.engine.decide.core.block_pool import chain_hashes, root_hash
from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.core.request import Request
from cumulo.engine.decide.kv_tiers import HostTier, ReadFiles, TierReading
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.engine import Engine
from cumulo.engine.outputs import RequestOutput
from cumulo.engine.play.disk_tier import KvFiles, TierMover
from tests.engine.invariants import tier_problems
from tests.engine.tiny_engine import VOCAB, make_decoder, make_engine, run

DECODER = make_decoder("dense")
MODEL, OTHER_MODEL = b"m" * 16, b"o" * 16
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)
# Two prompts of 5 blocks each, for a device that holds 7: each drives the other out.
PROMPTS = [[(seed * 11 + j * 7) % VOCAB for j in range(20)] for seed in range(2)]


def engine_with(
    folder: Path | None, tier_blocks: int = 20, model: bytes = MODEL, limit: int = 1 << 30
) -> Engine:
    engine = make_engine(DECODER, blocks=7, block_size=4, tier_blocks=tier_blocks, disk=folder is not None)
    if folder is not None:
        engine.mover = TierMover(KvFiles(folder, model, limit), engine.runner.pool, engine.scheduler)
        engine.scheduler.tiers.disk_s_per_block = 0.0
    return engine


def ask(engine: Engine, prompt: list[int], salt: str = "") -> RequestOutput:
    request = engine.add(prompt, PARAMS, cache_salt=salt)
    return run(engine)[request.id]


def settle(engine: Engine) -> None:
    """Until everything ordered is on disk."""
    tiers, mover = engine.scheduler.tiers, engine.mover
    mover.exchange(0.0)
    while tiers.writing:
        mover.news.wait(1.0)
        mover.exchange(0.0)


def answer(output: RequestOutput) -> tuple[list[int], list[float]]:
    sample = output.samples[0]
    return sample.token_ids, [entry.logprob for entry in sample.logprobs]


def same(output: RequestOutput, prompt: list[int]) -> None:
    tokens, logprobs = answer(ask(make_engine(DECODER, blocks=40, block_size=4), prompt))
    assert output.error is None
    assert output.samples[0].token_ids == tokens
    assert answer(output)[1] == pytest.approx(logprobs, abs=1e-9)


def fetched(output: RequestOutput) -> list[str]:
    return [event.detail["where"] for event in output.story.events if event.kind == "fetched"]


def fill(folder: Path, salt: str = "") -> None:
    """An engine that serves both prompts and ends as a server does."""
    engine = engine_with(folder)
    for prompt in PROMPTS:
        ask(engine, prompt, salt)
    engine.mover.save(lambda plan: engine.runner.submit(plan).result(), 5.0)
    engine.mover.close()


def test_an_evicted_prefix_comes_back_from_host_memory_with_the_same_answer() -> None:
    engine = engine_with(None)
    for prompt in PROMPTS:
        ask(engine, prompt)
    again = ask(engine, PROMPTS[0])
    assert fetched(again) == ["in host memory"]
    assert again.story.cached_tokens == 16  # all full blocks before the last token
    assert "instead of computing them" in again.story.describe()
    same(again, PROMPTS[0])


def test_a_prefix_is_found_on_disk_after_a_restart_with_the_same_answer(tmp_path: Path) -> None:
    fill(tmp_path)
    engine = engine_with(tmp_path)
    for prompt in PROMPTS:
        again = ask(engine, prompt)
        assert fetched(again) == ["on disk"]
        same(again, prompt)
    engine.mover.close()


def test_another_model_and_another_salt_find_nothing(tmp_path: Path) -> None:
    fill(tmp_path, salt="tenant a")
    for engine, salt in (
        (engine_with(tmp_path, model=OTHER_MODEL), "tenant a"),
        (engine_with(tmp_path), "tenant b"),
    ):
        output = ask(engine, PROMPTS[0], salt)
        assert fetched(output) == [] and output.story.cached_tokens == 0
        engine.mover.close()


def test_a_file_under_another_models_name_is_refused_by_its_header(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / MODEL.hex()).rename(tmp_path / OTHER_MODEL.hex())
    engine = engine_with(tmp_path, model=OTHER_MODEL)
    output = ask(engine, PROMPTS[0])
    assert fetched(output) == [] and engine.scheduler.tiers.counts.bad_files
    same(output, PROMPTS[0])
    engine.mover.close()


def _hashes(prompt: list[int]) -> list[bytes]:
    return chain_hashes(root_hash(""), array("i", prompt[:16]), 4)


@pytest.mark.parametrize("damage", ["flipped byte", "cut", "empty", "gone"])
def test_a_damaged_file_is_noticed_and_its_tokens_are_computed(tmp_path: Path, damage: str) -> None:
    fill(tmp_path)
    engine = engine_with(tmp_path)
    for path in tmp_path.rglob("*.kv"):
        data = bytearray(path.read_bytes())
        if damage == "gone":
            path.unlink()
            continue
        data[len(data) // 2] ^= 1
        path.write_bytes({"flipped byte": bytes(data), "cut": bytes(data[:-9]), "empty": b""}[damage])
    output = ask(engine, PROMPTS[0])
    assert fetched(output) == []
    assert "damaged or missing" in output.story.describe()
    same(output, PROMPTS[0])
    assert engine.scheduler.tiers.counts.bad_files == 4
    assert not engine.scheduler.tiers.on_disk & set(_hashes(PROMPTS[0]))
    engine.mover.close()


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with(tmp_path)
    replace = Path.replace

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    for prompt in PROMPTS * 2:
        same(ask(engine, prompt), prompt)
    settle(engine)
    assert engine.scheduler.tiers.counts.failed_writes
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    monkeypatch.setattr(Path, "replace", replace)
    engine.mover.save(lambda plan: engine.runner.submit(plan).result(), 5.0)
    assert list(tmp_path.rglob("*.kv"))
    engine.mover.close()


def test_files_never_take_more_than_they_may(tmp_path: Path) -> None:
    fill(tmp_path)
    one = max(path.stat().st_size for path in tmp_path.rglob("*.kv"))
    files = KvFiles(tmp_path, MODEL, 3 * one)
    assert len(files.scan()) > 3  # as of before
    assert len(files.scan()) <= 3
    assert files.write(b"h" * 16, [b"x" * (one - 84)])
    assert files.used_bytes <= 3 * one and files.read(b"h" * 16, one - 84) is not None


def test_engines_that_share_a_folder_find_each_others_blocks(tmp_path: Path) -> None:
    first, second = engine_with(tmp_path), engine_with(tmp_path)
    for prompt in PROMPTS:
        ask(first, prompt)
    first.mover.save(lambda plan: first.runner.submit(plan).result(), 5.0)
    second.mover._look()
    second.exchange()
    output = ask(second, PROMPTS[0])
    assert fetched(output) == ["on disk"]
    same(output, PROMPTS[0])
    for engine in (first, second):
        engine.mover.close()


@pytest.mark.long
def test_a_process_killed_while_it_writes_leaves_whole_files_only(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from cumulo.engine.play.disk_tier import KvFiles\n"
        "files = KvFiles(Path(sys.argv[1]), b'm' * 16, 1 << 30)\n"
        "number = 0\n"
        "while True:\n"
        "    files.write(number.to_bytes(16, 'big'), [bytes([number % 251]) * 200_000]); number += 1\n"
        "    if number == 20: print('on', flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    files = KvFiles(tmp_path, MODEL, 1 << 30)
    found = files.scan()
    assert len(found) >= 20
    for block_hash in found:
        data = files.read(block_hash, 200_000)
        assert data is not None and data[0] == int.from_bytes(block_hash, "big") % 251


def test_a_step_that_fails_leaves_nothing_wrong_in_a_tier() -> None:
    engine = engine_with(None)
    ask(engine, PROMPTS[0])
    submit = engine.runner.submit
    engine.runner.submit = lambda plan: submit(_broken(plan))  # type: ignore[method-assign]
    assert ask(engine, PROMPTS[1]).error is not None
    engine.runner.submit = submit  # type: ignore[method-assign]
    engine.scheduler.pool.clear_cache()
    for prompt in PROMPTS:
        same(ask(engine, prompt), prompt)


def _broken(plan):
    plan.swap_out = [(block, 10_000) for block, _ in plan.swap_out] or [(10_000, 0)]
    return plan


def test_the_host_tier_forgets_what_was_used_least_recently_and_nothing_that_is_pinned() -> None:
    tier = HostTier(3)
    for name in (b"a", b"b", b"c"):
        block = tier.take_block()
        assert block is not None and tier.put(name, block)
    tier.block_of.move_to_end(b"a")
    tier.pins[tier.block_of[b"b"]] += 1
    assert tier.take_block() == 2 and b"c" not in tier.block_of and b"b" in tier.block_of
    assert tier_problems(tier, 1) == [] and tier_problems(tier, 0)


@pytest.mark.parametrize(
    ("disk_s", "ahead", "event"),
    [(1e-3, 0, "fetched"), (1e-1, 0, "not_fetched"), (1e-3, 1000, "not_fetched")],
)
def test_what_is_sooner_computed_is_not_fetched(disk_s: float, ahead: int, event: str) -> None:
    """128 tokens of 1 ms each, in 8 blocks on disk; `ahead`: blocks that are read before them."""
    config = SchedulerConfig(
        blocks=64, block_size=16, max_context=512, max_running=4, tier_blocks=2000, disk=True
    )
    scheduler = Scheduler(config)
    tiers = scheduler.tiers
    assert tiers is not None
    request = Request("asked", range(129), SamplingParams(max_tokens=1), seed=0)
    tiers.on_disk.update(request.sequences[0].extend_hashes(8, 16))
    tiers.disk_s_per_block = disk_s
    if ahead:
        others = tuple(bytes([1]) * 16 for _ in range(ahead))
        tiers.reading[0] = TierReading(ReadFiles(0, others, tuple(range(ahead))), [], 0.0)
    scheduler.add(request)
    assert ("ReadFiles" in str(tiers.orders)) == (event == "fetched")
    assert any(one.kind == "not_fetched" for one in request.story.events) == (event == "not_fetched")

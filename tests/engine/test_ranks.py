"""An engine over several ranks says what one rank says, in tokens and log-probabilities, in float64 and on real
processes; and it says which rank died."""

import math
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch.distributed", reason="this torch has no distributed package")

from cumulo.engine.assembly import Assembly, assemble
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.params import Guide, SamplingParams
from cumulo.engine.engine import Engine
from cumulo.engine.outputs import RequestOutput
from cumulo.engine.play import ranked_runner
from cumulo.engine.play.ranked_runner import RankedRunner
from cumulo.errors import ConfigError, RanksFailed
from cumulo.layout.serving import ServingLayout, held_parameters, rank_part, serving_problems
from cumulo.models.files.load import inspect_model
from cumulo.ranks.rank_meter import PID, READ, WORDS
from cumulo.spec.counting import parameter_shapes
from tests import thorough
from tests.engine.equivalence import Lengths, Request, draw_requests
from tests.engine.guided_engine import CLOSING, VOCAB
from tests.engine.ranked_models import CONFIGS, save_model
from tests.engine.tiny_engine import run

pytestmark = pytest.mark.long

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
# Few blocks and small steps: prompts are cut, and sequences are preempted.
TIGHT = dict(
    device="cpu", dtype="float64", block_size=4, max_context=64, max_running=5, max_tokens_per_step=24
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: save_model(name, folder) for name in CONFIGS}


@contextmanager
def started(model: Path, **options: int) -> Iterator[Assembly]:
    blocks = 17 * options.get("dp", 1)
    assembly = assemble(model, EngineConfig(**{**TIGHT, "kv_blocks": blocks, **options}), True, None)
    try:
        yield assembly
    finally:
        assembly.player.runner.close()


def mixed_requests(rng: random.Random, count: int) -> list[Request]:
    requests = draw_requests(rng, count, VOCAB - 3, Lengths(prefix=30, own=15, answer=14))
    guided = SamplingParams(
        temperature=rng.choice([0.0, 1.0]), seed=3, max_tokens=14, logit_bias=CLOSING, logprobs=1,
        guide=Guide("json_schema", SCHEMA),
    )  # fmt: skip
    requests.insert(rng.randrange(count), ([rng.randrange(VOCAB - 3) for _ in range(5)], guided, 0, ""))
    requests.append((requests[0][0], SamplingParams(pooling="mean"), 0, ""))
    return requests


def play(engine: Engine, requests: list[Request], aborted: set[int], abort_at: int) -> list[RequestOutput]:
    for index, (prompt, params, priority, salt) in enumerate(requests):
        engine.add(prompt, params, request_id=f"r{index}", priority=priority, cache_salt=salt)

    def between(step: int) -> None:
        if step == abort_at:
            for index in aborted:
                engine.abort(f"r{index}")

    outputs = run(engine, between)
    assert engine.scheduler.pool.used_count == 0
    return [outputs[f"r{index}"] for index in range(len(requests))]


def assert_same(got: RequestOutput, expected: RequestOutput) -> None:
    assert got.error is None and expected.error is None
    assert [(s.token_ids, s.finish_reason) for s in got.samples] == [
        (s.token_ids, s.finish_reason) for s in expected.samples
    ]
    assert numbers(got) == pytest.approx(numbers(expected), abs=1e-9)


def numbers(output: RequestOutput) -> list[float]:
    found = list(output.embedding or ())
    for entries in (output.prompt_logprobs or (), *(sample.logprobs for sample in output.samples)):
        for entry in entries:
            found += [entry.logprob, entry.rank, *(p for _, p in entry.top), *(t for t, _ in entry.top)]
    return found + [sample.cumulative_logprob or 0.0 for sample in output.samples]


def compare(one: Engine, several: Engine, rounds: int, seed: int, count: int = 8) -> int:
    """Rounds of requests on both, some aborted on the several; how often one was preempted there."""
    preemptions = 0
    for round_index in range(rounds):
        rng = random.Random(seed + round_index)
        requests = mixed_requests(rng, count)
        aborted = {index for index in range(len(requests)) if rng.random() < 0.15}
        got = play(several, requests, aborted, rng.randrange(2, 20))
        expected = play(one, requests, set(), 0)
        for index, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            if not any(sample.finish_reason == "abort" for sample in mine.samples):
                assert_same(mine, theirs)
            elif requests[index][1].beam_width is None and requests[index][1].n == 1:
                tokens = mine.samples[0].token_ids
                assert tokens == theirs.samples[0].token_ids[: len(tokens)]
        preemptions += sum(output.story.preemptions for output in got)
    return preemptions


SHORT = [
    ("experts", {"ep": 2}),
    ("latent", {"dp": 2, "ep": 2}),
    ("latent", {"tp": 2, "pp": 2}),
]
LONG = [
    (model, sizes)
    for model in CONFIGS
    for sizes in (
        {"tp": 2},
        {"tp": 4},
        {"pp": 2},
        {"pp": 4},
        {"tp": 2, "pp": 2},
        {"ep": 2},
        {"ep": 4},
        {"dp": 2},
        {"dp": 2, "ep": 2},
        {"dp": 4, "ep": 4},
        {"dp": 2, "tp": 2, "ep": 4},
        {"dp": 2, "pp": 2, "ep": 2},
    )
    if (model in ("experts", "latent") or "ep" not in sizes) and (model, sizes) not in SHORT
]


def named(cases: list[tuple[str, dict[str, int]]]) -> list[str]:
    return [f"{model}-" + "-".join(f"{key}{size}" for key, size in sizes.items()) for model, sizes in cases]


@pytest.mark.parametrize(("model", "sizes"), SHORT, ids=named(SHORT))
def test_several_ranks_say_what_one_says(models: dict[str, Path], model: str, sizes: dict[str, int]) -> None:
    with started(models[model]) as one, started(models[model], **sizes) as several:
        assert isinstance(several.player.runner, RankedRunner)
        preemptions = compare(one.engine, several.engine, rounds=5 if thorough.chosen else 1, seed=1)
        assert preemptions > 0 or "dp" in sizes  # whose blocks are twice as many


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "sizes"), LONG, ids=named(LONG))
def test_many_mixes_on_several_ranks_say_what_one_says(
    models: dict[str, Path], model: str, sizes: dict[str, int]
) -> None:
    with started(models[model]) as one, started(models[model], **sizes) as several:
        compare(one.engine, several.engine, rounds=5, seed=1000)


def break_after_start(model: Path, end: Callable[[int], None], **options: object) -> str:
    """Starts two ranks, does something to rank 1 in mid-answer, and gives the error."""
    with started(model, tp=2, **options) as several:
        runner = several.player.runner
        assert isinstance(runner, RankedRunner)
        engine = several.engine
        engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        for _ in range(3):
            engine.step()
        pid = runner.ranks.pids[1]
        end(pid)
        try:
            with pytest.raises(RanksFailed) as caught:
                while engine.has_work:
                    engine.step()
        finally:
            os.kill(pid, signal.SIGCONT) if several_is_alive(pid) else None
    return str(caught.value)


def several_is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_rank_that_is_killed_is_named(models: dict[str, Path]) -> None:
    error = break_after_start(models["dense"], lambda pid: os.kill(pid, signal.SIGKILL))
    assert error.startswith("rank 1: died, exit code -9")


@pytest.mark.thorough
def test_a_rank_that_hangs_is_named(models: dict[str, Path]) -> None:
    error = break_after_start(models["dense"], lambda pid: os.kill(pid, signal.SIGSTOP), rank_timeout_s=2.0)
    assert error.startswith("rank 1: the others wait for it")


def test_a_step_that_stands_still_on_a_gpu_is_blamed_on_the_rank_with_the_fewest_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks wait inside kernels there, so nobody counts how often."""
    progress = np.zeros((3, WORDS), dtype=np.uint64)
    progress[:, PID], progress[1, READ], progress[2, READ] = 1, 9, 8
    ranks = SimpleNamespace(
        pipes={},
        failures=lambda grace_s: [],
        stack_text=lambda rank: "in a kernel",
        end=lambda: None,
    )
    table = SimpleNamespace(progress=progress)
    runner = RankedRunner(None, ranks, table, None, timeout_s=5.0, on_gpu=True)  # type: ignore[arg-type]
    assert not runner.stands_still()
    now_s = 100.0
    monkeypatch.setattr(ranked_runner.time, "monotonic", lambda: now_s)
    runner.waits_since_s = now_s
    assert not runner.stands_still()
    now_s += 6.0
    assert runner.stands_still()
    told = str(runner.failure(RuntimeError("nonsense")))
    assert told == "rank 2: the others wait for it; it stood at\nin a kernel"


# -- layouts -------------------------------------------------------------------------------------------------
def test_every_element_is_held_by_some_rank_and_none_beyond_need(models: dict[str, Path]) -> None:
    for model, sizes in SHORT + LONG:
        spec = inspect_model(models[model]).spec
        layout = EngineConfig(**sizes).layout
        assert not list(serving_problems(spec, layout, 8))
        held: dict[str, int] = dict.fromkeys(parameter_shapes(spec), 0)
        for rank in range(layout.world):
            for parameter in held_parameters(rank_part(spec, layout, rank)).values():
                held[parameter.source] += parameter.elements
        for name, shape in parameter_shapes(spec).items():
            whole = math.prod(shape)
            assert held[name] >= whole
            matrix = len(shape) > 1 and "attention.kv_a" not in name and "attention.q_a" not in name
            if matrix and "router" not in name and "qkv" not in name and name != "embed.weight":
                copies = 1 if ".experts." in name and layout.ep > 1 else layout.dp
                assert held[name] == copies * whole, (name, sizes)


@pytest.mark.parametrize(
    ("model", "sizes", "reason"),
    [
        (
            "dense",
            {"tp": 3},
            "tp 3 cannot share 4 attention heads and 2 key/value heads evenly; tp 1 or 2 or 4 can",
        ),
        ("dense", {"ep": 2}, "ep 2 spreads experts, and this model has none; omit ep"),
        ("dense", {"pp": 4, "tp": 4}, "takes 16 ranks, and this machine has"),
        ("dense", {"pp": 5}, "pp 5 cannot share 4 layers; use pp 4 or fewer"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_what_would_work(
    models: dict[str, Path], model: str, sizes: dict[str, int], reason: str
) -> None:
    with pytest.raises(ConfigError) as caught, started(models[model], **sizes):
        pass
    assert reason in str(caught.value)


def test_sizes_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="use ep 4, or change tp or dp"):
        ServingLayout(tp=2, dp=2, ep=3)

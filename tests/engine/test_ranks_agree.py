"""A step that one rank fails at alone: all ranks hear of it at once and stop with its reason, or all go on without
what it could not do. Nobody waits for a rank that will not come."""

import os
import pickle
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from tests.engine.cuda_ranks import SIZES, ToldRunner, answers, play_rank, rank_runner, requests_of, spec_of  # isort: skip
from torch.distributed.distributed_c10d import _get_default_store

from cumulo.engine.assembly import assemble
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.engine import Engine
from cumulo.engine.play import rank_player
from cumulo.engine.play.cuda.launches import CudaStep
from cumulo.engine.play.runner_cuda import CudaRunner
from cumulo.errors import ModelError, RanksFailed, StoppedTogether
from cumulo.kernels.cuda.captured import CapturedGraphs
from cumulo.layout.serving import ServingLayout, rank_part
from cumulo.models.files.load import inspect_model
from cumulo.models.play.rank_links import connect
from cumulo.ranks import peer_memory
from cumulo.ranks.rank_group import meeting_point
from cumulo.ranks.start import run_ranks
from tests.engine.ranked_models import save_model
from tests.engine.tiny_cuda_engine import EOS, SPECS, make_decoder, make_engine, use_few_programs
from tests.engine.tiny_engine import run
from tests.models.adapter_files import write_adapter

pytestmark = pytest.mark.long

TWO = ServingLayout(pp=2)


# -- the vote ---------------------------------------------------------------------------------------------
def vote(rank: int, layout: ServingLayout, failing: tuple[int, ...]) -> str:
    world_store = _get_default_store()
    if rank == 0:
        store = meeting_point()
        world_store.set("port", str(store.port))
    else:
        store = meeting_point(int(world_store.get("port")))
    links = connect(rank_part(spec_of("dense", layout), layout, rank), store, 60.0)

    def work() -> int:
        if rank in failing:
            raise MemoryError(f"{rank} has no röom")
        return rank

    assert links.together(lambda: 7) == 7
    try:
        return f"did {links.together(work)}"
    except StoppedTogether as error:
        own = isinstance(error.__cause__, MemoryError)
        assert own == (rank in failing)
        return str(error)


@pytest.mark.parametrize("failing", [(), (3,), (1, 2)])
def test_all_ranks_of_all_stages_hear_the_reasons_of_those_that_failed(failing: tuple[int, ...]) -> None:
    found = run_ranks(vote, 4, ServingLayout(tp=2, pp=2), failing)
    reasons = "\n".join(f"rank {rank}: MemoryError: {rank} has no röom" for rank in failing)
    assert found == [reasons or f"did {rank}" for rank in range(4)]


# -- at the start -----------------------------------------------------------------------------------------
def play_without_weights(rank: int, setup: rank_player.RankSetup) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise ModelError("the weights of this rank cannot be read")

    rank_player.load_model = fail
    rank_player.play_rank(rank, setup)


def die_loading(rank: int, setup: rank_player.RankSetup) -> None:
    rank_player.load_model = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    rank_player.play_rank(rank, setup)


@pytest.mark.parametrize(
    ("one_rank", "reason"),
    [(play_without_weights, "the weights of this rank cannot be read"), (die_loading, "died, exit code -9")],
)
def test_weights_that_one_rank_cannot_load_are_told_before_the_others_wait_for_it(
    one_rank: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[object] = []
    monkeypatch.setattr(rank_player, "play_rank", one_rank)
    monkeypatch.setattr(rank_player, "_make_runner", lambda *given: begun.append(given))
    config = EngineConfig(device="cpu", kv_blocks=8, block_size=4, max_context=32, tp=2)
    with pytest.raises(RanksFailed) as caught:
        assemble(save_model("dense", tmp_path), config, True, None)
    assert str(caught.value).startswith("rank 1: ") and reason in str(caught.value)
    assert not begun  # where rank 0 would have waited for rank 1


def without_room(rank: int, layout: ServingLayout) -> str:
    def fail(size: int) -> NoReturn:
        raise MemoryError(f"no room for {size} bytes")

    if rank == 1:
        peer_memory._room = fail
    try:
        rank_runner(spec_of("dense", layout), layout, rank)
    except StoppedTogether as error:
        return str(error)
    return "made"


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU ranks share symmetric memory, not a file")
def test_memory_that_one_rank_cannot_share_is_told_to_all() -> None:
    found = run_ranks(without_room, 3, ServingLayout(pp=3))
    assert len(set(found)) == 1 and found[0].startswith("rank 1: MemoryError: no room for ")


def play_without_adapters(rank: int, setup: rank_player.RankSetup) -> None:
    read, calls = rank_player.read_adapter, list[object]()

    def fail_once(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 1:
            raise OSError("the folder is not on this host")
        return read(*given)

    rank_player.read_adapter = fail_once
    rank_player.play_rank(rank, setup)


def test_an_adapter_that_one_rank_cannot_read_is_refused_and_the_ranks_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_player, "play_rank", play_without_adapters)
    model = save_model("dense", tmp_path)
    folder = write_adapter(tmp_path / "poet", inspect_model(model).spec, strength=1.0)
    config = EngineConfig(
        device="cpu", kv_blocks=8, block_size=4, max_context=32, tp=2, max_loras=1, rank_timeout_s=600
    )
    assembly = assemble(model, config, True, None)
    try:
        engine = assembly.engine
        engine.add([1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True))
        engine.step()
        with pytest.raises(ModelError, match=r"\Arank 1: OSError: the folder is not on this host\Z"):
            engine.adapters.add("poet", engine.adapters.read(folder))
        engine.adapters.add("poet", engine.adapters.read(folder))  # its slot is free again
        engine.add([1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True), adapter="poet")
        assert [len(one.samples[0].token_ids) for one in run(engine).values()] == [9, 9]
    finally:
        assembly.player.runner.close()


# -- in a step --------------------------------------------------------------------------------------------
class PlayedGraph:
    """In the place of a CUDA graph: launches the same kernels again."""

    def __init__(self, launch: Any) -> None:
        self.replay = launch


class Graphs(CapturedGraphs):
    def __init__(self, full: bool) -> None:
        super().__init__()
        self._full = full

    def capture(self, shape: Any, launch: Any) -> Any:
        if self._full:
            raise MemoryError("no room for a graph")
        self._graphs[shape] = PlayedGraph(launch)
        return self._graphs[shape]


def graphs_of(rank: int, requests: Any) -> tuple[Any, int, bool]:
    """What is said, how many graphs there are in the end, and whether more may come."""
    kept: list[CudaRunner] = []

    def captures(runner: CudaRunner) -> None:
        runner.launches.graphs, runner.launches._use_graphs = Graphs(full=rank == 1), True
        kept.append(runner)

    said = play_rank(rank, "dense", TWO, requests, captures)
    return said, len(kept[0].launches.graphs), kept[0].launches._use_graphs


@pytest.mark.long
def test_a_graph_that_one_rank_cannot_capture_is_played_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_programs(monkeypatch)
    spec, requests = spec_of("dense", TWO), requests_of(1, SPECS["dense"].vocab_size)
    expected = answers(make_engine(make_decoder(spec), True), requests)
    (said, *first), (_, *second) = run_ranks(graphs_of, 2, requests, timeout_s=600)
    assert first == second == [0, False]
    assert [tokens for tokens, _ in said] == [tokens for tokens, _ in expected]


class KeepingRunner(ToldRunner):
    def submit(self, plan: StepPlan) -> CudaStep:
        self.step = super().submit(plan)
        return self.step


def fail_at_first(rank: int, failing: int) -> str:
    """What the runner of each rank says of a plan whose kernels one rank cannot launch."""
    runner = rank_runner(spec_of("dense", TWO), TWO, rank)

    def fail(*_: object) -> NoReturn:
        raise RuntimeError("an illegal launch")

    if rank == failing:
        runner.model.forward = fail  # type: ignore[method-assign]
    if rank:
        told = pickle.loads(_get_default_store().get("plan 0"))
        assert isinstance(told, StepPlan)
        return str(runner.submit(told).failed)
    teller = KeepingRunner(runner)
    engine = Engine(Scheduler(SchedulerConfig(**SIZES)), teller, None, vocab_size=54, eos_ids=(EOS,), depth=2)
    engine.add([1, 2, 3], SamplingParams(max_tokens=2))
    with suppress(StoppedTogether):
        engine.step()
    return str(teller.step.failed)


@pytest.mark.long
@pytest.mark.parametrize("failing", [0, 1])
def test_a_new_shape_that_one_rank_cannot_launch_stops_all_with_its_reason(failing: int) -> None:
    found = run_ranks(fail_at_first, 2, failing, timeout_s=600)
    assert found == [f"rank {failing}: RuntimeError: an illegal launch"] * 2

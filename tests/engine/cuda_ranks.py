"""An engine over ranks on the GPU's kernels, each rank in a process of its own: rank 0 has the engine and tells the
others every plan, as `RankedRunner` does. Without a GPU Triton's interpreter plays the kernels.

Import it before anything that defines a kernel, as `tiny_cuda_engine`, whose models it cuts.
"""

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

# Asked without starting CUDA: the ranks are forked from a process that has imported this file.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

from tests.engine.tiny_cuda_engine import DEVICE, EOS, HAS_GPU, SPECS, make_decoder, use_few_programs  # isort: skip
from torch.distributed.distributed_c10d import _get_default_store

from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.engine import Engine
from cumulo.engine.play import rank_player_cuda
from cumulo.engine.play.cuda.launches import CudaStep
from cumulo.engine.play.rank_play import SharedGuides
from cumulo.engine.play.runner_cuda import CudaRunner
from cumulo.layout.serving import RankPart, ServingLayout, held_parameters, rank_part
from cumulo.models.decoder import Decoder
from cumulo.models.play.rank_decoder import empty_rank_decoder
from cumulo.models.play.rank_links import connect
from cumulo.ranks.rank_group import THIS_HOST, meeting_point
from cumulo.spec.model import ModelSpec

SIZES = dict(blocks=24, block_size=16, max_context=120, max_running=6, max_tokens_per_step=48)
Said = list[tuple[list[int], list[float]]]


def cut(whole: Decoder, part: RankPart) -> Decoder:
    decoder = empty_rank_decoder(part, whole.dtype, DEVICE)
    for name, held in held_parameters(part).items():
        given = whole.get_parameter(held.source)
        for box in held.boxes:
            decoder.get_parameter(name).data[box.held_slices] = given[box.whole_slices]
    return decoder


def rank_runner(
    spec: ModelSpec, layout: ServingLayout, rank: int, invariant: bool = False, backend: str = "auto"
) -> CudaRunner:
    part, world_store = rank_part(spec, layout, rank), _get_default_store()
    if rank == 0:
        store = meeting_point()
        world_store.set("port", str(store.port))
    else:
        store = meeting_point(int(world_store.get("port")))
    decoder = cut(make_decoder(spec), part)
    decoder.rotary.serve(SIZES["max_context"])
    config = EngineConfig(
        device="cpu", dtype="float32", block_size=SIZES["block_size"], max_running=SIZES["max_running"],
        max_tokens_per_step=SIZES["max_tokens_per_step"], tp=layout.tp, pp=layout.pp, dp=layout.dp, ep=layout.ep,
        batch_invariant=invariant, rank_backend=backend,
    )  # fmt: skip
    memory = SimpleNamespace(
        kv_blocks=SIZES["blocks"] * layout.dp, max_context=SIZES["max_context"], tier_blocks=0
    )
    # Every rank at an address of its own, as if each were on another host.
    links = connect(part, store, 60.0, host=THIS_HOST if backend == "auto" else f"127.0.0.{rank + 2}")
    guides = SharedGuides(None, links)
    runner = rank_player_cuda.make_cuda_runner(
        config, memory, part, decoder, store, (EOS,), guides, links, DEVICE
    )  # type: ignore[arg-type]
    for storage in (runner.cache.key_storage, runner.cache.value_storage):
        storage.fill_(torch.nan)  # what a block held cannot matter
    return runner


class ToldRunner:
    """Rank 0's runner, which tells the others."""

    def __init__(self, runner: CudaRunner) -> None:
        self._runner, self._store, self._plans = runner, _get_default_store(), 0

    def submit(self, plan: StepPlan) -> CudaStep:
        self.tell(pickle.dumps(plan, -1))
        return self._runner.submit(plan)

    def tell(self, message: bytes) -> None:
        self._store.set(f"plan {self._plans}", message)
        self._plans += 1


def answers(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> Said:
    ids = [engine.add(prompt, params).id for prompt, params in requests]
    done = {}
    while engine.has_work:
        for output in engine.step().finished:
            assert output.error is None, output.error
            sample = output.samples[0]
            numbers = [entry.logprob for entry in (*(output.prompt_logprobs or ()), *(sample.logprobs or ()))]
            done[output.request_id] = sample.token_ids, numbers
    assert engine.scheduler.pool.used_count == 0
    return [done[one] for one in ids]


def play_rank(
    rank: int,
    name: str,
    layout: ServingLayout,
    requests: list[tuple[list[int], SamplingParams]],
    prepare: Callable[[CudaRunner], None] = lambda runner: None,
    invariant: bool = False,
    backend: str = "auto",
) -> Said:
    """What rank 0's engine answers; the others say nothing. `prepare` is given the runner first. `backend`: gloo,
    as if the ranks were on several hosts."""
    if not HAS_GPU:
        use_few_programs(SimpleNamespace(setattr=setattr))  # type: ignore[arg-type]
    spec = spec_of(name, layout)
    runner = rank_runner(spec, layout, rank, invariant, backend)
    prepare(runner)
    if rank:
        plans, store = 0, _get_default_store()
        while message := store.get(f"plan {plans}"):
            told = pickle.loads(message)
            assert isinstance(told, StepPlan)
            runner.submit(told).result()
            plans += 1
        return []
    config = SchedulerConfig(**{**SIZES, "blocks": SIZES["blocks"] * layout.dp}, dp=layout.dp)
    teller = ToldRunner(runner)
    engine = Engine(
        Scheduler(config), teller, None, vocab_size=spec.vocab_size, eos_ids=(EOS,), depth=layout.pp
    )
    said = answers(engine, requests)
    teller.tell(b"")
    return said


def spec_of(name: str, layout: ServingLayout) -> ModelSpec:
    """With as many layers as stages, at least two, and a vocabulary that ranks can share."""
    return replace(SPECS[name], layers=max(2, layout.pp), vocab_size=54, heads=4, kv_heads=2)


def requests_of(count: int, vocabulary: int) -> list[tuple[list[int], SamplingParams]]:
    """Of different lengths, greedy and sampled, some with log-probabilities, drawn on the host."""
    generator = torch.Generator().manual_seed(11)
    made: list[tuple[list[int], dict[str, Any]]] = []
    for index in range(count):
        length = 5 + 17 * (index % 3)
        prompt = torch.randint(0, vocabulary, (length,), generator=generator).tolist()
        kinds: list[dict[str, Any]] = [
            dict(temperature=0.0), dict(temperature=0.0, logprobs=2), dict(temperature=1.0, top_k=9),
            dict(temperature=0.8, prompt_logprobs=1),
        ]  # fmt: skip
        made.append((prompt, kinds[index % 4]))
    return [(prompt, SamplingParams(max_tokens=4, ignore_eos=True, seed=5, **kind)) for prompt, kind in made]

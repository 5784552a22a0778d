"""What every rank of an engine does at its start, rank 0 in the engine's process and the others in their own:
find the others, load its part, make its runner. `start_ranks` is called by the assembly.

On a GPU the same steps make a CudaRunner (`rank_player_cuda`, imported only there).
"""

import logging
import multiprocessing
import os
import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch

from cumulo.base.files import weights_digest
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.plan import PendingStep, StepPlan
from cumulo.engine.guides.guided import Guidance, GuidedSlots
from cumulo.engine.memory.memory_plan import MemoryPlan
from cumulo.engine.play.player import (
    DeviceRunner,
    Player,
    kv_cache,
    runnable,
    torch_runner,
)
from cumulo.engine.play.rank_play import RankPlay, SharedGuides
from cumulo.engine.play.ranked_runner import AdapterOrder, RankedRunner
from cumulo.engine.play.runner_torch import TorchRunner
from cumulo.engine.play.transfer_wire import RankCaches
from cumulo.errors import CumuloError, ModelError, RanksFailed
from cumulo.layout.equal_sums import equality_note
from cumulo.layout.serving import RankPart, rank_part
from cumulo.models.adapters.bank import AdapterBank
from cumulo.models.adapters.files import read_adapter
from cumulo.models.batch import KVCache
from cumulo.models.decoder import Decoder
from cumulo.models.files.hub import resolve
from cumulo.models.files.load import LoadedModel, load_model
from cumulo.models.play.rank_decoder import RankDecoder
from cumulo.models.play.rank_links import RankLinks, connect
from cumulo.models.play.spread_experts import SpreadExperts
from cumulo.ranks.plan_pipe import PlanReader
from cumulo.ranks.rank_group import THIS_HOST, TCPStore, meeting_point
from cumulo.ranks.rank_meter import WORDS, RankMeter, RankTable
from cumulo.ranks.remote import RankListener, host_and_port, join_engine
from cumulo.ranks.start import RankProcesses, ask_starter, be_rank, lost_another, starter, tell_starter
from cumulo.spec.model import ModelSpec

_OPENED, _LOADED, _READY = "opened", "loaded", "ready"
_GRACE_S = 3.0  # after a connection has been lost, the rank that caused it has this long to be heard of


@dataclass(frozen=True, slots=True)
class RankSetup:
    """All that a rank is told: the same for every rank."""

    model: str | Path | None
    spec: ModelSpec  # of the whole model
    config: EngineConfig
    memory: MemoryPlan  # of the engine: its blocks are those of all data-parallel ranks
    keep_quantised: bool
    with_tokenizer: bool
    threads: int
    port: int  # where the ranks meet
    table: Path  # the memory in which ranks of this host count what they do
    engine_pid: int  # rank 0's process
    meeting_host: str = THIS_HOST  # rank 0's
    host: str = THIS_HOST  # of the rank that is told this
    place: int = 0  # of a rank of another host: its number there
    # Of an engine with a role: rank 0's descriptors of the files that hold each rank's KV cache.
    kv_files: tuple[tuple[int, ...], ...] = ()
    weights: str = ""  # digest of rank 0's, where ranks of other hosts have copies of their own

    @property
    def own_ranks(self) -> int:
        """Ranks on rank 0's host; the others have come from elsewhere (`cumulo.ranks.remote`)."""
        return self.config.layout.world - self.config.remote_ranks

    @property
    def on_gpu(self) -> bool:
        return self.config.device == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.config.dtype)  # type: ignore[no-any-return]

    def part(self, rank: int) -> RankPart:
        return rank_part(self.spec, self.config.layout, rank)

    def cache(self, rank: int) -> KVCache:
        """A rank's part of the KV; of an engine with a role, in the memory that rank 0 has made for it."""
        files = [
            os.open(f"/proc/{self.engine_pid}/fd/{file}", os.O_RDWR)
            for file in (self.kv_files[rank] if self.kv_files else ())
        ]
        return kv_cache(self.part(rank).local, self.config, self.memory, self.dtype, files=files)


def start_ranks(
    setup: RankSetup,
    store: TCPStore,
    load: Callable[[RankPart], LoadedModel],
    guidance_of: Callable[[LoadedModel], Guidance | None],
) -> tuple[LoadedModel, Guidance | None, Player]:
    """Start all ranks and be rank 0; returns when every one has loaded its part. `load` loads rank 0's."""
    layout = setup.config.layout
    caches = _shared_caches(setup)
    setup = replace(setup, kv_files=tuple(tuple(one.descriptors) for one in caches))
    modules = (__name__, "cumulo.models.files.load")
    own = range(1, setup.own_ranks)
    ranks = RankProcesses(play_rank, own, (setup,), threads=setup.threads, preload=modules)
    try:
        if setup.config.remote_ranks:
            _admit_others(setup, ranks)
        torch.set_num_threads(setup.threads)
        if setup.on_gpu:
            from cumulo.engine.play.rank_player_cuda import use_own_gpu

            use_own_gpu(0)
        table = RankTable(setup.table, layout.world)
        ranks.wait_for(_OPENED)
        setup.table.unlink()  # all have it open: nothing stays behind, however the engine ends
        part = setup.part(0)
        meter = RankMeter(table.progress[0])
        links = connect(
            part, store, setup.config.rank_timeout_s, meter, setup.host, setup.config.collective_text
        )
        loaded = load(part)
        guidance = guidance_of(loaded)
        ranks.wait_for(_LOADED)  # however long it takes; from here on ranks wait for each other
        ranks.go_on()
        runner, runs_on = _make_runner(
            setup,
            part,
            loaded.decoder,
            links,
            store,
            GuidedSlots(guidance),
            loaded.eos_ids,
            setup.config.overlap,
        )
        meter.holds(sum(runner.memory_bytes().values()))
        ranks.wait_for(_READY)
    except BaseException as error:
        lost = isinstance(error, RuntimeError) and lost_another(error)
        causes = ranks.failures(_GRACE_S) if lost else []
        ranks.end()
        setup.table.unlink(missing_ok=True)
        if causes:
            raise RanksFailed("\n".join(causes)) from error
        raise
    ranked = RankedRunner(runner, ranks, table, meter, setup.config.rank_timeout_s, setup.on_gpu)
    if caches:
        ranked.caches = RankCaches(caches)
    if setup.on_gpu:
        from cumulo.engine.play.rank_player_cuda import shown_caches, watch_ranks

        if setup.config.role != "both":
            ranked.caches = shown_caches(runner, store, layout.world)
        watch_ranks(ranked, runner, ranks)
    return loaded, guidance, Player(ranked, f"{layout.world} ranks ({layout}), {runs_on}")


def _shared_caches(setup: RankSetup) -> list[KVCache]:
    """Of all ranks of an engine with a role, made and mapped here: this process hands KV over for all of them."""
    if setup.config.role == "both" or setup.on_gpu:
        return []
    ranks = range(setup.config.layout.world)
    given = (setup.config, setup.memory, setup.dtype)
    return [kv_cache(setup.part(rank).local, *given, shared=True) for rank in ranks]


def _check_weights(setup: RankSetup) -> None:
    path = resolve(setup.model).path
    if (own := weights_digest(path)) != setup.weights:
        raise ModelError(
            f"{path} has other weights (digest {own}) than the engine's model ({setup.weights}): copy the same "
            "files to all hosts"
        )


def play_rank(rank: int, setup: RankSetup) -> None:
    """A rank in its own process, until the engine's ends."""
    if setup.on_gpu:
        from cumulo.engine.play.rank_player_cuda import end_with, use_own_gpu

        here = rank < setup.own_ranks
        end_with(setup.engine_pid if here else None, starter().fileno())
        use_own_gpu(rank if here else setup.place)
    words = np.zeros(WORDS, dtype=np.uint64)  # of a rank on another host, where nobody looks
    if rank < setup.own_ranks:
        words = RankTable(setup.table, setup.config.layout.world).progress[rank]
    tell_starter(_OPENED)
    plans = PlanReader(starter(), words)
    part = setup.part(rank)
    store = meeting_point(setup.port, setup.meeting_host)
    meter = RankMeter(words)
    links = connect(part, store, setup.config.rank_timeout_s, meter, setup.host, setup.config.collective_text)
    if setup.weights:
        _check_weights(setup)
    loaded = load_model(
        setup.model,
        dtype=setup.dtype,
        device=setup.config.device,
        keep_quantised=setup.keep_quantised,
        with_tokenizer=setup.with_tokenizer,  # which knows what ends an answer
        part=part,
    )
    ask_starter(_LOADED)
    runner, _ = _make_runner(setup, part, loaded.decoder, links, store, None, loaded.eos_ids, overlap=False)
    meter.holds(sum(runner.memory_bytes().values()))
    if setup.on_gpu and setup.config.role != "both":
        from cumulo.engine.play.rank_player_cuda import show_cache

        show_cache(runner, store, rank)
    tell_starter(_READY)
    # A GPU is given the next step while it computes one; but whoever waits for prompts is told of each that ends.
    ahead = 1 + setup.config.layout.pp if setup.on_gpu and setup.config.role != "prefill" else 0
    running = deque[PendingStep]()
    while (message := plans.receive()) is not None:
        told: StepPlan | AdapterOrder = pickle.loads(message)
        if isinstance(told, AdapterOrder):
            tell_starter(_load_adapter(setup, runner, told))
            continue
        step = runner.submit(told)
        running.append(step)
        # A step that could not be launched is told at once: the others wait for it inside their kernels.
        while len(running) > ahead or (running and getattr(step, "failed", None) is not None):
            done = running.popleft().result()
            meter.step(done.finished_s - done.started_s)


def _admit_others(setup: RankSetup, ranks: RankProcesses) -> None:
    """Wait for the ranks of other hosts."""
    listener = RankListener(setup.config.rank_address, setup.config.transfer_key)
    try:
        for rank in range(setup.own_ranks, setup.config.layout.world):
            ranks.adopt(rank, listener.admit(rank, setup))
    finally:
        listener.close()


def _load_adapter(setup: RankSetup, runner: DeviceRunner, order: AdapterOrder) -> str:
    """Why it cannot be served; empty: it can. The slot is nobody's until all ranks have said so."""
    assert isinstance(runner, TorchRunner)
    try:
        weights = read_adapter(order.folder, setup.spec, setup.config.max_lora_rank)
        if weights.fingerprint != order.fingerprint:
            return f"the adapter in {order.folder} was changed while the ranks read it"
        runner.load_adapter(order.slot, weights)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _make_runner(
    setup: RankSetup,
    part: RankPart,
    decoder: Decoder,
    links: RankLinks,
    store: TCPStore,
    guided: GuidedSlots | None,
    eos_ids: tuple[int, ...],
    overlap: bool,
) -> tuple[DeviceRunner, str]:
    config, memory = setup.config, setup.memory
    decoder.rotary.serve(memory.max_context)
    if setup.on_gpu:
        from cumulo.engine.play.rank_player_cuda import make_cuda_runner

        guides, device = SharedGuides(guided, links), torch.device("cuda", torch.cuda.current_device())
        on_gpu = make_cuda_runner(config, memory, part, decoder, store, eos_ids, guides, links, device)
        runs_on = f"GPU kernels on {torch.cuda.get_device_name()}"
        if config.batch_invariant:
            given = (setup.spec, config.layout, config.sum_parts, config.weights, config.dtype)
            runs_on += f", {equality_note(*given)}"
        return on_gpu, runs_on
    spread = None
    if config.redundant_experts:
        spread = SpreadExperts(decoder, part, links, config.redundant_experts, config.expert_balance_steps)
    model, runs_on = runnable(decoder, lambda: RankDecoder(decoder, part, links, spread), links)
    cache, bank = setup.cache(part.rank), None
    if config.max_loras:
        bank = AdapterBank(decoder, setup.spec, config.max_loras, config.max_lora_rank, part)
    play = RankPlay(part, links, config.max_running, cache.blocks)
    own = {"overlap": overlap, "threads": setup.threads, "rank": play, "bank": bank}
    runner = torch_runner(model, cache, config, memory, eos_ids, **own)
    runner.table.guided = SharedGuides(guided, links)
    return runner, runs_on


log = logging.getLogger(__name__)

_REFUSED = 3  # exit status: joining again would not help


def serve_ranks(address: str, key: str, model: str | None, threads: int | None, count: int = 1) -> None:
    """So many ranks, a process each, until it is interrupted. `model`: where it lies on this host; None: where
    the engine's lies on its own."""
    host_and_port(address)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # the next engine is joined without importing torch again
    ranks: dict[int, BaseProcess] = {}  # by place: on GPUs, which of this host's it takes
    while True:
        for place in set(range(count)) - set(ranks):
            # A process for each engine: what one leaves in torch must not meet the next.
            given = (address, key, model, threads, place)
            ranks[place] = context.Process(target=_be_rank_once, args=given, daemon=True)
            ranks[place].start()
        wait([one.sentinel for one in ranks.values()])
        ended = [one for one in ranks.values() if one.exitcode is not None]
        ranks = {place: one for place, one in ranks.items() if one.exitcode is None}
        if any(one.exitcode == _REFUSED for one in ended):
            raise CumuloError(f"the engine at {address} refused this rank; the line above says why")


def _be_rank_once(address: str, key: str, model: str | None, threads: int | None, place: int) -> None:
    try:
        connection, rank, setup, own_host = join_engine(address, key)
    except CumuloError as error:
        print(f"error: {error}", flush=True)
        raise SystemExit(_REFUSED) from error
    print(f"rank {rank} of the engine at {address}", flush=True)
    threads = threads or setup.threads
    setup = replace(setup, model=model or setup.model, threads=threads, host=own_host, place=place)
    be_rank(connection, play_rank, rank, (setup,), setup.threads)

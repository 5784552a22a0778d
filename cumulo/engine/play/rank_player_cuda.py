"""A rank of an engine on a GPU: its CudaRunner, and what keeps the others from waiting for it
forever. Used by `rank_player`.

On a GPU ranks wait for each other inside kernels, which nothing times out. So when a rank dies or hangs, the
engine's process lets its own kernels go on, with nonsense, and fails the step; and a rank whose engine died ends
itself.
"""

import os
import select
import threading
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import torch

from cumulo.engine.config import EngineConfig
from cumulo.engine.memory.memory_plan import MemoryPlan
from cumulo.engine.play.player import DeviceRunner, cuda_runner
from cumulo.engine.play.rank_play import DeviceRank, SequenceSplit, SharedGuides
from cumulo.engine.play.ranked_runner import RankedRunner
from cumulo.engine.play.runner_cuda import CudaRunner
from cumulo.engine.play.transfer_cuda import cuda_handles
from cumulo.engine.play.transfer_wire import RankCaches
from cumulo.errors import ConfigError
from cumulo.kernels.cuda.collective.one_shot import release
from cumulo.kernels.cuda.collective.peers import PeerMemory, aligned, flags_bytes
from cumulo.layout.layout import nearest_divisor
from cumulo.layout.serving import RankPart, ServingLayout, rank_part
from cumulo.models.decoder import Decoder
from cumulo.models.play.cuda_decoder import why_not
from cumulo.models.play.cuda_rows import RankRows, rows_bytes
from cumulo.models.play.cuda_slice import RankSlice, shared_bytes
from cumulo.models.play.cuda_stage import FarStage, RankStage, stage_bytes
from cumulo.models.play.rank_links import RankLinks
from cumulo.ranks.device_group import MessageGroup, NcclGroup, StagedGroup
from cumulo.ranks.peer_memory import MirroredMemory, peer_memory
from cumulo.ranks.rank_group import RankGroup, TCPStore
from cumulo.ranks.start import RankProcesses
from cumulo.spec.model import ModelSpec

Members = tuple[int, ...]
SharedParts = tuple[RankSlice | None, RankStage | FarStage | None, RankRows | None]


def by_messages(config: EngineConfig) -> bool:
    """Whether ranks exchange messages, because they do not read each other's memory."""
    return config.rank_backend in ("nccl", "gloo")


def held_for_others(part: RankPart, config: EngineConfig, dtype: torch.dtype) -> int:
    """Bytes of a rank's GPU: its own that others read, or with messages a copy of every member's."""
    slices, stages, rows = _sizes(part, config, dtype)
    if by_messages(config):
        return part.layout.tp * slices + part.layout.stage_ranks * rows
    return slices + stages + rows


def _sizes(part: RankPart, config: EngineConfig, dtype: torch.dtype) -> tuple[int, int, int]:
    """Bytes that a rank shares with other slices, with other stages, and with ranks that have other rows. All
    ranks have as many: symmetric memory asks for it."""
    tokens, draws, layout = config.max_tokens_per_step, config.max_running, part.layout
    hidden, invariant = part.whole.hidden, config.batch_invariant
    slices = stages = rows = 0
    if layout.tp > 1:
        slices = shared_bytes(part.local, tokens, draws, dtype, layout.tp, invariant)
    if layout.pp > 1:
        stages = stage_bytes(hidden, tokens, draws, dtype, layout.pp)
    if layout.dp > 1:
        rows = rows_bytes(hidden, tokens, draws, dtype, layout.stage_ranks, invariant)
    return slices, stages, rows


def shared_parts(
    config: EngineConfig,
    part: RankPart,
    dtype: torch.dtype,
    store: TCPStore,
    links: RankLinks,
    device: torch.device,
) -> SharedParts:
    """What a step does with other slices, stages and rows. All ranks call it."""
    sizes = _sizes(part, config, dtype)
    tokens, draws, layout = config.max_tokens_per_step, config.max_running, part.layout
    tensor, pipeline, stage = (
        layout.tensor_group(part.rank),
        layout.pipeline_group(part.rank),
        layout.stage_group(part.rank),
    )
    near = far = None
    if by_messages(config):
        groups = _groups(config, part.rank, (tensor, pipeline, stage), store, links, device)

        def memory_of(members: Members, size: int) -> PeerMemory:
            return MirroredMemory(size, groups[members], device)

        if layout.pp > 1:
            name = f"drawn {'-'.join(map(str, pipeline))}"
            drawn = RankGroup(store, name, pipeline, part.rank, config.rank_timeout_s, host=links.host)
            far = FarStage(groups[pipeline], drawn, part, draws)
    else:
        size = flags_bytes(layout.world) + sum(map(aligned, sizes))
        peers = peer_memory(size, store, "cumulo-peers", part.rank, layout.world, device, links.together)
        memory_of = peers.among
    # Carved in one order on all ranks.
    rank_slice = rows = None
    if layout.tp > 1:
        rank_slice = RankSlice(
            memory_of(tensor, sizes[0]), part, tokens, draws, dtype, config.batch_invariant
        )
    if layout.pp > 1 and far is None:
        near = RankStage(memory_of(pipeline, sizes[1]), part, tokens, draws, dtype)
    if layout.dp > 1:
        rows = RankRows(memory_of(stage, sizes[2]), part, tokens, draws, dtype, config.batch_invariant)
    return rank_slice, near or far, rows


def _groups(
    config: EngineConfig,
    rank: int,
    members: tuple[Members, ...],
    store: TCPStore,
    links: RankLinks,
    device: torch.device,
) -> dict[Members, MessageGroup]:
    """By members; a group that two purposes have in common is made once."""
    made: dict[Members, MessageGroup] = {}
    over_gloo = (links.tensor, links.pipeline, links.stage)
    for one, group in zip(members, over_gloo, strict=True):
        if group is None or one in made:
            continue
        if config.rank_backend == "gloo":
            made[one] = StagedGroup(group, device)
        else:
            name = "-".join(map(str, one))
            meet = partial(NcclGroup, store, name, one, rank, config.rank_timeout_s, device)
            made[one] = links.together(meet)
    if not made:
        raise ConfigError("an engine of one rank has nobody to exchange messages with: omit rank_backend")
    return made


_MANY = 64
_RELEASE_S = 0.01  # between attempts to let kernels go on
_LOOK_S = 0.5  # between looks whether a step stands still


def gpu_places(backend: str) -> int:
    """How many ranks this machine has a GPU for. Several may be told to share one, to try a layout; over gloo
    they always may."""
    shared = backend == "gloo" or os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
    return _MANY if shared else torch.cuda.device_count()


def own_memory(spec: ModelSpec, config: EngineConfig, layout: ServingLayout, free_bytes: int) -> int:
    """Of a GPU's memory what a rank has for weights, cache and steps; the rest is what ranks show each other."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    shared = held_for_others(rank_part(spec, layout, 0), config, dtype)
    on_one = -(-(layout.world - config.remote_ranks) // torch.cuda.device_count())
    return free_bytes // on_one - shared - config.max_running * spec.vocab_size * dtype.itemsize


def refuse_layout(spec: ModelSpec, layout: ServingLayout) -> None:
    """What only CPUs do so far."""
    if spec.vocab_size % layout.tp:
        raise ConfigError(
            f"tp {layout.tp} does not divide the vocabulary of {spec.vocab_size} tokens, as it must on GPUs; tp "
            f"{nearest_divisor(spec.vocab_size, layout.tp)} does"
        )


def use_own_gpu(place: int) -> None:
    """Ranks take the GPUs in turn; where there are fewer, they share. `place`: of this rank among those of its
    host."""
    torch.cuda.set_device(place % torch.cuda.device_count())


def make_cuda_runner(
    config: EngineConfig,
    memory: MemoryPlan,
    part: RankPart,
    decoder: Decoder,
    store: TCPStore,
    eos_ids: tuple[int, ...],
    guided: SharedGuides,
    links: RankLinks,
    device: torch.device,
) -> CudaRunner:
    obstacle = why_not(decoder)
    if obstacle is not None:
        raise ConfigError(
            f"on several GPUs a model runs on our kernels only ({obstacle}); omit tp, pp, dp and ep"
        )
    rank_slice, stage, rows = shared_parts(config, part, decoder.dtype, store, links, device)
    split = SequenceSplit(part, config.max_running, memory.kv_blocks // config.dp)
    parts: dict[str, Any] = {"rank_slice": rank_slice, "stage": stage, "rows": rows}
    parts["largest"] = links.largest_of_slices
    runner = cuda_runner(
        decoder,
        part.local,
        config,
        memory,
        eos_ids,
        device,
        rank=DeviceRank(part, stage, split, links),
        **parts,
    )
    runner.table.guided = guided
    return runner


def show_cache(runner: DeviceRunner, store: TCPStore, rank: int) -> None:
    """For an engine with a role: let rank 0, which hands KV over for all, open this rank's."""
    assert isinstance(runner, CudaRunner)
    store.set(f"kv cache {rank}", cuda_handles(runner.cache))


def shown_caches(runner: DeviceRunner, store: TCPStore, ranks: int) -> RankCaches:
    assert isinstance(runner, CudaRunner)
    others = [store.get(f"kv cache {rank}").decode() for rank in range(1, ranks)]
    return RankCaches([runner.cache], [cuda_handles(runner.cache), *others])


def watch_ranks(ranked: RankedRunner, runner: DeviceRunner, ranks: RankProcesses) -> None:
    """When a rank dies, or lets the others wait for longer than it may, what this process waits for on the GPU
    ends, and its step fails."""
    assert isinstance(runner, CudaRunner)
    stage, meeting = runner.model.stage, (runner.model.slice, runner.model.rows)
    memories = [part.memory for part in meeting if part is not None]
    stream = torch.cuda.Stream()
    device = torch.cuda.current_device()
    shared = [memory for memory in memories if not isinstance(memory, MirroredMemory)]
    for memory in shared:
        release(memory, only_load=True)

    def watch() -> None:
        while not wait(ranks.sentinels, _LOOK_S) and not ranked.stands_still():
            if ranked.closed.is_set():
                return
        ranked.lost = True
        torch.cuda.set_device(device)
        with torch.cuda.stream(stream):
            for memory in memories:
                if isinstance(memory, MirroredMemory):
                    memory.group.abort()
            while not ranked.closed.wait(_RELEASE_S):
                for memory in shared:
                    release(memory)
                if stage is not None:
                    stage.let_go()

    threading.Thread(target=watch, name="cumulo-rank-watch", daemon=True).start()


def end_with(process_id: int | None, connection: int) -> None:
    """End this process as soon as the engine's has, whatever it waits for then. None: that one is on another
    host, and this connection to it ends."""
    looked = select.poll()
    if process_id is None:
        looked.register(connection, select.POLLRDHUP | select.POLLHUP)  # not when there is something to read
    else:
        looked.register(os.pidfd_open(process_id), select.POLLIN)

    def watch() -> None:
        looked.poll()
        os._exit(1)

    threading.Thread(target=watch, name="cumulo-engine-watch", daemon=True).start()

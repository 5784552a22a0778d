"""What a rank on a GPU shares with the others during a step, by the means that `rank_backend` says: memory that all
read, or messages that fill copies of it. `rank_player_cuda` makes it, on every rank alike."""

from collections.abc import Callable
from functools import partial

import torch

from cumulo.engine.config import EngineConfig
from cumulo.errors import ConfigError
from cumulo.kernels.cuda.collective.peers import PeerMemory, aligned, flags_bytes
from cumulo.layout.serving import RankPart
from cumulo.models.play.cuda_rows import RankRows, rows_bytes
from cumulo.models.play.cuda_slice import RankSlice, shared_bytes
from cumulo.models.play.cuda_stage import FarStage, RankStage, stage_bytes
from cumulo.models.play.rank_links import RankLinks
from cumulo.ranks.device_group import MessageGroup, NcclGroup, StagedGroup
from cumulo.ranks.peer_memory import MirroredMemory, peer_memory
from cumulo.ranks.rank_group import RankGroup, TCPStore

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
    """Bytes that a rank shares with other slices, with other stages, and with ranks that have other rows. All ranks
    have as many: symmetric memory asks for it."""
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
    memory_of: Callable[[Members, int], PeerMemory]
    near = far = None
    if by_messages(config):
        groups = _groups(config, part.rank, (tensor, pipeline, stage), store, links, device)
        memory_of = partial(_mirrored, groups, device)
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


def _mirrored(
    groups: dict[Members, MessageGroup], device: torch.device, members: Members, size: int
) -> PeerMemory:
    return MirroredMemory(size, groups[members], device)


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

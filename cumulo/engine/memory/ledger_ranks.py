"""The memory plan of an engine over several ranks: each holds a share of the weights and of the KV cache. The
assembly asks."""

import dataclasses
import math

from cumulo.engine.config import EngineConfig
from cumulo.engine.memory.memory_plan import MemoryPlan, plan_memory
from cumulo.layout.serving import RankPart, ServingLayout, held_parameters, rank_part
from cumulo.spec.counting import parameter_shapes
from cumulo.spec.model import ModelSpec


def plan_rank_memory(
    spec: ModelSpec, weight_bytes: int, config: EngineConfig, layout: ServingLayout, available_bytes: int
) -> MemoryPlan:
    """Of the engine: the ledger is rank 0's, and there are as many blocks as the rank with the least room holds.

    `weight_bytes` is what the whole model takes, `available_bytes` what one rank may use.
    """
    elements = sum(math.prod(shape) for shape in parameter_shapes(spec).values())

    def plan(rank: int, kv_blocks: int | None) -> MemoryPlan:
        part = rank_part(spec, layout, rank)
        held = sum(parameter.elements for parameter in held_parameters(part).values())
        held += _copied_elements(part, config.redundant_experts)
        own = dataclasses.replace(config, kv_blocks=kv_blocks)
        return plan_memory(part.local, weight_bytes * held // elements, own, available_bytes)

    asked = None if config.kv_blocks is None else -(-config.kv_blocks // layout.dp)
    # Ranks of a stage hold as much as each other, within a row of the vocabulary.
    plans = [plan(rank, asked) for rank in range(0, layout.world, layout.stage_ranks)]
    blocks = min(one.kv_blocks for one in plans)
    host_blocks = min(one.host_blocks for one in plans)
    return dataclasses.replace(
        plan(0, blocks),
        kv_blocks=blocks * layout.dp,
        host_blocks=host_blocks,
        tier_blocks=min(one.tier_blocks for one in plans),
    )


def _copied_elements(part: RankPart, redundant: int) -> int:
    """Parameters in a rank's places for copies of experts."""
    moe, ranks = part.whole.moe, part.layout.ep
    if not redundant or moe is None:
        return 0
    places = (moe.experts + redundant) // ranks - len(part.experts)
    of_experts = (one.elements for name, one in held_parameters(part).items() if ".experts." in name)
    return places * sum(of_experts) // max(1, len(part.experts))

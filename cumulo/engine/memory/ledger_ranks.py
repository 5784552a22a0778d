"""The memory plan of an engine over several ranks: each holds a share of the weights and of the KV cache. The
assembly asks."""

import dataclasses
import math

from cumulo.engine.config import EngineConfig
from cumulo.engine.memory.ledger import MemoryPlan, plan_memory
from cumulo.layout.serving import ServingLayout, held_parameters, rank_part
from cumulo.spec.model import ModelSpec
from cumulo.spec.parameters import parameter_shapes


def plan_rank_memory(
    spec: ModelSpec, weight_bytes: int, config: EngineConfig, layout: ServingLayout, available_bytes: int
) -> MemoryPlan:
    """Of the engine: the ledger is rank 0's, and there are as many blocks as the rank with the least room holds.

    `weight_bytes` is what the whole model takes, `available_bytes` what one rank may use.
    """
    elements = sum(math.prod(shape) for shape in parameter_shapes(spec).values())
    plans: list[MemoryPlan] = []
    # Ranks of a stage hold as much as each other, within a row of the vocabulary.
    for rank in range(0, layout.world, layout.stage_ranks):
        part = rank_part(spec, layout, rank)
        held = sum(parameter.elements for parameter in held_parameters(part).values())
        one = dataclasses.replace(config, kv_blocks=_per_rank(config.kv_blocks, layout.dp))
        plans.append(plan_memory(part.local, weight_bytes * held // elements, one, available_bytes))
    blocks = min(plan.kv_blocks for plan in plans)
    part = rank_part(spec, layout, 0)
    held = sum(parameter.elements for parameter in held_parameters(part).values())
    exact = dataclasses.replace(config, kv_blocks=blocks)
    own = plan_memory(part.local, weight_bytes * held // elements, exact, available_bytes)
    host_blocks = min(plan.host_blocks for plan in plans)
    return dataclasses.replace(own, kv_blocks=blocks * layout.dp, host_blocks=host_blocks)


def _per_rank(blocks: int | None, ranks: int) -> int | None:
    return None if blocks is None else -(-blocks // ranks)

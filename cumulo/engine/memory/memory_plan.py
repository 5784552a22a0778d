"""How memory is shared out before a model is loaded. The engine and the planner ask `plan_memory`.

It predicts every part, chooses the number of KV blocks where the user left it open, and refuses what cannot fit
by naming the largest setting that would.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

from cumulo.base.quantities import GIB
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.core.config import SchedulerConfig, SchedulingOptions
from cumulo.engine.memory.ledger import Ledger, format_bytes
from cumulo.engine.memory.needs import DraftNeeds, Needs
from cumulo.errors import CumuloError, OutOfMemory
from cumulo.layout.serving import RankPart, ServingLayout, held_parameters, rank_part
from cumulo.spec.counting import parameter_shapes
from cumulo.spec.model import ModelSpec

# Left to the rest of the system: a machine filled to the last page starts to swap or kills the process.
_SHARE_LEFT_FREE = 0.05
# Where nobody says how much KV to keep: room for this many tokens per sequence that may run at once, but at
# most this share of what is free and this many bytes. On a CPU decoding slows down with context long before
# memory for it runs out, so a laptop's memory is better left to its owner.
_TYPICAL_CONTEXT = 1024
_KV_SHARE, KV_LIMIT_BYTES = 0.25, 4 * GIB
# A GPU serves and does nothing else: all but this share of its memory is used, the rest goes to libraries.
_GPU_SHARE_LEFT_FREE = 0.03


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    kv_blocks: int
    max_context: int  # prompt and output together; less than the model's where the KV cache is smaller
    ledger: Ledger
    tier_blocks: int = 0  # of host memory, for KV that leaves the device


def plan_memory(
    spec: ModelSpec,
    weight_bytes: int,
    config: EngineConfig,
    available_bytes: int,
    *,
    loading_bytes: int = 0,
    draft: DraftNeeds | None = None,
) -> MemoryPlan:
    """Predict every row, choose what the configuration leaves open, or raise OutOfMemory.

    `weight_bytes` is what the weights take in the end, `loading_bytes`, where it is more, before being quantised.

    A `max_context` that was asked for must fit at least once into the KV cache. One that was not asked for
    (the model's own may be 131,072) becomes what the cache holds; the plan and the ledger say so.
    """
    config = config.settled("cuda" if config.device.startswith("cuda") else "cpu")
    needs = Needs(spec, weight_bytes, config, draft)
    on_gpu = config.device == "cuda"
    usable = int(available_bytes * (1 - (_GPU_SHARE_LEFT_FREE if on_gpu else _SHARE_LEFT_FREE)))
    if config.max_context is not None and config.max_context > spec.max_context:
        raise CumuloError(
            f"max_context={config.max_context} was asked for, but this model supports at most "
            f"{spec.max_context:,} tokens; set max_context={spec.max_context} or less"
        )
    if weight_bytes <= usable < loading_bytes:
        raise OutOfMemory(
            f"weights={config.weights} was asked for, but weights are loaded before they are quantised: as they "
            f"are they take {format_bytes(loading_bytes)} of {format_bytes(usable)} usable; take a larger GPU or "
            "a smaller model"
        )
    if not needs.fit(usable):
        raise OutOfMemory(refusal(needs, usable))
    kv_blocks, why = needs.given_kv_blocks, "as configured"
    if kv_blocks is None and on_gpu:
        most = usable // needs.block_bytes
        kv_blocks = largest(lambda blocks: needs.total(blocks) <= usable, needs.least_kv_blocks, most)
        why = "all that is left on the GPU"
    elif kv_blocks is None:
        limit = int(min(_KV_SHARE * available_bytes, KV_LIMIT_BYTES)) // needs.block_bytes
        typical = config.max_running * needs.blocks_for(min(needs.context, _TYPICAL_CONTEXT))
        wanted = max(min(max(typical, needs.blocks_for(needs.context)), limit), needs.least_kv_blocks)
        kv_blocks = largest(lambda blocks: needs.total(blocks) <= usable, needs.least_kv_blocks, wanted)
        why = f"for {config.max_running:,} sequences, within a quarter of free memory and 4 GiB"
    context = needs.context_with(kv_blocks)
    if context < needs.context:
        why += f"; longest context {context:,} of the model's {needs.context:,}"
    rows = tuple(needs.rows(kv_blocks, why))
    return MemoryPlan(kv_blocks, context, Ledger(rows, available_bytes), needs.tier_blocks)


def refusal(needs: Needs, usable_bytes: int) -> str:
    """Why it does not fit, and for each setting the largest value that makes it fit on its own."""
    config, usable = needs.config, format_bytes(usable_bytes)
    if needs.weight_bytes > usable_bytes:
        return (
            f"the model's weights alone take {format_bytes(needs.weight_bytes)}, but only {usable} of memory "
            "are usable: take a smaller or a quantised model, or free memory"
        )
    given, least = needs.given_kv_blocks, needs.least_kv_blocks
    advice: list[str] = []
    if given is not None and given < least:
        block = config.block_size
        what = f"a KV cache of {given * block:,} tokens cannot hold one sequence of {least * block:,}"
        name = "kv_blocks" if config.kv_blocks is not None else "kv_memory_gib"
        # Rounded up: the number printed must be enough.
        enough = least if name == "kv_blocks" else math.ceil(least * needs.block_bytes / GIB * 1000) / 1000
        if needs.changed(**{name: enough}).fit(usable_bytes):
            advice.append(f"{name}={enough} or more")
    else:
        total = format_bytes(needs.total(least if given is None else given))
        what = f"this configuration needs {total} of memory, and {usable} are usable"
    for name in ("max_context", "kv_blocks", "max_tokens_per_step", "max_running", "max_loras"):
        value = getattr(config, name)
        if value is not None and (best := _largest_setting(needs, usable_bytes, name, value, 1)) is not None:
            advice.append(f"{name}={best}")
    for name in ("kv_memory_gib", "kv_host_gib"):
        value = getattr(config, name)
        if value and (best := _largest_setting(needs, usable_bytes, name, int(value * 100), 100)) is not None:
            advice.append(f"{name}={best / 100:g}")
    if not advice:
        return f"{what}; no single setting helps: take a smaller or a quantised model, or free memory"
    return f"{what}; the largest that fits, all else unchanged: {', or '.join(advice)}"


def _largest_setting(needs: Needs, usable_bytes: int, name: str, present: int, per_unit: int) -> int | None:
    """The largest value below the present one with which everything fits, in units of 1 / per_unit."""

    def fit(value: int) -> bool:
        return needs.changed(**{name: value / per_unit if per_unit > 1 else value}).fit(usable_bytes)

    smallest = {"kv_blocks": needs.least_kv_blocks, "kv_host_gib": 0}.get(name, 1)
    if name == "kv_memory_gib":  # the least that holds one sequence
        smallest = math.ceil(needs.least_kv_blocks * needs.block_bytes / GIB * per_unit)
    return largest(fit, smallest, present) if smallest <= present and fit(smallest) else None


def largest(fit: Callable[[int], bool], low: int, high: int) -> int:
    """The largest value in low..high that fits, given that `low` does and that fitting is monotone."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fit(middle) else (low, middle - 1)
    return low


def scheduler_config(config: EngineConfig, memory: MemoryPlan) -> SchedulerConfig:
    """From the engine's options, settled for its device, and what the memory ledger gives it."""
    return SchedulerConfig(
        **{option.name: getattr(config, option.name) for option in fields(SchedulingOptions)},
        blocks=memory.kv_blocks,
        max_context=memory.max_context,
        tier_blocks=memory.tier_blocks,
        disk=bool(config.kv_disk),
        speculate=_drafts(config),
    )


def _drafts(config: EngineConfig) -> Literal["", "ngram", "model", "rounds"]:
    if config.speculate in ("", "ngram"):
        return "ngram" if config.speculate else ""
    return "rounds" if config.device == "cuda" else "model"


def plan_rank_memory(
    spec: ModelSpec, weight_bytes: int, config: EngineConfig, layout: ServingLayout, available_bytes: int
) -> MemoryPlan:
    """The memory plan of the engine: the ledger is rank 0's, and there are as many blocks as the rank with the
    least room holds.

    `weight_bytes` is what the whole model takes, `available_bytes` what one rank may use.
    """
    elements = sum(math.prod(shape) for shape in parameter_shapes(spec).values())

    def plan(rank: int, kv_blocks: int | None) -> MemoryPlan:
        part = rank_part(spec, layout, rank)
        held = sum(parameter.elements for parameter in held_parameters(part).values())
        held += _copied_elements(part, config.redundant_experts)
        own = dataclasses.replace(config, kv_blocks=kv_blocks)
        # On CPUs every rank draws from all logits; on GPUs the parts in which they lie are counted elsewhere.
        vocabulary = part.local.vocab_size if config.device.startswith("cuda") else spec.vocab_size
        local = dataclasses.replace(part.local, vocab_size=vocabulary)
        return plan_memory(local, weight_bytes * held // elements, own, available_bytes)

    asked = None if config.kv_blocks is None else -(-config.kv_blocks // layout.dp)
    # Ranks of a stage hold as much as each other, within a row of the vocabulary.
    plans = [plan(rank, asked) for rank in range(0, layout.world, layout.stage_ranks)]
    blocks = min(one.kv_blocks for one in plans)
    return dataclasses.replace(
        plan(0, blocks),
        kv_blocks=blocks * layout.dp,
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

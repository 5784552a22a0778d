"""What a model and a configuration need of memory, part by part. `plan_memory` asks it for numbers of KV blocks."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cumulo.base.quantities import GIB, LedgerLine
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.speculation.choose import most_draws
from cumulo.errors import CumuloError
from cumulo.layout.pieces import padded_rank, served_elements
from cumulo.spec.gpu_kernels import adapter_obstacle_of, obstacle_of
from cumulo.spec.model import ModelSpec
from cumulo.spec.operations import Weight, layer_operations, model_operations

# Multiplied otherwise than by the quantised products: the router in float32, kv_b per head.
_NEVER_QUANTISED = ("ffn.router.weight", "attention.kv_b.weight")
INT4_GROUP = 128  # weights that share a scale; rows that it does not divide stay as they are


def _quantised_matrices(spec: ModelSpec) -> Iterator[Weight]:
    """The layers' matrices; embedding, head and routed experts stay as they are."""
    for layer, operation in model_operations(spec):
        for weight in operation.weights:
            if layer is not None and len(weight.shape) == 2 and weight.name not in _NEVER_QUANTISED:
                yield weight


def quantised_saved_bytes(spec: ModelSpec, bytes_per_element: int, kind: str) -> int:
    """What weights=fp8 or int4 frees: the layers' matrices shrink to a byte a number and four for each row's scale,
    or to half a byte and four for each group's."""
    if kind == "auto":
        return 0
    matrices = _quantised_matrices(spec)
    if kind == "fp8":
        return sum(weight.size * (bytes_per_element - 1) - 4 * weight.shape[0] for weight in matrices)
    return sum(
        weight.size * bytes_per_element - weight.size // 2 - 4 * weight.size // INT4_GROUP
        for weight in matrices
        if weight.shape[1] % INT4_GROUP == 0
    )


@lru_cache(maxsize=64)
def int4_scratch_bytes(spec: ModelSpec, bytes_per_element: int) -> int:
    """Where the largest matrix of a layer is unpacked for steps of many tokens: gate and up lie together."""
    sizes = (
        (2 if weight.name.endswith(("gate.weight", "up.weight")) else 1) * weight.size
        for weight in _quantised_matrices(spec)
        if weight.shape[1] % INT4_GROUP == 0
    )
    return max(sizes, default=0) * bytes_per_element


@lru_cache(maxsize=256)
def gpu_buffer_bytes(spec: ModelSpec, tokens: int, outputs: int, bytes_per_element: int) -> int:
    """What the GPU decoder works in: the stream and its normed copy, one layer's projections, attention's result,
    the feed-forward's two sides and their product, and the rows whose logits are wanted."""
    buffers: dict[str, int] = {}
    mixed = 0  # numbers that attention's last product takes
    for has_experts in {spec.is_moe_layer(layer) for layer in range(spec.layers)}:
        for operation in layer_operations(spec, has_experts, "serve"):
            # Layers run one after the other; shared experts work in the plain feed-forward's buffers.
            name = operation.name.replace(".shared.", ".")
            buffers[name] = max(buffers.get(name, 0), operation.buffer)
            if name == "attention.output" and operation.product is not None:
                mixed = operation.product.inputs
    per_token = 2 * spec.hidden + sum(buffers.values())
    routing = 0
    if spec.moe is not None:
        moe, choices = spec.moe, tokens * spec.moe.experts_per_token
        sorted_choices = choices + (moe.experts + 1) * 128  # every expert's begin at a tile of up to 128
        words = tokens * moe.experts + 2 * choices + moe.experts + sorted_choices + sorted_choices // 16 + 1
        routing = 4 * words
    return bytes_per_element * (tokens * per_token + outputs * (2 * spec.hidden + mixed)) + routing


def gpu_logit_bytes(vocabulary: int, draws: int, bytes_per_element: int) -> int:
    """Logits, and what sampling keeps: maximum, place, mass and count of every 4,096 tokens, the maximum of every
    64, the bits, weights and tokens of up to 4,096 candidates, and three numbers."""
    parts = -(-vocabulary // 4096)
    candidates = min(4096, 1 << (vocabulary - 1).bit_length())
    return draws * (vocabulary * bytes_per_element + parts * (16 + 4096 // 64 * 4) + 12 * candidates + 16)


def gpu_table_bytes(max_running: int, tokens: int, context: int, block_size: int) -> int:
    """Token ids, block tables and a step's copy of these, the words a plan travels in, three numbers a token."""
    blocks = -(-(context + 1) // block_size)
    words = 15 * max_running + 1
    return 4 * (max_running * (context + 1 + 2 * blocks + 1) + words + 3 * tokens)


BYTES_PER_ELEMENT = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

_GPU_LIBRARIES_BYTES = 3 * GIB // 2  # matrix libraries' workspaces, compiled kernels, captured graphs
_GATHERED_BYTES = 2 * GIB  # scores and gathered keys and values of PyTorch's operators on a GPU, at worst
_SAMPLER_SLICE = 1 << 20  # logits the sampler works on at once
# A model is of no use with less context than this (or its own, if that is shorter).
_SHORTEST_CONTEXT = 256
_KV_SCALE_BYTES = 4  # of int8 keys and values
_STAGING_BYTES = 64 << 20  # of host memory, on the way to disk


def _row(name: str, predicted_bytes: int, how: str) -> LedgerLine:
    return LedgerLine(name, predicted_bytes, how=how)


@dataclass(frozen=True, slots=True)
class DraftNeeds:
    """What speculation by a model or head takes."""

    name: str
    weight_bytes: int
    bytes_per_token: int  # of its own KV cache, and of the hidden states a head reads
    step_token_bytes: int = 0  # of buffers, for each token that a step may have


@dataclass(frozen=True, slots=True)
class Needs:
    """A model and a configuration, and the bytes they need for a given number of KV blocks."""

    spec: ModelSpec
    weight_bytes: int
    config: EngineConfig
    draft: DraftNeeds | None = None

    @property
    def element_bytes(self) -> int:
        dtype = self.config.dtype
        if dtype not in BYTES_PER_ELEMENT:
            raise CumuloError(
                f"dtype must be auto, {', '.join(BYTES_PER_ELEMENT)}; got {self.config.dtype!r}"
            )
        return BYTES_PER_ELEMENT[dtype]

    @property
    def block_bytes(self) -> int:
        spec, kind = self.spec, self.config.kv_dtype
        per_token = spec.kv_bytes_per_token(self.element_bytes if kind == "auto" else 1)
        if kind == "int8":  # and a scale of keys and of values for each head
            per_token += 2 * _KV_SCALE_BYTES * spec.layers * spec.kv_cache_heads
        return self.config.block_size * per_token

    @property
    def tier_blocks(self) -> int:
        """Blocks pass through host memory on their way to disk: there are some where only a disk is asked for."""
        asked = int(self.config.kv_host_gib * GIB) // self.block_bytes
        return max(asked, _STAGING_BYTES // self.block_bytes, 16) if self.config.kv_disk else asked

    @property
    def context(self) -> int:
        """The longest sequence wanted."""
        return self.config.max_context or self.spec.max_context

    @property
    def given_kv_blocks(self) -> int | None:
        if self.config.kv_blocks is None and self.config.kv_memory_gib is not None:
            return int(self.config.kv_memory_gib * GIB) // self.block_bytes
        return self.config.kv_blocks

    @property
    def least_kv_blocks(self) -> int:
        """One sequence of the context asked for or, when none was, of the shortest useful one."""
        asked = self.config.max_context
        return self.blocks_for(asked if asked is not None else min(self.context, _SHORTEST_CONTEXT))

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    def context_with(self, kv_blocks: int) -> int:
        return min(self.context, kv_blocks * self.config.block_size)

    def rows(self, kv_blocks: int, why: str = "") -> Iterator[LedgerLine]:
        spec, config, element = self.spec, self.config, self.element_bytes
        context = self.context_with(kv_blocks)
        tokens, draws = config.max_tokens_per_step, min(config.max_running, config.max_tokens_per_step)

        yield _row("weights", self.weight_bytes, self._weights_in_words())
        yield _row(
            "kv cache",
            kv_blocks * self.block_bytes,
            f"{kv_blocks:,} blocks of {config.block_size} tokens, {why}",
        )
        if self.draft is not None:
            yield _row(
                "draft model", self.draft.weight_bytes, f"{self.draft.name}, which drafts for speculation"
            )
            if self.draft.step_token_bytes:
                held = config.max_tokens_per_step * self.draft.step_token_bytes
                yield _row("draft buffers", held, "what the head sees of a step")
            kept = kv_blocks * config.block_size * self.draft.bytes_per_token
            yield _row("draft kv cache", kept, "for the same blocks, committed as they are used")
        if config.max_loras:
            room = served_elements(spec, config.max_lora_rank) * element
            yield _row("adapters", config.max_loras * room, self._adapters_in_words())
        if config.device == "cuda":
            yield from self._gpu_rows(tokens, context)
            return
        yield _row(
            "activations", activation_bytes(spec, tokens, element, context),
            f"one layer's intermediate results for {tokens:,} tokens",
        )  # fmt: skip
        yield _row(
            "logits", logit_bytes(spec, draws, element),
            f"{draws:,} draws from {spec.vocab_size:,} tokens, and the sampler's candidates at worst",
        )  # fmt: skip
        yield _row(
            "token tables", table_bytes(config.max_running, context, config.block_size),
            f"{config.max_running:,} sequences of {context:,} tokens, committed as they are used",
        )  # fmt: skip
        if self.tier_blocks:
            yield _row(
                "host tier", self.tier_blocks * self.block_bytes,
                f"{self.tier_blocks:,} blocks, committed as they are used",
            )  # fmt: skip

    def _adapters_in_words(self) -> str:
        config = self.config
        when = ", committed as they are loaded" if config.device == "cpu" else ""
        return f"{config.max_loras:,} adapters of up to rank {padded_rank(config.max_lora_rank)}{when}"

    def _weights_in_words(self) -> str:
        if self.config.weights == "auto":
            return "as stored in the file, packed where quantised"
        experts = ", routed experts too" if self.spec.moe is not None else ""
        how = {"fp8": "8 bits, a scale a row", "int4": "4 bits, a scale for 128"}[self.config.weights]
        return f"layers' matrices in {how}; the rest{experts} in {self.config.dtype}"

    def _gpu_rows(self, tokens: int, context: int) -> Iterator[LedgerLine]:
        """The GPU decoder works in buffers it allocates once, so these are exact; models it cannot play run as on a
        CPU."""
        spec, config, element = self.spec, self.config, self.element_bytes
        # Parallel samples draw from one row: there may be more draws than tokens.
        draws = most_draws(config.max_running, bool(config.speculate))
        with_operators = config.max_loras and adapter_obstacle_of(spec) is not None
        if with_operators or obstacle_of(spec, config.dtype) is not None:
            activations = activation_bytes(spec, tokens, element, context) + _GATHERED_BYTES
            yield _row("activations", activations, f"one layer's intermediate results for {tokens:,} tokens")
            yield _row("logits", logit_bytes(spec, draws, element), f"{draws:,} draws")
        else:
            buffers = gpu_buffer_bytes(spec, tokens, draws, element)
            if config.weights == "int4":
                buffers += int4_scratch_bytes(spec, element)
            yield _row("activations", buffers, f"buffers for {tokens:,} tokens")
            sampling = gpu_logit_bytes(spec.vocab_size, draws, element)
            yield _row("logits", sampling, f"{draws:,} draws, with the sampler's candidates")
            tables = gpu_table_bytes(config.max_running, tokens, context, config.block_size)
            yield _row("token tables", tables, f"{draws:,} sequences of {context:,} tokens")
        yield _row(
            "libraries and graphs", _GPU_LIBRARIES_BYTES, "reserved; what they take depends on the driver"
        )
        # The host tier lies in the host's memory: it is no part of this sum.

    def total(self, kv_blocks: int) -> int:
        return int(sum(row.predicted for row in self.rows(kv_blocks)))

    def fit(self, usable_bytes: int) -> bool:
        given = self.given_kv_blocks
        if given is not None and given < self.least_kv_blocks:
            return False
        return self.total(self.least_kv_blocks if given is None else given) <= usable_bytes

    def changed(self, **settings: Any) -> "Needs":
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **settings))


def activation_bytes(spec: ModelSpec, tokens: int, bytes_per_element: int, context: int) -> int:
    """Peak of one decoder layer: the residual stream and its normed copy, and the larger of attention and
    feed-forward. Layers run one after the other, so their number does not matter.
    """
    stream = tokens * 4 * spec.hidden  # residual, normed copy, the block's result, the layer's
    blocks: Counter[tuple[str, bool]] = Counter()
    for has_experts in (False, True):
        for operation in layer_operations(spec, has_experts, "serve"):
            block = operation.name.split(".")[0], has_experts
            blocks[block] += tokens * operation.eager
            # The float32 kernel reads blocks in place; for other types one sequence's keys and values are gathered.
            if bytes_per_element != BYTES_PER_ELEMENT["float32"]:
                blocks[block] += context * operation.kv_read
    return bytes_per_element * (stream + max(blocks.values()))


def logit_bytes(spec: ModelSpec, draws: int, bytes_per_element: int) -> int:
    """Logits, a copy where samples share a row, and what the sampler makes of one slice of rows when every
    token is a candidate (14 columns of 8 bytes); sampling is never below float32.
    """
    elements = draws * spec.vocab_size
    return elements * 2 * max(4, bytes_per_element) + min(elements, _SAMPLER_SLICE) * 112


def table_bytes(max_running: int, context: int, block_size: int) -> int:
    """The runner's token ids and block tables (int32), and some columns of parameters."""
    return max_running * (4 * (context + 1) + 4 * -(-(context + 1) // block_size) + 120)

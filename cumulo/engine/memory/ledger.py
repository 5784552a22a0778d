"""The memory ledger: what every part will need, beside what it took. The engine asks it before loading.

`plan_memory` predicts, chooses the number of KV blocks where the user left it open, and refuses what cannot
fit by naming the largest setting that would. After loading, measured bytes are entered beside the predicted.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cumulo.base.ledger import LedgerLine
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.speculation.choose import most_draws
from cumulo.engine.memory.ledger_gpu import (
    gpu_buffer_bytes,
    gpu_logit_bytes,
    gpu_table_bytes,
    int4_scratch_bytes,
)
from cumulo.errors import CumuloError, OutOfMemory
from cumulo.layout.adapters import padded_rank, served_elements
from cumulo.spec.gpu_kernels import obstacle_of
from cumulo.spec.model import ModelSpec
from cumulo.spec.operations import layer_operations

if TYPE_CHECKING:
    from rich.table import Table

GIB = 1 << 30
BYTES_PER_ELEMENT = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

# Left to the rest of the system: a machine filled to the last page starts to swap or kills the process.
_SHARE_LEFT_FREE = 0.05
# Where nobody says how much KV to keep: room for this many tokens per sequence that may run at once, but at
# most this share of what is free and this many bytes. On a CPU decoding slows down with context long before
# memory for it runs out, so a laptop's memory is better left to its owner.
_TYPICAL_CONTEXT = 1024
_KV_SHARE, _KV_LIMIT_BYTES = 0.25, 4 * GIB
# A GPU serves and does nothing else: all but this share of its memory is used, the rest goes to libraries.
_GPU_SHARE_LEFT_FREE = 0.03
_GPU_LIBRARIES_BYTES = 3 * GIB // 2  # matrix libraries' workspaces, compiled kernels, captured graphs
_GATHERED_BYTES = 2 * GIB  # scores and gathered keys and values of PyTorch's operators on a GPU, at worst
_SAMPLER_SLICE = 1 << 20  # logits the sampler works on at once
# A model is of no use with less context than this (or its own, if that is shorter).
_SHORTEST_CONTEXT = 256
_STAGING_BYTES = 64 << 20  # of host memory, on the way to disk


@dataclass(frozen=True, slots=True)
class Ledger:
    rows: tuple[LedgerLine, ...]
    available_bytes: int  # when the plan was made

    @property
    def predicted_bytes(self) -> int:
        return int(sum(row.predicted for row in self.rows))

    @property
    def measured_bytes(self) -> int | None:
        """The measured rows' sum, once there is one."""
        measured = [row.measured for row in self.rows if row.measured is not None]
        return int(sum(measured)) if measured else None

    def __getitem__(self, name: str) -> LedgerLine:
        return next(row for row in self.rows if row.name == name)

    def measured(self, measured_bytes: Mapping[str, int | None]) -> "Ledger":
        """A copy with measurements entered by row name; None leaves a row as it is."""
        unknown = set(measured_bytes) - {row.name for row in self.rows}
        if unknown:
            raise ValueError(f"the ledger has no row {', '.join(sorted(unknown))}")
        rows = (
            dataclasses.replace(row, measured=measured_bytes[row.name])
            if measured_bytes.get(row.name) is not None
            else row
            for row in self.rows
        )
        return dataclasses.replace(self, rows=tuple(rows))

    def to_dict(self) -> dict[str, Any]:
        return {
            "available_bytes": self.available_bytes,
            "predicted_bytes": self.predicted_bytes,
            "measured_bytes": self.measured_bytes,
            "rows": [
                {
                    "name": row.name,
                    "predicted_bytes": row.predicted,
                    "measured_bytes": row.measured,
                    "how": row.how,
                }
                for row in self.rows
            ],
        }

    def __rich__(self) -> "Table":
        return ledger_table(self)


@dataclass(frozen=True, slots=True)
class DraftNeeds:
    """What speculation by a model or head takes."""

    name: str
    weight_bytes: int
    bytes_per_token: int  # of its own KV cache, and of the hidden states a head reads


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    kv_blocks: int
    host_blocks: int  # of the swap pool
    max_context: int  # prompt and output together; less than the model's where the KV cache is smaller
    ledger: Ledger
    tier_blocks: int = 0  # of host memory, for prefixes

    @property
    def all_host_blocks(self) -> int:
        """The swap pool's, then the tier's."""
        return self.host_blocks + self.tier_blocks


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
        limit = int(min(_KV_SHARE * available_bytes, _KV_LIMIT_BYTES)) // needs.block_bytes
        typical = config.max_running * needs.blocks_for(min(needs.context, _TYPICAL_CONTEXT))
        wanted = max(min(max(typical, needs.blocks_for(needs.context)), limit), needs.least_kv_blocks)
        kv_blocks = largest(lambda blocks: needs.total(blocks) <= usable, needs.least_kv_blocks, wanted)
        why = f"for {config.max_running:,} sequences, within a quarter of free memory and 4 GiB"
    context = needs.context_with(kv_blocks)
    if context < needs.context:
        why += f"; longest context {context:,} of the model's {needs.context:,}"
    rows = tuple(needs.rows(kv_blocks, why))
    return MemoryPlan(
        kv_blocks, needs.host_blocks, context, Ledger(rows, available_bytes), tier_blocks=needs.tier_blocks
    )


def ledger_table(ledger: Ledger) -> "Table":
    """For a terminal: predicted beside measured, and their ratio."""
    from rich.table import Table

    table = Table(title="Memory ledger", title_justify="left")
    table.add_column("part")
    for column in ("predicted", "measured", "ratio"):
        table.add_column(column, justify="right")
    table.add_column("how", style="dim")
    for row in ledger.rows:
        table.add_row(row.name, *_cells(row.predicted, row.measured), row.how)
    table.add_section()
    compared = sum(row.predicted for row in ledger.rows if row.measured is not None)
    ratio = _cells(compared, ledger.measured_bytes)[2]
    measured = _cells(compared, ledger.measured_bytes)[1]
    of = f"of {format_bytes(ledger.available_bytes)} available"
    table.add_row("total", format_bytes(ledger.predicted_bytes), measured, ratio, of, style="bold")
    return table


def format_bytes(count: float) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def _cells(predicted: float, measured: float | None) -> tuple[str, str, str]:
    if measured is None:
        return format_bytes(predicted), "", ""
    ratio = f"{measured / predicted:.2f}" if predicted else ""
    return format_bytes(predicted), format_bytes(measured), ratio


# -- what a configuration needs ---------------------------------------------------------------------------
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
        element = 1 if self.config.kv_dtype == "fp8" else self.element_bytes
        return self.config.block_size * self.spec.kv_bytes_per_token(element)

    @property
    def host_blocks(self) -> int:
        return int(self.config.swap_gib * GIB) // self.block_bytes

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

        def row(name: str, predicted_bytes: int, how: str) -> LedgerLine:
            return LedgerLine(name, predicted_bytes, how=how)

        yield row("weights", self.weight_bytes, self._weights_in_words())
        yield row(
            "kv cache",
            kv_blocks * self.block_bytes,
            f"{kv_blocks:,} blocks of {config.block_size} tokens, {why}",
        )
        if self.draft is not None:
            yield row(
                "draft model", self.draft.weight_bytes, f"{self.draft.name}, which drafts for speculation"
            )
            kept = kv_blocks * config.block_size * self.draft.bytes_per_token
            yield row("draft kv cache", kept, "for the same blocks, committed as they are used")
        if config.max_loras:
            room = served_elements(spec, config.max_lora_rank) * element
            yield row("adapters", config.max_loras * room, self._adapters_in_words())
        if config.device == "cuda":
            yield from self._gpu_rows(row, tokens, context)
            return
        yield row(
            "activations", activation_bytes(spec, tokens, element, context),
            f"one layer's intermediate results for {tokens:,} tokens",
        )  # fmt: skip
        yield row(
            "logits", logit_bytes(spec, draws, element),
            f"{draws:,} draws from {spec.vocab_size:,} tokens, and the sampler's candidates at worst",
        )  # fmt: skip
        yield row(
            "token tables", table_bytes(config.max_running, context, config.block_size),
            f"{config.max_running:,} sequences of {context:,} tokens, committed as they are used",
        )  # fmt: skip
        if self.host_blocks:
            yield row(
                "swap pool", self.host_blocks * self.block_bytes, f"{self.host_blocks:,} blocks on the host"
            )
        if self.tier_blocks:
            yield row(
                "host tier", self.tier_blocks * self.block_bytes,
                f"{self.tier_blocks:,} blocks of prefixes, committed as they are used",
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

    def _gpu_rows(
        self, row: Callable[[str, int, str], LedgerLine], tokens: int, context: int
    ) -> Iterator[LedgerLine]:
        """The GPU decoder works in buffers it allocates once, so these are exact; models it cannot play run as on a
        CPU."""
        spec, config, element = self.spec, self.config, self.element_bytes
        # Parallel samples draw from one row: there may be more draws than tokens.
        draws = most_draws(config.max_running, bool(config.speculate))
        with_operators = config.max_loras and (spec.moe is not None or spec.mla is not None)
        if with_operators or obstacle_of(spec, config.dtype) is not None:
            activations = activation_bytes(spec, tokens, element, context) + _GATHERED_BYTES
            yield row("activations", activations, f"one layer's intermediate results for {tokens:,} tokens")
            yield row("logits", logit_bytes(spec, draws, element), f"{draws:,} draws")
        else:
            buffers = gpu_buffer_bytes(spec, tokens, draws, element)
            if config.weights == "int4":
                buffers += int4_scratch_bytes(spec, element)
            yield row("activations", buffers, f"buffers for {tokens:,} tokens")
            sampling = gpu_logit_bytes(spec.vocab_size, draws, element)
            yield row("logits", sampling, f"{draws:,} draws, with the sampler's candidates")
            tables = gpu_table_bytes(config.max_running, tokens, context, config.block_size)
            yield row("token tables", tables, f"{draws:,} sequences of {context:,} tokens")
        yield row(
            "libraries and graphs", _GPU_LIBRARIES_BYTES, "reserved; what they take depends on the driver"
        )
        # The swap pool lies in the host's memory: it is no part of this sum.

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


# -- refusing ---------------------------------------------------------------------------------------------
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
    for name in ("kv_memory_gib", "swap_gib", "kv_host_gib"):
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

    smallest = {"max_context": 1, "kv_blocks": needs.least_kv_blocks, "swap_gib": 0, "kv_host_gib": 0}.get(
        name, 1
    )
    if name == "kv_memory_gib":  # the least that holds one sequence
        smallest = math.ceil(needs.least_kv_blocks * needs.block_bytes / GIB * per_unit)
    return largest(fit, smallest, present) if smallest <= present and fit(smallest) else None


def largest(fit: Callable[[int], bool], low: int, high: int) -> int:
    """The largest value in low..high that fits, given that `low` does and that fitting is monotone."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fit(middle) else (low, middle - 1)
    return low

"""Whether a layout divides a model and its batches: what does not is named before anything is allocated, with what
would. Pure; called when a configuration is read, and again once the vocabulary is known."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cumulo.errors import ConfigError, InvalidRequest
from cumulo.layout.layout import Layout
from cumulo.layout.stages import pipeline_chunks
from cumulo.pipeline.decide.catalog import family
from cumulo.spec.model import ModelSpec

if TYPE_CHECKING:
    from cumulo.train.decide.config import TrainConfig


def check_layout(config: "TrainConfig", spec: ModelSpec) -> None:
    if problems := list(layout_problems(config, spec)):
        raise ConfigError("; ".join(problems))


def layout_problems(config: "TrainConfig", spec: ModelSpec) -> Iterator[str]:
    """Why this model cannot be trained so. A vocabulary of 0 is one that is not known yet."""
    if config.layout.world == 1:
        return
    yield from _tensor_parallel(config.layout, spec)
    yield from _expert_parallel(config.layout, spec)
    yield from _sequence(config, spec)
    yield from _pipeline(config, spec)


def batch_problem(config: "TrainConfig") -> str | None:
    """Why the batch cannot be shared out among the data-parallel ranks."""
    batch, micro, dp = config.batch_sequences, config.micro_batch, config.layout.dp
    if batch < 1 or micro < 1 or batch % (micro * dp) == 0:
        return None
    if batch % dp:
        more = -(-batch // dp) * dp
        return f"batch_sequences {batch} is no multiple of layout.dp {dp}; {more} would be"
    fitting = max(size for size in range(1, micro + 1) if batch // dp % size == 0)
    each = f" of each of {dp} data-parallel ranks, {batch // dp}," if dp > 1 else f" {batch}"
    return f"batch_sequences{each} is no multiple of micro_batch {micro}; micro_batch {fitting} would fit"


def _tensor_parallel(layout: Layout, spec: ModelSpec) -> Iterator[str]:
    tp = layout.tp
    sizes = {"model.heads": spec.heads}
    if spec.mla is None:
        sizes["model.kv_heads"] = spec.kv_heads
    if spec.moe is None or spec.moe.dense_layers:
        sizes["model.ffn_hidden"] = spec.ffn_hidden
    if spec.moe is not None:
        sizes["model.moe.expert_hidden"] = spec.moe.expert_hidden
        sizes["model.moe.shared_hidden"] = spec.moe.shared_hidden
    for name, size in sizes.items():
        if size % tp:
            yield f"{name} {size} does not divide by layout.tp {tp}; {_fitting(size, tp)} would"
    if spec.vocab_size % tp:
        yield (
            f"the vocabulary of {spec.vocab_size} does not divide by layout.tp {tp}; "
            f"fill it up with model.vocab_multiple: {tp}, or take tp {_fitting(spec.vocab_size, tp)}"
        )


def _expert_parallel(layout: Layout, spec: ModelSpec) -> Iterator[str]:
    if layout.ep == 1:
        return
    if spec.moe is None:
        yield f"layout.ep {layout.ep} spreads experts, and this model has none; remove it"
    elif spec.moe.experts % layout.ep:
        fitting = _fitting(spec.moe.experts, layout.ep)
        yield f"model.moe.experts {spec.moe.experts} does not divide by layout.ep {layout.ep}; {fitting} would"


def _sequence(config: "TrainConfig", spec: ModelSpec) -> Iterator[str]:
    layout, length = config.layout, config.data.sequence_length
    if layout.cp > 1 and length % (2 * layout.cp):
        # A ring rank has a piece from the front and one from the back, so that causal work is even.
        yield (
            f"data.sequence_length {length} does not divide into the 2 × {layout.cp} pieces of layout.cp; "
            f"{-(-length // (2 * layout.cp)) * 2 * layout.cp} would"
        )
        return
    tokens = config.micro_batch * (length // layout.cp)
    if layout.sequence_parallel and tokens % layout.tp:
        yield (
            f"sequence parallelism cuts a micro-batch's {tokens} tokens in layout.tp {layout.tp} parts, which they "
            f"do not divide by; make data.sequence_length or micro_batch a multiple of {layout.tp}"
        )
    kv_heads = spec.heads if spec.mla else spec.kv_heads
    for name, heads in (("heads", spec.heads), ("kv_heads", kv_heads)):
        if heads % (layout.tp * layout.ulysses):
            yield (
                f"model.{name} {heads} does not divide by layout.ulysses {layout.ulysses}"
                + (f" × layout.tp {layout.tp}" if layout.tp > 1 else "")
                + "; a ring needs no heads: lower ulysses"
            )


def _pipeline(config: "TrainConfig", spec: ModelSpec) -> Iterator[str]:
    layout = config.layout
    if layout.pp == 1:
        return
    try:
        chosen = family(layout.schedule)
    except InvalidRequest as error:
        yield f"layout.schedule: {error}"
        return
    micro_batches = config.batch_sequences // (layout.dp * config.micro_batch)
    chunks = layout.chunks_per_stage or chosen.chunks_per_stage
    if micro_batches and (refusal := chosen.refusal(layout.pp, micro_batches, chunks)) is not None:
        yield f"{refusal} (micro-batches are batch_sequences / (layout.dp × micro_batch))"
        return
    if (pieces := pipeline_chunks(layout)) > spec.layers:
        yield (
            f"model.layers {spec.layers} cannot fill the {pieces} chunks of {layout.pp} stages under "
            f"{layout.schedule}; use fewer stages or another schedule"
        )


def _fitting(size: int, wanted: int) -> int:
    """The largest divisor of `size` that is no more than `wanted`."""
    return max(divisor for divisor in range(1, wanted + 1) if size % divisor == 0)

"""What a layout cannot share evenly of a model, its sequences and its batch. Each problem says what was asked and
what would work; trainer and planner refuse by it before anything is allocated. Pure."""

from collections.abc import Iterator

from cumulo.errors import InvalidRequest
from cumulo.layout.layout import Layout, chunks_per_stage, nearest_divisor, pipeline_chunks, uneven
from cumulo.pipeline.decide.catalog import family
from cumulo.spec.model import ModelSpec


def layout_problems(
    spec: ModelSpec,
    layout: Layout,
    sequence_length: int,
    batch: int,
    micro_batch: int,
    ends: int = 0,
    repeats_heads: bool = False,
) -> Iterator[str]:
    """Why this model cannot be trained so, with `batch` sequences in a step and `micro_batch` at once. `ends`: of
    embedding and head, how many may be a chunk by themselves. `repeats_heads`: as in `tensor_problems`."""
    yield from tensor_problems(spec, layout.tp, repeats_heads)
    yield from _expert_problems(spec, layout.ep)
    yield from _sequence_problems(spec, layout, sequence_length, micro_batch)
    split = batch_problem(layout, batch, micro_batch)
    if split is not None:
        yield split
    if layout.pp == 1:
        return
    try:
        chosen = family(layout.schedule)
    except InvalidRequest as error:
        yield f"schedule: {error}"
        return
    micro_batches = batch // (layout.dp * micro_batch)
    if not split and (refusal := chosen.refusal(layout.pp, micro_batches, chunks_per_stage(layout))):
        yield f"{refusal} (micro-batches are the batch / (dp × micro_batch))"
    elif problem := layers_problem(spec.layers + ends, layout):
        yield problem


def tensor_sliced(spec: ModelSpec) -> dict[str, int]:
    """What tensor parallelism slices: each must divide by tp. The vocabulary can be padded."""
    sliced = {"attention heads": spec.heads}
    if spec.mla is None:
        sliced["key/value heads"] = spec.kv_heads
    if spec.moe is None or spec.moe.dense_layers:
        sliced["feed-forward columns"] = spec.ffn_hidden
    if spec.moe is not None:
        sliced["columns of an expert"] = spec.moe.expert_hidden
        sliced["columns of the shared expert"] = spec.moe.shared_hidden
    return sliced


def tensor_problems(spec: ModelSpec, tp: int, repeats_heads: bool = False) -> Iterator[str]:
    """`repeats_heads`: where there are more ranks than key/value heads, several ranks may hold the same head."""
    for what, count in tensor_sliced(spec).items():
        if repeats_heads and what == "key/value heads" and tp % count == 0:
            continue
        if count % tp:
            yield uneven("tp", tp, what, count)


def batch_problem(layout: Layout, batch: int, micro_batch: int) -> str | None:
    """Why a step's sequences cannot be shared out among the data-parallel ranks."""
    at_once = layout.dp * micro_batch
    if batch % at_once == 0:
        return None
    below = batch // at_once * at_once
    near = f"a batch of {below} or {below + at_once} can" if below else f"a batch of {at_once} can"
    if batch % layout.dp == 0:
        near += f", or micro-batches of {nearest_divisor(batch // layout.dp, micro_batch)}"
    asked = (
        f"a batch of {batch} sequences cannot be cut into micro-batches of {micro_batch} over dp {layout.dp}"
    )
    return f"{asked}; {near}"


def layers_problem(layers: int, layout: Layout) -> str | None:
    """Why the model has too few layers for the pipeline."""
    chunks = pipeline_chunks(layout)
    if chunks <= layers:
        return None
    return (
        f"{layers} layers cannot fill the {chunks} chunks of {layout.pp} stages under {layout.schedule}; "
        f"use pp {max(1, layers * layout.pp // chunks)} or fewer, or another schedule"
    )


def _expert_problems(spec: ModelSpec, ep: int) -> Iterator[str]:
    if spec.moe is not None and spec.moe.experts % ep:
        yield uneven("ep", ep, "experts", spec.moe.experts)
    if spec.moe is None and ep > 1:
        yield f"ep {ep} spreads experts, and this model has none; use ep 1"


def _sequence_problems(spec: ModelSpec, layout: Layout, length: int, micro_batch: int) -> Iterator[str]:
    pieces = 2 * layout.cp  # a ring rank has one from the front and one from the back: causal work is even
    if layout.cp > 1 and length % pieces:
        near = 1 if length % 2 else nearest_divisor(length // 2, layout.cp)
        yield (
            f"cp {layout.cp} cannot share {length} tokens of a sequence evenly; cp {near} can, or a sequence of "
            f"{-(-length // pieces) * pieces} tokens (a rank has 2 pieces of it)"
        )
        return
    tokens = micro_batch * (length // layout.cp)
    if layout.sequence_parallel and tokens % layout.tp:
        yield (
            f"sequence parallelism cannot share {tokens} tokens of a micro-batch over tp {layout.tp}; make the "
            f"sequence length or the micro-batch a multiple of {layout.tp}"
        )
    if layout.ulysses > 1:
        for what in ("attention heads", "key/value heads"):
            if (heads := tensor_sliced(spec).get(what, spec.heads)) % (layout.tp * layout.ulysses):
                ranks = f"ulysses {layout.ulysses}" + (f" × tp {layout.tp}" if layout.tp > 1 else "")
                yield f"{ranks} cannot share {heads} {what} evenly; a ring needs no heads: lower ulysses"

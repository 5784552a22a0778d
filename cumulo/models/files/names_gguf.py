"""Where each tensor of a GGUF file goes in the decoder. Read by `weights_gguf`.

GGUF names are the same in all architectures (`blk.3.attn_q.weight`), so one table serves them all: what a
model has, its spec says. The one thing that depends on the architecture is the order of query and key rows:
converters interleave the two halves of each head of llama models, so that neighbours are rotated together.
"""

import re
from collections.abc import Container, Iterator
from dataclasses import replace

import numpy as np

from cumulo.errors import ModelError
from cumulo.models.files.gguf_blocks import float_array
from cumulo.models.files.gguf_file import GGUFFile
from cumulo.models.files.placement import Placement
from cumulo.spec.from_gguf import spec_from_gguf
from cumulo.spec.model import MLASpec, ModelSpec, MoESpec

_MOST_EXPERTS = 65536
_MOST_FACTORS = 65536
_ROPE_FACTORS = "rope_freqs.weight"
_UNUSED = re.compile(r"(blk\.\d+\.)?(rope_freqs|attn_rot_embd)\.weight")
_LATENT_HALVES = re.compile(r"blk\.\d+\.attn_[kv]_b\.weight")


def spec_of(file: GGUFFile) -> ModelSpec:
    """The spec of a file, for the weights as `weights_gguf` loads them: rows in the order of the model's
    original release, so that caches, adapters and comparisons do not depend on the file format."""
    _check_counts(file)
    factors = file.tensors.get(_ROPE_FACTORS)
    if factors is not None and factors.rows * factors.columns > _MOST_FACTORS:
        raise ModelError(
            f"{_ROPE_FACTORS} has {factors.rows * factors.columns:,} numbers, more than any head"
        )
    spec = spec_from_gguf(
        file.metadata,
        file.tensors.keys(),
        None if factors is None else float_array(factors).ravel().tolist(),
    )
    return replace(spec, rope_interleaved=False) if file.architecture == "llama" else spec


def _check_counts(file: GGUFFile) -> None:
    """Counts for which something is made per item: a damaged one must not make billions of them."""
    limits = {"block_count": len(file.tensors), "leading_dense_block_count": len(file.tensors)}
    limits |= {"expert_count": _MOST_EXPERTS, "expert_group_count": _MOST_EXPERTS}
    for name, limit in limits.items():
        value = file.metadata.get(f"{file.architecture}.{name}")
        if isinstance(value, int) and value > limit:
            raise ModelError(
                f"{file.architecture}.{name} is {value:,}, but the file has only {len(file.tensors)} tensors; "
                "it is damaged or incomplete, download it again"
            )


def ignorable(name: str, names: Container[str]) -> bool:
    """Whether a tensor may be in the file without being loaded: tables that the spec already covers, and
    the halves of a latent projection that the file also has whole."""
    if _LATENT_HALVES.fullmatch(name):
        return f"{name.rsplit('.', 2)[0]}.attn_kv_b.weight" in names
    return _UNUSED.fullmatch(name) is not None


def row_order(architecture: str, spec: ModelSpec, source: str) -> np.ndarray | None:
    """The rows of a file tensor in the order the decoder wants them; None: as they are."""
    match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", source)
    if architecture != "llama" or spec.rope_interleaved or match is None:
        return None
    heads = spec.heads if match[1] == "q" else spec.kv_heads
    # The file's rows are [head, pair, which half]; the decoder's [head, which half, pair].
    rows = np.arange(heads * spec.head_dim).reshape(heads, spec.head_dim // 2, 2)
    return rows.swapaxes(1, 2).ravel()


def placements(spec: ModelSpec, names: Container[str]) -> list[Placement]:
    """Every tensor the file must have. `names` (those it has) decides between the spellings in use: experts
    stacked or one by one, the latent projection whole or in halves."""
    result = [Placement("token_embd.weight", "embed.weight", (spec.vocab_size, spec.hidden))]
    for layer in range(spec.layers):
        result += _layer(spec, layer, names)
    result.append(Placement("output_norm.weight", "final_norm.weight", (spec.hidden,)))
    if not spec.tied_embeddings:
        result.append(Placement("output.weight", "head.weight", (spec.vocab_size, spec.hidden)))
    return result


def _layer(spec: ModelSpec, layer: int, names: Container[str]) -> Iterator[Placement]:
    source, target = f"blk.{layer}.", f"layers.{layer}."
    yield Placement(f"{source}attn_norm.weight", f"{target}attention_norm.weight", (spec.hidden,))
    yield Placement(f"{source}ffn_norm.weight", f"{target}ffn_norm.weight", (spec.hidden,))
    if spec.mla is None:
        yield from _attention(spec, source, f"{target}attention.")
    else:
        yield from _latent_attention(spec, spec.mla, source, f"{target}attention.", names)
    if spec.moe is not None and spec.is_moe_layer(layer):
        yield from _experts(spec, spec.moe, source, f"{target}ffn.", names)
    else:
        yield from _gated(
            spec, [f"{source}ffn_{part}" for part in ("gate", "up", "down")], f"{target}ffn.", spec.ffn_hidden
        )


def _linear(
    source: str, target: str, outputs: int, inputs: int, bias: bool = False, first_row: int = 0
) -> Iterator[Placement]:
    """A matrix, or the part of a fused one that begins at `first_row`, with its bias if it has one."""
    yield Placement(f"{source}.weight", f"{target}.weight", (outputs, inputs), (first_row, 0))
    if bias:
        yield Placement(f"{source}.bias", f"{target}.bias", (outputs,), (first_row,))


def _attention(spec: ModelSpec, source: str, target: str) -> Iterator[Placement]:
    first_row = 0
    for part, heads in (("q", spec.heads), ("k", spec.kv_heads), ("v", spec.kv_heads)):
        rows = heads * spec.head_dim
        yield from _linear(
            f"{source}attn_{part}", f"{target}qkv", rows, spec.hidden, spec.qkv_bias, first_row
        )
        first_row += rows
    if spec.qk_norm:
        for part in "qk":
            yield Placement(
                f"{source}attn_{part}_norm.weight", f"{target}{part}_norm.weight", (spec.head_dim,)
            )
    columns = spec.heads * spec.head_dim
    yield from _linear(f"{source}attn_output", f"{target}output", spec.hidden, columns, spec.output_bias)


def _latent_attention(
    spec: ModelSpec, mla: MLASpec, source: str, target: str, names: Container[str]
) -> Iterator[Placement]:
    query_rows = spec.heads * (mla.nope_head_dim + mla.rope_head_dim)
    if mla.q_rank is None:
        yield from _linear(f"{source}attn_q", f"{target}q", query_rows, spec.hidden)
    else:
        yield from _linear(f"{source}attn_q_a", f"{target}q_a", mla.q_rank, spec.hidden, spec.qkv_bias)
        yield Placement(f"{source}attn_q_a_norm.weight", f"{target}q_a_norm.weight", (mla.q_rank,))
        yield from _linear(f"{source}attn_q_b", f"{target}q_b", query_rows, mla.q_rank)
    latent_rows = mla.kv_rank + mla.rope_head_dim
    yield from _linear(f"{source}attn_kv_a_mqa", f"{target}kv_a", latent_rows, spec.hidden, spec.qkv_bias)
    yield Placement(f"{source}attn_kv_a_norm.weight", f"{target}kv_a_norm.weight", (mla.kv_rank,))
    yield from _latent_projection(spec, mla, source, target, names)
    columns = spec.heads * mla.value_head_dim
    yield from _linear(f"{source}attn_output", f"{target}output", spec.hidden, columns, spec.output_bias)


def _latent_projection(
    spec: ModelSpec, mla: MLASpec, source: str, target: str, names: Container[str]
) -> Iterator[Placement]:
    head_rows = mla.nope_head_dim + mla.value_head_dim
    if f"{source}attn_k_b.weight" in names and f"{source}attn_kv_b.weight" not in names:
        # Newer files are made for the absorbed form: the key half is stored transposed, per head.
        view = (spec.heads, head_rows, mla.kv_rank)
        yield Placement(
            f"{source}attn_k_b.weight",
            f"{target}kv_b.weight",
            (spec.heads, mla.kv_rank, mla.nope_head_dim),
            (0, 0, 0),
            view,
            transposed=True,
        )
        yield Placement(
            f"{source}attn_v_b.weight",
            f"{target}kv_b.weight",
            (spec.heads, mla.value_head_dim, mla.kv_rank),
            (0, mla.nope_head_dim, 0),
            view,
        )
    else:
        yield from _linear(f"{source}attn_kv_b", f"{target}kv_b", spec.heads * head_rows, mla.kv_rank)


def _gated(spec: ModelSpec, sources: list[str], target: str, width: int) -> Iterator[Placement]:
    gate, up, down = sources
    yield from _linear(gate, f"{target}gate_up", width, spec.hidden, spec.mlp_bias)
    yield from _linear(up, f"{target}gate_up", width, spec.hidden, spec.mlp_bias, first_row=width)
    yield from _linear(down, f"{target}down", spec.hidden, width, spec.mlp_bias)


def _experts(
    spec: ModelSpec, moe: MoESpec, source: str, target: str, names: Container[str]
) -> Iterator[Placement]:
    count, width, hidden = moe.experts, moe.expert_hidden, spec.hidden
    yield Placement(f"{source}ffn_gate_inp.weight", f"{target}router.weight", (count, hidden))
    if moe.selection_bias:
        yield Placement(f"{source}exp_probs_b.bias", f"{target}router.selection_bias", (count,))
    parts = (
        ("gate", "gate_up", (width, hidden), 0),
        ("up", "gate_up", (width, hidden), width),
        ("down", "down", (hidden, width), 0),
    )
    one_by_one = f"{source}ffn_gate.0.weight" in names  # how Mixtral was converted at first
    for part, stack, shape, first_row in parts:
        into = f"{target}experts.{stack}"
        if one_by_one:
            for expert in range(count):
                yield Placement(f"{source}ffn_{part}.{expert}.weight", into, shape, (expert, first_row, 0))
        else:
            yield Placement(f"{source}ffn_{part}_exps.weight", into, (count, *shape), (0, first_row, 0))
    if moe.shared_hidden:
        names_of_shared = [f"{source}ffn_{part}_shexp" for part in ("gate", "up", "down")]
        yield from _gated(spec, names_of_shared, f"{target}shared.", moe.shared_hidden)

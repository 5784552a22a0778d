"""Where each tensor of a GGUF file goes in the decoder. Read by `weights_gguf`.

GGUF names are the same in all architectures (`blk.3.attn_q.weight`), so one table from the names of Hugging Face
serves them all: what a model has, its spec says. Only the order of query and key rows depends on the architecture:
converters interleave the two halves of each head of llama models, so that neighbours are rotated together.
"""

import re
from collections.abc import Container, Iterator
from dataclasses import replace

import numpy as np

from cumulo.errors import ModelError
from cumulo.models.files import names_huggingface
from cumulo.models.files.gguf_blocks import float_array
from cumulo.models.files.gguf_file import GGUFFile
from cumulo.models.files.placement import Placement
from cumulo.spec.from_gguf import spec_from_gguf
from cumulo.spec.model import ModelSpec

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
    """Every tensor the file must have: those of a Hugging Face folder, under other names. `names` (those it has)
    decides between the spellings in use: experts stacked or one by one, the latent projection whole or halved."""
    found: list[Placement] = []
    for one in names_huggingface.placements(replace(spec, family="llama")):
        match = _PLACE.fullmatch(one.source)
        assert match is not None
        layer, expert, name, kind = match["layer"], match["expert"], match["name"], match["kind"]
        if layer is None:
            found.append(replace(one, source=f"{_NAMES[name]}.{kind}"))
        elif expert is not None:
            found += _expert(spec, one, f"blk.{layer}.ffn_{name.removesuffix('_proj')}", int(expert), names)
        elif name == "self_attn.kv_b_proj":
            found += _latent_projection(spec, one, f"blk.{layer}.attn", names)
        elif kind == "e_score_correction_bias":
            found.append(replace(one, source=f"blk.{layer}.exp_probs_b.bias"))
        else:
            found.append(replace(one, source=f"blk.{layer}.{_NAMES[name]}.{kind}"))
    return found


_PLACE = re.compile(
    r"(?:model\.layers\.(?P<layer>\d+)\.)?(?:mlp\.experts\.(?P<expert>\d+)\.)?(?P<name>.+)\.(?P<kind>\w+)"
)
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm", "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip


def _expert(
    spec: ModelSpec, one: Placement, source: str, expert: int, names: Container[str]
) -> Iterator[Placement]:
    """One expert's matrix, as Mixtral was converted at first, or those of all experts in one tensor."""
    assert spec.moe is not None
    if f"{source}.0.weight" in names:
        yield replace(one, source=f"{source}.{expert}.weight")
    elif expert == 0:
        yield replace(one, source=f"{source}_exps.weight", shape=(spec.moe.experts, *one.shape))


def _latent_projection(
    spec: ModelSpec, one: Placement, source: str, names: Container[str]
) -> Iterator[Placement]:
    mla = spec.mla
    assert mla is not None
    if f"{source}_k_b.weight" not in names or f"{source}_kv_b.weight" in names:
        yield replace(one, source=f"{source}_kv_b.weight")
        return
    # Newer files are made for the absorbed form: the key half is stored transposed, per head.
    view = (spec.heads, mla.nope_head_dim + mla.value_head_dim, mla.kv_rank)
    keys = (spec.heads, mla.kv_rank, mla.nope_head_dim)
    values = (spec.heads, mla.value_head_dim, mla.kv_rank)
    yield Placement(f"{source}_k_b.weight", one.target, keys, (0, 0, 0), view, transposed=True)
    yield Placement(f"{source}_v_b.weight", one.target, values, (0, mla.nope_head_dim, 0), view)

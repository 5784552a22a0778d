"""Which matrices of a model are quantised: those of the layers. Embedding, head, norms, routers and the expansion
of latent attention stay in 16 bits, as other tools leave them.

Names are those of Hugging Face folders, where projections are stored one by one.
"""

import re
from collections.abc import Iterable

from cumulo.spec.model import ModelSpec


def row_lengths(spec: ModelSpec) -> list[int]:
    """How many inputs the quantised matrices have, each length once."""
    lengths = {spec.hidden}
    if spec.mla is None:
        lengths.add(spec.heads * spec.head_dim)
    else:
        lengths.add(spec.heads * spec.mla.value_head_dim)
        if spec.mla.q_rank is not None:
            lengths.add(spec.mla.q_rank)
    if spec.moe is None or spec.moe.dense_layers:
        lengths.add(spec.ffn_hidden)
    if spec.moe is not None:
        lengths |= {spec.moe.expert_hidden, *([spec.moe.shared_hidden] if spec.moe.shared_hidden else [])}
    return sorted(lengths)


def is_quantised(module: str) -> bool:
    """Whether the matrix of a module, such as model.layers.3.mlp.up_proj, is quantised."""
    return (
        module.startswith("model.layers.")
        and module.endswith("_proj") | module.endswith((".w1", ".w2", ".w3", "kv_a_proj_with_mqa"))
        and not module.endswith("kv_b_proj")
    )


def plain_modules(modules: Iterable[str], layers: int | None) -> list[str]:
    """Those of `modules` that stay in 16 bits, by their full names; a layer's routed experts have one name.
    `layers`: only the first so many are quantised."""
    plain = ["lm_head"]
    for module in modules:
        layer = re.match(r"model\.layers\.(\d+)\.", module)
        beyond = layer is not None and layers is not None and int(layer[1]) >= layers
        if beyond or not is_quantised(module):
            plain.append(re.sub(r"\.experts\.\d+\..*", ".experts", module))
    return list(dict.fromkeys(plain))


def ignored_patterns(spec: ModelSpec, layers: int | None) -> list[str]:
    """What a quantization_config lists as left out; `re:` marks a regular expression. `layers`: only the first so
    many are quantised."""
    patterns = ["lm_head"]
    if layers is not None and layers < spec.layers:
        patterns.append(f"re:.*layers\\.({'|'.join(map(str, range(layers, spec.layers)))})\\..*")
    if spec.moe is not None:
        patterns.append("re:.*(mlp|block_sparse_moe)\\.gate$")
    if spec.mla is not None:
        patterns.append("re:.*kv_b_proj$")
    return patterns

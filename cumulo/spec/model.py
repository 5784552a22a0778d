"""ModelSpec: everything about a decoder that its weights do not say. Read by models, engine and planner.

A family is a row of values, never a branch in code: the decoder asks `spec.qk_norm`, not "is it Qwen3?".
`cumulo.spec.from_huggingface` and `cumulo.spec.from_gguf` make specs from the two file formats.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched past the trained context."""

    kind: Literal["linear", "llama3", "yarn", "factors"]
    factor: float
    original_context: int
    # llama3 (Dubey et al. 2024): wavelengths between these two multiples of the context are blended.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn (Peng et al. 2023)
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True  # round the blended range of dimensions outwards to whole numbers
    # factors: each frequency is divided by its own number (GGUF stores llama3 scaling that way)
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class MoESpec:
    """A mixture-of-experts feed-forward: who is routed where, and how the weights are normalised."""

    experts: int
    experts_per_token: int
    expert_hidden: int
    shared_hidden: int = 0  # width of the always-on expert (all shared experts concatenated); 0 = none
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalise_weights: bool = True  # top-k weights sum to one
    routed_scale: float = 1.0
    groups: int = 1  # group-limited routing (DeepSeek): experts in `groups` groups, best `top_groups` kept
    top_groups: int = 1
    group_score: Literal["max", "top2sum"] = "max"
    selection_bias: bool = False  # a learned bias added for selection only (DeepSeek-V3)
    dense_layers: tuple[int, ...] = ()  # layers that keep the plain feed-forward


@dataclass(frozen=True, slots=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2): keys and values are projections of one small latent."""

    q_rank: int | None  # None: the query is projected directly
    kv_rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int
    norm_eps: float = 1e-6  # of the latents' norms: DeepSeek keeps it apart from the model's norm_eps


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str  # "llama", "qwen3", "deepseek_v3", ...: for people; code reads the fields below
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden: int
    max_context: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_interleaved: bool = False  # rotate (0,1),(2,3),... instead of (0,d/2),(1,d/2+1),...
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm on each head's query and key (Qwen3)
    sliding_window: int | None = None  # a token sees this many positions, itself included
    windowed_layers: tuple[int, ...] | None = None  # None: all layers, when sliding_window is set
    moe: MoESpec | None = None
    mla: MLASpec | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # of the stored weights
    # Models of GPT-3's kind, which can be planned and counted but are not played here (`check.refuse_unplayable`).
    gated_ffn: bool = True  # False: one matrix up and one down, without a gate
    learned_positions: bool = False  # a table of max_context rows beside the embedding, no rotation
    norm_bias: bool = False  # LayerNorm, with a bias, in the place of RMSNorm

    @property
    def rope_dim(self) -> int:
        """How many of a head's dimensions are rotated."""
        return self.mla.rope_head_dim if self.mla else self.head_dim

    # -- what the KV cache stores per token and layer -------------------------------------------------
    @property
    def kv_cache_heads(self) -> int:
        """With latent attention one shared 'head' is cached: the latent and the rotated key part."""
        return 1 if self.mla else self.kv_heads

    @property
    def kv_key_dim(self) -> int:
        return self.mla.kv_rank + self.mla.rope_head_dim if self.mla else self.head_dim

    @property
    def kv_value_dim(self) -> int:
        """Width of the separately stored value; 0 with latent attention, whose value is part of the key."""
        return 0 if self.mla else self.head_dim

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        return self.layers * self.kv_cache_heads * (self.kv_key_dim + self.kv_value_dim) * bytes_per_element

    def window_of_layer(self, layer: int) -> int | None:
        if self.sliding_window is None or (
            self.windowed_layers is not None and layer not in self.windowed_layers
        ):
            return None
        return self.sliding_window

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense_layers

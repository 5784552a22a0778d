"""A decoder as the list of its operations: the one place that knows what a layer computes, reads, writes and keeps.

    for operation in layer_operations(spec, has_experts=False):
        operation.forward_flops(tokens, pairs)

Parameters, FLOPs, the planner's seconds and bytes, the memory ledgers and the MFU meter are sums over this list.
All numbers are those of the whole model for one token; `Share` says what one rank has of them. To add a kind of
layer, yield its operations from one of `LAYER_PARTS`.

Two forms differ: `train` computes keys and values of all heads and keeps what backward needs, `serve` writes a
cache and computes latent attention in the latent space (DeepSeek-AI 2024, section 2.1.2: the absorbed form).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from cumulo.spec.model import MLASpec, ModelSpec, MoESpec

Form = Literal["train", "serve"]
Family = Literal["matmul", "attention", "norm", "elementwise", "routing", "embedding", "loss"]  # of kernels
# What tensor-parallel ranks have of a tensor: a part, with sequence parallelism a part, or all of it.
Cut = Literal["tensor", "stream", "whole"]
# What training can compute again in backward (`train.recompute_operations`).
Again = Literal["norm", "activation", "attention"]


class Share(NamedTuple):
    """Among how many ranks the parts of a layer are divided."""

    tensor: int = 1
    stream: int = 1  # the tensor-parallel ranks where they share the tokens between products, else 1
    expert: int = 1

    def ranks(self, cut: Cut) -> int:
        return self.tensor if cut == "tensor" else self.stream if cut == "stream" else 1


class Weight(NamedTuple):
    name: str
    shape: tuple[int, ...]
    cut: Literal["tensor", "expert", "whole"] = "whole"

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class MatrixProduct(NamedTuple):
    """Of [tokens, inputs] and [inputs, outputs], or such a product for each of many experts."""

    outputs: int
    inputs: int
    sliced: Literal["outputs", "inputs"] | None  # by the tensor-parallel ranks
    choices: int = 1  # of experts, by each token
    experts: int = 1

    @property
    def weights_per_token(self) -> int:
        return self.outputs * self.inputs * self.choices


class Scores(NamedTuple):
    """Queries of all heads with the keys they see, and the sums of values."""

    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    joined: bool  # one product gives queries, keys and values

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of a query and a key: two for each number of a score, and of its product with the value."""
        return 2 * self.heads * (self.key_width + self.value_width)


class Kept(NamedTuple):
    """A tensor that backward needs, where training uses joined kernels: numbers of one token."""

    numbers: int
    cut: Cut
    again: tuple[str, ...] = ()  # not kept where one of these is computed again
    bytes_each: int = 0  # 0: as wide as activations
    per_key: bool = False  # so many for each key of the sequence; flash attention does without
    dropout: bool = False  # only with it


@dataclass(frozen=True, slots=True)
class Operation:
    name: str  # the part before the first dot is the block it belongs to
    family: Family
    weights: tuple[Weight, ...] = ()
    product: MatrixProduct | None = None
    scores: Scores | None = None
    # Numbers of one token between products, if everything between two of them were one kernel.
    reads: int = 0
    writes: int = 0
    cut: Cut = "whole"  # of these
    kv_read: int = 0  # numbers of the cache, for each key that a sequence sees
    kept: tuple[Kept, ...] = ()
    again: Again | None = None  # it is part of this, where that is computed again
    buffer: int = 0  # numbers of one token that the GPU's decoder has a buffer for
    eager: int = 0  # ... that PyTorch's operators hold until the block ends

    def forward_flops(self, tokens: float, pairs: float = 0) -> float:
        """`pairs`: of a query and a key that it sees, over all the tokens."""
        flops = 2 * self.product.weights_per_token * tokens if self.product else 0
        return flops + self.scores.flops_per_pair * pairs if self.scores else flops

    @property
    def moved(self) -> int:
        return self.reads + self.writes


# -- the lists ----------------------------------------------------------------------------------------------
@lru_cache(4096)
def layer_operations(spec: ModelSpec, has_experts: bool, form: Form = "train") -> tuple[Operation, ...]:
    """One layer, of those with experts or of those without: all of a kind are alike."""
    return tuple(operation for part in LAYER_PARTS for operation in part(spec, has_experts, form))


@lru_cache(512)
def first_operations(spec: ModelSpec) -> tuple[Operation, ...]:
    """Before the layers."""
    tables = [Weight("embed.weight", (spec.vocab_size, spec.hidden), "tensor")]
    if spec.learned_positions:
        tables.append(Weight("positions.weight", (spec.max_context, spec.hidden)))
    return (Operation("embed", "embedding", tuple(tables), reads=spec.hidden, writes=spec.hidden),)


@lru_cache(512)
def last_operations(spec: ModelSpec) -> tuple[Operation, ...]:
    """After the layers: the vocabulary's product, of the tokens whose logits are wanted."""
    own = () if spec.tied_embeddings else (Weight("head.weight", (spec.vocab_size, spec.hidden), "tensor"),)
    product = MatrixProduct(spec.vocab_size, spec.hidden, "outputs")
    return (_norm("final_norm", spec), Operation("head", "loss", own, product))


def model_operations(spec: ModelSpec, form: Form = "train") -> Iterator[tuple[int | None, Operation]]:
    """Every operation in order, with the number of its layer."""
    for operation in first_operations(spec):
        yield None, operation
    for layer in range(spec.layers):
        for operation in layer_operations(spec, spec.is_moe_layer(layer), form):
            yield layer, operation
    for operation in last_operations(spec):
        yield None, operation


@lru_cache(512)
def layer_scores(spec: ModelSpec, form: Form = "train") -> tuple[Scores, ...]:
    """The scores of one layer: layers with and without experts attend alike."""
    return tuple(found.scores for found in layer_operations(spec, False, form) if found.scores)


def weights_met(spec: ModelSpec, has_experts: bool) -> int:
    """Weights of a layer's products that one token meets: of the experts those it is sent to."""
    found = layer_operations(spec, has_experts)
    return sum(operation.product.weights_per_token for operation in found if operation.product)


# -- what a layer is made of --------------------------------------------------------------------------------
def _attention_block(spec: ModelSpec, has_experts: bool, form: Form) -> Iterator[Operation]:
    yield _norm("attention_norm", spec, "norm")
    yield from _plain_attention(spec, form) if spec.mla is None else _latent_attention(spec, spec.mla, form)
    yield from _residual("attention_add", spec, form)


def _plain_attention(spec: ModelSpec, form: Form) -> Iterator[Operation]:
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    projected = query + 2 * key
    yield _linear("attention.qkv", projected, spec.hidden, "outputs", spec.qkv_bias, buffer=projected)
    if spec.qk_norm:
        norms = tuple(Weight(f"attention.{name}_norm.weight", (spec.head_dim,)) for name in "qk")
        before = (Kept(query + key, "tensor", ("attention",)),)
        yield Operation("attention.qk_norm", "norm", norms, kept=before, again="attention")
    yield from _rotation(spec, form, query + key, projected, eager=2 * (query + key))
    inputs = (Kept(projected, "tensor"), Kept(query, "tensor", ("attention",)))
    scores = Scores(spec.heads, spec.kv_heads, spec.head_dim, spec.head_dim, joined=True)
    yield _attention(spec, scores, inputs, query)
    yield _linear("attention.output", spec.hidden, query, "inputs", spec.output_bias)


def _latent_attention(spec: ModelSpec, mla: MLASpec, form: Form) -> Iterator[Operation]:
    heads, hidden, rank = spec.heads, spec.hidden, mla.kv_rank
    query = heads * (mla.nope_head_dim + mla.rope_head_dim)
    value = heads * mla.value_head_dim
    if mla.q_rank is None:
        yield _linear("attention.q", query, hidden, "outputs", buffer=query, eager=query)
    else:
        yield _linear("attention.q_a", mla.q_rank, hidden, None, spec.qkv_bias, buffer=mla.q_rank, eager=0)
        yield _latent_norm("attention.q_a_norm", mla.q_rank)
        yield _linear("attention.q_b", query, mla.q_rank, "outputs", buffer=query, again="attention")
    latent = rank + mla.rope_head_dim
    shared_key = (Kept(mla.rope_head_dim, "stream"),)  # the rotated part of the key, which all heads share
    yield _linear(
        "attention.kv_a", latent, hidden, None, spec.qkv_bias, buffer=latent, eager=0, kept=shared_key
    )
    yield _latent_norm("attention.kv_a_norm", rank)
    # What is moved is counted by a plain head's width, as the profiles' passes were fitted.
    turned = value + spec.kv_heads * spec.head_dim
    to_cache = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    if form == "train":
        up = heads * (mla.nope_head_dim + mla.value_head_dim)
        yield _linear("attention.kv_b", up, rank, "outputs", again="attention")
        yield from _rotation(spec, form, turned, to_cache)
        again = ("attention",)
        queries = Kept(query, "tensor", again if mla.q_rank else ())
        inputs = (queries, Kept(query, "tensor", again), Kept(2 * value, "tensor", again))
        scores = Scores(heads, heads, mla.nope_head_dim + mla.rope_head_dim, mla.value_head_dim, joined=False)
        yield _attention(spec, scores, inputs, value)
    else:  # kv_b's two halves multiply queries on their way into the latent space, and results on theirs out
        weight = Weight(
            "attention.kv_b.weight", (heads * (mla.nope_head_dim + mla.value_head_dim), rank), "tensor"
        )
        absorb = MatrixProduct(heads * mla.nope_head_dim, rank, "outputs")
        absorbed = heads * latent
        yield Operation(
            "attention.absorb", "matmul", (weight,), absorb, buffer=absorbed, eager=absorbed + heads * rank
        )
        yield from _rotation(spec, form, turned, to_cache)
        yield _attention(spec, Scores(heads, 1, latent, rank, joined=False), (), heads * rank)
        result = MatrixProduct(value, rank, "outputs")
        yield Operation("attention.value", "matmul", (), result, buffer=value, eager=value)
    yield _linear("attention.output", hidden, value, "inputs", spec.output_bias)


def _rotation(spec: ModelSpec, form: Form, turned: int, to_cache: int, eager: int = 0) -> Iterator[Operation]:
    """Queries and keys; where a model is served, with the way of keys and values into the cache."""
    moved = turned if form == "train" else to_cache
    if form == "serve" or not spec.learned_positions:
        yield Operation(
            "attention.rotate", "elementwise", reads=moved, writes=moved, cut="tensor", again="attention",
            eager=eager,
        )  # fmt: skip


def _attention(spec: ModelSpec, scores: Scores, inputs: tuple[Kept, ...], result: int) -> Operation:
    again, heads = ("attention",), scores.heads
    stored = ("selective", "attention")
    kept = (
        *inputs,
        Kept(heads, "tensor", again, bytes_each=4),  # flash attention's log-sum-exp
        # Softmax's output, and with dropout what it leaves and its mask.
        Kept(heads, "tensor", stored, per_key=True),
        Kept(heads, "tensor", stored, per_key=True, dropout=True),
        Kept(heads, "tensor", stored, bytes_each=1, per_key=True, dropout=True),
    )
    cached = spec.kv_cache_heads * (spec.kv_key_dim + spec.kv_value_dim)
    return Operation(
        "attention.scores", "attention", scores=scores, kv_read=cached, kept=kept,
        again="attention", buffer=result, eager=result,
    )  # fmt: skip


def _feed_forward_block(spec: ModelSpec, has_experts: bool, form: Form) -> Iterator[Operation]:
    if has_experts and spec.moe is not None:
        # The router takes the norm's output, too: it is not computed again.
        yield _norm("ffn_norm", spec)
        yield from _experts(spec, spec.moe, form)
    else:
        yield _norm("ffn_norm", spec, "norm")
        yield from _feed_forward("ffn", spec, spec.ffn_hidden, form)
    yield from _residual("ffn_add", spec, form)


def _feed_forward(name: str, spec: ModelSpec, width: int, form: Form) -> Iterator[Operation]:
    up = ("gate_up", 2 * width) if spec.gated_ffn else ("up", width)
    yield _linear(
        f"{name}.{up[0]}", up[1], spec.hidden, "outputs", spec.mlp_bias, buffer=2 * width, eager=2 * width
    )
    yield _activation(name, spec, width, 1, form, buffer=width, eager=2 * width)
    yield _linear(f"{name}.down", spec.hidden, width, "inputs", spec.mlp_bias)


def _experts(spec: ModelSpec, moe: MoESpec, form: Form) -> Iterator[Operation]:
    hidden, width, choices = spec.hidden, moe.expert_hidden, moe.experts_per_token
    router = [Weight("ffn.router.weight", (moe.experts, hidden))]
    if moe.selection_bias:
        router.append(Weight("ffn.router.selection_bias", (moe.experts,)))
    yield Operation(
        "ffn.router", "routing", tuple(router), MatrixProduct(moe.experts, hidden, None),
        kept=(Kept(moe.experts, "stream", bytes_each=4),),
    )  # fmt: skip
    # Of each chosen expert what it takes and what it gives, whose weight needs a gradient. The planner's profiles
    # count the copies of training by themselves; where a model is served, they are read, written and added up.
    copies = choices * hidden
    yield Operation(
        "ffn.experts.copies", "routing", kept=(Kept(2 * copies, "stream"),), buffer=copies, eager=4 * copies,
        reads=2 * copies if form == "serve" else 0, writes=copies if form == "serve" else 0,
    )  # fmt: skip

    def product(name: str, outputs: int, inputs: int, sliced: Literal["outputs", "inputs"]) -> Operation:
        weight = Weight(f"ffn.experts.{name}", (moe.experts, outputs, inputs), "expert")
        found = MatrixProduct(outputs, inputs, sliced, choices, moe.experts)
        return Operation(f"ffn.experts.{name}", "matmul", (weight,), found)

    up = ("gate_up", 2 * width) if spec.gated_ffn else ("up", width)
    yield product(*up, hidden, "outputs")
    yield _activation("ffn.experts", spec, width, choices, form, buffer=choices * width, eager=4 * width)
    yield product("down", hidden, width, "inputs")
    if moe.shared_hidden:
        yield from _feed_forward("ffn.shared", spec, moe.shared_hidden, form)


def _activation(
    name: str, spec: ModelSpec, width: int, choices: int, form: Form, *, buffer: int, eager: int
) -> Operation:
    # What serves always has a gate.
    reads, writes = (2 if spec.gated_ffn or form == "serve" else 1) * choices * width, choices * width
    kept = (Kept(reads, "tensor"), Kept(writes, "tensor", ("activation",)))
    return Operation(
        f"{name}.activation", "elementwise", reads=reads, writes=writes, cut="tensor", kept=kept,
        again="activation", buffer=buffer, eager=eager,
    )  # fmt: skip


def _linear(
    name: str,
    outputs: int,
    inputs: int,
    sliced: Literal["outputs", "inputs"] | None,
    bias: bool = False,
    *,
    again: Again | None = None,
    kept: tuple[Kept, ...] = (),
    buffer: int = 0,
    eager: int | None = None,
) -> Operation:
    weights = [Weight(f"{name}.weight", (outputs, inputs), "tensor" if sliced else "whole")]
    if bias:  # one that is added to a sum over ranks is whole
        weights.append(Weight(f"{name}.bias", (outputs,), "tensor" if sliced == "outputs" else "whole"))
    product = MatrixProduct(outputs, inputs, sliced)
    return Operation(
        name, "matmul", tuple(weights), product, kept=kept, again=again, buffer=buffer,
        eager=buffer if eager is None else eager,
    )  # fmt: skip


def _norm(name: str, spec: ModelSpec, again: Again | None = None) -> Operation:
    """A norm of the stream. Backward needs what it takes and what it gives."""
    parts = ("weight", "bias") if spec.norm_bias else ("weight",)
    hidden = spec.hidden
    kept = (Kept(hidden, "stream"), Kept(hidden, "stream", (again,) if again else ()))
    weights = tuple(Weight(f"{name}.{part}", (hidden,)) for part in parts)
    return Operation(name, "norm", weights, reads=hidden, writes=hidden, cut="stream", kept=kept, again=again)


def _latent_norm(name: str, width: int) -> Operation:
    kept = (Kept(width, "stream"), Kept(width, "stream", ("attention",)))
    return Operation(name, "norm", (Weight(f"{name}.weight", (width,)),), kept=kept)


def _residual(name: str, spec: ModelSpec, form: Form) -> Iterator[Operation]:
    """Joined with the norm after it when training, with the product before it when serving."""
    if form == "train":
        mask = Kept(spec.hidden, "stream", bytes_each=1, dropout=True)
        yield Operation(
            name, "elementwise", reads=spec.hidden, writes=spec.hidden, cut="stream", kept=(mask,)
        )


LAYER_PARTS: list[Callable[[ModelSpec, bool, Form], Iterable[Operation]]] = [
    _attention_block,
    _feed_forward_block,
]

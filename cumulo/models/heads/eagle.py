"""EagleHead: one decoder layer that drafts from hidden states of the served model (EAGLE-3, Li et al. 2025).

At a place it sees the served model's stream there, taken at three layers, next to the embedding of the token that
was drawn behind it, and says which token comes after that. Behind its own proposals it takes its own output in
place of the stream. It knows only the most frequent tokens, so that its last matrix is small.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cumulo.kernels.cpu.paged_attention import paged_attention
from cumulo.models.batch import ForwardBatch, KVCache
from cumulo.models.linear import Linear, RMSNorm, TensorKind
from cumulo.models.moe import FeedForward
from cumulo.models.rope import RotaryTable
from cumulo.spec.model import ModelSpec


class StreamTap:
    def __init__(
        self, layers: Sequence[int], slots: int, hidden: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """`layers`: the stream is kept as it enters these, ascending."""
        self.layers = tuple(layers)
        self.kept = torch.zeros((slots, len(self.layers) * hidden), dtype=dtype, device=device)
        self._hidden = hidden

    @property
    def nbytes(self) -> int:
        return self.kept.nbytes

    def places(self, layer: int) -> list[Tensor]:
        """Where the stream that enters a layer is kept, [slots, hidden]: a model of few layers has several."""
        hidden = self._hidden
        return [
            self.kept[:, place * hidden : (place + 1) * hidden]
            for place, kept in enumerate(self.layers)
            if kept == layer
        ]

    def keep(self, layer: int, stream: Tensor, slots: Tensor) -> None:
        """The stream [tokens, hidden] that enters a layer, and where each token's keys and values lie."""
        for kept in self.places(layer):
            kept[slots] = stream

    def stream_at(self, slots: Tensor) -> Tensor:
        """[tokens, layers x hidden]."""
        return self.kept[slots]

    def copy_blocks(self, pairs: list[tuple[int, int]], block_size: int) -> None:
        blocks = self.kept.view(-1, block_size, self.kept.shape[1])
        for source, target in pairs:
            blocks[target] = blocks[source]


def eagle_layers(layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer, as EAGLE-3 takes them (Li et al. 2025; its published code)."""
    low = min(2, layers - 1)
    return low, max(low, layers // 2), max(low, layers - 3)


Likeliest = tuple[NDArray[np.int64], NDArray[np.float32]]  # tokens, and the chances that they are right


def likeliest_of(logits: Tensor) -> Likeliest:
    """The most likely token of each row of logits, and its probability."""
    values = logits.numpy()
    tokens = values.argmax(axis=-1)
    above = values - np.take_along_axis(values, tokens[:, None], axis=-1)
    return tokens, 1 / np.exp(above).sum(axis=-1)


class EagleHead(nn.Module):
    __call__: Callable[..., Tensor]

    def __init__(
        self, spec: ModelSpec, features: int, draft_vocabulary: int, *, dtype: torch.dtype = torch.float32
    ) -> None:
        """`spec`: of the head, with one layer; `features`: numbers of the served model's stream at a place."""
        super().__init__()
        self.spec, self.dtype, hidden = spec, dtype, spec.hidden
        kind = TensorKind(dtype, "cpu")
        width = spec.heads * spec.head_dim
        rows = width + 2 * spec.kv_heads * spec.head_dim
        self.fc = Linear(features, hidden, kind=kind)
        self.token_norm = RMSNorm(hidden, spec.norm_eps, kind=kind)
        self.stream_norm = RMSNorm(hidden, spec.norm_eps, kind=kind)
        self.qkv = Linear(2 * hidden, rows, kind=kind)
        self.output = Linear(width, hidden, kind=kind)
        self.ffn_norm = RMSNorm(hidden, spec.norm_eps, kind=kind)
        self.ffn = FeedForward(spec, spec.ffn_hidden, kind=kind)
        self.final_norm = RMSNorm(hidden, spec.norm_eps, kind=kind)
        self.head = Linear(hidden, draft_vocabulary, kind=kind)
        self.rotary = RotaryTable(spec, dtype)
        # By the head's own number of a token: the served model's.
        self.token_of = torch.zeros(draft_vocabulary, dtype=torch.int64)

    # -- serving ------------------------------------------------------------------------------------------
    def forward(self, stream: Tensor, tokens: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """The head's stream [R, hidden] at `batch.logit_rows`, from stream and embedded tokens [T, hidden]."""
        query, key, value = self.heads(stream, tokens)
        rotation = self.rotary.rotation_at(batch.positions)
        cache.write(0, batch.slots, rotation.apply(key), value)
        mixed = paged_attention(
            rotation.apply(query), cache.keys[0], cache.values[0], batch, self.spec.head_dim**-0.5, None
        )
        wanted = batch.logit_rows
        return self.rest(stream[wanted], mixed[wanted].flatten(1))

    # -- the parts, which training uses too -------------------------------------------------------------------
    def heads(self, stream: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [T, heads, head_dim], not rotated."""
        spec = self.spec
        both = torch.cat((self.token_norm(tokens), self.stream_norm(stream)), dim=-1)
        states = self.qkv(both).view(*both.shape[:-1], -1, spec.head_dim)
        query, key, value = states.split((spec.heads, spec.kv_heads, spec.kv_heads), dim=-2)
        return query, key, value

    def rest(self, stream: Tensor, mixed: Tensor) -> Tensor:
        stream = stream + self.output(mixed)
        return stream + self.ffn(self.ffn_norm(stream))

    def logits(self, stream: Tensor) -> Tensor:
        """Over the head's own tokens."""
        return self.head(self.final_norm(stream))

    @property
    def weight_bytes(self) -> int:
        packed = [module.packed for module in self.modules() if isinstance(module, Linear) and module.packed]
        return sum(one.nbytes for one in self.parameters()) + sum(one.nbytes for one in packed)

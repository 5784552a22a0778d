"""Decoder: the one language model of Cumulo, dense, mixture-of-experts or latent attention as its spec says.

A runner calls `forward` with one step's flat tokens and the KV cache, then `logits`. Loaders fill its
parameters by name (`cumulo.spec.counting` lists them) or replace matrices by packed ones.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from cumulo.kernels.low_rank import AdapterRows
from cumulo.kernels.packed import Packed
from cumulo.models.attention import Attention, LatentAttention
from cumulo.models.batch import ForwardBatch, KVCache
from cumulo.models.heads.eagle import StreamTap
from cumulo.models.linear import Linear, RMSNorm, TensorKind
from cumulo.models.moe import Experts, FeedForward, MixtureOfExperts
from cumulo.models.rope import RotaryTable, Rotation
from cumulo.spec.check import refuse_unplayable
from cumulo.spec.model import ModelSpec


class Layer(nn.Module):
    """One transformer block: attention and feed-forward, each on a normed copy of the residual stream."""

    __call__: Callable[..., Tensor]
    attention: Attention | LatentAttention
    ffn: FeedForward | MixtureOfExperts

    def __init__(self, spec: ModelSpec, layer: int, *, kind: TensorKind) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden, spec.norm_eps, kind=kind)
        if spec.mla is None:
            self.attention = Attention(spec, layer, kind=kind)
        else:
            self.attention = LatentAttention(spec, spec.mla, layer, kind=kind)
        self.ffn_norm = RMSNorm(spec.hidden, spec.norm_eps, kind=kind)
        if spec.moe is not None and spec.is_moe_layer(layer):
            self.ffn = MixtureOfExperts(spec, spec.moe, kind=kind)
        else:
            self.ffn = FeedForward(spec, spec.ffn_hidden, kind=kind)

    def forward(self, x: Tensor, rotation: Rotation, batch: ForwardBatch, cache: KVCache) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, batch, cache)
        return x + self.ffn(self.ffn_norm(x))


class AdapterRoom(Protocol):
    """Adapters of a decoder, which its matrices know; an AdapterBank."""

    def begin(self, rows: AdapterRows | None) -> None:
        """The next products are of these rows."""
        ...


class Decoder(nn.Module):
    __call__: Callable[..., Tensor]

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate every parameter, uninitialised; `device="meta"` allocates nothing."""
        super().__init__()
        refuse_unplayable(spec)
        self.spec, self.dtype, kind = spec, dtype, TensorKind(dtype, device)
        self.embed = Linear(spec.hidden, spec.vocab_size, kind=kind)
        self.layers = nn.ModuleList(Layer(spec, layer, kind=kind) for layer in range(spec.layers))
        self.final_norm = RMSNorm(spec.hidden, spec.norm_eps, kind=kind)
        if not spec.tied_embeddings:
            self.head = Linear(spec.hidden, spec.vocab_size, kind=kind)
        self.rotary = RotaryTable(spec, dtype)
        self.bank: AdapterRoom | None = None  # where adapters are served
        self.tap: StreamTap | None = None  # of a draft head

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Compute a step, write its keys and values, and return the normed hidden states [R, hidden] of
        `batch.logit_rows`."""
        if self.bank is not None:
            self.bank.begin(batch.adapters)
        x = self.embed.rows(batch.token_ids)
        rotation = self.rotary.rotation_at(batch.positions)
        for index, layer in enumerate(self.layers):
            if self.tap is not None and index in self.tap.layers:
                self.tap.keep(index, x, batch.slots)
            x = layer(x, rotation, batch, cache)
            if cache.on_layer is not None:
                cache.on_layer(index)
        return self.final_norm(x[batch.logit_rows])

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocabulary]."""
        return self.embed(hidden) if self.spec.tied_embeddings else self.head(hidden)

    @property
    def weight_bytes(self) -> int:
        """Of all parameters and of what matrices were packed into, each storage counted once."""
        packed: list[Packed] = []
        for module in self.modules():
            if isinstance(module, Linear) and module.packed is not None:
                packed.append(module.packed)
            elif isinstance(module, Experts):
                packed += [weight for weights in module.packed.values() for weight in weights]
        return sum(parameter.nbytes for parameter in self.parameters()) + sum(one.nbytes for one in packed)

    # -- for loaders -----------------------------------------------------------------------------------
    def can_pack(self, name: str) -> bool:
        """Whether parameter `name` may be replaced by a packed matrix (or, for experts, one per expert)."""
        owner, attribute = self._owner(name)
        if isinstance(owner, Experts):
            return True
        return (
            isinstance(owner, Linear) and attribute == "weight" and not name.endswith("attention.kv_b.weight")
        )

    def allocate(self, name: str) -> nn.Parameter:
        """Memory for parameter `name` of a decoder that was made on the meta device."""
        owner, attribute = self._owner(name)
        planned = getattr(owner, attribute)
        setattr(owner, attribute, TensorKind(planned.dtype, "cpu").parameter(*planned.shape))
        return getattr(owner, attribute)  # type: ignore[no-any-return]

    def pack(self, name: str, packed: Packed | Sequence[Packed]) -> None:
        """Replace parameter `name` by a packed matrix; a stack of experts by one packed matrix per expert."""
        owner, attribute = self._owner(name)
        if not self.can_pack(name):
            raise ValueError(f"{name} must stay a plain tensor")
        if isinstance(owner, Experts) and isinstance(packed, Sequence):
            owner.pack(attribute, packed)
        elif isinstance(owner, Linear) and not isinstance(packed, Sequence):
            owner.pack(packed)
        else:
            raise ValueError(
                f"{name} takes {'one matrix per expert' if isinstance(owner, Experts) else 'one matrix'}"
            )

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, attribute = name.rpartition(".")
        return self.get_submodule(path), attribute

"""TrainingDecoder: the decoder with gradients, over packed documents and without a KV cache. The trainer's model.

Its parameters have the names and shapes of `cumulo.models.decoder.Decoder`, so weights go from one to the other as
they are. Tokens lie flat, [T, hidden] for B rows of S: only attention knows of rows and documents.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cumulo.models.linear import Linear, RMSNorm
from cumulo.models.moe import FeedForward
from cumulo.models.rope import RotaryTable, Rotation
from cumulo.spec.model import ModelSpec
from cumulo.train.attention import DocumentMask, TrainingAttention, TrainingLatentAttention
from cumulo.train.experts import TrainingMixture
from cumulo.train.loader import DeviceBatch
from cumulo.train.loss import cross_entropy_sum


@dataclass(frozen=True, slots=True, eq=False)
class Losses:
    """Sums, so that parts of a batch add up to the whole whatever the parts are."""

    token_sum: Tensor  # cross-entropy over the learnt tokens, in nats
    balance_sum: Tensor | None  # how uneven experts are used, over rows; None: no experts


class TrainingLayer(nn.Module):
    __call__: Callable[..., tuple[Tensor, Tensor | None]]
    attention: TrainingAttention | TrainingLatentAttention
    ffn: FeedForward | TrainingMixture

    def __init__(
        self, spec: ModelSpec, layer: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden, spec.norm_eps, dtype=dtype, device=device)
        if spec.mla is None:
            self.attention = TrainingAttention(spec, layer, dtype=dtype, device=device)
        else:
            self.attention = TrainingLatentAttention(spec, spec.mla, layer, dtype=dtype, device=device)
        self.ffn_norm = RMSNorm(spec.hidden, spec.norm_eps, dtype=dtype, device=device)
        if spec.moe is not None and spec.is_moe_layer(layer):
            self.ffn = TrainingMixture(spec, spec.moe, dtype=dtype, device=device)
        else:
            self.ffn = FeedForward(spec, spec.ffn_hidden, dtype=dtype, device=device)

    def forward(self, x: Tensor, rotation: Rotation, documents: DocumentMask) -> tuple[Tensor, Tensor | None]:
        x = x + self.attention(self.attention_norm(x), rotation, documents)
        if isinstance(self.ffn, TrainingMixture):
            change, balance = self.ffn(self.ffn_norm(x), documents.rows)
            return x + change, balance
        return x + self.ffn(self.ffn_norm(x)), None


class TrainingDecoder(nn.Module):
    __call__: Callable[..., Losses]

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        recompute: bool = False,
    ) -> None:
        """`recompute`: keep only each layer's input, and compute the layer again for its gradients."""
        super().__init__()
        self.spec, self.dtype, self.recompute = spec, dtype, recompute
        self.embed = Linear(spec.hidden, spec.vocab_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            TrainingLayer(spec, layer, dtype=dtype, device=device) for layer in range(spec.layers)
        )
        self.final_norm = RMSNorm(spec.hidden, spec.norm_eps, dtype=dtype, device=device)
        if not spec.tied_embeddings:
            self.head = Linear(spec.hidden, spec.vocab_size, dtype=dtype, device=device)
        self.rotary = RotaryTable(spec, dtype)
        for name, parameter in self.named_parameters():
            # The selection bias is steered by the load of the experts, never by a gradient (DeepSeek-V3, 2.1.2).
            parameter.requires_grad_(not name.endswith("selection_bias"))

    @property
    def output_weight(self) -> nn.Parameter:
        return self.embed.weight if self.spec.tied_embeddings else self.head.weight

    def forward(self, batch: DeviceBatch) -> Losses:
        hidden, balance = self.hidden(batch)
        return Losses(cross_entropy_sum(hidden, self.output_weight, batch.targets.flatten()), balance)

    def hidden(self, batch: DeviceBatch) -> tuple[Tensor, Tensor | None]:
        """Normed hidden states [B * S, hidden] of all tokens, and the experts' balance."""
        documents = DocumentMask.of(batch)
        x = self.embed.rows(batch.tokens.flatten())
        rotation = self.rotary.at(batch.positions.flatten())
        balances: list[Tensor] = []
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x, balance = checkpoint(layer, x, rotation, documents, use_reentrant=False)
            else:
                x, balance = layer(x, rotation, documents)
            if balance is not None:
                balances.append(balance)
        return self.final_norm(x), _mean(balances)

    def logits(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.output_weight)


def _mean(values: Iterable[Tensor]) -> Tensor | None:
    found = list(values)
    return torch.stack(found).mean() if found else None

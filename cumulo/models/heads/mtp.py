"""MtpHead: the multi-token-prediction module of DeepSeek-V3 as a drafter (DeepSeek-AI 2024, section 2.2).

One more layer of the model's own kind: at a place it sees the model's last hidden state next to the embedding of
the token that was drawn behind it, and says which token comes after that. Behind its own proposals it takes its own
output in place of the hidden state. It has the calls of an EagleHead, and EagleDraft plays both.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from cumulo.models.batch import ForwardBatch, KVCache
from cumulo.models.decoder import Layer
from cumulo.models.linear import Linear, RMSNorm
from cumulo.models.rope import RotaryTable
from cumulo.spec.model import ModelSpec


class MtpHead(nn.Module):
    __call__: Callable[..., Tensor]

    def __init__(self, served: ModelSpec, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        moe = None if served.moe is None else replace(served.moe, dense_layers=())
        self.spec, self.dtype = replace(served, layers=1, moe=moe), dtype
        hidden, eps = served.hidden, served.norm_eps
        self.token_norm = RMSNorm(hidden, eps, dtype=dtype, device="cpu")
        self.stream_norm = RMSNorm(hidden, eps, dtype=dtype, device="cpu")
        self.joined = Linear(2 * hidden, hidden, dtype=dtype, device="cpu")
        self.layer = Layer(self.spec, 0, dtype=dtype, device="cpu")
        self.final_norm = RMSNorm(hidden, eps, dtype=dtype, device="cpu")
        self.head = Linear(hidden, served.vocab_size, dtype=dtype, device="cpu")
        self.rotary = RotaryTable(self.spec, dtype)
        self.token_of = torch.arange(served.vocab_size)

    def fc(self, stream: Tensor) -> Tensor:
        """The model's last hidden states are taken as they are."""
        return stream

    def forward(self, stream: Tensor, tokens: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """The module's stream [R, hidden] at `batch.logit_rows`, from hidden states and embedded tokens."""
        # As serving engines do: at the first place there is nothing to see of a token.
        tokens = tokens * (batch.positions > 0)[:, None]
        both = torch.cat((self.token_norm(tokens), self.stream_norm(stream)), dim=-1)
        rotation = self.rotary.rotation_at(batch.positions)
        return self.layer(self.joined(both), rotation, batch, cache)[batch.logit_rows]

    def logits(self, stream: Tensor) -> Tensor:
        return self.head(self.final_norm(stream))

    @property
    def weight_bytes(self) -> int:
        return sum(one.nbytes for one in self.parameters())

"""TrainingDecoder: the decoder with gradients, over packed documents and without a KV cache. The trainer's model.

Its parameters have the names and shapes of `cumulo.models.decoder.Decoder`, so weights go from one to the other as
they are. Tokens lie flat, [T, hidden] for B rows of S: only attention knows of rows and documents.

It can be a part of the model: some of its layers (a pipeline's chunk), slices of its matrices, some of its experts.
Parameters keep the names they have in the whole model; what happens where it is cut, a `Split` says.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cumulo.layout.local_spec import local_spec
from cumulo.layout.pieces import ChunkPart
from cumulo.models.linear import Linear, RMSNorm
from cumulo.models.rope import RotaryTable, Rotation
from cumulo.spec.check import refuse_unplayable
from cumulo.spec.model import ModelSpec
from cumulo.train.data.loader import DeviceBatch
from cumulo.train.model.arithmetic import WIDE, Arithmetic, use_arithmetic
from cumulo.train.model.attention import TrainingAttention, TrainingLatentAttention
from cumulo.train.model.document_mask import Documents, OwnTokens
from cumulo.train.model.experts import ExpertUsage, TrainingFeedForward, TrainingMixture, balance_sum
from cumulo.train.model.loss import cross_entropy_sum
from cumulo.train.model.recompute import Recompute
from cumulo.train.model.split import WHOLE, Split


class Losses(NamedTuple):
    """Sums, so that parts of a batch and of a model add up to the whole whatever the parts are: over data-parallel
    and context-parallel ranks and pipeline stages. Tensor-parallel ranks have the same. A tuple, so that torch's
    own wrappers find the tensors in it."""

    token_sum: Tensor  # cross-entropy over the loss tokens, in nats; 0 without the last layers
    balance_sum: Tensor | None  # how uneven experts are used, over rows; None: no experts here
    hidden: Tensor | None  # what the next part of the model takes; None: there is none


class TrainingLayer(nn.Module):
    __call__: Callable[..., tuple[Tensor, ExpertUsage | None]]
    attention: TrainingAttention | TrainingLatentAttention
    ffn: TrainingFeedForward | TrainingMixture

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        split: Split,
        recompute: Recompute,
        fused: Arithmetic | None,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """`spec` has the sizes of this rank's slices."""
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden, spec.norm_eps, dtype=dtype, device=device)
        if spec.mla is None:
            self.attention = TrainingAttention(
                spec, layer, split, recompute, fused, dtype=dtype, device=device
            )
        else:
            self.attention = TrainingLatentAttention(
                spec, spec.mla, layer, split, recompute, dtype=dtype, device=device
            )
        self.ffn_norm = RMSNorm(spec.hidden, spec.norm_eps, dtype=dtype, device=device)
        if spec.moe is not None and spec.is_moe_layer(layer):
            self.ffn = TrainingMixture(spec, spec.moe, split, recompute, dtype=dtype, device=device)
        else:
            self.ffn = TrainingFeedForward(
                spec, spec.ffn_hidden, split, recompute, fused, dtype=dtype, device=device
            )

    def forward(
        self, x: Tensor, rotation: Rotation, documents: Documents, rows: int
    ) -> tuple[Tensor, ExpertUsage | None]:
        x = self.attention(x, self.attention_norm, rotation, documents)
        if isinstance(self.ffn, TrainingMixture):
            return self.ffn(x, self.ffn_norm, rows)
        return self.ffn(x, self.ffn_norm), None


def joins_operations(device: torch.device, dtype: torch.dtype, split: Split) -> bool:
    """Where the operations of `train.fused` are known to be right."""
    return device.type == "cuda" and dtype.itemsize == 2 and split.tensor.size == 1


class TrainingDecoder(nn.Module):
    __call__: Callable[..., Losses]

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        recompute: bool | Collection[str] = False,
        split: Split = WHOLE,
        part: ChunkPart | None = None,
        arithmetic: Arithmetic = WIDE,
        fused: bool | None = None,
    ) -> None:
        """`spec`: of the whole model; `part`: the layers to hold, None: all.
        `recompute`: keep only each layer's input and compute the layer again for its gradients, or only some
        operations of it (see `Recompute`).
        `arithmetic`: of the products inside layers.
        `fused`: operations joined as a GPU likes them (`train.fused`); None: where they are known to be right."""
        super().__init__()
        refuse_unplayable(spec)
        self.spec, self.dtype, self.split = spec, dtype, split
        self.recompute = Recompute.from_option(recompute)
        self.part = part or ChunkPart(0, range(spec.layers), first=True, last=True)
        local = local_spec(spec, split.tensor.size)
        if fused is None:
            fused = joins_operations(torch.device(device), dtype, split)
        joined = arithmetic if fused else None
        if self.part.holds("embed.weight", spec.tied_embeddings):
            self.embed = Linear(spec.hidden, local.vocab_size, dtype=dtype, device=device)
        self.layers = nn.ModuleDict(
            {
                str(layer): TrainingLayer(
                    local, layer, split, self.recompute, joined, dtype=dtype, device=device
                )
                for layer in self.part.layers
            }
        )
        if arithmetic is not WIDE:
            for module in self.layers.values():
                use_arithmetic(module, arithmetic)
        if self.part.last:
            self.final_norm = RMSNorm(spec.hidden, spec.norm_eps, dtype=dtype, device=device)
            if not spec.tied_embeddings:
                self.head = Linear(spec.hidden, local.vocab_size, dtype=dtype, device=device)
        self.rotary = RotaryTable(spec, dtype)
        self._loads: dict[int, Tensor] = {}
        for name, parameter in self.named_parameters():
            # The selection bias is steered by the load of the experts, never by a gradient (DeepSeek-V3, 2.1.2).
            parameter.requires_grad_(not name.endswith("selection_bias"))

    def compile_layers(self) -> None:
        for layer in self.layers.values():
            layer.compile()

    @property
    def output_weight(self) -> nn.Parameter:
        return self.embed.weight if self.spec.tied_embeddings else self.head.weight

    def forward(self, batch: DeviceBatch, x: Tensor | None = None) -> Losses:
        """`batch`: whole rows, of which the split takes its places; `x`: what the part before this one gave."""
        own = self.split.context.own_tokens(batch)
        x, balance = self._layers(x, own, batch)
        if not self.part.last:
            return Losses(x.new_zeros(()), balance, x)
        x = self.final_norm(x)
        tensor, weight = self.split.tensor, self.output_weight
        token_sum = cross_entropy_sum(tensor.enter(x), weight, own.targets, tensor.vocabulary(len(weight)))
        return Losses(token_sum, balance, None)

    def hidden(self, batch: DeviceBatch) -> tuple[Tensor, Tensor | None]:
        """Normed hidden states [T, hidden] of the whole model's tokens, and the experts' balance."""
        x, balance = self._layers(None, self.split.context.own_tokens(batch), batch)
        return self.final_norm(x), balance

    def _layers(self, x: Tensor | None, own: OwnTokens, batch: DeviceBatch) -> tuple[Tensor, Tensor | None]:
        if x is None:
            x = self.split.tensor.embed(self.embed.weight, own.tokens)
        rotation = self.rotary.rotation_at(own.positions)
        rows, length = batch.tokens.shape
        used: dict[int, ExpertUsage] = {}
        for number, layer in self.layers.items():
            x, usage = self.recompute.layer(layer, x, rotation, own.documents, rows)
            if usage is not None:
                used[int(number)] = usage
        return x, self._balance(used, length)

    def take_loads(self) -> Mapping[int, Tensor]:
        """By layer, how often each expert was chosen [experts] since the last call, in training; by the rows this
        rank has places of."""
        loads, self._loads = self._loads, {}
        return loads

    def _balance(self, used: Mapping[int, ExpertUsage], length: int) -> Tensor | None:
        """The mean over all layers with experts, of which these are ours."""
        moe = self.spec.moe
        if moe is None or not used:
            return None
        split = self.split
        # One exchange for all layers: the choices of tokens that other ranks have.
        choices = split.context.total(
            split.tensor.total(torch.stack([usage.choices for usage in used.values()]))
        )
        if torch.is_grad_enabled():
            for layer, load in zip(used, choices.sum(1, dtype=torch.float64), strict=True):
                self._loads[layer] = load + self._loads.get(layer, 0.0)
        balances = [
            balance_sum(ExpertUsage(usage.scores, chosen), length, moe.experts_per_token)
            for usage, chosen in zip(used.values(), choices, strict=True)
        ]
        layers = sum(self.spec.is_moe_layer(layer) for layer in range(self.spec.layers))
        return split.tensor.total(torch.stack(balances).sum() / layers)

    def logits(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.output_weight)

"""TrainingDecoder: the decoder with gradients, over packed documents and without a KV cache. The trainer's model.

Its parameters have the names and shapes of `cumulo.models.decoder.Decoder`, so weights go from one to the other as
they are. Tokens lie flat, [T, hidden] for B rows of S: only attention knows of rows and documents.

It can be a part of the model: some of its layers (a pipeline's chunk), slices of its matrices, some of its experts.
Parameters keep the names they have in the whole model; what happens where it is cut, a `Split` says.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cumulo.layout.layout import local_spec
from cumulo.layout.pieces import ChunkPart
from cumulo.models.linear import Linear, RMSNorm, TensorKind
from cumulo.models.rope import RotaryTable, Rotation
from cumulo.ranks.tensor_parallel import VocabularySlice
from cumulo.spec.check import refuse_unplayable
from cumulo.spec.model import ModelSpec
from cumulo.train.data.packing import IGNORED, DeviceBatch
from cumulo.train.model.arithmetic import WIDE, Arithmetic, use_arithmetic
from cumulo.train.model.attention import TrainingAttention, TrainingLatentAttention
from cumulo.train.model.document_mask import Documents
from cumulo.train.model.experts import ExpertUsage, TrainingFeedForward, TrainingMixture, balance_sum
from cumulo.train.model.recompute import Recompute
from cumulo.train.model.split import WHOLE, LayerSettings, Split

# Cross-entropy of a model's last product without all its logits at once. Called by `TrainingDecoder`.
#
# On a GPU by kernels/cuda/loss/linear_cross_entropy.py; elsewhere by the same idea in torch: some rows at a time,
# logits become the loss and at once their own gradient, so that backward only scales what is ready.

_LOGIT_BYTES = 32 << 20  # of a chunk: stays near the caches, and long enough for the products
_LOGIT_BYTES_GPU = 512 << 20  # of a chunk of a slice of the vocabulary: long enough to hide the exchange


def cross_entropy_sum(
    x: Tensor, weight: Tensor, targets: Tensor, vocabulary: VocabularySlice | None = None
) -> Tensor:
    """Cross-entropy of x [T, H] · weightᵀ [V, H], summed over the targets [T] that are not IGNORED."""
    if x.is_cuda and vocabulary is None:
        from cumulo.kernels.cuda.loss.linear_cross_entropy import linear_cross_entropy

        return linear_cross_entropy(x, weight, targets, ignore_index=IGNORED)
    total: Tensor = _ChunkedCrossEntropy.apply(x, weight, targets, vocabulary)  # type: ignore[no-untyped-call]
    return total


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, vocabulary: VocabularySlice | None
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x) if needs_x else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        limit_bytes = _LOGIT_BYTES_GPU if x.is_cuda else _LOGIT_BYTES
        rows = max(1, limit_bytes // (len(weight) * wide.itemsize))
        total = torch.zeros((), dtype=wide, device=x.device)
        for begin in range(0, len(x), rows):
            part = slice(begin, begin + rows)
            logits = (x[part] @ weight.T).to(wide)
            wanted, kept = targets[part].clamp(min=0), targets[part] != IGNORED
            minus_one = logits.new_full((len(wanted), 1), -1.0)
            log_sum = logits.logsumexp(-1)
            if vocabulary is None:
                found = logits.gather(-1, wanted[:, None])[:, 0]
            else:
                here = (wanted >= vocabulary.first) & (wanted < vocabulary.first + len(weight))
                wanted = (wanted - vocabulary.first).masked_fill(~here, 0)
                minus_one = minus_one * here[:, None]
                log_sum, found = vocabulary.merge(log_sum, logits.gather(-1, wanted[:, None])[:, 0] * here)
            total += ((log_sum - found) * kept).sum()
            if grad_x is None and grad_weight is None:
                continue
            # softmax minus one at the target, and nothing where the target is ignored
            gradient = logits.sub_(log_sum[:, None]).exp_()
            gradient.scatter_add_(1, wanted[:, None], minus_one)
            gradient.mul_(kept[:, None])
            if grad_x is not None:
                grad_x[part] = gradient.to(x.dtype) @ weight
            if grad_weight is not None:
                if x.is_cuda and x.dtype != wide:  # whose matrix units take half types only, and sum wide
                    grad_weight += gradient.to(x.dtype).T @ x[part]
                else:
                    grad_weight.addmm_(gradient.T, x[part].to(wide))
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_x, grad_weight = ctx.saved_tensors
        scale = upstream[0]
        return (
            None if grad_x is None else grad_x * scale.to(grad_x.dtype),
            None if grad_weight is None else (grad_weight * scale).to(ctx.dtype),
            None,
            None,
        )


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

    def __init__(self, spec: ModelSpec, layer: int, settings: LayerSettings) -> None:
        """`spec` has the sizes of this rank's slices."""
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden, spec.norm_eps, kind=settings.kind)
        if spec.mla is None:
            self.attention = TrainingAttention(spec, layer, settings)
        else:
            self.attention = TrainingLatentAttention(spec, spec.mla, layer, settings)
        self.ffn_norm = RMSNorm(spec.hidden, spec.norm_eps, kind=settings.kind)
        if spec.moe is not None and spec.is_moe_layer(layer):
            self.ffn = TrainingMixture(spec, spec.moe, settings)
        else:
            self.ffn = TrainingFeedForward(spec, spec.ffn_hidden, settings)

    def forward(
        self, x: Tensor, rotation: Rotation, documents: Documents, rows: int
    ) -> tuple[Tensor, ExpertUsage | None]:
        x = self.attention(x, self.attention_norm, rotation, documents)
        if isinstance(self.ffn, TrainingMixture):
            return self.ffn(x, self.ffn_norm, rows)
        return self.ffn(x, self.ffn_norm), None


def joins_operations(device: torch.device, dtype: torch.dtype, split: Split) -> bool:
    """Where the operations of `fused` are known to be right."""
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
        `fused`: operations joined as a GPU likes them (see `fused.py`); None: where they are known to be right."""
        super().__init__()
        refuse_unplayable(spec)
        self.spec, self.dtype, self.split, kind = spec, dtype, split, TensorKind(dtype, device)
        self.recompute = Recompute.from_option(recompute)
        self.part = part or ChunkPart(0, range(spec.layers), first=True, last=True)
        local = local_spec(spec, split.tensor.size)
        if fused is None:
            fused = joins_operations(torch.device(device), dtype, split)
        settings = LayerSettings(kind, split, self.recompute, arithmetic if fused else None)
        if self.part.holds("embed.weight", spec.tied_embeddings):
            self.embed = Linear(spec.hidden, local.vocab_size, kind=kind)
        self.layers = nn.ModuleDict(
            {str(layer): TrainingLayer(local, layer, settings) for layer in self.part.layers}
        )
        if arithmetic is not WIDE:
            for module in self.layers.values():
                use_arithmetic(module, arithmetic)
        if self.part.last:
            self.final_norm = RMSNorm(spec.hidden, spec.norm_eps, kind=kind)
            if not spec.tied_embeddings:
                self.head = Linear(spec.hidden, local.vocab_size, kind=kind)
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
        if x is None:
            x = self.split.tensor.embed(self.embed.weight, own.tokens)
        rotation = self.rotary.rotation_at(own.positions)
        rows, length = batch.tokens.shape
        used: dict[int, ExpertUsage] = {}
        for number, layer in self.layers.items():
            x, usage = self.recompute.layer(layer, x, rotation, own.documents, rows)
            if usage is not None:
                used[int(number)] = usage
        balance = self._balance(used, length)
        if not self.part.last:
            return Losses(x.new_zeros(()), balance, x)
        x = self.final_norm(x)
        tensor, weight = self.split.tensor, self.output_weight
        token_sum = cross_entropy_sum(tensor.enter(x), weight, own.targets, tensor.vocabulary(len(weight)))
        return Losses(token_sum, balance, None)

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


DEVIATION = 0.02  # GPT-2 (Radford et al. 2019)


@torch.no_grad()
def initialise(parameters: Mapping[str, Tensor], spec: ModelSpec, seed: int) -> None:
    """Norms one, biases zero, matrices normal; those that write to the residual stream divided by √(2 layers)."""
    for name, parameter in parameters.items():
        if name.endswith(("bias", "selection_bias")):
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            deviation = DEVIATION
            if name.endswith(("attention.output.weight", "down.weight", "experts.down")):
                deviation /= (2 * spec.layers) ** 0.5
            parameter.copy_(seeded_normal(name, parameter, seed) * deviation)


def seeded_normal(name: str, parameter: Tensor, seed: int) -> Tensor:
    # Each parameter has a generator of its own, so a device that holds only some of them draws the same numbers.
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    return torch.randn(parameter.shape, generator=generator).to(parameter.device)

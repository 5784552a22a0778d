"""Feed-forward layers: the gated one (SwiGLU, Shazeer 2020) and the mixture of such experts. Used by decoder
layers; which of the two a layer has, the spec says."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cumulo.kernels.packed import Packed
from cumulo.models.linear import Linear, TensorKind
from cumulo.spec.model import ModelSpec, MoESpec


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, from both side by side in the last dimension."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


class FeedForward(nn.Module):
    __call__: Callable[..., Tensor]

    def __init__(self, spec: ModelSpec, width: int, *, kind: TensorKind) -> None:
        super().__init__()
        self.gate_up = Linear(spec.hidden, 2 * width, spec.mlp_bias, kind=kind)
        self.down = Linear(width, spec.hidden, spec.mlp_bias, kind=kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gated(self.gate_up(x)))


class ExpertRouter(nn.Module):
    """Which experts a token goes to, and with what weight. At least float32: a near tie must not flip."""

    __call__: Callable[..., tuple[Tensor, Tensor]]
    selection_bias: nn.Parameter | None

    def __init__(self, spec: ModelSpec, moe: MoESpec, *, kind: TensorKind) -> None:
        super().__init__()
        self.moe = moe
        self.dtype = torch.promote_types(kind.dtype, torch.float32)
        self.weight = kind.parameter(moe.experts, spec.hidden)
        self.selection_bias = None
        if moe.selection_bias:
            self.selection_bias = TensorKind(self.dtype, kind.device).parameter(moe.experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and expert indices, both [T, experts_per_token]."""
        return self.choose(self.scores(x))

    def scores(self, x: Tensor) -> Tensor:
        """How well each expert suits each token, [T, experts]."""
        logits = F.linear(x.to(self.dtype), self.weight.to(self.dtype))
        return logits.softmax(-1) if self.moe.scoring == "softmax" else logits.sigmoid()

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        moe = self.moe
        preference = scores if self.selection_bias is None else scores + self.selection_bias
        if moe.groups > 1:
            preference = self._within_best_groups(preference)
        chosen = preference.topk(moe.experts_per_token, -1).indices
        weights = scores.gather(-1, chosen)
        if moe.normalise_weights:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * moe.routed_scale, chosen

    def _within_best_groups(self, preference: Tensor) -> Tensor:
        """Experts outside the best groups become impossible (DeepSeek-V2, section 2.2.2; V3, 2.1.2)."""
        moe = self.moe
        grouped = preference.view(len(preference), moe.groups, -1)
        if moe.group_score == "max":
            strength = grouped.amax(-1)
        else:
            strength = grouped.topk(2, -1).values.sum(-1)
        best = strength.topk(moe.top_groups, -1).indices
        excluded = torch.ones_like(strength, dtype=torch.bool).scatter_(-1, best, False)
        return grouped.masked_fill(excluded[..., None], float("-inf")).flatten(-2)


class Experts(nn.Module):
    """All routed experts of a layer, stacked, or packed one by one. Each computes only its own tokens."""

    __call__: Callable[..., Tensor]
    gate_up: nn.Parameter
    down: nn.Parameter

    def __init__(self, spec: ModelSpec, moe: MoESpec, *, kind: TensorKind) -> None:
        super().__init__()
        self.experts = moe.experts
        self.gate_up = kind.parameter(moe.experts, 2 * moe.expert_hidden, spec.hidden)
        self.down = kind.parameter(moe.experts, spec.hidden, moe.expert_hidden)
        self.shapes = {"gate_up": self.gate_up.shape, "down": self.down.shape}
        self.packed: dict[str, Sequence[Packed]] = {}

    def pack(self, name: str, packed: Sequence[Packed]) -> None:
        """Replace `gate_up` or `down` by one packed matrix per expert."""
        found = (len(packed), *packed[0].shape)
        if found != tuple(self.shapes[name]) or len({tuple(weight.shape) for weight in packed}) != 1:
            raise ValueError(f"packed experts of shape {found} cannot replace {tuple(self.shapes[name])}")
        delattr(self, name)
        self.packed[name] = packed

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The weighted sum of each token's experts, [T, hidden]."""
        tokens, per_token = chosen.shape
        # Sorting the (token, choice) pairs by expert makes each expert's tokens one contiguous run.
        by_expert = chosen.flatten().argsort(stable=True)
        inputs = x[by_expert // per_token]
        results = torch.empty_like(inputs)
        start = 0
        for expert, count in enumerate(torch.bincount(chosen.flatten(), minlength=self.experts).tolist()):
            if count:
                run = slice(start, start + count)
                results[run] = self.matmul("down", expert, gated(self.matmul("gate_up", expert, inputs[run])))
                start += count
        # Back in the order of choices: a token's sum does not depend on which tokens were beside it.
        own = torch.empty_like(results).index_copy_(0, by_expert, results).view(tokens, per_token, -1)
        return (own * weights.to(x.dtype)[..., None]).sum(1)

    def matmul(self, name: str, expert: int, x: Tensor) -> Tensor:
        """x Wᵀ with one expert's `gate_up` or `down`."""
        if name in self.packed:
            return self.packed[name][expert].matmul(x)
        return F.linear(x, getattr(self, name)[expert])


class MixtureOfExperts(nn.Module):
    """Routed experts plus, in DeepSeek's models, one expert that every token passes through."""

    __call__: Callable[..., Tensor]
    shared: FeedForward | None

    def __init__(self, spec: ModelSpec, moe: MoESpec, *, kind: TensorKind) -> None:
        super().__init__()
        self.router = ExpertRouter(spec, moe, kind=kind)
        self.experts = Experts(spec, moe, kind=kind)
        self.shared = None
        if moe.shared_hidden:
            self.shared = FeedForward(spec, moe.shared_hidden, kind=kind)

    def forward(self, x: Tensor) -> Tensor:
        routed = self.experts(x, *self.router(x))
        return routed if self.shared is None else routed + self.shared(x)

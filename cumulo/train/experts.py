"""The mixture of experts with gradients, and how evenly they are used. Part of `TrainingDecoder`'s layers."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulo.models.moe import MixtureOfExperts, gated


class TrainingMixture(MixtureOfExperts):
    """The parameters of `MixtureOfExperts`; beside the result it says how unevenly the experts were used."""

    __call__: Callable[..., tuple[Tensor, Tensor]]  # type: ignore[assignment]

    def forward(self, x: Tensor, rows: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        scores = self.router.scores(x)
        weights, chosen = self.router.choose(scores)
        routed = self._routed(x, weights, chosen)
        if self.shared is not None:
            routed = routed + self.shared(x)
        return routed, balance_sum(scores, chosen, rows)

    def _routed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The weighted sum of each token's experts. No token is dropped, however many want one expert."""
        experts, per_token = self.experts, chosen.shape[1]
        by_expert = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=experts.experts).tolist()
        inputs = x[by_expert // per_token].split(counts)
        results = [
            F.linear(gated(F.linear(part, experts.gate_up[expert])), experts.down[expert])
            for expert, part in enumerate(inputs)
        ]
        back = torch.empty_like(by_expert)
        back[by_expert] = torch.arange(len(by_expert), device=x.device)
        own = torch.cat(results)[back].view(-1, per_token, x.shape[-1])
        return (own * weights.to(x.dtype)[..., None]).sum(1)


def balance_sum(scores: Tensor, chosen: Tensor, rows: int) -> Tensor:
    """Σ over rows of Σ over experts of f·P: the share of choices times the mean score, 1 per row when even.

    The sequence-wise balance loss of DeepSeek-V3 (2024, equations 17 to 20). Over each sequence, not over the
    batch, so that the loss of a batch is the sum over its parts, however they are spread over devices.
    """
    experts = scores.shape[-1]
    by_row = scores.view(rows, -1, experts)
    mean_score = (by_row / by_row.sum(-1, keepdim=True)).mean(1)  # P, [rows, experts]
    choices = chosen.view(rows, -1)
    counts = torch.zeros(rows, experts, dtype=scores.dtype, device=scores.device)
    counts.scatter_add_(1, choices, torch.ones_like(choices, dtype=scores.dtype))
    share = counts * (experts / choices.shape[1])  # f
    return (share * mean_score).sum()

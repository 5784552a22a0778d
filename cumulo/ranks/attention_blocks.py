"""Blocks of attention, the steps of a ring: in torch with a mask, or by our kernel. Made by
`cumulo.train.parallel.context_parallel`, computed by `cumulo.ranks.ring_attention`."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class MaskedBlock:
    """Everywhere, for windows and for heads whose keys and values differ in size."""

    queries: slice
    keys: slice
    visible: Tensor  # [B, Q, K]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        scores = self._scores(query, key, scale)
        log_sum = scores.logsumexp(-1)  # [B, KV, G, Q]
        weights = (scores - log_sum[..., None]).exp().nan_to_num(0.0)  # of a query that sees none of the keys
        out = torch.einsum("bkgqs,bske->bqkge", weights, value.to(scores.dtype)).flatten(2, 3)
        return out, log_sum.flatten(1, 2).transpose(1, 2)

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        log_sum: Tensor,
        grad: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """FlashAttention's backward (Dao et al. 2022, algorithm 4) with all keys of the block at once."""
        kv_heads, wide = key.shape[2], log_sum.dtype
        scores = self._scores(query, key, scale)
        grouped_sum = log_sum.transpose(1, 2).unflatten(1, (kv_heads, -1))
        weights = (scores - grouped_sum[..., None]).exp()
        grouped_grad = grad.to(wide).unflatten(2, (kv_heads, -1))  # [B, Q, KV, G, E]
        grad_value = torch.einsum("bkgqs,bqkge->bske", weights, grouped_grad)
        grad_weights = torch.einsum("bqkge,bske->bkgqs", grouped_grad, value.to(wide))
        delta = (grad.to(wide) * out.to(wide)).sum(-1).transpose(1, 2).unflatten(1, (kv_heads, -1))
        grad_scores = weights * (grad_weights - delta[..., None]) * scale
        grad_query = torch.einsum("bkgqs,bskd->bqkgd", grad_scores, key.to(wide)).flatten(2, 3)
        grouped_query = query.to(wide).unflatten(2, (kv_heads, -1))
        grad_key = torch.einsum("bkgqs,bqkgd->bskd", grad_scores, grouped_query)
        return grad_query, grad_key, grad_value

    def _scores(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        """[B, KV, query heads per key head, Q, K]"""
        wide = torch.promote_types(query.dtype, torch.float32)
        grouped = query.unflatten(2, (key.shape[2], -1))
        scores = torch.einsum("bqkgd,bskd->bkgqs", grouped, key).to(wide) * scale
        return scores.masked_fill(~self.visible[:, None, None], -torch.inf)


@dataclass(frozen=True, slots=True, eq=False)
class PackedBlock:
    """On a GPU: our flash kernel, which takes documents laid end to end. Keys and values have one shape."""

    queries: slice
    keys: slice
    # [documents + 1] int32: where each document begins among these queries; the same of keys.
    query_starts: Tensor
    key_starts: Tensor
    causal: bool  # queries and keys are the same tokens; otherwise all the keys come before the queries

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        # Imported here: without a GPU there need be no Triton.
        from cumulo.kernels.cuda.attention.flash_attention import flash_attention_op

        out, log_sum = flash_attention_op(
            *(states.flatten(0, 1) for states in (query, key, value)),
            self.query_starts,
            self.key_starts,
            self.causal,
            scale,
        )
        return out.view(*query.shape[:-1], -1), log_sum.T.unflatten(0, query.shape[:2])

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        log_sum: Tensor,
        grad: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from cumulo.kernels.cuda.attention.flash_attention import flash_attention_backward_op

        grads = flash_attention_backward_op(
            *(states.flatten(0, 1) for states in (query, key, value, out)),
            log_sum.flatten(0, 1).T.contiguous(),
            grad.flatten(0, 1),
            None,
            self.query_starts,
            self.key_starts,
            self.causal,
            scale,
        )
        of_query, of_key, of_value = grads
        return of_query.view_as(query), of_key.view_as(key), of_value.view_as(value)

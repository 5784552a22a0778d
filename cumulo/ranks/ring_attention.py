"""Ring attention (Liu et al. 2023): keys and values pass round a ring of ranks, and all ranks' queries see them.
Called by `cumulo.train.parallel.context_parallel`.

While a block of keys is computed with, the next is on its way. Partial results are merged by their log-sum-exp, as
in FlashAttention (Dao et al. 2022); backward passes the keys round again, and their gradients travel with them
until they are home.

A rank has two chunks of every row, one from the front and one from the back, so that under a causal mask all have
the same work (zigzag): with a rank before it in the ring it computes both its chunks with the other's front chunk,
with a rank behind it its back chunk with both of the other's, and what is left out nobody could see.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cumulo.ranks.collectives import Passing, Ring


@dataclass(frozen=True, slots=True, eq=False)
class MaskedBlock:
    """Everywhere, for windows and for heads whose keys and values differ in size."""

    queries: slice  # their places among the rank's tokens of a row; the same of `keys`
    keys: slice
    visible: Tensor  # [B, Q, K]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """query [B, Q, H, D], key [B, K, KV, D], value [B, K, KV, E] -> out [B, Q, H, E] and log-sum-exp [B, Q, H]
        in at least float32; zeros and -inf for a query that sees none of the keys."""
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
        """Gradients of query, key and value, given the merged results of all blocks: FlashAttention's backward (Dao
        et al. 2022, algorithm 4) with all keys of the block at once."""
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
            self.query_starts,
            self.key_starts,
            self.causal,
            scale,
        )
        of_query, of_key, of_value = grads
        return of_query.view_as(query), of_key.view_as(key), of_value.view_as(value)


# Some of a rank's queries and some of another's keys, who of them see each other, and how it is computed.
AttentionBlock: TypeAlias = MaskedBlock | PackedBlock


_KEYS, _GRADIENTS = 0, 1  # tags of the two streams of messages


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, ring: Ring, blocks: list[AttentionBlock | None]
) -> Tensor:
    """query [B, L, H, D], key [B, L, KV, D], value [B, L, KV, E] of this rank -> [B, L, H, E].

    `blocks[j]`: what to do with the keys of rank j of the ring, None: nothing of it is visible.
    """
    out: Tensor = _RingAttention.apply(query, key, value, scale, ring, blocks)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        ring: Ring,
        blocks: list[AttentionBlock | None],
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        rows, length, heads, _ = query.shape
        out = torch.zeros(rows, length, heads, value.shape[-1], dtype=wide, device=query.device)
        log_sum = torch.full((rows, length, heads), -torch.inf, dtype=wide, device=query.device)
        pair = own = torch.cat((key, value), -1)
        for step in range(ring.size):
            passing = ring.pass_on(pair, _KEYS) if step + 1 < ring.size else None
            block = blocks[(ring.index - step) % ring.size]
            if block is not None:
                keys, values = pair[:, block.keys].split((key.shape[-1], value.shape[-1]), -1)
                part, part_sum = block.forward(query[:, block.queries], keys, values, scale)
                _merge(out[:, block.queries], log_sum[:, block.queries], part, part_sum)
            if passing is not None:
                pair = passing.wait()
        mixed = out.to(query.dtype)
        ctx.save_for_backward(query, own, mixed, log_sum)
        ctx.sizes, ctx.scale, ctx.ring, ctx.blocks = (key.shape[-1], value.shape[-1]), scale, ring, blocks
        return mixed

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        query, pair, out, log_sum = ctx.saved_tensors
        ring: Ring = ctx.ring
        grad = upstream[0]
        grad_query = torch.zeros_like(query, dtype=log_sum.dtype)
        passing_grads: Passing | None = None
        for step in range(ring.size):
            passing = ring.pass_on(pair, _KEYS) if step + 1 < ring.size else None
            block = ctx.blocks[(ring.index - step) % ring.size]
            grad_pair = torch.zeros_like(pair, dtype=log_sum.dtype)
            if block is not None:
                mine = block.queries
                keys, values = pair[:, block.keys].split(ctx.sizes, -1)
                parts = block.backward(
                    query[:, mine], keys, values, out[:, mine], log_sum[:, mine], grad[:, mine], ctx.scale
                )
                grad_query[:, mine] += parts[0]
                grad_pair[:, block.keys] = torch.cat(parts[1:], -1)
            if passing_grads is not None:  # what the ranks before us found for these keys
                grad_pair += passing_grads.wait()
            if ring.size > 1:
                passing_grads = ring.pass_on(grad_pair, _GRADIENTS)
            if passing is not None:
                pair = passing.wait()
        if passing_grads is not None:
            grad_pair = passing_grads.wait()
        grad_key, grad_value = grad_pair.to(query.dtype).split(ctx.sizes, -1)
        return grad_query.to(query.dtype), grad_key, grad_value, None, None, None


def _merge(out: Tensor, log_sum: Tensor, part: Tensor, part_sum: Tensor) -> None:
    """Attention over two sets of keys from the attention over each (Liu et al. 2023), in place in the first."""
    merged = torch.logaddexp(log_sum, part_sum)
    out.mul_((log_sum - merged).exp_()[..., None]).addcmul_(part, (part_sum - merged).exp_()[..., None])
    log_sum.copy_(merged)

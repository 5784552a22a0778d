"""Attention with gradients and without a cache: projections around the `Documents` of a batch. Part of
`TrainingDecoder`'s layers."""

from collections.abc import Callable

import torch
from torch import Tensor

from cumulo.models.attention import Attention, LatentAttention
from cumulo.models.linear import RMSNorm
from cumulo.models.rope import Rotation
from cumulo.spec.model import MLASpec, ModelSpec
from cumulo.train.model.arithmetic import Arithmetic, fusible, product
from cumulo.train.model.document_mask import Documents
from cumulo.train.model.split import LayerSettings


class TrainingAttention(Attention):
    """The parameters of `Attention`, without its cache."""

    __call__: Callable[..., Tensor]

    def __init__(self, spec: ModelSpec, layer: int, settings: LayerSettings) -> None:
        super().__init__(spec, layer, kind=settings.kind)
        self.tensor, self.recompute, self.fused = settings.split.tensor, settings.recompute, settings.fused

    def forward(  # type: ignore[override]
        self, x: Tensor, norm: RMSNorm, rotation: Rotation, documents: Documents
    ) -> Tensor:
        """x and what attention adds to it."""
        again = "attention" in self.recompute.operations  # which overwriting what it is computed from forbids
        if self.fused is not None and not again and fusible(self.qkv, self.output):
            return self._fused(x, norm, rotation, documents, self.fused)
        projected = self.recompute.operation("norm", self._project, x, norm)
        partial = self.recompute.operation("attention", self._mix, projected, rotation, documents)
        return x + self.tensor.leave(partial, self.output.bias)

    def _fused(
        self, x: Tensor, norm: RMSNorm, rotation: Rotation, documents: Documents, arithmetic: Arithmetic
    ) -> Tensor:
        from cumulo.train.model.fused import normed_product, rotated

        x, projected = normed_product(x, norm.weight, self.qkv.weight, norm.eps, arithmetic)
        if self.qk_norm or rotation.interleaved:
            query, key, value = self._turned(projected, rotation)
        else:
            query, key, value = rotated(projected, *rotation.angles, self.heads, self.kv_heads)
        mixed = documents.attend(query, key, value, self.scale, self.window)
        return product(mixed.flatten(1), self.output.weight, arithmetic, residual=x)

    def _project(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return self.qkv(self.tensor.enter(norm(x)))

    def _turned(self, projected: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        states = projected.view(len(projected), -1, self.head_dim)
        query, key, value = states.split((self.heads, self.kv_heads, self.kv_heads), 1)
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        return rotation.apply(query), rotation.apply(key), value

    def _mix(self, projected: Tensor, rotation: Rotation, documents: Documents) -> Tensor:
        query, key, value = self._turned(projected, rotation)
        mixed = documents.attend(query, key, value, self.scale, self.window)
        return self.tensor.partial(self.output, mixed.flatten(1))


class TrainingLatentAttention(LatentAttention):
    """The parameters of `LatentAttention`; keys and values are expanded per head, which is less work when all
    tokens are queries (DeepSeek-V2, section 2.1)."""

    __call__: Callable[..., Tensor]

    def __init__(self, spec: ModelSpec, mla: MLASpec, layer: int, settings: LayerSettings) -> None:
        super().__init__(spec, mla, layer, kind=settings.kind)
        self.tensor, self.recompute = settings.split.tensor, settings.recompute

    def forward(  # type: ignore[override]
        self, x: Tensor, norm: RMSNorm, rotation: Rotation, documents: Documents
    ) -> Tensor:
        query, compressed = self.recompute.operation("norm", self._project, x, norm)
        partial = self.recompute.operation("attention", self._mix, query, compressed, rotation, documents)
        return x + self.tensor.leave(partial, self.output.bias)

    def _project(self, x: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """The queries, or the latent they are made of, and the keys' and values' latent."""
        x = self.tensor.enter(norm(x))
        return (self.q if self.mla.q_rank is None else self.q_a)(x), self.kv_a(x)

    def _mix(self, query: Tensor, compressed: Tensor, rotation: Rotation, documents: Documents) -> Tensor:
        mla, tokens = self.mla, len(query)
        projected = query if mla.q_rank is None else self.q_b(self.q_a_norm(query))
        nope, rope = projected.view(tokens, self.heads, -1).split((mla.nope_head_dim, mla.rope_head_dim), -1)
        latent, shared = compressed.split((mla.kv_rank, mla.rope_head_dim), -1)
        expanded = self.kv_b(self.kv_a_norm(latent)).view(tokens, self.heads, -1)
        key_nope, value = expanded.split((mla.nope_head_dim, mla.value_head_dim), -1)
        turned = rotation.apply(shared.contiguous()[:, None]).expand(-1, self.heads, -1)
        query = torch.cat((nope, rotation.apply(rope.contiguous())), -1)
        mixed = documents.attend(query, torch.cat((key_nope, turned), -1), value, self.scale, self.window)
        return self.tensor.partial(self.output, mixed.flatten(1))

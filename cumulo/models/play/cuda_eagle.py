"""CudaEagle: an EagleHead in GPU kernels, into buffers that never move, so that rounds of drafting and verifying
can be captured in one CUDA graph. Its keys and values lie in a cache of its own under the served model's blocks.
"""

import torch
from torch import Tensor

from cumulo.errors import ConfigError
from cumulo.kernels.cuda.attention.paged_attention import AttentionPlan
from cumulo.kernels.cuda.elementwise.rms_norm import norm_pair, rms_norm
from cumulo.kernels.cuda.elementwise.rope_cache import rope_cache
from cumulo.kernels.cuda.elementwise.swiglu import swiglu
from cumulo.kernels.cuda.linear import few_dot
from cumulo.kernels.cuda.linear.linear import choose, linear
from cumulo.kernels.cuda.linear.product import PagedRotation
from cumulo.kernels.cuda.sampling.greedy_rounds import fits_tiles, likeliest_tiles, tile_parts
from cumulo.kernels.cuda.sampling.rounds import PART, logit_parts
from cumulo.models.batch import KVCache
from cumulo.models.heads.eagle import EagleHead
from cumulo.models.play.cuda_decoder import CudaDecoder

_MOST_COLUMNS = 2048  # of the hidden states whose products one program takes whole rows of


class CudaEagle:
    def __init__(self, head: EagleHead, served: CudaDecoder, max_rows: int) -> None:
        """`head`: on the served model's device, in its precision. It proposes for up to `max_rows` rows at once."""
        spec, own = served.spec, head.spec
        if spec.mla is not None or (own.heads, own.kv_heads, own.head_dim) != (
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
        ):
            raise ConfigError(
                f"on a GPU a draft head has the served model's attention heads so far ({spec.heads} and "
                f"{spec.kv_heads} of {spec.head_dim}; this one has {own.heads} and {own.kv_heads} of "
                f"{own.head_dim}): choose device=cpu"
            )
        if None not in served.windows:
            raise ConfigError(
                "on a GPU a draft head needs a model with full attention in some layer: choose device=cpu"
            )
        self.head, self.spec, self.embed = head, own, served.decoder.embed.weight
        device, dtype, hidden = served.device, served.dtype, own.hidden
        head.rotary.rotation_at(torch.zeros(0, dtype=torch.int64, device=device))
        assert head.rotary.table is not None
        self.cosine, self.sine = (table.contiguous() for table in head.rotary.table)
        self.token_of = head.token_of.to(device=device, dtype=torch.int32)

        def buffer(rows: int, columns: int) -> Tensor:
            return torch.empty((rows, columns), dtype=dtype, device=device)

        tokens, width = served.max_tokens, own.heads * own.head_dim
        self.stream, self.paired = buffer(tokens, hidden), buffer(tokens, 2 * hidden)
        self.qkv = buffer(tokens, width + 2 * own.kv_heads * own.head_dim)
        self.mixed = buffer(min(tokens, 2 * served.max_outputs + 64), width)
        self.rows_stream, self.rows_normed = buffer(max_rows, hidden), buffer(max_rows, hidden)
        self.rows_mixed = buffer(max_rows, width)
        self.gate_up, self.activated = buffer(max_rows, 2 * own.ffn_hidden), buffer(max_rows, own.ffn_hidden)
        self.logits = buffer(max_rows, len(self.token_of))
        parts = (max_rows, -(-len(self.token_of) // PART))
        self._best = torch.empty(parts, dtype=torch.float32, device=device)
        self._places = torch.empty(parts, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        own = (self.stream, self.paired, self.qkv, self.mixed, self.rows_stream, self.rows_normed,
               self.rows_mixed, self.gate_up, self.activated, self.logits, self._best, self._places)  # fmt: skip
        return sum(one.nbytes for one in own)

    def see(
        self, tapped: Tensor, token_ids: Tensor, positions: Tensor, slots: Tensor, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        """Stream and queries [T, ...] at places of the served model, whose keys and values are written. `tapped`:
        its stream there; `token_ids`: the tokens behind them."""
        stream = linear(tapped, self.head.fc.weight, out=self.stream[: len(tapped)])
        return stream, self.see_own(stream, token_ids, positions, slots, cache)

    def see_own(
        self, stream: Tensor, token_ids: Tensor, positions: Tensor, slots: Tensor, cache: KVCache
    ) -> Tensor:
        """Queries behind its own proposals, rotated; keys and values go to the cache. `stream` is what `output`
        returned."""
        tokens, head, spec = len(stream), self.head, self.spec
        norms = (head.token_norm.weight, head.stream_norm.weight)
        both = norm_pair(self.embed, token_ids, stream, *norms, spec.norm_eps, self.paired[:tokens])
        qkv, weight = self.qkv[:tokens], head.qkv.weight
        keys, values = cache.keys[0], cache.values[0]
        if self._rotates(tokens):
            rotation = PagedRotation(self.cosine, self.sine, positions, slots, keys, values, spec.heads)
            return linear(both, weight, qkv, rotation=rotation)
        linear(both, weight, qkv)
        rope_cache(
            qkv, self.cosine, self.sine, positions, slots, keys, values, spec.heads,
            interleaved=spec.rope_interleaved,
        )  # fmt: skip
        return qkv

    def _rotates(self, tokens: int) -> bool:
        """Whether the product of so many rows rotates queries and keys itself."""
        weight, spec = self.head.qkv.weight, self.spec
        plain = weight.is_cuda and weight.element_size() == 2 and not spec.rope_interleaved
        return (
            plain and spec.head_dim % 32 == 0 and self.fits(tokens) and few_dot.takes(tokens, weight.shape[1])
        )

    def output(
        self, stream: Tensor, qkv: Tensor, attention: AttentionPlan, cache: KVCache, rows: Tensor | None
    ) -> Tensor:
        """The head's stream [R, hidden] behind the places of `rows` (None: all), in a buffer of its own."""
        tokens, spec, head = len(stream), self.spec, self.head
        mixed = self.mixed[:tokens]
        query = qkv.view(tokens, -1, spec.head_dim)[:, : spec.heads]
        attention.attend(
            query,
            cache.keys[0],
            cache.values[0],
            mixed.view(tokens, spec.heads, spec.head_dim),
            spec.head_dim**-0.5,
        )
        count = tokens if rows is None else len(rows)
        out = self.rows_stream[:count]
        if rows is not None:
            torch.index_select(stream, 0, rows, out=out)
            mixed = torch.index_select(mixed, 0, rows, out=self.rows_mixed[:count])
        linear(mixed, head.output.weight, out=out, residual=stream if rows is None else out)
        activated, gate_up = self.activated[:count], self.gate_up[:count]
        if choose(count, head.ffn.gate_up.weight, True).kernel != "library":
            linear(
                out, head.ffn.gate_up.weight, out=activated, norm_weight=head.ffn_norm.weight, eps=spec.norm_eps,
                swiglu=True,
            )  # fmt: skip
        else:
            self._normed_product(out, head.ffn_norm.weight, head.ffn.gate_up.weight, gate_up)
            swiglu(gate_up, activated)
        return linear(activated, head.ffn.down.weight, out=out, residual=out)

    def fits(self, rows: int) -> bool:
        """Whether so few rows are played that the kernels made for a round's serve them."""
        return rows <= few_dot.MAX_ROWS and self.spec.hidden <= _MOST_COLUMNS

    def likeliest(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Of each part of the head's own tokens the largest logit [R, parts], and whose it is."""
        norm, weight, rows = self.head.final_norm.weight, self.head.head.weight, len(stream)
        tiled = fits_tiles(rows, self.spec.hidden)
        parts = tile_parts(len(weight)) if tiled else self._best.shape[1]
        best, places = (one.view(-1)[: rows * parts].view(rows, parts) for one in (self._best, self._places))
        if tiled:
            likeliest_tiles(stream, weight, norm, self.spec.norm_eps, best, places)
        else:
            logit_parts(self.logits_of(stream), best, places)
        return best, places

    def logits_of(self, stream: Tensor) -> Tensor:
        """Over the head's own tokens."""
        return self._normed_product(
            stream, self.head.final_norm.weight, self.head.head.weight, self.logits[: len(stream)]
        )

    def _normed_product(self, x: Tensor, norm: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        eps = self.spec.norm_eps
        if choose(len(x), weight).kernel != "library":
            return linear(x, weight, out=out, norm_weight=norm, eps=eps)
        normed = rms_norm(x, norm, eps, out=self.rows_normed[: len(x)])
        return linear(normed, weight, out=out)

"""CudaEagle: an EagleHead in GPU kernels, into buffers that never move, so that rounds of drafting and verifying
can be captured in one CUDA graph. Its keys and values lie in a cache of its own under the served model's blocks.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cumulo.errors import ConfigError
from cumulo.kernels.cuda.attention.paged_attention import AttentionPlan
from cumulo.kernels.cuda.elementwise.rms_norm import rms_norm
from cumulo.kernels.cuda.elementwise.rope_cache import rope_cache
from cumulo.kernels.cuda.elementwise.swiglu import swiglu
from cumulo.kernels.cuda.linear.draft_linear import fits, likeliest, likeliest_parts, paired_linear
from cumulo.kernels.cuda.linear.few_linear import SMALL_MATRIX, FewConfig, default_config, few_linear
from cumulo.kernels.cuda.linear.likeliest_linear import DEFAULT as TILE
from cumulo.kernels.cuda.linear.likeliest_linear import TileConfig, likeliest_tiles, tile_parts
from cumulo.kernels.cuda.linear.likeliest_linear import fits as fits_tiles
from cumulo.kernels.cuda.linear.linear import choose, linear
from cumulo.kernels.cuda.linear.rotated_linear import rotated_linear
from cumulo.kernels.cuda.sampling.tree_growth import PART, logit_parts
from cumulo.models.batch import KVCache
from cumulo.models.heads.eagle import EagleHead
from cumulo.models.play.cuda_decoder import CudaDecoder


def few_config(rows: int, weight: Tensor, swiglu: bool = False) -> FewConfig:
    """How few_linear cuts this product: as measured, or by rule; it starts as the head's other kernels do."""
    found = choose(rows, weight, swiglu).config
    if not isinstance(found, FewConfig):
        found = default_config(rows, weight.shape[0], weight.shape[1], swiglu)
    return replace(found, waits_first=False)


@dataclass(slots=True)
class RoundWays:
    """How parts of a round are played. `benchmarks/gpu_round_ways.py` compares them."""

    rotates_in_product: bool = True  # the head's queries and keys, by the product that makes them
    enters_at_once: bool = True  # inputs, work list and embeddings of a round in one launch
    draws_without_logits: bool = True  # greedy draws, on the tensor cores
    proposes_in_tiles: bool = True  # ... and the head's proposals
    draw_tile: TileConfig = TILE
    draft_tile: TileConfig = TILE


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
        self.ways = RoundWays()
        device, dtype, hidden = served.device, served.dtype, own.hidden
        head.rotary.rotation_at(torch.zeros(0, dtype=torch.int64, device=device))
        assert head.rotary.table is not None
        self.cosine, self.sine = (table.contiguous() for table in head.rotary.table)
        # The projections see token and stream side by side: of a few rows in one product, of more in two, of which
        # the second adds onto the first.
        self._of_token = head.qkv.weight[:, :hidden].contiguous()
        self._of_stream = head.qkv.weight[:, hidden:].contiguous()
        self.token_of = head.token_of.to(device=device, dtype=torch.int32)

        def buffer(rows: int, columns: int) -> Tensor:
            return torch.empty((rows, columns), dtype=dtype, device=device)

        tokens, width = served.max_tokens, own.heads * own.head_dim
        self.stream, self.embedded, self.normed = (buffer(tokens, hidden) for _ in range(3))
        self.qkv = buffer(tokens, width + 2 * own.kv_heads * own.head_dim)
        self.mixed = buffer(min(tokens, 2 * served.max_outputs + 64), width)
        self.rows_stream, self.rows_normed = buffer(max_rows, hidden), buffer(max_rows, hidden)
        self.rows_mixed = buffer(max_rows, width)
        self.gate_up, self.activated = buffer(max_rows, 2 * own.ffn_hidden), buffer(max_rows, own.ffn_hidden)
        self.logits = buffer(max_rows, len(self.token_of))
        parts = (max_rows, likeliest_parts(len(self.token_of)))
        self._best = torch.empty(parts, dtype=torch.float32, device=device)
        self._places = torch.empty(parts, dtype=torch.int32, device=device)
        self._masses = torch.empty(parts, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        own = (self.stream, self.embedded, self.normed, self.qkv, self.mixed, self.rows_stream, self.rows_normed,
               self.rows_mixed, self.gate_up, self.activated, self.logits, self._best, self._places,
               self._masses)  # fmt: skip
        return sum(one.nbytes for one in own)

    def see(
        self, tapped: Tensor, token_ids: Tensor, positions: Tensor, slots: Tensor, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        """Stream and queries [T, ...] at places of the served model, whose keys and values are written. `tapped`:
        its stream there; `token_ids`: the tokens behind them."""
        stream = linear(tapped, self.head.fc.weight, out=self.stream[: len(tapped)])
        return stream, self._attended(stream, token_ids, positions, slots, cache)

    def see_own(
        self, stream: Tensor, token_ids: Tensor, positions: Tensor, slots: Tensor, cache: KVCache
    ) -> Tensor:
        """The same behind its own proposals: `stream` is what `output` returned."""
        return self._attended(stream, token_ids, positions, slots, cache)

    def _attended(
        self, stream: Tensor, token_ids: Tensor, positions: Tensor, slots: Tensor, cache: KVCache
    ) -> Tensor:
        tokens, head = len(stream), self.head
        qkv, norms = self.qkv[:tokens], (head.token_norm.weight, head.stream_norm.weight)
        if self.fits(tokens) and self.ways.rotates_in_product:
            return rotated_linear(
                self.embed, token_ids, stream, head.qkv.weight, qkv, *norms, self.spec.norm_eps, self.cosine,
                self.sine, positions, slots, cache.keys[0], cache.values[0], self.spec.heads,
                interleaved=self.spec.rope_interleaved,
            )  # fmt: skip
        if self.fits(tokens):
            paired_linear(self.embed, token_ids, stream, head.qkv.weight, qkv, *norms, self.spec.norm_eps)
        else:
            embedded = torch.index_select(self.embed, 0, token_ids, out=self.embedded[:tokens])
            self._normed_product(embedded, norms[0], self._of_token, qkv)
            self._normed_product(stream, norms[1], self._of_stream, qkv, residual=qkv)
        rope_cache(
            qkv, self.cosine, self.sine, positions, slots, cache.keys[0], cache.values[0], self.spec.heads,
            interleaved=self.spec.rope_interleaved,
        )  # fmt: skip
        return qkv

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
        down = head.ffn.down.weight
        few = self.fits(count) and down.numel() <= SMALL_MATRIX
        if few:
            weight = head.output.weight
            few_linear(mixed, weight, out, residual=stream, rows=rows, config=few_config(count, weight))
        else:
            if rows is not None:
                torch.index_select(stream, 0, rows, out=out)
                mixed = torch.index_select(mixed, 0, rows, out=self.rows_mixed[:count])
            linear(mixed, head.output.weight, out=out, residual=stream if rows is None else out)
        activated, gate_up = self.activated[:count], self.gate_up[:count]
        if few:
            weight = head.ffn.gate_up.weight
            few_linear(
                out, weight, activated, norm_weight=head.ffn_norm.weight, eps=spec.norm_eps, swiglu=True,
                config=few_config(count, weight, swiglu=True),
            )  # fmt: skip
            return few_linear(activated, down, out, residual=out, config=few_config(count, down))
        if choose(count, head.ffn.gate_up.weight, True).kernel != "library":
            linear(
                out, head.ffn.gate_up.weight, out=activated, norm_weight=head.ffn_norm.weight, eps=spec.norm_eps,
                swiglu=True,
            )  # fmt: skip
        else:
            self._normed_product(out, head.ffn_norm.weight, head.ffn.gate_up.weight, gate_up)
            swiglu(gate_up, activated)
        linear(activated, down, out=out, residual=out)
        return out

    def fits(self, rows: int) -> bool:
        """Whether so few rows are played that the kernels made for a round's serve them."""
        return fits(rows, self.spec.hidden)

    def likeliest(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Of each part of the head's own tokens the largest logit [R, parts], and whose it is."""
        norm, weight = self.head.final_norm.weight, self.head.head.weight
        if self.ways.proposes_in_tiles and fits_tiles(len(stream), self.spec.hidden):
            tile = self.ways.draft_tile
            best, places, _ = self._parts_of(len(stream), tile_parts(len(weight), tile))
            likeliest_tiles(stream, weight, norm, self.spec.norm_eps, best, places, config=tile)
            return best, places
        best, places = self._best[: len(stream)], self._places[: len(stream)]
        likeliest(stream, weight, norm, self.spec.norm_eps, best, places)
        return best, places

    def proposals(self, stream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same for any number of rows, and each part's mass: what a tree grows from. Parts are small here: each
        offers only its largest, and a second choice may be next to the first."""
        rows, tokens = len(stream), len(self.token_of)
        norm, weight = self.head.final_norm.weight, self.head.head.weight
        if self.fits(rows):
            best, places, masses = self._best[:rows], self._places[:rows], self._masses[:rows]
            likeliest(stream, weight, norm, self.spec.norm_eps, best, places, masses)
        else:
            best, places, masses = self._parts_of(rows, -(-tokens // PART))
            logit_parts(self.logits_of(stream), best, places, masses)
        return best, places, masses

    def _parts_of(self, rows: int, parts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Room for the largest logits of fewer parts than there are at most."""
        own = (self._best, self._places, self._masses)
        best, places, masses = (one.view(-1)[: rows * parts].view(rows, parts) for one in own)
        return best, places, masses

    def logits_of(self, stream: Tensor) -> Tensor:
        """Over the head's own tokens."""
        return self._normed_product(
            stream, self.head.final_norm.weight, self.head.head.weight, self.logits[: len(stream)]
        )

    def _normed_product(
        self, x: Tensor, norm: Tensor, weight: Tensor, out: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        eps = self.spec.norm_eps
        if choose(len(x), weight).kernel != "library":
            return linear(x, weight, out=out, norm_weight=norm, eps=eps, residual=residual)
        normed = rms_norm(x, norm, eps, out=self.normed[: len(x)])
        return linear(normed, weight, out=out, residual=residual)

"""RankDecoder: one rank's part of a decoder, played with torch's operators and summed with the other ranks'. A
runner uses it as it uses a whole `Decoder`; dense models on CPUs are played by `FusedDecoder` in the same way.

What a half-layer computes of a slice is a partial sum (Shoeybi et al. 2019, section 3): two sums over ranks a
layer. The stream between layers is the same on all ranks of a stage that compute the same sequences.
"""

from dataclasses import replace

import torch
from torch import Tensor

from cumulo.layout.expert_placement import HeldCopy
from cumulo.layout.serving import RankPart
from cumulo.models.batch import ForwardBatch, KVCache
from cumulo.models.decoder import Decoder, Layer
from cumulo.models.linear import Linear, RMSNorm, TensorKind
from cumulo.models.moe import Experts, FeedForward, MixtureOfExperts
from cumulo.models.play.rank_links import RankLinks
from cumulo.models.play.spread_experts import SpreadExperts, held_experts


def empty_rank_decoder(part: RankPart, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    """A decoder of this rank's sizes, uninitialised, with nothing that other ranks or stages have."""
    spec = part.local
    decoder, kind = Decoder(spec, dtype, "meta"), TensorKind(dtype, "meta")
    if not part.has_embedding:
        decoder.embed = Linear(spec.hidden, 0, kind=kind)
    if not part.has_head and not spec.tied_embeddings:
        decoder.head = Linear(spec.hidden, 0, kind=kind)
    if not part.last:
        decoder.final_norm = RMSNorm(0, spec.norm_eps, kind=kind)
    if spec.moe is not None and part.layout.ep > 1:
        held = replace(spec.moe, experts=len(part.experts))
        for layer in decoder.layers:
            assert isinstance(layer, Layer)
            if isinstance(layer.ffn, MixtureOfExperts):
                layer.ffn.experts = Experts(spec, held, kind=kind)
    return decoder.to_empty(device=device)


@torch.no_grad()
def leave_biases_to_one(decoder: Decoder, part: RankPart) -> None:
    """A bias behind a sum over ranks is added by one of them."""
    if part.carries_stream:
        return
    for name, parameter in decoder.named_parameters():
        if name.endswith(("attention.output.bias", "down.bias")):
            parameter.zero_()


def embed_slice(embed: Linear, part: RankPart, token_ids: Tensor, links: RankLinks) -> Tensor:
    """Each rank looks up the tokens of its part of the vocabulary; of all others it has zeros to add."""
    if links.tensor is None:
        return embed.rows(token_ids)
    own = token_ids - part.vocabulary.start
    elsewhere = (own < 0) | (own >= len(part.vocabulary))
    rows = embed.rows(own.masked_fill(elsewhere, 0))
    return links.sum_slices(rows.masked_fill(elsewhere[:, None], 0.0))


class RankDecoder:
    def __init__(
        self, decoder: Decoder, part: RankPart, links: RankLinks, spread: SpreadExperts | None = None
    ) -> None:
        """`spread`: experts with redundant copies."""
        self.decoder, self.part, self.links, self.spread = decoder, part, links, spread

    @property
    def weight_bytes(self) -> int:
        return self.decoder.weight_bytes

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Computes like a whole decoder; the result of a stage that is not the last goes to the next, and is
        empty here."""
        decoder, links = self.decoder, self.links
        if self.spread is not None:
            self.spread.begin_step()
        if decoder.bank is not None:
            decoder.bank.begin(batch.adapters)
        if self.part.first:
            x = embed_slice(decoder.embed, self.part, batch.token_ids, links)
        else:
            x = links.receive_stream(len(batch.token_ids), decoder.dtype)
        rotation = decoder.rotary.rotation_at(batch.positions)
        for layer in decoder.layers:
            assert isinstance(layer, Layer)
            if len(x):  # a data-parallel rank may have none of a step's rows, and still has experts
                mixed = layer.attention(layer.attention_norm(x), rotation, batch, cache)
                x = x + links.sum_slices(mixed)
            x = x + self._feed_forward(layer, layer.ffn_norm(x), batch)
        if not self.part.last:
            links.send_stream(x)
            return x[:0]
        return decoder.final_norm(x[batch.logit_rows])

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocabulary], on every rank of the stage."""
        return self.links.gather_vocabulary(self.decoder.logits(hidden))

    def _feed_forward(self, layer: Layer, x: Tensor, batch: ForwardBatch) -> Tensor:
        ffn, links = layer.ffn, self.links
        if isinstance(ffn, FeedForward) or self.part.layout.ep == 1:
            return links.sum_slices(ffn(x)) if len(x) else x
        # Experts work on the rows of all ranks: how many each has follows from the plan, so nothing is asked for.
        rows = links.gather_rows(x, batch.shares)
        if self.spread is not None:
            routed = self.spread(ffn.experts, rows, *ffn.router(rows))
        else:
            held = [HeldCopy(place, expert, 0, 1) for place, expert in enumerate(self.part.experts)]
            routed = held_experts(ffn.experts, held, rows, *ffn.router(rows), links)
        if links.data is None:
            return links.sum_experts(routed if ffn.shared is None else routed + ffn.shared(x))
        first = sum(batch.shares[: self.part.place.dp])
        total = links.sum_experts(routed)[first : first + len(x)]
        if ffn.shared is None or not len(x):
            return total
        return total + links.sum_slices(ffn.shared(x))

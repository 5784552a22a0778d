"""Writer: a model's answers to thousands of prompts at the same time, all begun and drawn together. A head is
trained on millions of such tokens; what an engine does for each request (admission, blocks, streams) would take
longer than the model itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulo.errors import ConfigError
from cumulo.models.attention import Attention
from cumulo.models.decoder import Decoder, Layer
from cumulo.models.heads.eagle import eagle_layers
from cumulo.models.rope import Rotation


@torch.no_grad()
def hidden_states(decoder: Decoder, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Of texts [examples, n], filled up at their ends: what a head sees [examples, n, features], and the model's
    last states, normed [examples, n, hidden]."""
    examples, n = tokens.shape
    tapped, seen = eagle_layers(decoder.spec.layers), list[Tensor]()
    x = decoder.embed.rows(tokens.flatten())
    rotation = decoder.rotary.rotation_at(torch.arange(n, device=tokens.device).repeat(examples))
    for index, layer in enumerate(decoder.layers):
        seen += [x] * tapped.count(index)
        assert isinstance(layer, Layer)
        x, _, _ = attended(layer, x, rotation, examples)
    return torch.cat(seen, dim=-1).unflatten(0, (examples, n)), decoder.final_norm(x).unflatten(
        0, (examples, n)
    )


def attended(layer: Layer, x: Tensor, rotation: Rotation, examples: int) -> tuple[Tensor, Tensor, Tensor]:
    """A layer over whole texts [examples x n, hidden]; its keys and values [examples, kv_heads, n, head_dim]."""
    attention, n = layer.attention, len(x) // examples
    if not isinstance(attention, Attention) or (attention.window or n) < n:
        raise ConfigError("a head is trained for models with grouped attention over the whole text so far")
    query, key, value = (
        one.unflatten(0, (examples, n)).transpose(1, 2)
        for one in attention.project(layer.attention_norm(x), rotation)
    )
    mixed = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=attention.scale, enable_gqa=True
    )
    x = x + attention.output(mixed.transpose(1, 2).flatten(0, 1).flatten(1))
    return x + layer.ffn(layer.ffn_norm(x)), key, value


_MOST_ROWS = 8192
_MOST_PLACES = {"cpu": 32_768, "cuda": 2_000_000}  # of all rows' keys and values, which are taken in advance
_PROMPT_PLACES = 65_536  # of prompts that are computed at once
_LOOK_EVERY = 32  # steps between two looks at who has ended
_ALIGNED = 8  # places: the attention kernels want their masks so
_LIKELIEST = 128  # tokens among which is drawn


@dataclass(frozen=True, slots=True)
class Draw:
    temperature: float = 0.0
    top_p: float = 1.0


class Writer:
    def __init__(self, decoder: Decoder, ends: Sequence[int], *, seed: int = 0) -> None:
        """`ends`: tokens that end an answer, the last of it. `decoder`: plain, with grouped attention."""
        for layer in decoder.layers:
            if not (isinstance(layer, Layer) and isinstance(layer.attention, Attention)):
                raise ConfigError("a head is trained for models with grouped attention so far")
        self.decoder = decoder
        self._device = decoder.final_norm.weight.device
        self._ends = torch.tensor(list(ends), dtype=torch.int64, device=self._device)
        self._random = torch.Generator(self._device).manual_seed(seed)

    def write(
        self, prompts: Sequence[Sequence[int]], most: int, draws: Sequence[Draw], tell: Callable[[int], None]
    ) -> list[list[int]]:
        """Up to `most` tokens behind each prompt, in the order of the prompts. `tell`: how many are written."""
        answers: list[list[int]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), index))
        done = 0
        while done < len(order):
            places = _MOST_PLACES[self._device.type] // (len(prompts[order[done]]) + most)
            rows = max(1, min(_MOST_ROWS, places))
            taken = order[done : done + rows]
            written = self._together([prompts[i] for i in taken], most, [draws[i] for i in taken])
            for index, answer in zip(taken, written, strict=True):
                answers[index] = answer
            done += len(taken)
            tell(done)
        return answers

    @torch.inference_mode()
    def _together(self, prompts: list[Sequence[int]], most: int, draws: Sequence[Draw]) -> list[list[int]]:
        device, count = self._device, len(prompts)
        lengths = torch.tensor([len(one) for one in prompts], device=device)
        padded = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(one, dtype=torch.int64) for one in prompts], batch_first=True
        ).to(device)
        temperatures = torch.tensor([one.temperature for one in draws], device=device)
        top_p = torch.tensor([one.top_p for one in draws], device=device)
        room = -(-(padded.shape[1] + most) // _ALIGNED) * _ALIGNED
        spec = self.decoder.spec
        shape = (count, spec.kv_heads, room, spec.head_dim)
        caches = [
            (torch.zeros(shape, dtype=self.decoder.dtype, device=device),
             torch.zeros(shape, dtype=self.decoder.dtype, device=device))
            for _ in self.decoder.layers
        ]  # fmt: skip
        hidden = self._begin(padded, lengths, caches)
        written = torch.full((count, most), -1, dtype=torch.int64, device=device)
        who = torch.arange(count, device=device)  # is still written
        going = torch.ones(count, dtype=torch.bool, device=device)
        sampled = (temperatures > 0).nonzero()[:, 0]
        longest = padded.shape[1]
        for step in range(most):
            drawn = self._drawn(self.decoder.logits(hidden), sampled, temperatures, top_p)
            written[who, step] = torch.where(going, drawn, -1)
            going &= ~torch.isin(drawn, self._ends)
            if step % _LOOK_EVERY == _LOOK_EVERY - 1:
                left = int(going.sum())
                if left == 0:
                    break
                if left <= 0.8 * len(who):
                    kept = going.nonzero()[:, 0]
                    who, lengths, drawn, temperatures, top_p = (
                        one[kept] for one in (who, lengths, drawn, temperatures, top_p)
                    )
                    going, sampled = going[kept], (temperatures > 0).nonzero()[:, 0]
                    for index, (keys, values) in enumerate(caches):
                        caches[index] = keys[kept], values[kept]
                        del keys, values
            if step < most - 1:
                hidden = self._step(drawn, lengths, longest + step + 1, caches)
                lengths = lengths + 1
        return [row[row >= 0].tolist() for row in written.cpu()]

    def _begin(self, tokens: Tensor, lengths: Tensor, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Computes prompts [rows, n], filled up at their ends; returns the last states, normed."""
        n, ended = tokens.shape[1], list[Tensor]()
        rows = max(1, _PROMPT_PLACES // n)
        for first in range(0, len(tokens), rows):
            part = slice(first, first + rows)
            some = tokens[part]
            x = self.decoder.embed.rows(some.flatten())
            rotation = self.decoder.rotary.rotation_at(torch.arange(n, device=x.device).repeat(len(some)))
            for layer, (keys, values) in zip(self.decoder.layers, caches, strict=True):
                assert isinstance(layer, Layer)
                x, key, value = attended(layer, x, rotation, len(some))
                keys[part, :, :n], values[part, :, :n] = key, value
            last = x.unflatten(0, (len(some), n))[torch.arange(len(some)), lengths[part] - 1]
            ended.append(self.decoder.final_norm(last))
        return torch.cat(ended)

    def _step(self, tokens: Tensor, places: Tensor, most: int, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One token more for every row, at its place; no row is longer than `most` then."""
        rows = torch.arange(len(tokens), device=tokens.device)
        x, rotation = self.decoder.embed.rows(tokens), self.decoder.rotary.rotation_at(places)
        spec, most = self.decoder.spec, -(-most // _ALIGNED) * _ALIGNED
        unseen = torch.arange(most, device=tokens.device) > places[:, None]
        bias = torch.zeros(unseen.shape, dtype=x.dtype, device=x.device).masked_fill_(unseen, -torch.inf)
        bias = bias[:, None, None].expand(-1, spec.kv_heads, spec.heads // spec.kv_heads, -1)
        for layer, (keys, values) in zip(self.decoder.layers, caches, strict=True):
            assert isinstance(layer, Layer) and isinstance(layer.attention, Attention)
            attention = layer.attention
            query, key, value = attention.project(layer.attention_norm(x), rotation)
            keys[rows, :, places], values[rows, :, places] = key, value
            mixed = F.scaled_dot_product_attention(
                query.unflatten(1, (attention.kv_heads, -1)), keys[:, :, :most], values[:, :, :most],
                attn_mask=bias, scale=attention.scale,
            )  # fmt: skip
            x = x + attention.output(mixed.flatten(1))
            x = x + layer.ffn(layer.ffn_norm(x))
        ended: Tensor = self.decoder.final_norm(x)
        return ended

    def _drawn(self, logits: Tensor, sampled: Tensor, temperatures: Tensor, top_p: Tensor) -> Tensor:
        """The likeliest token of each row, but of `sampled` rows one that is drawn."""
        likeliest = logits.argmax(-1)
        if len(sampled):
            values, tokens = logits[sampled].float().topk(min(_LIKELIEST, logits.shape[1]), dim=-1)
            chances = (values / temperatures[sampled, None]).softmax(-1)
            # Those whose more likely ones do not have the share yet.
            before = chances.cumsum(-1) - chances
            chances = chances * (before < top_p[sampled, None])
            chosen = torch.multinomial(chances, 1, generator=self._random)
            likeliest[sampled] = tokens.gather(1, chosen)[:, 0]
        return likeliest

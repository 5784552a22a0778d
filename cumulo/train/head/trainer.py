"""HeadTrainer: trains an EagleHead on a model's own answers. Called by `cumulo train` for `kind: eagle`.

Training is unrolled as drafting is (EAGLE-3's training-time test): the head proposes behind the model's hidden
state, then behind its own output, and every proposal is trained. A proposal of the second kind attends to what the
head made of the model's hidden states before its place, and to its own output at its place. What it learns is the
model's probabilities there, not only the token that was drawn: few answers say more that way (Hinton et al. 2015).
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cumulo.engine.assembly import device_kind
from cumulo.engine.config import EngineConfig
from cumulo.errors import ConfigError
from cumulo.models.attention import Attention
from cumulo.models.batch import KVCache
from cumulo.models.decoder import Decoder, Layer
from cumulo.models.files.load import load_model
from cumulo.models.heads.eagle import EagleHead
from cumulo.models.heads.files import save_eagle
from cumulo.models.heads.tap import eagle_layers
from cumulo.models.linear import Linear
from cumulo.models.moe import FeedForward
from cumulo.spec.model import ModelSpec
from cumulo.train.head.answers import OwnAnswer, make_answers
from cumulo.train.head.config import HeadConfig
from cumulo.train.head.states import hidden_states, one_sequence

_HELD_OUT = 16  # one answer of so many is not trained on
_TELL_EVERY = 10
_CONTEXT = 2048
_TOGETHER = 16  # answers that are judged at once

Tell = Callable[[str, int, int], None]  # what, done, of


@dataclass(frozen=True, slots=True)
class HeadResult:
    folder: Path
    steps: int
    seconds: float
    answers: int
    tokens: int
    loss: float
    accuracy: list[float]  # of the first, second, ... proposal, on answers that were not trained on
    known_share: float  # of the answers' tokens that the head can propose at all


@dataclass(frozen=True, slots=True)
class _Kept:
    """A model's hidden states that were kept with an answer."""

    stream: Tensor  # [n, features]
    teacher: Tensor  # [n, hidden]: the last ones, normed, which say what the model expects behind them


@dataclass(frozen=True, slots=True)
class _Example:
    length: int  # n: places 0 .. n - 1 are seen
    tokens: Tensor  # [n + unroll + 1]: of places 0 ..
    first: int  # places before it lie in the prompt: not trained
    kept: _Kept | None  # None: computed with each batch


@dataclass(frozen=True, slots=True)
class _Batch:
    """Examples side by side, filled up at their ends, which nothing before sees."""

    stream: Tensor  # [examples, n, features]
    tokens: Tensor  # [examples, n + unroll + 1]
    teacher: Tensor  # [examples, n, hidden]
    rows: Tensor  # [places]: of the places that are trained, whose example
    places: Tensor  # ... and where


class HeadTrainer:
    def __init__(self, config: HeadConfig, tell: Tell) -> None:
        self.config, self.tell = config, tell
        self._taught_rows: Tensor | None = None
        torch.manual_seed(config.seed)

    def run(self) -> HeadResult:
        config, began_s = self.config, time.perf_counter()
        device = device_kind(config.device)
        engine = EngineConfig(device=device, threads=config.threads, max_context=_CONTEXT, kv_memory_gib=2.0)
        answers = make_answers(config, engine, self.tell)
        # As it is served there: on a GPU in 16 bits, where it is also several times faster.
        decoder = load_model(
            config.model, dtype=torch.bfloat16 if device == "cuda" else torch.float32, device=device,
            keep_quantised=device == "cpu", with_tokenizer=False,
        ).decoder  # fmt: skip
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        head = new_head(config, decoder, answers).to(device)
        if device == "cuda":
            decoder.rotary.serve(_CONTEXT)
            torch.set_float32_matmul_precision("high")
        examples = []
        for number, answer in enumerate(answers, 1):
            examples.append(_example(answer, decoder, config.unroll, device))
            self.tell("the model's probabilities", number, len(answers))
        examples = [one for one in examples if one.length > one.first + config.unroll + 1]
        held_out, trained = examples[::_HELD_OUT], [e for i, e in enumerate(examples) if i % _HELD_OUT]
        loss = self._train(head, decoder, trained)
        accuracy = self.accuracy(head, decoder, held_out)
        folder = Path(config.folder)
        save_eagle(folder, head.to("cpu"))
        known = np.isin(np.concatenate([one.tokens for one in answers]), head.token_of.numpy())
        result = HeadResult(
            folder, config.steps, time.perf_counter() - began_s, len(answers), sum(len(a.tokens) for a in answers),
            loss, accuracy, float(known.mean()),
        )  # fmt: skip
        told = asdict(result) | {"folder": str(folder), "config": asdict(config)}
        (folder / "training.json").write_text(json.dumps(told, indent=2) + "\n")
        return result

    def _train(self, head: EagleHead, decoder: Decoder, examples: list[_Example]) -> float:
        config = self.config
        parameters = [one.requires_grad_() for one in head.parameters()]
        device = parameters[0].device.type
        optimizer = torch.optim.AdamW(
            parameters, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda"
        )
        # Products in 16 bits where a GPU is many times faster at them; weights and their steps stay in 32.
        short = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
        batches, average = _batches(examples, config), float("nan")
        for step in range(config.steps):
            warm = min(1.0, (step + 1) / max(1, config.warmup_steps))
            rate = config.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / config.steps))
            for group in optimizer.param_groups:
                group["lr"] = max(rate, 0.05 * config.learning_rate * warm)
            batch = self.together(decoder, next(batches))
            with short:
                losses = torch.stack([loss.mean() for loss, _ in self.unrolled(head, decoder, batch)])
            loss = losses.mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % _TELL_EVERY == 0 or step == config.steps - 1:
                total = float(loss.detach())
                average = total if math.isnan(average) else 0.7 * average + 0.3 * total
                self.tell(f"training, loss {average:.2f}", step + 1, config.steps)
        for parameter in parameters:
            parameter.requires_grad_(False)
        return average

    @torch.no_grad()
    def accuracy(self, head: EagleHead, decoder: Decoder, examples: list[_Example]) -> list[float]:
        """How often the first, second, ... proposal is the model's own token, those before it being right."""
        right = np.zeros(self.config.unroll)
        tried = np.zeros(self.config.unroll)
        for first in range(0, len(examples), _TOGETHER):
            batch = self.together(decoder, examples[first : first + _TOGETHER])
            reached = torch.ones(len(batch.places), dtype=torch.bool, device=batch.stream.device)
            for index, (_, hits) in enumerate(self.unrolled(head, decoder, batch)):
                tried[index] += int(reached.sum())
                reached &= hits
                right[index] += int(reached.sum())
        return [float(share) for share in right / np.maximum(tried, 1)]

    def unrolled(self, head: EagleHead, decoder: Decoder, batch: _Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """By proposal: losses and whether it was right, at the places that are trained."""
        (examples, n, _), rows, places = batch.stream.shape, batch.rows, batch.places
        number_of = _numbers(head)
        expected = self._teacher_rows(head, decoder)
        stream = head.fc(batch.stream.to(head.dtype))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for ahead in range(self.config.unroll):
            tokens = decoder.embed.rows(batch.tokens[:, ahead + 1 : ahead + 1 + n].flatten()).to(head.dtype)
            positions = torch.arange(ahead, ahead + n, device=stream.device).repeat(examples)
            query, key, value = head.heads(stream.flatten(0, 1), tokens)
            rotation = head.rotary.rotation_at(positions)
            keys.append(rotation.apply(key).unflatten(0, (examples, n)))
            values.append(value.unflatten(0, (examples, n)))
            mixed = _attend(rotation.apply(query).unflatten(0, (examples, n)), keys, values, head.spec)
            stream = head.rest(stream, mixed.flatten(2))
            logits = head.logits(stream[rows, places]).to(head.dtype)
            taught = F.linear(batch.teacher[rows, places + 1 + ahead].to(head.dtype), expected).to(head.dtype)
            wanted = number_of[batch.tokens[rows, places + 2 + ahead]]
            yield _losses(logits, taught) * (wanted >= 0), logits.argmax(dim=-1) == wanted

    def together(self, decoder: Decoder, examples: list[_Example]) -> _Batch:
        def padded(tensors: list[Tensor]) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)

        # Places behind which the model's probabilities are known as far as proposals go.
        ends = [one.length - self.config.unroll for one in examples]
        trained = [np.arange(one.first, end) for one, end in zip(examples, ends, strict=True)]
        whose = np.repeat(np.arange(len(examples)), [len(one) for one in trained])
        rows, places = torch.from_numpy(np.stack((whose, np.concatenate(trained)))).to(
            examples[0].tokens.device
        )
        longest = max(one.length for one in examples)
        tokens = padded([one.tokens[: longest + self.config.unroll + 1] for one in examples])
        tokens = F.pad(tokens, (0, longest + self.config.unroll + 1 - tokens.shape[1]))
        kept = [one.kept for one in examples if one.kept is not None]
        if len(kept) == len(examples):
            stream, teacher = padded([one.stream for one in kept]), padded([one.teacher for one in kept])
        else:
            stream, teacher = hidden_states(decoder, tokens[:, :longest])
        return _Batch(stream, tokens, teacher, rows, places)

    def _teacher_rows(self, head: EagleHead, decoder: Decoder) -> Tensor:
        """Of the model's last matrix, those of the tokens that the head knows."""
        if self._taught_rows is None:
            last = decoder.embed if decoder.spec.tied_embeddings else decoder.head
            self._taught_rows = last.rows(head.token_of.to(head.head.weight.device)).to(head.dtype)
        return self._taught_rows


def _losses(logits: Tensor, taught: Tensor) -> Tensor:
    """Cross-entropy against what the model expects, and against the likeliest token alone: a proposal is that one,
    so it counts for as much as all of them. Both are the logarithm of the sum less what is expected of the logits;
    written so, nothing as large as the logits is made twice."""
    sure = logits.gather(1, taught.argmax(dim=-1, keepdim=True))[:, 0]
    expected = (taught.softmax(dim=-1) * logits).sum(dim=-1)
    return logits.logsumexp(dim=-1) - 0.5 * expected - 0.5 * sure


def _attend(query: Tensor, keys: list[Tensor], values: list[Tensor], spec: ModelSpec) -> Tensor:
    """Place p of a pass sees the first pass up to place p, and of every later pass its own chain: place p."""
    scale, groups = spec.head_dim**-0.5, spec.heads // spec.kv_heads
    keys = [key.repeat_interleave(groups, dim=2) for key in keys]
    values = [value.repeat_interleave(groups, dim=2) for value in values]
    n = query.shape[1]
    scores = torch.einsum("ephd,eqhd->ehpq", query, keys[0]) * scale
    scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool, device=query.device).triu(1), -math.inf)
    chain = [torch.einsum("ephd,ephd->ehp", query, key)[..., None] * scale for key in keys[1:]]
    weights = torch.cat((scores, *chain), dim=-1).softmax(dim=-1)
    mixed = torch.einsum("ehpq,eqhd->ephd", weights[..., :n], values[0])
    for index, value in enumerate(values[1:]):
        mixed = mixed + weights[..., n + index].transpose(1, 2)[..., None] * value
    return mixed


def _numbers(head: EagleHead) -> Tensor:
    """By token of the served model: the head's number for it, or -1."""
    known = head.token_of.to(head.head.weight.device)
    numbers = torch.full((head.spec.vocab_size,), -1, dtype=torch.int64, device=known.device)
    numbers[known] = torch.arange(len(known), device=known.device)
    return numbers


def _example(answer: OwnAnswer, decoder: Decoder, unroll: int, device: str) -> _Example:
    known = len(answer.tokens) if answer.stream is None else len(answer.stream)
    length = min(known, len(answer.tokens) - unroll - 1)
    kept = None
    if answer.stream is not None:
        stream = torch.from_numpy(answer.stream[:length]).to(device)
        kept = _Kept(stream, _last_states(decoder, stream).to(torch.float16))
    tokens = torch.from_numpy(answer.tokens.astype(np.int64)).to(device)
    # At place p the token p + 2 is proposed: the first that is an answer's follows the prompt.
    return _Example(length, tokens, max(0, answer.prompt_length - 2), kept)


@torch.inference_mode()
def _last_states(decoder: Decoder, stream: Tensor) -> Tensor:
    """The model's last hidden states, normed, from those that enter the highest tapped layer."""
    spec, places = decoder.spec, torch.arange(len(stream), device=stream.device)
    cache = KVCache(spec, 1, len(stream), decoder.dtype, stream.device)
    batch = one_sequence(places, places)
    state, rotation = stream[:, -spec.hidden :].to(decoder.dtype), decoder.rotary.rotation_at(places)
    for layer in decoder.layers[eagle_layers(spec.layers)[-1] :]:
        state = layer(state, rotation, batch, cache)
    hidden: Tensor = decoder.final_norm(state)
    return hidden


def _batches(examples: list[_Example], config: HeadConfig) -> Iterator[list[_Example]]:
    rng = np.random.default_rng(config.seed)
    batch: list[_Example] = []
    while True:
        for index in rng.permutation(len(examples)):
            batch.append(examples[index])
            if sum(one.length for one in batch) >= config.batch_tokens:
                yield batch
                batch = []


def new_head(config: HeadConfig, decoder: Decoder, answers: list[OwnAnswer]) -> EagleHead:
    """A head that begins as the model's last layer on its highest tapped hidden state."""
    spec = decoder.spec
    tokens = np.concatenate([one.tokens[one.prompt_length :] for one in answers])
    counts = np.bincount(tokens, minlength=spec.vocab_size)
    frequent = np.argsort(-counts, kind="stable")[: min(config.draft_vocabulary, spec.vocab_size)]
    own = ModelSpec(
        family="llama", vocab_size=spec.vocab_size, hidden=spec.hidden, layers=1, heads=spec.heads,
        kv_heads=spec.kv_heads, head_dim=spec.head_dim, ffn_hidden=spec.ffn_hidden, max_context=spec.max_context,
        norm_eps=spec.norm_eps, rope_theta=spec.rope_theta,
    )  # fmt: skip
    # Small steps are lost in 16 bits.
    head = EagleHead(
        own, 3 * spec.hidden, len(frequent), dtype=torch.promote_types(decoder.dtype, torch.float32)
    )
    head.token_of = torch.from_numpy(np.sort(frequent).astype(np.int64))
    layer, hidden = decoder.layers[-1], spec.hidden
    assert isinstance(layer, Layer)
    if not isinstance(layer.attention, Attention) or not isinstance(layer.ffn, FeedForward):
        raise ConfigError("a head is trained for dense models with grouped attention so far")
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, 2 * hidden :].copy_(torch.eye(hidden))
        head.qkv.weight[:, hidden:].copy_(matrix(layer.attention.qkv))
        head.qkv.weight[:, :hidden].normal_(std=0.02)
        head.output.weight.copy_(matrix(layer.attention.output))
        head.ffn.gate_up.weight.copy_(matrix(layer.ffn.gate_up))
        head.ffn.down.weight.copy_(matrix(layer.ffn.down))
        last = decoder.embed if spec.tied_embeddings else decoder.head
        head.head.weight.copy_(last.rows(head.token_of.to(decoder.final_norm.weight.device)))
        for norm, like in (
            (head.token_norm, layer.attention_norm), (head.stream_norm, layer.attention_norm),
            (head.ffn_norm, layer.ffn_norm), (head.final_norm, decoder.final_norm),
        ):  # fmt: skip
            norm.weight.copy_(like.weight)
        head.token_norm.weight.fill_(1.0)
        # What it begins with foresees the token that is known already: it should not be so sure of that.
        head.final_norm.weight.mul_(0.3)
    head.rotary.serve(spec.max_context)
    return head


def matrix(linear: Linear) -> Tensor:
    """The plain weights, whatever they are packed into."""
    device = "cpu" if linear.packed is not None else linear.weight.device
    return linear.rows(torch.arange(linear.shape[0], device=device))

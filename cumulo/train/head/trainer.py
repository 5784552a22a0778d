"""HeadTrainer: trains an EagleHead on a model's own answers. Called by `cumulo train` for `kind: eagle`.

Training is unrolled as drafting is (EAGLE-3's training-time test): the head proposes behind the model's hidden
state, then behind its own output, and every proposal is trained. A proposal of the second kind attends to what the
head made of the model's hidden states before its place, and to its own output at its place. What it learns is the
model's probabilities there, not only the token that was drawn: few answers say more that way (Hinton et al. 2015).
"""

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cumulo.engine.assembly import device_kind
from cumulo.errors import ConfigError
from cumulo.models.attention import Attention
from cumulo.models.decoder import Decoder, Layer
from cumulo.models.files.load import LoadedModel, load_model
from cumulo.models.heads.eagle import EagleHead
from cumulo.models.heads.files import save_eagle
from cumulo.models.linear import Linear
from cumulo.models.moe import FeedForward
from cumulo.spec.model import ModelSpec
from cumulo.train.head.answers import OwnAnswer, Tell, answered, prompt_lines, write_answers
from cumulo.train.head.config import HeadConfig
from cumulo.train.head.examples import Example, HeadBatch, batches, examples_of, together, with_states
from cumulo.train.head.prompts import AskedTurns
from cumulo.train.head.writer import Writer

_HELD_OUT = 32  # one answer of so many is not trained on
_TELL_EVERY = 10
_SAVE_EVERY_S = 100.0
_CONTEXT = 2048
_TOGETHER = 16  # answers that are judged at once
_JUDGED = 5  # proposals behind each other
_LEAST_RATE = 0.05  # of the learning rate, at the end


@dataclass(frozen=True, slots=True)
class HeadResult:
    folder: Path
    steps: int
    seconds: float
    answers: int
    tokens: int
    loss: float
    # By set of answers that were not trained on: how often the first, second, ... proposal is the model's token,
    # those before it being right.
    right: dict[str, list[float]]
    known_share: float  # of the answers' tokens that the head can propose at all

    @property
    def accuracy(self) -> list[float]:
        return self.right["held-out answers"]


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """The tokens that a head can propose."""

    number_of: Tensor  # by token of the served model: the head's number for it, or -1
    teacher_rows: Tensor  # of the model's last matrix


class HeadTrainer:
    def __init__(self, config: HeadConfig, tell: Tell) -> None:
        self.config, self.tell = config, tell
        self._known: KnownTokens | None = None
        self._saved_s = time.perf_counter()
        torch.manual_seed(config.seed)

    def run(self) -> HeadResult:
        config, began_s = self.config, time.perf_counter()
        device, folder = device_kind(config.device), Path(config.folder)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        if device == "cuda":  # as it is served there: in 16 bits, where it is also several times faster
            model = load_model(config.model, dtype=torch.bfloat16, device=device, keep_quantised=False)
            model.decoder.rotary.serve(_CONTEXT)
            torch.set_float32_matmul_precision("high")
        else:
            model = load_model(config.model)
        answers = write_answers(config, model, self.tell)
        decoder = model.decoder
        judged = {"held-out answers": answers[::_HELD_OUT]}
        judged |= {Path(name).stem: self._answers_to(name, model) for name in config.judge}
        trained = [answer for index, answer in enumerate(answers) if index % _HELD_OUT]
        head = new_head(config, decoder, trained).to(device)
        examples = examples_of(trained, config.unroll, device)
        self.tell("the model's states", 0, len(examples))
        examples = with_states(examples, decoder)
        steps, loss = self._train(head, decoder, examples)
        right = {
            name: self.accuracy(head, decoder, examples_of(some, _JUDGED, device), _JUDGED)
            for name, some in judged.items()
        }
        save_eagle(folder, head.to("cpu"))
        known = np.isin(
            np.concatenate([one.tokens[one.prompt_length :] for one in answers]), head.token_of.numpy()
        )
        result = HeadResult(
            folder, steps, time.perf_counter() - began_s, len(answers), sum(len(a.tokens) for a in answers),
            loss, right, float(known.mean()),
        )  # fmt: skip
        told = asdict(result) | {"folder": str(folder), "config": asdict(config)}
        (folder / "training.json").write_text(json.dumps(told, indent=2) + "\n")
        return result

    def _answers_to(self, name: str, model: LoadedModel) -> list[OwnAnswer]:
        """The model's greedy answers to a file's prompts."""
        assert model.tokenizer is not None
        asked = [AskedTurns((line,)) for line in prompt_lines(name)]
        writer = Writer(model.decoder, model.eos_ids)
        return answered(self.config, model.tokenizer, writer, asked, lambda *_: None, len(asked) + 1)

    def _train(self, head: EagleHead, decoder: Decoder, examples: Sequence[Example]) -> tuple[int, float]:
        """Returns the steps that were taken, and the loss."""
        config, device = self.config, head.head.weight.device.type
        parameters = [one.requires_grad_() for one in head.parameters()]
        optimizer = torch.optim.AdamW(
            parameters, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda"
        )
        # Products in 16 bits where a GPU is many times faster at them; weights and their steps stay in 32.
        short = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
        source = batches(examples, config.batch_tokens, config.seed)
        average, step, done = float("nan"), 0, 0.0
        began_s = time.perf_counter()
        while done < 1.0:
            batch = together(decoder, next(source), config.unroll)
            with short:
                loss = self.loss(head, decoder, batch)
            loss.backward()
            warm = min(1.0, (step + 1) / max(1, config.warmup_steps))
            rate = warm * max(_LEAST_RATE, 0.5 * (1 + math.cos(math.pi * done)))
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * rate
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            done = step / config.steps
            if config.minutes is not None:
                done = (time.perf_counter() - began_s) / (60 * config.minutes)
            if step % _TELL_EVERY == 1 or done >= 1.0:
                total = float(loss.detach())
                average = total if math.isnan(average) else 0.9 * average + 0.1 * total
                self.tell(f"training, loss {average:.2f}", round(1000 * min(1.0, done)), 1000)
                self._save_now_and_then(head)
        for parameter in parameters:
            parameter.requires_grad_(False)
        return step, average

    def _save_now_and_then(self, head: EagleHead) -> None:
        if time.perf_counter() - self._saved_s > _SAVE_EVERY_S:
            save_eagle(Path(self.config.folder), head)
            self._saved_s = time.perf_counter()

    def loss(self, head: EagleHead, decoder: Decoder, batch: HeadBatch) -> Tensor:
        """The mean over proposals and over the places whose token the head knows."""
        known_tokens, losses = self._known_tokens(head, decoder), list[Tensor]()
        taught = F.linear(batch.teacher.to(head.dtype), known_tokens.teacher_rows).to(head.dtype)
        for ahead, stream in enumerate(self.unrolled(head, decoder, batch)):
            known = known_tokens.number_of[batch.tokens[batch.rows, batch.places + 2 + ahead]] >= 0
            every = _losses(head.logits(stream).to(head.dtype), taught[batch.taught + ahead])
            losses.append((every * known).mean())
        return torch.stack(losses).mean()

    @torch.no_grad()
    def accuracy(
        self, head: EagleHead, decoder: Decoder, examples: Sequence[Example], depth: int
    ) -> list[float]:
        """How often the first, second, ... proposal is the model's own token, those before it being right."""
        right, tried = np.zeros(depth), np.zeros(depth)
        number_of = self._known_tokens(head, decoder).number_of
        for first in range(0, len(examples), _TOGETHER):
            batch = together(decoder, examples[first : first + _TOGETHER], depth)
            reached = torch.ones_like(batch.places, dtype=torch.bool)
            for ahead, stream in enumerate(self.unrolled(head, decoder, batch)):
                wanted = number_of[batch.tokens[batch.rows, batch.places + 2 + ahead]]
                tried[ahead] += int(reached.sum())
                reached = reached & (head.logits(stream).argmax(dim=-1) == wanted)
                right[ahead] += int(reached.sum())
        return [float(share) for share in right / np.maximum(tried, 1)]

    def unrolled(self, head: EagleHead, decoder: Decoder, batch: HeadBatch) -> Iterator[Tensor]:
        """By proposal: the head's stream at the places that are trained."""
        examples, n, _ = batch.stream.shape
        stream = head.fc(batch.stream.to(head.dtype))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for ahead in range(batch.depth):
            tokens = decoder.embed.rows(batch.tokens[:, ahead + 1 : ahead + 1 + n].flatten()).to(head.dtype)
            positions = torch.arange(ahead, ahead + n, device=stream.device).repeat(examples)
            query, key, value = head.heads(stream.flatten(0, 1), tokens)
            rotation = head.rotary.rotation_at(positions)
            keys.append(rotation.apply(key).unflatten(0, (examples, n)))
            values.append(value.unflatten(0, (examples, n)))
            mixed = _attend(rotation.apply(query).unflatten(0, (examples, n)), keys, values, head.spec)
            stream = head.rest(stream, mixed.flatten(2))
            yield stream[batch.rows, batch.places]

    def _known_tokens(self, head: EagleHead, decoder: Decoder) -> KnownTokens:
        """Looked up once: every copy to a GPU would wait for what it computes."""
        if self._known is None:
            known = head.token_of.to(head.head.weight.device)
            number_of = torch.full((head.spec.vocab_size,), -1, dtype=torch.int64, device=known.device)
            number_of[known] = torch.arange(len(known), device=known.device)
            last = decoder.embed if decoder.spec.tied_embeddings else decoder.head
            self._known = KnownTokens(number_of, last.rows(known).to(head.dtype))
        return self._known


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


def new_head(config: HeadConfig, decoder: Decoder, answers: list[OwnAnswer]) -> EagleHead:
    """A head that begins as the model's last layer on its highest tapped hidden state."""
    spec = decoder.spec
    tokens = np.concatenate([one.tokens[one.prompt_length :] for one in answers])
    counts = np.bincount(tokens, minlength=spec.vocab_size)
    frequent = np.argsort(-counts, kind="stable")[: min(config.draft_vocabulary, spec.vocab_size)]
    own = ModelSpec(
        family="llama", vocab_size=spec.vocab_size, hidden=spec.hidden, layers=1, heads=spec.heads,
        kv_heads=spec.kv_heads, head_dim=spec.head_dim, ffn_hidden=config.ffn_hidden or spec.ffn_hidden,
        max_context=spec.max_context, norm_eps=spec.norm_eps, rope_theta=spec.rope_theta,
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
        # A wider feed-forward layer begins as the model's with units whose outputs are not used yet.
        head.ffn.gate_up.weight.normal_(std=0.02)
        head.ffn.down.weight.zero_()
        width = min(own.ffn_hidden, spec.ffn_hidden)
        both = zip(head.ffn.gate_up.weight.chunk(2), matrix(layer.ffn.gate_up).chunk(2), strict=True)
        for ours, theirs in both:
            ours[:width].copy_(theirs[:width])
        head.ffn.down.weight[:, :width].copy_(matrix(layer.ffn.down)[:, :width])
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

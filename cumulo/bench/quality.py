"""How alike two decoders read the same text: KL divergence, top-1 agreement and perplexity, for `cumulo bench
quality`."""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from cumulo.engine.llm import LLM
from cumulo.engine.play.runner_torch import TorchRunner
from cumulo.models.batch import ForwardBatch

BLOCK_SIZE = 16
LOGIT_ROWS = 16  # at a time, as in a step of sixteen sequences; also bounds memory at large vocabularies


def engine_model(llm: LLM) -> Any:
    """The decoder that the engine's runner plays plans on."""
    return cast(TorchRunner, llm.engine.runner).model


def hidden_states(llm: LLM, sequences: Tensor) -> Tensor:
    """Final hidden states of every position [sequences, tokens, hidden]; a sequence is a step, as a prompt is."""
    decoder, cache = engine_model(llm), cast(TorchRunner, llm.engine.runner).cache
    count, length = sequences.shape
    positions, blocks = torch.arange(length), torch.arange(-(-length // BLOCK_SIZE), dtype=torch.int32)
    result = torch.empty(count, length, llm.spec.hidden)
    for index, tokens in enumerate(sequences):
        batch = ForwardBatch(
            token_ids=tokens,
            positions=positions,
            slots=positions,  # the same blocks for every sequence, one after another
            query_starts=torch.tensor([0, length], dtype=torch.int32),
            context_lengths=torch.tensor([length], dtype=torch.int32),
            block_tables=blocks[None],
            logit_rows=positions,
        )
        result[index] = decoder.forward(batch, cache)
    return result


@dataclass(frozen=True, slots=True)
class Likeness:
    """KL and agreement are against the exact decoder."""

    kl: float  # mean, in nats
    agreement: float  # share of equal likeliest tokens
    perplexity: float


def likeness(exact: LLM, reference: Tensor, own: LLM, states: Tensor, tokens: Tensor) -> Likeness:
    """From the hidden states of both, of every position but the last, whose next token is not known."""
    divergence, agreed, surprise, count = 0.0, 0, 0.0, 0
    for wanted_states, own_states, ids in zip(reference, states, tokens, strict=True):
        for start in range(0, len(ids) - 1, LOGIT_ROWS):
            rows = slice(start, min(start + LOGIT_ROWS, len(ids) - 1))
            wanted = given = engine_model(exact).logits(wanted_states[rows]).double().log_softmax(-1)
            if own is not exact:
                given = engine_model(own).logits(own_states[rows]).double().log_softmax(-1)
            following = ids[rows.start + 1 : rows.stop + 1]
            divergence += float((wanted.exp() * (wanted - given)).sum())
            agreed += int((wanted.argmax(-1) == given.argmax(-1)).sum())
            surprise -= float(given.gather(1, following[:, None]).sum())
            count += len(following)
    return Likeness(divergence / count, agreed / count, math.exp(surprise / count))

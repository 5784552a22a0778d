"""How true the default path is to its file: KL divergence and top-1 agreement with the file in float32.

Both decoders read the same real text, once as a prompt (long rows) and once token by token with sixteen
sequences side by side (the rows of decoding), because the two take different kernels.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from cumulo.base.reference_text import reference_text
from cumulo.base.report import Row
from cumulo.engine.config import EngineConfig
from cumulo.engine.llm import LLM
from cumulo.engine.play.runner_torch import TorchRunner
from cumulo.models.batch import ForwardBatch

SEQUENCES = 16
TOKENS_PER_SEQUENCE = 160  # 2,560 positions
CONTEXT = 512
BLOCK_SIZE = 16
BLOCKS = SEQUENCES * CONTEXT // BLOCK_SIZE
LOGIT_ROWS = 16  # at a time, as in a step of sixteen sequences; also bounds memory at large vocabularies


def measure(model: str | None, threads: int, tell: Callable[[str, int, int], None]) -> list[Row]:
    config = EngineConfig(threads=threads, kv_blocks=BLOCKS, block_size=BLOCK_SIZE, max_context=CONTEXT)
    rows: list[Row] = []
    tell("quality: loading the default path", 0, 5)
    with LLM(model, config=config) as fast:
        tokens = fast.tokenizer.encode(reference_text()[:100_000])[: SEQUENCES * TOKENS_PER_SEQUENCE]
        tell("quality: loading the file as float32", 1, 5)
        with LLM(model, config=config, keep_quantised=False) as exact, torch.inference_mode():
            sequences = torch.tensor(tokens).view(SEQUENCES, TOKENS_PER_SEQUENCE)
            tell("quality: float32 reads the text", 2, 5)
            reference = hidden_states(exact, sequences, TOKENS_PER_SEQUENCE)
            for number, (name, chunk) in enumerate((("prefill", TOKENS_PER_SEQUENCE), ("decode", 1))):
                tell(f"quality: the default path reads it, {name}", 3 + number, 5)
                found = likeness(exact, reference, fast, hidden_states(fast, sequences, chunk), sequences)
                positions = f"{sequences.numel():,} positions, against the file in float32"
                rows.append(Row(f"mean KL, {name}", found.kl, "nats", "lower", must=0.01, note=positions))
                rows.append(
                    Row(f"top-1 agreement, {name}", 100 * found.agreement, "%", must=97.0, note=positions)
                )
    return rows


def engine_model(llm: LLM) -> Any:
    """The decoder that the engine's runner plays plans on."""
    return cast(TorchRunner, llm.engine.runner).model


def hidden_states(llm: LLM, sequences: Tensor, chunk: int, blocks: int = BLOCKS) -> Tensor:
    """Final hidden states of every position [sequences, tokens, hidden], computed `chunk` tokens at a time.

    Chunks as long as a sequence go one sequence per step, like prompts; shorter ones all sequences together.
    """
    decoder, cache = engine_model(llm), cast(TorchRunner, llm.engine.runner).cache
    count, length = sequences.shape
    tables = torch.arange(blocks, dtype=torch.int32).view(count, -1)
    groups = [[index] for index in range(count)] if chunk == length else [list(range(count))]
    result = torch.empty(count, length, llm.spec.hidden)
    for group in groups:
        for start in range(0, length, chunk):
            positions = torch.arange(start, min(start + chunk, length))
            size = len(positions)
            slots = torch.stack(
                [
                    tables[index][positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
                    for index in group
                ]
            )
            batch = ForwardBatch(
                token_ids=sequences[group, start : start + size].reshape(-1),
                positions=positions.repeat(len(group)),
                slots=slots.reshape(-1),
                query_starts=torch.arange(len(group) + 1, dtype=torch.int32) * size,
                context_lengths=torch.full((len(group),), start + size, dtype=torch.int32),
                block_tables=tables[group],
                logit_rows=torch.arange(len(group) * size),
            )
            result[group, start : start + size] = decoder.forward(batch, cache).view(len(group), size, -1)
    return result


@dataclass(frozen=True, slots=True)
class Likeness:
    """How alike two decoders read the same text; KL and agreement are against the exact one."""

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

"""Stepper: the smallest honest runner. Feeds sequences to a decoder step by step through a paged cache whose
blocks are handed out in random order, so that a decoder that ignores block tables cannot pass."""

import random

import numpy as np
import torch

from cumulo.kernels.low_rank import AdapterRows, group_rows
from cumulo.models.batch import ForwardBatch, KVCache
from cumulo.models.decoder import Decoder
from cumulo.models.play.fused import FusedDecoder


class Stepper:
    def __init__(
        self, decoder: Decoder | FusedDecoder, blocks: int = 128, block_size: int = 4, seed: int = 0
    ) -> None:
        self.decoder, self.block_size = decoder, block_size
        self.cache = KVCache(decoder.spec, blocks, block_size, decoder.dtype)
        # Unwritten slots hold NaN: whoever reads one spoils the answer.
        self.cache.key_storage.fill_(float("nan"))
        self.cache.value_storage.fill_(float("nan"))
        self.free = random.Random(seed).sample(range(blocks), blocks)
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.adapters: dict[str, int] = {}  # by sequence: the slot of its adapter

    @torch.inference_mode()
    def step(self, chunks: dict[str, list[int]]) -> dict[str, torch.Tensor]:
        """Compute new tokens of the named sequences together; logits [tokens, vocabulary] of each."""
        positions, slots, starts, contexts, rows = [], [], [0], [], []
        for name, tokens in chunks.items():
            begin = self.lengths.get(name, 0)
            end = self.lengths[name] = begin + len(tokens)
            table = self.tables.setdefault(name, [])
            while len(table) * self.block_size < end:
                table.append(self.free.pop())
            for position in range(begin, end):
                positions.append(position)
                slots.append(
                    table[position // self.block_size] * self.block_size + position % self.block_size
                )
            starts.append(starts[-1] + len(tokens))
            contexts.append(end)
            rows.append(table)
        width = max(map(len, rows))
        batch = ForwardBatch(
            token_ids=torch.tensor([token for tokens in chunks.values() for token in tokens]),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lengths=torch.tensor(contexts, dtype=torch.int32),
            block_tables=torch.tensor(
                [table + [-1] * (width - len(table)) for table in rows], dtype=torch.int32
            ),
            logit_rows=torch.arange(starts[-1]),
        )
        if self.adapters:
            held = [self.adapters.get(name, -1) for name, tokens in chunks.items() for _ in tokens]
            groups = group_rows(np.array(held, dtype=np.int32))
            batch.adapters = AdapterRows(groups, groups)
        logits = self.decoder.logits(self.decoder.forward(batch, self.cache))
        return {name: logits[starts[i] : starts[i + 1]] for i, name in enumerate(chunks)}

    def feed(self, tokens: list[int], chunk: int, name: str = "only") -> torch.Tensor:
        """Logits of all tokens of one sequence, computed `chunk` tokens at a time."""
        parts = [self.step({name: tokens[i : i + chunk]})[name] for i in range(0, len(tokens), chunk)]
        return torch.cat(parts)

    def greedy(self, tokens: list[int], count: int, chunk: int) -> list[int]:
        """`count` greedy tokens after the prompt: prefill in chunks, then one token per step."""
        logits = self.feed(tokens, chunk)
        output = [int(logits[-1].argmax())]
        while len(output) < count:
            output.append(int(self.step({"only": output[-1:]})["only"][-1].argmax()))
        return output

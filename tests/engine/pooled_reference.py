"""Embeddings by two routes: `transformers`' hidden states, pooled by hand, and our engine around a decoder."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.params import Pooling, SamplingParams
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.engine import Engine
from cumulo.engine.play.runner_torch import TorchRunner
from cumulo.models.batch import KVCache
from tests.engine.tiny_engine import run


@torch.no_grad()
def reference_embedding(model: Any, tokens: Sequence[int], pooling: Pooling) -> NDArray[np.float32]:
    """What `transformers` says: the normed hidden states, pooled, at length 1."""
    hidden = model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states[-1][0]
    pooled = hidden.mean(0) if pooling == "mean" else hidden[-1]
    vector: NDArray[np.float32] = (pooled / pooled.norm()).numpy()
    return vector


def engine_embeddings(
    decoder: Any, prompts: Sequence[Sequence[int]]
) -> dict[tuple[int, Pooling], list[float]]:
    """All prompts, pooled both ways, in one float32 engine: in chunks, beside each other and a decoding request."""
    config = SchedulerConfig(blocks=64, block_size=8, max_context=256, max_running=8, max_tokens_per_step=13)
    cache = KVCache(decoder.spec, config.blocks, config.block_size)
    runner = TorchRunner(decoder, cache, max_slots=config.max_running, max_context=config.max_context)
    engine = Engine(Scheduler(config), runner, None, vocab_size=decoder.spec.vocab_size, overlap=False)
    engine.add(prompts[0], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    wanted: list[tuple[int, Pooling]] = []
    for index, prompt in enumerate(prompts):
        for pooling in ("mean", "last"):
            wanted.append((index, pooling))
            engine.add(prompt, SamplingParams(pooling=pooling), request_id=f"{index} {pooling}")
    outputs = run(engine)
    return {(index, pooling): outputs[f"{index} {pooling}"].embedding or [] for index, pooling in wanted}

"""An exported decoder played by onnxruntime and compared with torch token by token, for `cumulo compile onnx`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cumulo.compile.onnx.decoder import MISSING
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.llm import LLM
from cumulo.errors import ModelError
from cumulo.spec.model import ModelSpec

Array = np.ndarray[Any, Any]


class OnnxDecoder:
    """A session and the KV cache of one batch."""

    def __init__(self, path: Path, spec: ModelSpec, threads: int | None = None) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise ModelError(MISSING) from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or torch.get_num_threads()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._spec, self._past = spec, dict[str, Array]()
        self.begin(1)

    def begin(self, batch: int) -> None:
        """Forget what was said."""
        empty = np.zeros((batch, self._spec.kv_heads, 0, self._spec.head_dim), np.float32)
        self._past = {
            f"past_{name}_{i}": empty for i in range(self._spec.layers) for name in ("key", "value")
        }

    def step(self, tokens: Array) -> Array:
        """Logits [batch, new, vocabulary] of tokens [batch, new] that follow what was said."""
        names = ["logits", *(name.removeprefix("past_") for name in self._past)]
        logits, *cache = self._session.run(names, {"token_ids": tokens.astype(np.int64), **self._past})
        self._past = dict(zip(self._past, cache, strict=True))
        return np.asarray(logits)

    def generate(self, prompt: Sequence[int], count: int) -> tuple[list[int], Array]:
        """The likeliest tokens, and the logits that each was drawn from."""
        self.begin(1)
        tokens, seen = np.array([prompt]), []
        said: list[int] = []
        for _ in range(count):
            seen.append(self.step(tokens)[0, -1])
            said.append(int(seen[-1].argmax()))
            tokens = np.array([[said[-1]]])
        return said, np.array(seen)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Greedy answers of onnxruntime and of torch to the same prompt."""

    tokens: int
    equal: int  # before the first that differs
    onnx_tok_s: float
    torch_tok_s: float


def compare(path: Path, llm: LLM, prompt: str, count: int) -> Comparison:
    """`llm`: the same weights in the engine, played by torch."""
    ids = llm.tokenizer.encode(prompt)
    player = OnnxDecoder(path, llm.spec)
    greedy = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    player.generate(ids, 1)
    llm.generate([ids], replace(greedy, max_tokens=1))
    began = time.perf_counter()
    said, _ = player.generate(ids, count)
    between = time.perf_counter()
    wanted = llm.generate([ids], greedy)[0].samples[0].token_ids
    ended = time.perf_counter()
    pairs = zip(said, wanted, strict=True)
    equal = next((at for at, (left, right) in enumerate(pairs) if left != right), count)
    return Comparison(count, equal, count / (between - began), count / (ended - between))

"""The sides of a comparison: Cumulo, transformers and llama.cpp, each in a process of its own."""

import ctypes
import importlib
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Self

from cumulo.errors import CumuloError

MAX_SEQUENCES = 16
CONTEXT_PER_SEQUENCE = 1024


class CumuloSide:
    """Our engine as a user gets it, with room for as many sequences as are measured at once."""

    def __init__(self, model: str | None, threads: int) -> None:
        from cumulo import LLM, SamplingParams
        from cumulo.engine.config import EngineConfig

        self.params = SamplingParams
        blocks = MAX_SEQUENCES * CONTEXT_PER_SEQUENCE // 16
        config = EngineConfig(threads=threads, kv_blocks=blocks, max_running=MAX_SEQUENCES)
        self.llm = LLM(model, config=config)

    def tokenize(self, text: str) -> list[int]:
        """The prompts' text in token ids, which all sides are given."""
        return list(self.llm.tokenizer.encode(text))

    def decode(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Greedy tokens per second of all sequences together, after their prompts."""
        # Prompts first, on their own: with their blocks cached, all sequences begin in the same step.
        self._generate(prompts, [1] * len(prompts))
        stories = [output.story for output in self._generate(prompts, [new_tokens] * len(prompts))]
        first_s = max(story.first_token_s or 0.0 for story in stories)
        last_s = max(story.finished_s or 0.0 for story in stories)
        return len(prompts) * (new_tokens - 1) / (last_s - first_s)

    def prefill(self, prompt: list[int]) -> float:
        """Prompt tokens per second until the first new token is known."""
        began_s = time.perf_counter()
        output = self._generate([prompt], [1])[0]
        elapsed_s = time.perf_counter() - began_s
        if output.story.cached_tokens:
            raise CumuloError(f"{output.story.cached_tokens} prompt tokens were cached: not a prefill")
        return len(prompt) / elapsed_s

    def answer(self, texts: list[str], output_tokens: list[int]) -> tuple[int, float, float]:
        """Answer every text as a user's message: tokens, seconds and processor seconds. The server's rival in
        `cumulo bench overhead`."""
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        tokenizer = self.llm.tokenizer
        prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
        outputs = self._generate([tokenizer.encode(prompt) for prompt in prompts], output_tokens)
        tokens = sum(output.story.output_tokens for output in outputs)
        return tokens, time.perf_counter() - began_s, time.process_time() - began_cpu_s

    def _generate(self, prompts: list[list[int]], new_tokens: list[int]) -> list[Any]:
        each = [self.params(temperature=0, max_tokens=count, ignore_eos=True) for count in new_tokens]
        outputs: list[Any] = self.llm.generate(prompts, each)
        for output in outputs:
            if output.error:
                raise CumuloError(f"the benchmark's request failed: {output.error}")
        return outputs


class TransformersSide:
    """Hugging Face transformers, float32, its default (SDPA) attention, the same file dequantised."""

    def __init__(self, model: Path, threads: int) -> None:
        import torch

        transformers: Any = importlib.import_module("transformers")
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self.torch = torch
        if model.is_dir():
            loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        else:
            loaded = transformers.AutoModelForCausalLM.from_pretrained(
                model.parent, gguf_file=model.name, dtype=torch.float32
            )
        self.model = loaded.eval()

    def decode(self, prompts: list[list[int]], new_tokens: int) -> float:
        times_s: list[float] = []

        def note_time(ids: Any, scores: Any, **_: Any) -> Any:
            times_s.append(time.perf_counter())
            return self.torch.zeros(len(prompts), dtype=self.torch.bool)

        ids = self.torch.tensor(prompts)
        with self.torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                pad_token_id=0,
                stopping_criteria=[note_time],
            )
        if len(times_s) != new_tokens:
            raise CumuloError(f"transformers made {len(times_s)} steps where {new_tokens} were asked for")
        return len(prompts) * (new_tokens - 1) / (times_s[-1] - times_s[0])

    def prefill(self, prompt: list[int]) -> float:
        ids = self.torch.tensor([prompt])
        began_s = time.perf_counter()
        with self.torch.inference_mode():
            self.model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1).item()
        return len(prompt) / (time.perf_counter() - began_s)


class LlamaCppSide:
    """llama.cpp through its C interface, as a server would drive it: one llama_decode per step for all."""

    def __init__(self, model: Path, threads: int) -> None:
        try:
            llama_cpp: Any = importlib.import_module("llama_cpp")
        except ImportError as error:
            raise CumuloError(
                "llama.cpp is asked for but llama-cpp-python is not installed: pip install llama-cpp-python "
                "(it compiles for some minutes), or leave it out: --against transformers"
            ) from error
        self.api = llama_cpp
        self.silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(model).encode(), options)
        if not self.model:
            raise CumuloError(f"llama.cpp cannot load {model}")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        # A context each, so that one sequence does not pay for sixteen.
        self.contexts = {count: self._context(count, threads) for count in (1, MAX_SEQUENCES)}
        self.batch = llama_cpp.llama_batch_init(MAX_SEQUENCES * CONTEXT_PER_SEQUENCE, 0, 1)

    def _context(self, sequences: int, threads: int) -> Any:
        options = self.api.llama_context_default_params()
        options.n_seq_max = sequences
        options.n_ctx = sequences * CONTEXT_PER_SEQUENCE
        options.n_batch, options.n_ubatch = 2048, 512
        options.n_threads = options.n_threads_batch = threads
        context = self.api.llama_init_from_model(self.model, options)
        if not context:
            raise CumuloError(f"llama.cpp cannot make a context of {options.n_ctx} tokens")
        return context

    def decode(self, prompts: list[list[int]], new_tokens: int) -> float:
        context = self.contexts[1 if len(prompts) == 1 else MAX_SEQUENCES]
        self.api.llama_memory_clear(self.api.llama_get_memory(context), True)
        tokens = []
        for sequence, prompt in enumerate(prompts):
            self._run(context, [(token, at, sequence) for at, token in enumerate(prompt)])
            tokens.append(self._argmax(context, len(prompt) - 1))
        began_s = time.perf_counter()
        for step in range(new_tokens - 1):
            entries = [(t, len(prompts[s]) + step, s) for s, t in enumerate(tokens)]
            self._run(context, entries, all_logits=True)
            tokens = [self._argmax(context, row) for row in range(len(entries))]
        return len(prompts) * (new_tokens - 1) / (time.perf_counter() - began_s)

    def prefill(self, prompt: list[int]) -> float:
        context = self.contexts[1]
        self.api.llama_memory_clear(self.api.llama_get_memory(context), True)
        began_s = time.perf_counter()
        self._run(context, [(token, at, 0) for at, token in enumerate(prompt)])
        self._argmax(context, len(prompt) - 1)
        return len(prompt) / (time.perf_counter() - began_s)

    def _run(self, context: Any, entries: list[tuple[int, int, int]], all_logits: bool = False) -> None:
        """Compute (token, position, sequence) rows; logits for the last one, or for all."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for row, (token, position, sequence) in enumerate(entries):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = all_logits or row == len(entries) - 1
        if status := self.api.llama_decode(context, batch):
            raise CumuloError(f"llama_decode failed with status {status}")

    def _argmax(self, context: Any, row: int) -> int:
        import numpy as np

        pointer = self.api.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(pointer, shape=(self.vocab_size,)).argmax())


class FreshPieces:
    """Consecutive pieces of a text or of its tokens: none is handed out twice, so no prefix cache knows one."""

    def __init__(self, whole: Sequence[Any]) -> None:
        self.whole, self.position = whole, 0

    def next_pieces(self, count: int, length: int) -> list[Any]:
        starts = range(self.position, self.position + count * length, length)
        self.position += count * length
        if self.position > len(self.whole):
            raise CumuloError(
                f"the benchmark's text ends after {len(self.whole):,} pieces: ask for fewer rounds"
            )
        return [self.whole[start : start + length] for start in starts]


class SideProcess:
    """One running side in a process of its own, so that threads and memory are its own. `ask` blocks until it has
    answered; between two questions it sleeps."""

    def __init__(self, name: str, model: str | None, model_path: Path, threads: int) -> None:
        self._name, self._source, self._threads = name, model if name == "cumulo" else model_path, threads
        # A file, not a pipe: nobody reads while libraries print.
        self._log = tempfile.NamedTemporaryFile(prefix="cumulo-side-")  # noqa: SIM115
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _begin, (self._log.name, threads))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._log.close()

    def load(self) -> float:
        """The seconds that it took."""
        return float(self._result(_load, self._name, self._source, self._threads))

    def ask(self, method: str, *arguments: Any) -> Any:
        return self._result(_ask, method, *arguments)

    def peak_memory_bytes(self) -> int:
        return int(self._result(_peak_memory_bytes))

    def _result(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._pool.submit(call, *arguments).result()
        except BrokenProcessPool as error:
            tail = Path(self._log.name).read_text("utf-8", "replace")[-2000:]
            raise RuntimeError(f"the {self._name} side of the benchmark died:\n{tail}") from error


_side: Any = None  # in the process of a side


def _begin(log: str, threads: int) -> None:
    os.environ |= {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _load(name: str, source: Any, threads: int) -> float:
    global _side
    kinds: dict[str, type] = {"transformers": TransformersSide, "llama.cpp": LlamaCppSide}
    began_s = time.perf_counter()
    _side = kinds.get(name, CumuloSide)(source, threads)
    return time.perf_counter() - began_s


def _ask(method: str, *arguments: Any) -> Any:
    return getattr(_side, method)(*arguments)


def _peak_memory_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB, macOS in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

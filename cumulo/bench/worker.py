"""A benchmark side in a process of its own, so that threads and memory are its own: both ends of the pipe.

`SideProcess` (in the benchmark's process) starts `python -m cumulo.bench.worker NAME ...` and asks it for one
measurement at a time; requests and answers are JSON lines. Between requests the worker sleeps in read().
"""

import ctypes
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from cumulo.errors import CumuloError

MAX_SEQUENCES = 16
CONTEXT_PER_SEQUENCE = 1024


class Side(Protocol):
    def decode(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Greedy tokens per second of all sequences together, after their prompts."""
        ...

    def prefill(self, prompt: list[int]) -> float:
        """Prompt tokens per second until the first new token is known."""
        ...


class CumuloSide:
    """Our engine as a user gets it; `places`: at most so many sequences compute at once, as in a server."""

    def __init__(self, model: str | None, threads: int, places: int | None = None) -> None:
        from cumulo import LLM, SamplingParams
        from cumulo.engine.config import EngineConfig

        self.params = SamplingParams
        if places is None:
            config = EngineConfig(threads=threads, kv_blocks=MAX_SEQUENCES * CONTEXT_PER_SEQUENCE // 16)
        else:
            config = EngineConfig(threads=threads, max_running=places)
        self.llm = LLM(model, config=config)

    def tokenize(self, text: str) -> list[int]:
        """The prompts' text in token ids, which all sides are given."""
        return list(self.llm.tokenizer.encode(text))

    def decode(self, prompts: list[list[int]], new_tokens: int) -> float:
        # Prompts first, on their own: with their blocks cached, all sequences begin in the same step.
        self._generate(prompts, [1] * len(prompts))
        stories = [output.story for output in self._generate(prompts, [new_tokens] * len(prompts))]
        first_s = max(story.first_token_s or 0.0 for story in stories)
        last_s = max(story.finished_s or 0.0 for story in stories)
        return len(prompts) * (new_tokens - 1) / (last_s - first_s)

    def prefill(self, prompt: list[int]) -> float:
        began_s = time.perf_counter()
        output = self._generate([prompt], [1])[0]
        elapsed_s = time.perf_counter() - began_s
        if output.story.cached_tokens:
            raise CumuloError(f"{output.story.cached_tokens} prompt tokens were cached: not a prefill")
        return len(prompt) / elapsed_s

    def answer(self, texts: list[str], output_tokens: list[int]) -> dict[str, Any]:
        """Answer every text as a user's message: the server's rival in `cumulo bench overhead`."""
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        tokenizer = self.llm.tokenizer
        prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
        outputs = self._generate([tokenizer.encode(prompt) for prompt in prompts], output_tokens)
        return {
            "seconds": time.perf_counter() - began_s,
            "cpu_s": time.process_time() - began_cpu_s,
            "output_tokens": sum(output.story.output_tokens for output in outputs),
        }

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


def make_side(
    name: str, model: str | None, model_path: Path, threads: int, places: int | None = None
) -> Side:
    if name == "transformers":
        return TransformersSide(model_path, threads)
    if name == "llama.cpp":
        return LlamaCppSide(model_path, threads)
    return CumuloSide(model, threads, places)


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
    """One running side. `ask` blocks until it has answered."""

    def __init__(self, name: str, model: str | None, model_path: Path, threads: int, **settings: Any) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        settings |= {"name": name, "model": model, "model_path": str(model_path), "threads": threads}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cumulo.bench.worker", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"},
        )

    def ask(self, command: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"the {self.name} side of the benchmark died:\n{self._log_tail()}")
        answer = json.loads(line)
        if "user_error" in answer:
            raise CumuloError(answer["user_error"])
        return answer["value"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _log_tail(self) -> str:
        self._log.seek(0)
        return "".join(self._log.readlines()[-30:])


def serve(settings: dict[str, Any]) -> None:
    """Load the side named in `settings` and answer requests from stdin until it ends."""
    # Libraries print; only answers may go to the pipe.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    side: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        command = request.pop("command")
        try:
            if command == "load":
                began_s = time.perf_counter()
                side = make_side(**settings | {"model_path": Path(settings["model_path"])})
                answer(value=time.perf_counter() - began_s)
            elif command == "peak_memory_bytes":
                # Linux counts in KiB, macOS in bytes.
                unit = 1 if sys.platform == "darwin" else 1024
                answer(value=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
            else:
                answer(value=getattr(side, command)(**request))
        except CumuloError as error:
            answer(user_error=str(error))


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))

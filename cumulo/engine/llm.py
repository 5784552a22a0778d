"""LLM: the Python API. Loads a model, owns an engine, and turns prompts and conversations into answers.

>>> from cumulo import LLM, SamplingParams
>>> llm = LLM()  # the built-in model; or a folder, a .gguf file, a Hugging Face name
>>> llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))[0].text
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from cumulo.engine.assembly import Assembly, assemble
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.params import Pooling, SamplingParams
from cumulo.engine.decide.story import Story
from cumulo.engine.engine import Engine
from cumulo.engine.memory.ledger import Ledger
from cumulo.engine.outputs import Progress, RequestOutput, shortened
from cumulo.engine.token_stream import Answers, AwaitedAnswer, TokenStream
from cumulo.errors import CumuloError, InvalidRequest
from cumulo.models.adapters.config import greatest_rank
from cumulo.models.text.tokenizer import Tokenizer
from cumulo.spec.model import ModelSpec

Message = Mapping[str, Any]
Prompt = str | bytes | Sequence[int]
Adapters = str | Sequence[str | None] | None  # for all prompts, or one for each
LoadProgress = Callable[[str, int, int], None]  # stage, done, total
_SAVE_S = 2.0  # for KV blocks that go to disk when an LLM is closed


class LLM:
    """A model that answers. Safe to call from several threads; their requests share the engine's steps."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        keep_quantised: bool = True,
        progress: LoadProgress | None = None,
        lora: Mapping[str, str | Path] | None = None,
        **options: Any,
    ) -> None:
        """Load `model` (None: the built-in SmolLM2-135M-Instruct). `keep_quantised=False` computes with the
        file's weights dequantised to float32: slower, the reference the packed kernels are measured against.
        `lora`: low-rank adapters by name, each in a folder of PEFT's layout; a request names one with `adapter=`.
        `options` are those of EngineConfig, such as `tp=2`.
        """
        chosen = replace(config or EngineConfig(), **options).with_adapters(
            [greatest_rank(Path(folder)) for folder in (lora or {}).values()]
        )
        self._assembly: Assembly = assemble(model, chosen, keep_quantised, progress)
        self.config = self._assembly.config
        self._answers = Answers(self._assembly.engine)
        self._lock = self._answers.lock
        self._closed = False
        self.default_adapter: str | None = None  # of requests that name none
        for name, folder in (lora or {}).items():
            self.load_adapter(name, folder)

    # -- what it is -------------------------------------------------------------------------------------
    @property
    def spec(self) -> ModelSpec:
        return self._assembly.model.spec

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._assembly.model.tokenizer is not None
        return self._assembly.model.tokenizer

    @property
    def engine(self) -> Engine:
        return self._assembly.engine

    @property
    def ledger(self) -> Ledger:
        return self._assembly.ledger()

    def measure_ledger(self) -> Ledger:
        """The ledger with activations and logits measured too: plays a step of the largest size, and its draws."""
        with self._lock:
            if self.engine.has_work:
                raise CumuloError("memory is measured on an idle engine; wait until its requests have ended")
            return self._assembly.ledger_of_a_full_step()

    @property
    def max_context(self) -> int:
        return self._assembly.memory.max_context

    @property
    def model_name(self) -> str:
        return self._assembly.model.name

    @property
    def runs_on(self) -> str:
        """Which code computes: the fused native kernels or PyTorch's operators."""
        return self._assembly.runs_on

    def sampling(self, **chosen: Any) -> SamplingParams:
        """The values that the model's authors recommend, and the chosen ones in their place."""
        return SamplingParams(**{**self._assembly.model.generation_defaults, **chosen})

    # -- adapters ---------------------------------------------------------------------------------------
    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the loaded adapters."""
        return tuple(self.engine.scheduler.adapters.loaded)

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Requests may name the adapter in `folder` from now on. ModelError if it is not one of this model,
        InvalidRequest if there is no room: see `max_loras` of EngineConfig."""
        store = self.engine.adapters
        if store is None:
            raise CumuloError(
                "this LLM was made without adapters: make it with max_loras=1 or more, or with lora"
            )
        weights = store.read(folder)
        with self._lock:
            store.add(name, weights)

    def drop_adapter(self, name: str) -> None:
        """New requests cannot name it; its memory is used again when its last request has ended."""
        with self._lock:
            self.engine.scheduler.adapters.drop(name)

    # -- asking -----------------------------------------------------------------------------------------
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        parse_special_tokens: bool = True,
        adapter: Adapters = None,
    ) -> list[RequestOutput]:
        """Continue one prompt or many (texts or token ids), in one batch; outputs in the order of prompts.

        Special tokens written out in a prompt are recognised; with `parse_special_tokens=False`, for texts from
        people you do not trust, they are plain text. `adapter`: the name of a loaded adapter for all prompts, or
        one (or None) for each. A single prompt that cannot be served raises InvalidRequest.
        Of several, the bad ones come back with `error` set and the others are served.
        """
        encode = partial(self._encode_prompt, parse_special_tokens=parse_special_tokens)
        return self._run(_listed(prompts), params, encode, on_progress, adapter)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        parse_special_tokens: bool = False,
        adapter: Adapters = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, through the model's own chat template. Special tokens written out in
        messages are plain text, unless `parse_special_tokens`."""
        if len(messages) == 0:
            raise InvalidRequest("there are no messages to answer")
        one = isinstance(messages[0], Mapping)
        conversations = [messages] if one else list(messages)
        encode = partial(self._encode_chat, parse_special_tokens=parse_special_tokens)
        return self._run(conversations, params, encode, on_progress, adapter)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        adapter: str | None = None,
    ) -> TokenStream:
        """Iterate over an answer as it is made. Several streams may be read side by side; closing one early
        (or leaving its `with`) aborts its request."""
        is_chat = not isinstance(prompt, (str, bytes)) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        given: Any = prompt
        text, tokens = self._encode_chat(given) if is_chat else self._encode_prompt(given)
        return TokenStream(self._answers, self._add(text, tokens, params, adapter, stream=True))

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        width: int,
        *,
        max_tokens: int = 64,
        length_penalty: float = 1.0,
    ) -> list[RequestOutput]:
        """The `width` most likely continuations found by beam search, best first."""
        params = SamplingParams(
            beam_width=width, n=width, max_tokens=max_tokens, length_penalty=length_penalty
        )
        return self.generate(prompts, params)

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "mean",
        dimensions: int | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        adapter: Adapters = None,
    ) -> list[RequestOutput]:
        """A vector of length 1 for each text (or its token ids), as `embedding` of its output: the model's final
        hidden states, their mean or the last token's. `dimensions` keeps only that many of its first numbers.

        Errors are as in `generate`.
        """
        hidden = self.spec.hidden
        if dimensions is not None and not 1 <= dimensions <= hidden:
            raise InvalidRequest(
                f"dimensions must be 1 to {hidden}, this model's hidden size; got {dimensions}"
            )
        drawn = SamplingParams(pooling=pooling)
        outputs = self._run(_listed(texts), drawn, self._encode_prompt, on_progress, adapter)
        return [
            replace(output, embedding=shortened(output.embedding, dimensions).tolist())
            if dimensions is not None and output.embedding is not None
            else output
            for output in outputs
        ]

    # -- the loop behind them ---------------------------------------------------------------------------
    def _run(
        self,
        prompts: list[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        encode: Callable[[Any], tuple[str | None, list[int]]],
        on_progress: Callable[[Progress], None] | None,
        adapter: Adapters = None,
    ) -> list[RequestOutput]:
        each = _for_each(params, SamplingParams, len(prompts), "sets of parameters")
        named = _for_each(adapter, str, len(prompts), "adapters")
        answers: list[AwaitedAnswer] = []
        started_s = time.perf_counter()
        try:
            for prompt, chosen, name in zip(prompts, each, named, strict=True):
                answers.append(self._submit(prompt, chosen, encode, name, alone=len(prompts) == 1))
            waiting = answers
            while waiting := [answer for answer in waiting if answer.output is None]:
                self._answers.step()
                if on_progress is not None:
                    stories = [answer.output.story for answer in answers if answer.output is not None]
                    running = self.engine.scheduler.running
                    on_progress(
                        Progress(
                            finished=len(stories),
                            total=len(prompts),
                            prompt_tokens=sum(story.prompt_tokens for story in stories)
                            + sum(min(s.computed, s.prompt_length) for s in running),
                            output_tokens=sum(story.output_tokens for story in stories)
                            + sum(s.output_length for s in running),
                            elapsed_s=time.perf_counter() - started_s,
                        )
                    )
            return [answer.output for answer in answers if answer.output is not None]
        finally:
            # Interrupted (Ctrl-C, an error): nothing keeps running behind the caller's back.
            for answer in answers:
                self._answers.leave(answer)

    def _submit(
        self,
        prompt: Any,
        params: SamplingParams | None,
        encode: Callable[[Any], tuple[str | None, list[int]]],
        adapter: str | None,
        *,
        alone: bool,
    ) -> AwaitedAnswer:
        try:
            return self._add(*encode(prompt), params, adapter)
        except InvalidRequest as error:
            if alone:
                raise
            shown = prompt if isinstance(prompt, str) else None
            refused = RequestOutput("", shown, [], [], Story(time.perf_counter()), error=str(error))
            return AwaitedAnswer("", output=refused)

    def _add(
        self,
        text: str | None,
        tokens: list[int],
        params: SamplingParams | None,
        adapter: str | None,
        stream: bool = False,
    ) -> AwaitedAnswer:
        with self._lock:
            self._require_open()
            params = params if params is not None else self.sampling()
            named = adapter or self.default_adapter or ""
            request = self.engine.add(tokens, params, prompt_text=text, stream=stream, adapter=named)
            return self._answers.expect(request.id)

    def _encode_prompt(
        self, prompt: Prompt, parse_special_tokens: bool = True
    ) -> tuple[str | None, list[int]]:
        if isinstance(prompt, (str, bytes)):
            tokens = self.tokenizer.encode(prompt, True, parse_special_tokens)
            return (prompt if isinstance(prompt, str) else prompt.decode()), tokens
        return None, list(prompt)

    def _encode_chat(
        self, messages: Sequence[Message], parse_special_tokens: bool = False
    ) -> tuple[str | None, list[int]]:
        return self.tokenizer.render_chat(messages, parse_special_tokens=parse_special_tokens)

    # -- the end ----------------------------------------------------------------------------------------
    def _require_open(self) -> None:
        if self._closed:
            raise CumuloError("this LLM was closed; make a new one")

    def close(self) -> None:
        """Abort what is running and stop the runner's thread. Called by `with`; calling it twice is fine."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for request_id in list(self.engine.scheduler.requests):
                    self.engine.abort(request_id)
                self.engine.save_tiers(_SAVE_S)
                self.engine.runner.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """One prompt or many, as a list."""
    one = isinstance(prompts, (str, bytes)) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if one else list(prompts)


def _for_each(given: Any, kind: type, count: int, what: str) -> list[Any]:
    """What was given for all of `count` prompts, or for each of them."""
    each = [given] * count if given is None or isinstance(given, kind) else list(given)
    if len(each) != count:
        raise InvalidRequest(f"{count} prompts were given with {len(each)} {what}")
    return each

"""How many log-probabilities a request may ask for, and where its answer is worded. Called by Service.admit and
by the endpoints whose answers hold them.

Every token of every answer brings its own log-probability and that of `k` alternatives. 128 answers of 8,000 tokens
with 20 alternatives would be 21 million entries, gigabytes in this process. The bound is on what may come, so a
request is refused at once and in words, not half-way. Long lists are worded in a thread: the event loop goes on.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from cumulo.engine.decide.params import SamplingParams
from cumulo.serve.engine_link.messages import Finished
from cumulo.serve.errors import invalid

MAX_ENTRIES = 262_144
_FEW_ENTRIES = 2_048  # a few milliseconds to word
_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="word-logprobs")
_to_json = msgspec.json.Encoder().encode


def check_logprobs(prompts: Sequence[Sequence[int]], params: SamplingParams, max_context: int) -> None:
    """Raise ApiError if so many log-probabilities could come that no answer may hold them."""
    if params.logprobs is None and params.prompt_logprobs is None:
        return
    answers = max(params.n, params.best_of or 1, params.beam_width or 1)
    entries = of_prompts = 0
    for tokens in prompts:
        room = max(1, max_context - len(tokens))
        if params.logprobs is not None:
            longest = room if params.max_tokens is None else min(params.max_tokens, room)
            entries += answers * longest * (params.logprobs + 1)
        if params.prompt_logprobs is not None:
            of_prompts += params.n * len(tokens) * (params.prompt_logprobs + 1)  # told with every answer
    if entries + of_prompts <= MAX_ENTRIES:
        return
    if entries > of_prompts:
        length = "the whole context" if params.max_tokens is None else f"{params.max_tokens:,} tokens"
        raise invalid(
            f"this request could bring {entries + of_prompts:,} log-probabilities ({len(prompts)} x {answers} "
            f"answers of up to {length}, {(params.logprobs or 0) + 1} for each token) and an answer holds "
            f"{MAX_ENTRIES:,}: ask for fewer alternatives, fewer answers or a smaller max_tokens",
            "logprobs",
            "too_many_logprobs",
        )
    raise invalid(
        f"the prompts would bring {of_prompts:,} log-probabilities and an answer holds {MAX_ENTRIES:,}: ask for "
        "fewer alternatives or send fewer tokens",
        "prompt_logprobs" if params.logprobs is None else "logprobs",
        "too_many_logprobs",
    )


def entries_of(results: Sequence[Finished]) -> int:
    """How many log-probabilities there are to word."""
    count = 0
    for finished in results:
        for entries in (*(sample.logprobs for sample in finished.samples), finished.prompt_logprobs or ()):
            count += len(entries) * (1 + len(entries[0].top)) if entries else 0
    return count


async def worded(results: Sequence[Finished], word: Callable[[], Any]) -> Any:
    """What `word` makes of these results, as something `json_response` can send. With many log-probabilities it is
    made, and turned into JSON, in a thread."""
    if entries_of(results) <= _FEW_ENTRIES:
        return word()
    return await asyncio.get_running_loop().run_in_executor(_thread, lambda: msgspec.Raw(_to_json(word())))

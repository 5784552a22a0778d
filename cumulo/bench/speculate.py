"""`cumulo bench speculate`: the same engine with and without drafts, in turns, on edited files and on chat.

Tokens must be equal, prompt by prompt. Every group of prompts is answered by both sides, one right after the other,
in an order that alternates; a ratio is the median over the groups, so that a noisy neighbour hits both alike. The
ratio of processor time is printed too: it is the steadier one on a machine that others use.
"""

import inspect
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cumulo.base.report import Row
from cumulo.bench.turns import Tell, take_turns
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.llm import LLM
from cumulo.engine.outputs import Progress
from cumulo.errors import CumuloError

# Functions of Python's library, to be edited: on every machine, and known by heart by no small model.
_EDITED = (
    "base64.b85decode", "calendar.monthrange", "colorsys.rgb_to_hsv", "difflib.get_close_matches",
    "fnmatch.filter", "heapq.nsmallest", "linecache.getlines", "mimetypes.guess_extension", "copy.deepcopy",
    "ast.literal_eval", "shlex.join", "shutil.copyfileobj", "statistics.median_low", "string.capwords",
    "textwrap.dedent", "timeit.timeit",
)  # fmt: skip
_RENAMED = (
    "value", "result", "item", "text", "name", "index", "data", "path", "count", "line", "size", "key", "node"
)  # fmt: skip
_QUESTIONS = (
    "What is the capital of {}?", "Write three sentences about {}.", "Why do people like {}?",
    "Explain {} to a child.", "Give me a short list of facts about {}.", "Tell a short story about {}.",
    "What should I know before I learn about {}?", "How would you describe {} to a friend?",
)  # fmt: skip
_SUBJECTS = (
    "France", "the moon", "bread", "volcanoes", "chess", "the ocean", "bicycles", "winter", "trains", "honey",
    "Japan", "gravity", "dogs", "mountains", "music", "rain", "coffee", "maps", "robots", "gardens", "whales",
    "bridges", "clocks", "Brazil", "apples",
)  # fmt: skip


def editing_prompts(count: int) -> list[str]:
    """A file, and the beginning of the same file with a name changed: what follows is mostly what was there."""
    prompts = []
    for index in range(count):
        module, name = _EDITED[index % len(_EDITED)].rsplit(".")
        source = inspect.getsource(getattr(__import__(module), name))[:1600]
        word = _RENAMED[index // len(_EDITED) % len(_RENAMED)]
        first = source.split("\n", 1)[0]
        prompts.append(
            f"The file before the change:\n```python\n{source}\n```\n\n"
            f"The same file, with a comment about {word} at its end:\n```python\n{first}\n"
        )
    return prompts


def chat_prompts(count: int) -> list[str]:
    return [
        _QUESTIONS[index % len(_QUESTIONS)].format(_SUBJECTS[index % len(_SUBJECTS)])
        for index in range(count)
    ]


@dataclass(frozen=True, slots=True)
class _Answered:
    """What a side made of a group of prompts."""

    tokens: list[list[int]]
    rate: float  # tokens per second
    processor_rate: float  # tokens per second of processor time
    drafted: int
    accepted: int


Race = list[tuple[_Answered, _Answered]]  # of each group of prompts: without drafts, and with


def measure(
    model: str | None,
    speculate: str,
    threads: int | None,
    prompts: int,
    new_tokens: int,
    batches: Sequence[int],
    tell: Tell,
) -> list[Row]:
    if prompts < max(batches):
        raise CumuloError(f"--prompts must be at least the largest batch, {max(batches)}; got {prompts}")
    config = EngineConfig(threads=threads, kv_memory_gib=1.0, max_context=2048, prefix_cache=False)
    rows: list[Row] = []
    with LLM(model, config=config) as plain, LLM(model, config=config, speculate=speculate) as drafting:
        workloads = {"editing": _encode(plain, editing_prompts(prompts), chat=False)}
        workloads["chat"] = _encode(plain, chat_prompts(prompts), chat=True)
        sure = total = 0
        for name, encoded in workloads.items():
            for batch in batches:
                race = _race(plain, drafting, encoded, batch, new_tokens, name, tell)
                rows += _rows(name, batch, race, speculate, plain.config.device == "cuda")
                pairs = [pair for one, other in race for pair in zip(one.tokens, other.tokens, strict=True)]
                sure, total = sure + sum(one == other for one, other in pairs), total + len(pairs)
        equal = Row("answers with the same tokens", sure / total, "of 1", must=1.0, note=f"{sure} of {total}")
        rows.insert(0, equal)
    return rows


def _encode(llm: LLM, texts: Sequence[str], chat: bool) -> list[list[int]]:
    if not chat:
        return [list(llm.tokenizer.encode(text)) for text in texts]
    return [list(llm.tokenizer.render_chat([{"role": "user", "content": text}])[1]) for text in texts]


def _rows(name: str, batch: int, race: Race, speculate: str, on_gpu: bool) -> list[Row]:
    must = aim = None
    if batch >= 16:
        must = 0.97
    elif batch == 1 and name == "editing" and speculate == "ngram":
        must, aim = (2.0, None) if on_gpu else (1.4, 1.8)
    elif batch == 1 and name == "chat" and speculate != "ngram":
        must = 1.6 if on_gpu else 1.1
    processor_ratio = statistics.median(own.processor_rate / plain.processor_rate for plain, own in race)
    drafted, accepted = (sum(getattr(own, name) for _, own in race) for name in ("drafted", "accepted"))
    share, output = accepted / max(1, drafted), sum(len(row) for _, own in race for row in own.tokens)
    more: dict[str, Any] = {
        "processor_time_ratio": processor_ratio,
        "accepted_share": share,
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "tokens_per_s": statistics.median(own.rate for _, own in race),
        "groups": len(race),
    }
    note = (
        f"{processor_ratio:.2f}x per processor second; {share:.0%} of drafts accepted, "
        f"{accepted / max(1, output):.0%} of all tokens"
    )
    ratio = statistics.median(own.rate / plain.rate for plain, own in race)
    plural = "request" if batch == 1 else "requests"
    return [Row(f"{name}, {batch} {plural}", ratio, "x tok/s", must=must, aim=aim, note=note, more=more)]


def _race(
    plain: LLM,
    drafting: LLM,
    prompts: list[list[int]],
    batch: int,
    new_tokens: int,
    workload: str,
    tell: Tell,
) -> Race:
    groups = [prompts[first : first + batch] for first in range(0, len(prompts) - batch + 1, batch)]
    groups.insert(0, groups[0])  # the first round learns what steps of this size take
    sides = {
        name: lambda number, side=side: _answer(side, groups[number], new_tokens)
        for name, side in (("plain", plain), ("drafting", drafting))
    }
    answered = take_turns(sides, len(groups) - 1, tell, what=f"{workload}, {batch} at once, ")
    return list(zip(answered["plain"], answered["drafting"], strict=True))


def _answer(llm: LLM, prompts: list[list[int]], new_tokens: int) -> _Answered:
    """Rates count from when every prompt has its first token: both sides compute prompts alike."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens)
    begun: list[tuple[float, float, int]] = []  # clock, processor time, tokens so far
    prompt_tokens = sum(map(len, prompts))

    def watch(progress: Progress) -> None:
        known = progress.prompt_tokens >= prompt_tokens and progress.output_tokens >= len(prompts)
        if known and not begun:
            begun.append((time.perf_counter(), time.process_time(), progress.output_tokens))

    outputs = llm.generate(prompts, params, on_progress=watch)
    ended_s, ended_cpu_s = time.perf_counter(), time.process_time()
    tokens = [output.samples[0].token_ids for output in outputs]
    began_s, began_cpu_s, before = begun[0]
    count = max(1, sum(map(len, tokens)) - before)
    return _Answered(
        tokens,
        count / (ended_s - began_s),
        count / (ended_cpu_s - began_cpu_s),
        sum(output.story.drafted_tokens for output in outputs),
        sum(output.story.accepted_tokens for output in outputs),
    )

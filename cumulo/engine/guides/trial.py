"""Trying a guide out in a killable worker before the engine compiles it. Called by `Guidance` and the server's
GuideChecker.

A compiled guide cannot travel between processes, so a worker compiles it first, within limits on time and memory,
and takes a few steps with it. What passes there is compiled again by the engine, which then knows what it will
take. The second half of this file runs in the worker: it imports neither torch nor the tokenizer.
"""

import random
import resource
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cumulo.base.sandbox.worker import MIB, JobEnded, JobFailed, Limits, Worker, WorkerUnavailable
from cumulo.engine.decide.params import Guide
from cumulo.engine.guides.grammar import grammar_text, refusal
from cumulo.errors import CumuloError, InvalidRequest

# A trial gives way to everything else on the machine, so its own time on the clock says little: where the clock
# ends it the host is busy, and the guide may be sent again.
TRIAL = Limits(cpu_s=2.0, wall_s=60.0, memory_bytes=512 * MIB)
# A first try that tells the many quick guides from the few slow ones, so that the quick need not wait for those.
QUICK_TRIAL = Limits(cpu_s=0.15, wall_s=2.0, memory_bytes=512 * MIB)
MAX_KEPT_BYTES = 64 * MIB  # of a compiled guide, after a few steps
MAX_STEP_S = 0.05  # of processor time for one mask: all requests of a step wait for it
_WALK_STEPS = 6
_WALK_STACK_BYTES = 1 << 20  # masks are computed on usual stacks in the engine; here it is halved

# Of llguidance's parser and lexer, wherever a guide is compiled: a guide with very many readings fails instead of
# holding up everybody's steps. With these no schema of the JSON Schema Test Suite fails, and the most expensive
# step found in hostile guides falls from 465 to 45 ms.
PARSER_LIMITS = {"step_max_items": 5000, "step_lexer_fuel": 50_000, "max_lexer_states": 50_000}


class GuideCompilerBusy(CumuloError):
    """The guide may be fine: there is no worker, or no room, to find out now."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What compiling a guide and its first steps took."""

    cpu_s: float
    kept_bytes: int


class VocabularyBytes:
    """A tokenizer as llguidance reads one. Special tokens have a name in grammars, not a spelling: text that looks
    like one is still text."""

    is_tokenizer_wrapper = True

    def __init__(
        self, tokens: list[bytes], special_ids: list[int], eos_ids: list[int], bos_id: int | None
    ) -> None:
        self.tokens, self.special_token_ids, self.eos_ids = tokens, special_ids, eos_ids
        self.eos_token_id, self.bos_token_id = eos_ids[0], bos_id

    def __call__(self, text: str | bytes) -> list[int]:
        """llguidance asks for the tokens of a text only where it forces that, which our options forbid."""
        return []


def trial_worker(vocabulary: VocabularyBytes) -> Worker:
    """Each guide gets a process of its own, forked from one that has the vocabulary loaded."""

    def setup() -> Any:
        return vocabulary.tokens, vocabulary.special_token_ids, vocabulary.eos_ids, vocabulary.bos_token_id

    return Worker("cumulo.engine.guides.trial:make", setup, jobs_per_child=1)


def try_out(worker: Worker, guide: Guide, limits: Limits = TRIAL) -> Trial:
    """Raises InvalidRequest where the guide cannot be, JobEnded where `limits` stop it before TRIAL would have, and
    GuideCompilerBusy where it could not be tried."""
    try:
        found, _ = worker.call((guide.kind, guide.source), limits)
    except JobEnded as error:
        if error.reason == "lost":
            raise GuideCompilerBusy("the process that compiles guides was ended; try again") from error
        if error.reason in ("cpu time", "time") and limits.cpu_s < TRIAL.cpu_s:
            raise
        if error.reason == "time":
            raise GuideCompilerBusy(
                f"the machine is too busy to compile this guide: in {error.limits.wall_s:g} s it did not get its "
                f"{error.limits.cpu_s:g} s of processor time; try again"
            ) from error
        raise refusal(guide, f"it is too complex to compile: {error.words}") from error
    except JobFailed as error:
        raise refusal(guide, f"llguidance fails on it ({error})") from error
    except WorkerUnavailable as error:
        raise GuideCompilerBusy(f"guides cannot be compiled now: {error}") from error
    if (reason := found.get("refused")) is not None:
        raise InvalidRequest(str(reason))
    trial = Trial(float(found["cpu_s"]), int(found["kept_bytes"]))
    if trial.kept_bytes > MAX_KEPT_BYTES:
        raise refusal(
            guide,
            f"it is too complex: compiled, it takes {trial.kept_bytes // MIB} MiB of memory; "
            f"at most {MAX_KEPT_BYTES // MIB} are accepted",
        )
    if found["step_s"] > MAX_STEP_S:
        raise refusal(
            guide,
            f"it is too complex: finding the next allowed tokens takes {found['step_s'] * 1e3:.0f} ms, and every "
            f"request of a step waits for it; at most {MAX_STEP_S * 1e3:g} ms are accepted",
        )
    return trial


# -- compiling: in the worker and in the engine -----------------------------------------------------------------
def compile_guide(library: Any, vocabulary: Any, guide: Guide) -> Any:
    """A matcher at the beginning of its text, its first mask computed. InvalidRequest with llguidance's reason."""
    limits = library.LLParserLimits(verbose_errors=False, **PARSER_LIMITS)
    matcher = library.LLMatcher(vocabulary, grammar_text(guide), log_level=0, limits=limits)
    error = matcher.get_error() if matcher.is_error() else ""
    if not error:
        first = matcher.deep_copy()
        first.compute_bitmask()  # what no text can match shows only here
        error = first.get_error()
        if error.startswith("NoExtension"):
            error = "no text at all fits it"
    if error:
        raise refusal(guide, error)
    return matcher


def load_vocabulary(library: Any, plain: VocabularyBytes) -> Any:
    return library.LLTokenizer(plain, n_vocab=len(plain.tokens), eos_token=list(plain.eos_ids))


# -- in the worker ----------------------------------------------------------------------------------------------
def make(setup: tuple[list[bytes], list[int], list[int], int | None]) -> Any:
    import llguidance

    vocabulary, ends = load_vocabulary(llguidance, VocabularyBytes(*setup)), frozenset(setup[2])

    def work(job: tuple[Any, str]) -> tuple[dict[str, Any], bytes]:
        guide = Guide(*job)
        resident_bytes, begun_s = _resident_bytes(), time.process_time()
        try:
            matchers = [compile_guide(llguidance, vocabulary, guide)]
        except InvalidRequest as error:
            return {"refused": str(error)}, b""
        cpu_s = time.process_time() - begun_s
        step_s = _on_usual_stack(matchers, ends)
        kept_bytes = max(0, _resident_bytes() - resident_bytes)
        return {"cpu_s": cpu_s, "step_s": step_s, "kept_bytes": kept_bytes}, b""

    return work


def _on_usual_stack(matchers: list[Any], ends: frozenset[int]) -> float:
    """The processor time of the slowest step of a random walk, without the first: that belongs to compiling. The
    matcher also ends on that stack: what was nested deeply is taken apart by recursion."""
    slowest: list[float] = []
    usual = threading.stack_size(_WALK_STACK_BYTES)
    try:
        thread = threading.Thread(target=lambda: slowest.append(_walk(matchers.pop().deep_copy(), ends)))
        thread.start()
    finally:
        threading.stack_size(usual)
    thread.join()
    return slowest[0]


def _walk(matcher: Any, ends: Sequence[int] | frozenset[int]) -> float:
    chance, slowest_s = random.Random(0), 0.0
    for step in range(_WALK_STEPS):
        begun_s = time.thread_time()
        mask = matcher.compute_bitmask()
        if step:
            slowest_s = max(slowest_s, time.thread_time() - begun_s)
        if matcher.is_error():  # this text cannot go on; its own request would end there, others not
            break
        token = _any_token(mask, chance)
        if token is None or token in ends or not matcher.consume_tokens([token]):
            break
    return slowest_s


def _any_token(mask: Sequence[int], chance: random.Random) -> int | None:
    """One of the allowed, drawn from a random place of the vocabulary on."""
    start = chance.randrange(len(mask))
    for place in (*range(start, len(mask)), *range(start)):
        if mask[place]:
            bits = [bit for bit in range(8) if mask[place] >> bit & 1]
            return int(place) * 8 + bits[chance.randrange(len(bits))]
    return None


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError):
        return 0

"""Guided decoding: which tokens a Guide allows next. The engine checks guides here, the runner asks for masks.

A guide (JSON schema, regular expression, Lark grammar) is compiled by llguidance against the byte strings of
our own tokenizer, so GGUF and Hugging Face models are alike. The runner holds one matcher per guided slot. A
matcher is derived from the slot's tokens alone: before a draw it takes in those it has not seen. So there is
nothing to keep in step when a plan is made ahead of a sample, a sequence is preempted, or samples fork.
"""

import contextlib
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cumulo.base.sandbox.worker import Worker
from cumulo.engine.decide.params import Guide
from cumulo.engine.guides.grammar import refusal
from cumulo.engine.guides.trial import (
    GuideCompilerBusy,
    Trial,
    VocabularyBytes,
    compile_guide,
    load_vocabulary,
    trial_worker,
    try_out,
)
from cumulo.engine.sampling.sampler import NO_TOKEN_LEFT, TokenMasks
from cumulo.errors import InvalidRequest
from cumulo.models.text.tokenizer import Tokenizer

# llguidance recurses along chains of rules and references; on a usual stack a long one ends the process.
_COMPILE_STACK_BYTES = 256 << 20
_CACHED_GUIDES = 64
_MOST_KEPT_BYTES = 1 << 30  # all compiled guides together; more are refused until some have ended
_SLOW_COMPILE_S = 0.1  # from here on compiling gives way to the steps
# Of processor time for one mask: its request ends, so that it does not hold up another step.
_SLOW_MASK_S = 0.15
_RENEWED_WITHIN_S = 0.03
_REMEMBERED_SLOW = 256


@dataclass(frozen=True, slots=True)
class _Compiled:
    matcher: Any  # at the beginning of its text; callers get copies
    kept_bytes: int = 0  # of memory
    cpu_s: float = 0.0  # that compiling takes


class Guidance:
    """Compiles guides for one model. Made once per engine, used from any thread; costs nothing until used.

    Each new guide is first tried out in a killable worker (see `trial`). A server does that with workers of
    its own before it adds the request: `Engine.add` then finds the guide compiled.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.vocab_size, self.eos_ids = vocab_size, tuple(eos_ids)
        self._tokenizer = tokenizer
        self._llguidance: Any = None
        self._plain: VocabularyBytes | None = None
        self._vocabulary: Any = None  # llguidance's view of the tokenizer
        # Fresh matchers and the memory each takes: the last used, and whatever a live Guide object stands for, so
        # that no guide of a waiting request is compiled again between two steps.
        self._recent: OrderedDict[Guide, _Compiled] = OrderedDict()
        self._held: dict[int, _Compiled] = {}
        self._slow: OrderedDict[Guide, None] = OrderedDict()  # took too long in the middle of an answer
        self._lock = threading.Lock()
        self._worker: Worker | None = None

    def check(self, guide: Guide) -> None:
        """Try the guide out and compile it. Raises InvalidRequest with the reason, or GuideCompilerBusy."""
        if not self.knows(guide):
            with self._lock:
                if self._worker is None:
                    self._worker = self.new_worker()
            self.admit(guide, try_out(self._worker, guide))

    def knows(self, guide: Guide) -> bool:
        """Whether it is compiled already; then it stays so as long as this object lives. InvalidRequest if it has
        proved too slow."""
        with self._lock:
            if guide in self._slow:
                raise refusal(guide, _TOO_SLOW)
            found = self._find(guide)
            if found is not None:
                self._hold(guide, found)
            return found is not None

    def new_worker(self) -> Worker:
        """A worker for `try_out`. InvalidRequest if this model cannot be guided."""
        self._library()
        return trial_worker(self._plain_vocabulary())

    def admit(self, guide: Guide, trial: Trial) -> None:
        """Compile what has passed its trial."""
        with self._lock:
            kept = {id(one): one.kept_bytes for one in (*self._recent.values(), *self._held.values())}
            if sum(kept.values()) + trial.kept_bytes > _MOST_KEPT_BYTES:
                raise GuideCompilerBusy(
                    f"the guides in use take {sum(kept.values()) >> 20:,} MiB already; try again when some "
                    "requests have ended"
                )
        matcher = self._compile(guide, gives_way=trial.cpu_s > _SLOW_COMPILE_S)
        made = _Compiled(matcher, trial.kept_bytes, trial.cpu_s)
        with self._lock:
            self._keep(guide, made)

    def matcher(self, guide: Guide) -> Any:
        """A matcher at the beginning of its text, the caller's own."""
        with self._lock:
            found = self._find(guide)
        if found is None:
            found = _Compiled(self._compile(guide, gives_way=False))
            with self._lock:
                self._keep(guide, found)
        return found.matcher.deep_copy()

    def fresh(self, guide: Guide) -> Any | None:
        """A matcher that shares nothing with those before; None if it would hold up a step."""
        with self._lock:
            found = self._find(guide)
            self._recent.pop(guide, None)
            if found is None or found.cpu_s > _RENEWED_WITHIN_S:
                return None
        made = _Compiled(self._compile(guide, gives_way=False), found.kept_bytes, found.cpu_s)
        with self._lock:
            self._keep(guide, made)
        return made.matcher.deep_copy()

    def forget(self, guide: Guide, slow: bool = False) -> None:
        """Matchers share what the lexer has learnt: after a failure it may have no room left. `slow`: it is
        refused from now on."""
        with self._lock:
            self._recent.pop(guide, None)
            if slow:
                self._slow[guide] = None
                if len(self._slow) > _REMEMBERED_SLOW:
                    self._slow.popitem(last=False)

    def executor(self) -> Any:
        """Fills the masks of many matchers in parallel."""
        return self._library().LLExecutor()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _find(self, guide: Guide) -> _Compiled | None:
        found = self._recent.get(guide)
        if found is not None:
            self._recent.move_to_end(guide)
            return found
        return self._held.get(id(guide))

    def _keep(self, guide: Guide, made: _Compiled) -> None:
        self._recent[guide] = made
        if len(self._recent) > _CACHED_GUIDES:
            self._recent.popitem(last=False)
        self._hold(guide, made)

    def _hold(self, guide: Guide, made: _Compiled) -> None:
        if id(guide) not in self._held:
            weakref.finalize(guide, self._held.pop, id(guide), None).atexit = False
        self._held[id(guide)] = made

    def _compile(self, guide: Guide, *, gives_way: bool) -> Any:
        """On a thread with a large stack; one that takes long leaves the processors to the steps."""
        library, vocabulary = self._library(), self._load_vocabulary()
        results: list[Any] = []

        def work() -> None:
            if gives_way:
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)
            try:
                results.append(compile_guide(library, vocabulary, guide))
            except InvalidRequest as error:
                results.append(error)

        with _STACK_SIZE:
            usual = threading.stack_size(_COMPILE_STACK_BYTES)
            try:
                thread = threading.Thread(target=work, name="cumulo-guide", daemon=True)
                thread.start()
            finally:
                threading.stack_size(usual)
        thread.join()
        if not results:
            raise RuntimeError("llguidance failed while compiling a guide; its error is on standard error")
        if isinstance(results[0], InvalidRequest):
            raise results[0]
        return results[0]

    def _library(self) -> Any:
        if self._llguidance is None:
            try:
                import llguidance
            except ImportError:
                raise InvalidRequest(
                    "guided decoding (JSON, regular expressions, grammars) needs the package llguidance: "
                    "pip install -e '.[serve]' in Cumulo's folder"
                ) from None
            self._llguidance = llguidance
        return self._llguidance

    def _plain_vocabulary(self) -> VocabularyBytes:
        if self._plain is None:
            if not self.eos_ids:
                raise InvalidRequest(
                    "this model names no end-of-sequence token, so a guided answer could not end; add "
                    "eos_token_id to its generation_config.json"
                )
            tokens = [self._tokenizer.token_bytes(token) for token in range(self.vocab_size)]
            special = sorted({*self._tokenizer.special_ids, *self.eos_ids})
            self._plain = VocabularyBytes(tokens, special, list(self.eos_ids), self._tokenizer.bos_id)
        return self._plain

    def _load_vocabulary(self) -> Any:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = load_vocabulary(self._library(), self._plain_vocabulary())
            return self._vocabulary


_STACK_SIZE = threading.Lock()  # a thread's stack size is set for the whole process


_FAILED = "the guide failed"
_TOO_SLOW = (
    "it is too complex: finding the next allowed tokens takes too long, and a step's requests all wait for it"
)


def is_fault_of_guide(error: str) -> bool:
    """Whether a request that had begun ended because its own guide could not go on."""
    return error.startswith(_FAILED) or error == NO_TOKEN_LEFT


_TIMED_STEPS = 16


# -- in the runner -----------------------------------------------------------------------------------------
def _after_draft(matcher: Any, token: int) -> Any | None:
    """A copy of the matcher behind a drafted token; None if the guide does not allow it."""
    if matcher is None or matcher.is_error() or matcher.is_stopped() or matcher.validate_tokens([token]) < 1:
        return None
    copy = matcher.deep_copy()
    copy.consume_token(token)
    return copy


class GuidedSlots:
    """The matchers of a runner's guided slots. Only the runner's thread touches it; empty, it is falsy."""

    def __init__(self, guidance: Guidance | None) -> None:
        self._guidance = guidance
        # By slot: the matcher, the output tokens it has seen, and its guide.
        self._matchers: dict[int, tuple[Any, int, Guide]] = {}
        self._executor: Any = None
        self._one_by_one = 0  # steps for which masks are timed each by itself, because a step was slow

    def __bool__(self) -> bool:
        return bool(self._matchers)

    def begin(self, slot: int, guide: Guide | None) -> None:
        """The slot holds a sequence anew: whatever it held before is over."""
        self._matchers.pop(slot, None)
        if guide is not None:
            if self._guidance is None:
                raise RuntimeError(f"slot {slot} has a guide, but this runner was made without Guidance")
            self._matchers[slot] = self._guidance.matcher(guide), 0, guide

    def end(self, slot: int) -> None:
        self._matchers.pop(slot, None)

    def masks(
        self,
        slots: NDArray[np.int64],
        output_before: Callable[[int], NDArray[np.int32]],
        vocabulary: int,
    ) -> TokenMasks | None:
        """What each draw may be, whose slot is given; None if none of them is guided. `output_before`: by draw, the
        tokens of the answer so far."""
        draws = [draw for draw, slot in enumerate(slots.tolist()) if slot in self._matchers]
        if not draws:
            return None
        matchers, guides = [], []
        begun_s = time.thread_time()
        before: dict[
            int, Any
        ] = {}  # by slot: the matcher of the place before, if this step draws for it, too
        masked: list[int] = []
        for draw in draws:
            slot = int(slots[draw])
            matcher, seen, guide = self._matchers[slot]
            output = output_before(draw)
            if slot in before:
                matcher = _after_draft(before[slot], int(output[-1]))
                if matcher is None:
                    before[slot] = None
                    continue  # its draft will not be accepted: nothing is drawn here
            elif len(output) > seen:
                matcher.consume_tokens(output[seen:].tolist())
                self._matchers[slot] = matcher, len(output), guide
            before[slot] = matcher
            masked.append(draw)
            matchers.append(matcher)
            guides.append(guide)
        draws = masked
        bits = np.zeros((len(draws), -(-vocabulary // 32)), dtype=np.int32)
        too_slow = self._fill(matchers, bits, begun_s)
        errors: dict[int, str] = {}
        for row, (draw, matcher) in enumerate(zip(draws, matchers, strict=True)):
            if matcher.is_error() and row not in too_slow:
                if draw and slots[draw - 1] == slots[draw]:
                    errors[draw] = _FAILED  # behind a draft: it is drawn again without one
                    continue
                matcher = self._renewed(int(slots[draw]), output_before(draw), bits[row])
            if matcher.is_error() or row in too_slow:
                error = matcher.get_error().replace("<non-verbose/>", "").strip()[:500]
                errors[draw] = f"{_FAILED}: {error or _TOO_SLOW}"
                assert self._guidance is not None
                self._guidance.forget(guides[row], slow=row in too_slow)
        return TokenMasks(np.array(draws, dtype=np.int64), bits, errors)

    def _renewed(self, slot: int, output: NDArray[np.int32], row: NDArray[np.int32]) -> Any:
        """The slot's matcher with a lexer of its own, where the lexer that all requests with this guide share is
        full: this text alone may well fit into one. Fails as before if it does not."""
        matcher, seen, guide = self._matchers[slot]
        if "too many states" not in matcher.get_error():
            return matcher
        assert self._guidance is not None
        fresh = self._guidance.fresh(guide)
        if fresh is None:
            return matcher
        fresh.consume_tokens(output[:seen].tolist())
        fresh.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._matchers[slot] = fresh, seen, guide
        return fresh

    def _fill(self, matchers: list[Any], bits: NDArray[np.int32], begun_s: float) -> set[int]:
        """Computes the masks; returns the rows that took too long to be let take another step."""
        row_bytes = bits.shape[1] * bits.itemsize
        if len(matchers) == 1:
            matchers[0].unsafe_compute_mask_ptr(bits.ctypes.data, row_bytes)
            return {0} if time.thread_time() - begun_s > _SLOW_MASK_S else set()
        too_slow: set[int] = set()
        if self._one_by_one:
            self._one_by_one -= 1
            for row, matcher in enumerate(matchers):
                begun_s = time.thread_time()
                matcher.unsafe_compute_mask_ptr(bits.ctypes.data + row * row_bytes, row_bytes)
                if time.thread_time() - begun_s > _SLOW_MASK_S:
                    too_slow.add(row)
                    self._one_by_one = _TIMED_STEPS
            return too_slow
        if self._executor is None:
            assert self._guidance is not None
            self._executor = self._guidance.executor()
        jobs = [(matcher, row) for row, matcher in enumerate(matchers)]
        begun_wall_s = time.perf_counter()
        self._executor.unsafe_compute_mask_ptr(jobs, bits.ctypes.data, row_bytes, len(jobs))
        if time.perf_counter() - begun_wall_s > _SLOW_MASK_S:
            self._one_by_one = _TIMED_STEPS
        return too_slow

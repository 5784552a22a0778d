"""Guided decoding: which tokens a Guide allows next. The engine checks guides here, the runner asks for masks.

A guide (JSON schema, regular expression, Lark grammar) is compiled by llguidance against the byte strings of
our own tokenizer, so GGUF and Hugging Face models are alike. The runner holds one matcher per guided slot. A
matcher is derived from the slot's tokens alone: before a draw it takes in those it has not seen. So there is
nothing to keep in step when a plan is made ahead of a sample, a sequence is preempted, or samples fork.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cumulo.engine.guided_schema import enforceable
from cumulo.engine.params import Guide
from cumulo.engine.sampler import NO_TOKEN_LEFT, TokenMasks
from cumulo.errors import InvalidRequest
from cumulo.models.tokenizer import Tokenizer

# Compiling is bounded by llguidance's own limits, by these, and by the clock: a guide comes from a stranger.
MAX_SOURCE_CHARACTERS = 128 * 1024
MAX_REGEX_CHARACTERS = 16 * 1024
MAX_GRAMMAR_LINES = 500  # the time for chains of terminals grows with the cube of their number
MAX_PROPERTIES = 1000  # of one object; the time grows with their square
COMPILE_LIMIT_S = 5.0
# Of the parser, for one mask: a grammar with very many readings fails instead of holding up everybody's steps.
MAX_STEP_ITEMS = 5000
# llguidance recurses along chains of rules and references; on a usual stack a long one ends the process.
_COMPILE_STACK_BYTES = 256 << 20
_CACHED_GUIDES = 64
# Between JSON tokens: nothing, a space, or a line break with its indentation. Unbounded white space is where
# small models get lost: they indent until max_tokens.
JSON_WHITESPACE = r"[ ]|\n([ ]{0,32}|\t{0,8})"
# Without \uXXXX: a name spelt that way would pass for another one, and escape the schema of its property. Other
# characters are written as they are; only schemas that name control characters themselves need the escape.
_ESCAPES = 'nrbtf\\"'
_NAMES_CONTROL_CHARACTER = re.compile(r"\\u00[01]|\\\\(?:x[01]|u00[01]|[ux]\{|c[A-Za-z]|0)")
# Forced stretches are left to the model, too: llguidance would spell them out by calling our tokenizer, under
# the interpreter's lock and in time proportional to their length, at every step.
_OPTIONS = '%llguidance {"no_forcing": true}'
_NAMES = {
    "json_object": "JSON",
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "grammar": "grammar",
}


class Guidance:
    """Compiles guides for one model. Made once per engine, used from any thread; costs nothing until used.

    A server may call `check` in a thread of its own before it adds the request: `Engine.add` then finds the
    guide compiled.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.vocab_size, self.eos_ids = vocab_size, tuple(eos_ids)
        self._tokenizer = tokenizer
        self._llguidance: Any = None
        self._vocabulary: Any = None  # llguidance's view of the tokenizer
        self._compiled: OrderedDict[Guide, Any] = OrderedDict()  # fresh matchers, the last used at the end
        self._lock = threading.Lock()
        self._overdue: threading.Thread | None = None

    def check(self, guide: Guide) -> None:
        """Compile the guide, or raise InvalidRequest with the reason."""
        self.matcher(guide)

    def matcher(self, guide: Guide) -> Any:
        """A matcher at the beginning of its text, the caller's own."""
        with self._lock:
            found = self._compiled.get(guide)
            if found is not None:
                self._compiled.move_to_end(guide)
                return found.deep_copy()
        made = self._compile(guide)
        with self._lock:
            self._compiled[guide] = made
            if len(self._compiled) > _CACHED_GUIDES:
                self._compiled.popitem(last=False)
            return made.deep_copy()

    def executor(self) -> Any:
        """Fills the masks of many matchers in parallel."""
        return self._library().LLExecutor()

    def _compile(self, guide: Guide) -> Any:
        library, vocabulary = self._library(), self._load_vocabulary()
        grammar = grammar_text(guide)
        limits = library.LLParserLimits(verbose_errors=False, step_max_items=MAX_STEP_ITEMS)

        def work() -> tuple[Any, str]:
            matcher = library.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
            if matcher.is_error():
                return matcher, matcher.get_error()
            first = matcher.deep_copy()
            first.compute_bitmask()  # what no text can match shows only here
            error = first.get_error()
            return matcher, "no text at all fits it" if error.startswith("NoExtension") else error

        matcher, error = self._bounded(work, guide)
        if error:
            raise _refusal(guide, error)
        return matcher

    def _bounded(self, work: Callable[[], Any], guide: Guide) -> Any:
        """Run `work` on a large stack; give up on it when it takes too long (it cannot be interrupted)."""
        if self._overdue is not None and self._overdue.is_alive():
            raise _refusal(guide, "the compiler is still busy with a very complex one; try again later")
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(work()), name="cumulo-guide", daemon=True)
        usual = threading.stack_size(_COMPILE_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
        thread.join(COMPILE_LIMIT_S)
        if thread.is_alive():
            self._overdue = thread
            raise _refusal(guide, f"it is too complex: compiling it takes more than {COMPILE_LIMIT_S:g} s")
        if not results:
            raise RuntimeError("llguidance failed while compiling a guide; its error is on standard error")
        return results[0]

    def _library(self) -> Any:
        if self._llguidance is None:
            try:
                import llguidance
            except ImportError:
                raise InvalidRequest(
                    "guided decoding (JSON, regular expressions, grammars) needs the package llguidance: "
                    "pip install 'cumulo[serve]'"
                ) from None
            self._llguidance = llguidance
        return self._llguidance

    def _load_vocabulary(self) -> Any:
        with self._lock:
            if self._vocabulary is None:
                if not self.eos_ids:
                    raise InvalidRequest(
                        "this model names no end-of-sequence token, so a guided answer could not end; add "
                        "eos_token_id to its generation_config.json"
                    )
                self._vocabulary = self._library().LLTokenizer(
                    _Vocabulary(self._tokenizer, self.vocab_size, self.eos_ids),
                    n_vocab=self.vocab_size,
                    eos_token=list(self.eos_ids),
                )
            return self._vocabulary


class _Vocabulary:
    """Our tokenizer as llguidance reads one. Special tokens have a name in grammars, not a spelling: text that
    looks like one is still text."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted({*tokenizer.special_ids, *eos_ids})
        self.eos_token_id, self.bos_token_id = eos_ids[0], tokenizer.bos_id
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text)


# -- from a guide to llguidance's language -----------------------------------------------------------------
def grammar_text(guide: Guide) -> str:
    """The guide as a Lark grammar, or InvalidRequest where that shows already that it cannot be."""
    source, limit = guide.source, MAX_REGEX_CHARACTERS if guide.kind == "regex" else MAX_SOURCE_CHARACTERS
    if len(source) > limit:
        raise _refusal(guide, f"it has {len(source):,} characters; at most {limit:,} are accepted")
    try:
        source.encode()
    except UnicodeEncodeError as error:
        raise _refusal(guide, f"it is no valid Unicode text (character {error.start})") from None
    if guide.kind == "regex":
        from llguidance import regex_to_lark

        # "d": \d is 0-9, as in JSON schemas, not every script's digits.
        source = f"start: /{regex_to_lark(source, 'd')}/" if source else 'start: ""'
    elif guide.kind == "grammar":
        if (lines := source.count("\n") + 1) > MAX_GRAMMAR_LINES:
            raise _refusal(guide, f"it has {lines:,} lines; at most {MAX_GRAMMAR_LINES} are accepted")
    else:
        schema = {"type": "object"} if guide.kind == "json_object" else _read_schema(guide)
        source = f"start: %json {json_schema_text(schema)}"
    # The options come last: the positions in error messages stay those of the user's text.
    return f"{source}\n{_OPTIONS}\n"


def json_schema_text(schema: dict[str, Any]) -> str:
    """A schema for `%json` in a grammar, with our white space unless it says otherwise. InvalidRequest where
    llguidance would pass over what it says."""
    options = {"whitespace_pattern": JSON_WHITESPACE}
    if not _NAMES_CONTROL_CHARACTER.search(json.dumps(schema)):
        options["json_allowed_escapes"] = _ESCAPES
    if isinstance(own := schema.get("x-guidance"), dict):
        options |= own
    return json.dumps({**enforceable(schema), "x-guidance": options})


def _read_schema(guide: Guide) -> dict[str, Any]:
    try:
        schema = json.loads(guide.source)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else f"not valid JSON: {error}"
        raise _refusal(guide, why) from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise _refusal(guide, f"a schema is a JSON object, not {json.dumps(schema)[:40]}")
    parts: list[Any] = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if isinstance(named := part.get("properties"), dict) and len(named) > MAX_PROPERTIES:
                raise _refusal(
                    guide, f"an object in it has {len(named):,} properties, more than {MAX_PROPERTIES:,}"
                )
            parts.extend(part.values())
        elif isinstance(part, list):
            parts.extend(part)
    return schema


def _refusal(guide: Guide, reason: str) -> InvalidRequest:
    """llguidance's reason without what shows our wrapping rather than the user's text."""
    if guide.kind != "grammar":
        reason = re.split(r"\n +\d+ \| ", re.sub(r"^at \d+\(\d+\): ", "", reason))[0]
    kept = [line for line in reason.splitlines() if "<non-verbose/>" not in line and _OPTIONS not in line]
    reason = "\n".join(kept).strip()
    if len(reason) > 500:
        reason = reason[:500] + " ..."
    return InvalidRequest(f"this {_NAMES[guide.kind]} cannot guide an answer: {reason}")


_FAILED = "the guide failed"


def is_fault_of_guide(error: str) -> bool:
    """Whether a request that had begun ended because its own guide could not go on."""
    return error.startswith(_FAILED) or error == NO_TOKEN_LEFT


# -- in the runner -----------------------------------------------------------------------------------------
class GuidedSlots:
    """The matchers of a runner's guided slots. Only the runner's thread touches it; empty, it is falsy."""

    def __init__(self, guidance: Guidance | None) -> None:
        self._guidance = guidance
        self._matchers: dict[
            int, tuple[Any, int]
        ] = {}  # by slot: the matcher, and the output tokens it has seen
        self._executor: Any = None

    def __bool__(self) -> bool:
        return bool(self._matchers)

    def begin(self, slot: int, guide: Guide | None) -> None:
        """The slot holds a sequence anew: whatever it held before is over."""
        self._matchers.pop(slot, None)
        if guide is not None:
            if self._guidance is None:
                raise RuntimeError(f"slot {slot} has a guide, but this runner was made without Guidance")
            self._matchers[slot] = self._guidance.matcher(guide), 0

    def end(self, slot: int) -> None:
        self._matchers.pop(slot, None)

    def masks(
        self,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        prompt_lengths: NDArray[np.int64],  # by slot, as `tokens`
        tokens: NDArray[np.int32],
        vocabulary: int,
    ) -> TokenMasks | None:
        """What may be drawn at `positions` of `slots`; None if none of them is guided."""
        draws = [draw for draw, slot in enumerate(slots.tolist()) if slot in self._matchers]
        if not draws:
            return None
        matchers = []
        for draw in draws:
            slot = int(slots[draw])
            matcher, seen = self._matchers[slot]
            output = tokens[slot, int(prompt_lengths[slot]) : int(positions[draw])]
            if len(output) > seen:
                matcher.consume_tokens(output[seen:].tolist())
                self._matchers[slot] = matcher, len(output)
            matchers.append(matcher)
        bits = np.zeros((len(draws), -(-vocabulary // 32)), dtype=np.int32)
        row_bytes = bits.shape[1] * bits.itemsize
        if len(matchers) == 1:
            matchers[0].unsafe_compute_mask_ptr(bits.ctypes.data, row_bytes)
        else:
            if self._executor is None:
                assert self._guidance is not None
                self._executor = self._guidance.executor()
            jobs = [(matcher, row) for row, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(jobs, bits.ctypes.data, row_bytes, len(jobs))
        errors = {
            draw: f"{_FAILED}: {matcher.get_error().replace('<non-verbose/>', '').strip()[:500]}"
            for draw, matcher in zip(draws, matchers, strict=True)
            if matcher.is_error()
        }
        return TokenMasks(np.array(draws, dtype=np.int64), bits, errors)

"""TextStream: turns one sample's tokens into text as they come, and watches for stop strings."""

from cumulo.engine.decide.params import SamplingParams
from cumulo.models.text.detokenizer import IncrementalDetokenizer, StopStringMatcher
from cumulo.models.text.tokenizer import Tokenizer


class TextStream:
    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens, continues=True)
        self._matcher = StopStringMatcher(params.stop, params.include_stop) if params.stop else None
        self._min_tokens = params.min_tokens
        self._tokens = 0
        self._pieces: list[str] = []
        self.matched: str | None = None

    def push(self, token: int) -> str:
        """Text that is certain now. After a match, `matched` names the stop string and nothing more comes."""
        self._tokens += 1
        return self._emit(self._detokenizer.push(token), watch=self._tokens > self._min_tokens)

    def finish(self) -> str:
        """Whatever was held back, when the sample ended without a stop string."""
        if self.matched is not None:
            return ""
        text = self._emit(self._detokenizer.finish(), watch=True)
        if self._matcher is not None and self.matched is None:
            held = self._matcher.finish()
            self._pieces.append(held)
            text += held
        return text

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def _emit(self, text: str, *, watch: bool) -> str:
        if self._matcher is not None and watch and text:
            text, self.matched = self._matcher.push(text)
        if text:
            self._pieces.append(text)
        return text
